"""The memory plan against what the trainer really allocates: the bytes of its state, and what a forward pass keeps."""

import json
from typing import Any, cast

import pytest
import torch

from cli.plan.gpu import GRADIENT, WAYS, WEIGHT, Way, read_model
from stoa.config.run import Learning
from tests.unit.trainer_gpu.player import POLICY
from tests.unit.trainer_gpu.test_policy import layout_id
from trainer_gpu.model import build_model, hidden_packed, read_model_config
from trainer_gpu.modules import RMSNorm
from trainer_gpu.policy import Policy

MODEL = read_model(POLICY)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_planned_bytes_of_a_parameter_are_those_allocated(way: Way) -> None:
    """Within 2 %: buffers pad each parameter to 64 elements, which shows in a model of 284,512."""
    policy = Policy(POLICY, Learning(dtype="bfloat16", **cast(Any, way.settings)), seed=0, layout_id=layout_id("bfloat16"))
    parameters = list(policy.trainable.model.parameters())
    buffers: dict[int, int] = {}
    for tensor in [*parameters, *policy.trainable.gradients().values()]:
        buffers[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(buffers.values()) == pytest.approx((WEIGHT + GRADIENT) * MODEL.num_parameters, rel=0.02)
    kinds = ("master.", "exp_avg.", "exp_avg_sq.")
    state = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for n, t in policy.state().items() if n.startswith(kinds)}
    assert not state.keys() & buffers.keys()
    assert sum(state.values()) == pytest.approx(way.state_bytes * MODEL.num_parameters, rel=0.02)
    settings = json.loads(json.dumps(dict(way.settings)))
    assert all(getattr(Learning(**settings), name) == value for name, value in settings.items())


def test_planned_activations_are_those_that_torch_saves() -> None:
    """In bf16 on the CPU, where attention pads its row and norms keep fp32 copies that CUDA's does not: those left out."""
    model = build_model(read_model_config(POLICY), torch.bfloat16)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    depth = [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not depth[0] and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    def enter(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        keep(inputs[0])
        depth[0] += 1

    def leave(*_seen: object) -> None:
        depth[0] -= 1

    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    lengths = [64] * 8
    ids = torch.randint(0, 256, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_packed(model, ids, lengths)
    measured = sum(storage.nbytes() for storage in kept.values()) / len(ids)
    assert 0.9 * measured < MODEL.activation_bytes_per_token <= 1.02 * measured
