"""The policy's way in and out: base, saved state, wire; and what must not fit."""

import numpy as np
import pytest
import torch

from stoa.bucket.store import Store
from stoa.config.run import Bucket, Learning
from stoa.contracts.errors import CheckpointError, GpuMemoryError, LayoutError
from stoa.weights.layout import layout_of
from tests.servers import CREDENTIALS
from tests.unit.trainer_gpu.player import POLICY
from tests.unit.trainer_gpu.test_intake import group
from trainer_gpu.checkpoint import Part
from trainer_gpu.model import read_model_config
from trainer_gpu.policy import Policy
from trainer_gpu.publish import host_tensors


def layout_id(dtype: str) -> str:
    import json

    return layout_of(json.loads(read_model_config(POLICY).source), dtype).layout_id


def policy(dtype: str = "float32") -> Policy:
    return Policy(POLICY, Learning(dtype=dtype), seed=0, layout_id=layout_id(dtype))


def nudge(made: Policy, amount: float) -> None:
    """One Adam step of size `amount` on every weight whose gradient is not 0."""
    made.trainable.set_learning_rate(amount)
    made.trainable.step([lambda: sum(p.float().sum() for p in made.trainable.model.parameters())])
    made._at_base = False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wire_carries_fp32_masters_in_the_runs_layout(dtype: str) -> None:
    made = policy(dtype)
    before = {name: array.copy() for name, array in host_tensors(made)}
    assert {name: array.shape for name, array in before.items()} == {s.name: s.shape for s in made.layout.tensors}
    assert all(array.dtype == np.float32 for array in before.values())
    nudge(made, 1e-6)
    moved = {name: np.abs(array - before[name]) for name, array in host_tensors(made)}
    # Far below what bf16 can tell apart at these sizes, yet every master moved; the frozen bias did not.
    assert all(0 < change.max() < 2e-6 for name, change in moved.items() if not name.endswith("expert_bias"))
    assert all(change.max() == 0 for name, change in moved.items() if name.endswith("expert_bias"))


def test_base_and_saved_state_replace_the_policy_whole() -> None:
    made = policy()
    base = {name: tensor.clone() for name, tensor in made.state().items()}
    nudge(made, 1e-3)
    saved = {name: tensor.clone() for name, tensor in made.state().items()}
    assert any(not torch.equal(saved[name], base[name]) for name in base)
    made.load_base()
    assert all(torch.equal(tensor, base[name]) for name, tensor in made.state().items())
    made.trainable.load_state(saved.items())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in made.state().items())


def test_state_of_another_architecture_changes_nothing() -> None:
    made = policy()
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    part = Part("part-0000.safetensors", "nowhere", "", 0, tuple(before)[1:])
    with pytest.raises(CheckpointError, match="lacks 1 tensors"):
        made.restore_parts(Store(Bucket(), CREDENTIALS), [part], made.capture_rng())
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state().items())


def test_step_that_the_gpu_has_no_memory_for_says_so_and_what_to_change() -> None:
    def full(_row: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory 130 GiB is in use.")

    with pytest.raises(GpuMemoryError) as caught:
        policy().train([group(0)], version=3, step=7, planned_sequences=4, on_row=full)
    assert caught.value.message == "step 7 does not fit the GPU: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "stoa plan gpu" in caught.value.hint
    assert not caught.value.retryable


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_compiles_nothing(dtype: str) -> None:
    """On CUDA, Megatron's compiled functions would need a C compiler beside the trainer; here they are told to run as they are."""
    made = policy(dtype)
    with torch.compiler.set_stance("fail_on_recompile"):
        with pytest.raises(RuntimeError):
            torch.compile(lambda x: x + 1)(torch.ones(1))
        assert made.train([group(0)], version=3, step=1, planned_sequences=4, on_row=lambda row: None).metrics["grad_norm"] > 0


def test_checkpoint_folder_of_another_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="layout"):
        Policy(POLICY, Learning(), seed=0, layout_id=layout_id("bfloat16"))
