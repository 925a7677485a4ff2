"""The gradient of a warm start against PyTorch's, computing layers twice, and memory that was planned against memory that was used."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from environments.demonstrations import Demonstration
from environments.teachers import teach
from stoa.contracts.errors import CheckpointError, UsageError
from worker_mac.warmstart import memory, policy
from worker_mac.warmstart.batches import Batch, Host, split_rows
from worker_mac.warmstart.export import hub_names
from worker_mac.warmstart.learner import Learner
from worker_mac.warmstart.ranks import Ranks
from worker_mac.warmstart.settings import Settings

POLICY = Path(__file__).parents[3] / "environments/search/policy"
SETTINGS = Settings(model=str(POLICY), out="", state="")


def demonstrations(count: int) -> list[Demonstration]:
    source = teach("search", (POLICY / "tokenizer.json").read_bytes(), num_steps=600, batch_rows=count, seed=0)
    return [source.at(0, row) for row in range(count)]


def taught(settings: Settings) -> policy.Policy:
    model = policy.load(POLICY, settings)
    if settings.mode == "lora":
        policy.add_adapters(model, settings)
    policy.settle(model)
    if settings.grad_checkpoint:
        policy.checkpoint_layers(model)
    found = policy.Policy(model)
    if settings.mode == "lora":
        # Second halves start at 0, where half of the gradients are 0 too.
        numbers = np.random.default_rng(0)
        found.take({name: mx.array(numbers.normal(0, 0.02, a.shape).astype(np.float32)) for name, a in found.trained.items()})
    return found


def torch_gradients(rows: list[Demonstration]) -> tuple[float, dict[str, np.ndarray]]:
    """Of the summed loss, row by row without padding, by hub name."""
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    total = torch.zeros(())
    for row in rows:
        logits = model(input_ids=torch.tensor([row.ids])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(row.ids[1:]), reduction="none")
        total = total + (losses * torch.tensor(row.weights[1:])).sum()
    total.backward()
    names: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.numpy()
        if name.endswith("experts.gate_up_proj"):  # transformers holds experts stacked, gate over up
            for expert, both in enumerate(gradient):
                gate, up = np.split(both, 2)
                names[f"{name.removesuffix('gate_up_proj')}{expert}.w1.weight"] = gate
                names[f"{name.removesuffix('gate_up_proj')}{expert}.w3.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(gradient):
                names[f"{name.removesuffix('down_proj')}{expert}.w2.weight"] = down
        else:
            names[name] = gradient
    return float(total.detach()), names


def test_the_gradient_is_pytorchs() -> None:
    rows = demonstrations(6)
    loss, theirs = torch_gradients(rows)
    found = taught(replace(SETTINGS, mode="full")).gradient(Batch.of(rows))
    assert found.loss == pytest.approx(loss, rel=5e-5)
    assert found.weight == pytest.approx(sum(sum(row.weights) for row in rows), rel=1e-6)
    norm = np.sqrt(sum((gradient**2).sum() for gradient in theirs.values()))
    seen = set()
    for name, gradient in found.arrays.items():
        stacked = gradient.shape[0] if gradient.ndim == 3 and "switch_mlp" in name else 0
        for hub, source in hub_names("lfm2_moe", name.removesuffix(".weight"), stacked):
            ours = np.array(gradient if source.expert < 0 else gradient[source.expert])
            ours = ours if ours.shape == theirs[hub].shape else ours.transpose(0, 2, 1)
            assert np.abs(ours - theirs[hub]).max() <= 2e-6 * norm, hub
            seen.add(hub)
    assert seen == set(theirs)


class Second:
    """The first of two ranks; the second's part of every sum is given."""

    rank, size = 0, 2

    def __init__(self, part: mx.array) -> None:
        self._part = part

    def sum(self, vector: mx.array) -> mx.array:
        return vector + self._part


def test_a_step_is_by_the_weight_of_all_targets_whoever_computed_which_row() -> None:
    """Neither by rows nor by tokens: Adam would hide a wrong divisor, the clipped length does not."""
    rows = [
        Demonstration(row.ids, [w * share for w in row.weights]) for row, share in zip(demonstrations(4), (1, 0.25, 3, 0.5), strict=True)
    ]
    loss, theirs = torch_gradients(rows)
    weight = sum(sum(row.weights) for row in rows)
    norm = float(np.sqrt(sum((gradient**2).sum() for gradient in theirs.values()))) / weight
    asked, host = replace(SETTINGS, mode="full"), Host(1.0, 1000)
    theirs_too = split_rows([len(row.ids) for row in rows], [host, host])[1]
    other = taught(asked).gradient(Batch.of([rows[index] for index in theirs_too]))
    part = mx.concatenate([mx.array([other.loss, other.weight]), *(array.reshape(-1) for array in other.arrays.values())])
    assert 0 < len(theirs_too) < len(rows) and list(other.arrays) == list(taught(asked).trained)
    for ranks, hosts in ((Ranks(), [host]), (Second(part), [host, host])):
        found = Learner(taught(asked), asked, ranks, hosts=hosts, rows_at=lambda _: 3).step(0, rows)
        assert (found.num_rows, found.rows_left_out) == (4, 0)
        assert found.loss == pytest.approx(loss / weight, rel=1e-4) and found.gradient_norm == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_adapters_have_the_gradient_of_finite_differences(bits: int) -> None:
    learning, batch = taught(replace(SETTINGS, bits=bits)), Batch.of(demonstrations(3))
    start, found = learning.trained, learning.gradient(batch)
    norm = np.sqrt(sum(float((array**2).sum()) for array in found.arrays.values()))
    step, ends = 1e-3, []
    for sign in (1, -1):
        learning.take({name: array + sign * step / norm * found.arrays[name] for name, array in start.items()})
        ends.append(learning.loss(batch) * found.weight)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_layers_computed_twice_give_the_same_gradient_in_less_memory(mode: str) -> None:
    rows = [Demonstration([1 + (i * 7 + row) % 250 for i in range(128)], [0.0] * 120 + [1.0] * 8) for row in range(16)]
    batch, peaks, gradients = Batch.of(rows), [], []
    for twice in (False, True):
        learning = taught(replace(SETTINGS, mode=mode, grad_checkpoint=twice))
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gradients.append(learning.gradient(batch))
        peaks.append(mx.get_peak_memory() - before)
    norm = np.sqrt(sum(float((array**2).sum()) for array in gradients[0].arrays.values()))
    far = max(float(mx.abs(gradients[0].arrays[name] - array).max()) for name, array in gradients[1].arrays.items())
    assert far <= 1e-6 * norm and norm > 0
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("mode, bits", [("full", 0), ("lora", 4)])
@pytest.mark.parametrize("rows, length", [(32, 64), (2, 384)])
def test_no_more_memory_is_used_than_was_planned(mode: str, bits: int, twice: bool, rows: int, length: int) -> None:
    settings = replace(SETTINGS, mode=mode, bits=bits, grad_checkpoint=twice)
    plan = memory.plan(policy.read_config(POLICY), memory.read_tensors(POLICY), settings, 8 << 30)
    learning = taught(settings)
    batch = Batch.of([Demonstration([1 + (i + row) % 250 for i in range(length)], [0.0] + [1.0] * (length - 1)) for row in range(rows)])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    gradient = learning.gradient(batch)
    used = mx.get_peak_memory() - before
    planned = plan.total_bytes(rows, length) - plan.fixed_bytes + 4 * plan.num_trained
    assert gradient.weight == rows * (length - 1)
    assert used <= planned <= 4 * used
    assert plan.num_trained == pytest.approx(sum(array.size for array in learning.trained.values()), rel=1e-3)


def test_weights_are_stated_to_the_byte_before_loading() -> None:
    # 0 bits: the file's tensors; 4 bits: half a byte a number of a matrix, and two fp32 numbers a group of 64.
    tensors = memory.read_tensors(POLICY)
    matrices = sum(t.size for t in tensors if len(t.shape) == 2)
    rest = sum(t.size for t in tensors) - matrices
    for bits, expected in ((0, 4 * (matrices + rest)), (4, matrices // 2 + matrices // 64 * 8 + 4 * rest)):
        plan = memory.plan(policy.read_config(POLICY), tensors, replace(SETTINGS, bits=bits), 8 << 30)
        assert plan.weights_bytes == expected


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    plan = memory.plan(policy.read_config(POLICY), memory.read_tensors(POLICY), SETTINGS, 110 << 20)
    assert 0 < plan.longest(4096) < 4096
    fitting = plan.longest(4096)
    memory.refuse_unless_fits(plan, fitting, "it")
    with pytest.raises(UsageError, match=r"needs 1\.\d+ GB for one row of 4096 tokens, and 0\.12 GB may be used"):
        memory.refuse_unless_fits(plan, 4096, "it")
    assert plan.rows_at(fitting // 8 * 8) >= 1 and plan.total_bytes(1, fitting // 8 * 8) <= plan.limit_bytes


@pytest.mark.parametrize("damage", ["no folder", "torn header", "no tensors", "quantised"])
def test_a_base_that_cannot_be_used_is_named(damage: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization": {}}' if damage == "quantised" else "{}")
    if damage == "torn header":
        (tmp_path / "model.safetensors").write_bytes((POLICY / "model.safetensors").read_bytes()[:100])
    with pytest.raises(CheckpointError):
        policy.read_config(tmp_path / "nothing" if damage == "no folder" else tmp_path)
        memory.read_tensors(tmp_path)
