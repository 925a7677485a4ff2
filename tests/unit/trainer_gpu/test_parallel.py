"""A training step against torch's own AdamW, resuming, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load, save

from stoa.contracts.errors import CheckpointError, LayoutError, NonFiniteError
from tests.unit.trainer_gpu import checkpoints
from tests.unit.trainer_gpu.checkpoints import SEQ_LENS, VOCAB
from trainer_gpu.convert import mlx_tensors
from trainer_gpu.layout import Layout, check_layout, expert_share
from trainer_gpu.model import token_logprobs_packed
from trainer_gpu.parallel import Trainable, build_optimizer
from trainer_gpu.weights import local_weights

LR, BETAS, EPS, CLIP = 3e-3, (0.9, 0.95), 1e-8, 0.5


def trainable(folder: Path, dtype: torch.dtype = torch.float32, clip: float = CLIP) -> Trainable:
    _, model = checkpoints.load(folder, dtype)
    return build_optimizer(model, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, clip_grad=clip)


def loss_of(model: GPTModel, batch: int, scale: float = 1.0) -> Callable[[], torch.Tensor]:
    """Mean -ln p of one random packed row."""
    ids = torch.randint(0, VOCAB, (sum(SEQ_LENS),), generator=torch.Generator().manual_seed(batch))
    return lambda: -scale * token_logprobs_packed(model, ids, SEQ_LENS)[0].sum() / len(ids)


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def test_steps_equal_torch_adamw_with_clipping(moe_folder: Path) -> None:
    ours = trainable(moe_folder)
    _, plain = checkpoints.load(moe_folder)
    start = copied(local_weights(plain))
    adam = torch.optim.AdamW(plain.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    for batch in range(3):
        norm = ours.step([loss_of(ours.model, batch)])
        adam.zero_grad()
        loss_of(plain, batch)().backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)), rel=1e-5)
        adam.step()
    assert norm > CLIP, "clipping must have taken part"
    masters = ours.masters()
    theirs = {name: weight for name, weight in local_weights(plain).items() if not name.endswith("expert_bias")}
    assert set(masters) == set(theirs)
    wrong = torch.cat([(masters[name] - weight).flatten() for name, weight in theirs.items()]).norm()
    moved = torch.cat([(weight - start[name]).flatten() for name, weight in theirs.items()]).norm()
    assert float(wrong / moved) < 1e-4


def test_micro_batches_add_up_and_nothing_divides_them(moe_folder: Path) -> None:
    whole, cut = trainable(moe_folder, clip=0.0), trainable(moe_folder, clip=0.0)
    norm = whole.step([loss_of(whole.model, 1, scale=3.0)])
    assert cut.step([loss_of(cut.model, 1, scale=s) for s in (0.5, 2.0, 0.5)]) == pytest.approx(norm, rel=1e-5)
    gradients = cut.gradients()
    assert all(torch.allclose(g, gradients[name], atol=1e-6 * norm) for name, g in whole.gradients().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_resumed_trainer_is_bit_equal_to_one_that_went_on(dtype: torch.dtype, moe_folder: Path) -> None:
    steady = trainable(moe_folder, dtype)
    for batch in range(3):
        steady.step([loss_of(steady.model, batch)])
    first = trainable(moe_folder, dtype)
    for batch in range(2):
        first.step([loss_of(first.model, batch)])
    stored = save(copied(first.state.tensors()))
    second = trainable(moe_folder, dtype)
    second.load_state(load(stored).items())
    second.step([loss_of(second.model, 2)])
    expected, found = steady.state.tensors(), second.state.tensors()
    assert found.keys() == expected.keys()
    assert [name for name, t in expected.items() if not torch.equal(t, found[name])] == []
    assert int(found["optimizer.step"]) == 3
    parameters = dict(second.model.named_parameters())
    assert all(torch.equal(p, parameters[name]) for name, p in steady.model.named_parameters())


def test_a_resume_that_loses_a_moment_is_not_bit_equal(moe_folder: Path) -> None:
    first = trainable(moe_folder)
    first.step([loss_of(first.model, 0)])
    state = copied(first.state.tensors())
    first.step([loss_of(first.model, 1)])
    for key in ("exp_avg_sq.embedding.word_embeddings.weight", "optimizer.step"):
        second = trainable(moe_folder)
        second.load_state((state | {key: torch.zeros_like(state[key])}).items())
        second.step([loss_of(second.model, 1)])
        name = "master.embedding.word_embeddings.weight"
        assert not torch.equal(first.state.tensors()[name], second.state.tensors()[name])


def test_a_step_leaves_the_expert_bias_alone_and_moves_everything_else(moe_folder: Path) -> None:
    ours = trainable(moe_folder)
    before = copied(ours.state.tensors())
    for batch in range(8):
        ours.step([loss_of(ours.model, batch)])
    after = ours.state.tensors()
    still = {name for name in before if name.startswith(("master.", "buffer.")) and torch.equal(before[name], after[name])}
    assert still == {f"buffer.decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(1, 6)}


def test_exported_masters_are_what_the_optimizer_changed(moe_folder: Path) -> None:
    ours = trainable(moe_folder, torch.bfloat16)
    config, _ = checkpoints.load(moe_folder)
    ours.step([loss_of(ours.model, 0)])
    exact = dict(mlx_tensors(ours.model, config, ours.masters()))
    rounded = dict(mlx_tensors(ours.model, config))
    assert {t.dtype for t in exact.values()} == {torch.float32}
    name = "model.layers.2.feed_forward.switch_mlp.down_proj.weight"
    assert not torch.equal(exact[name], rounded[name].float())
    assert torch.equal(exact[name].bfloat16(), rounded[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, moe_folder: Path) -> None:
    ours = trainable(moe_folder)
    ours.step([loss_of(ours.model, 0)])
    before = copied(ours.state.tensors())
    with pytest.raises(NonFiniteError, match="the step was not taken"):
        ours.step([loss_of(ours.model, 1), lambda: loss_of(ours.model, 2)() * value])
    assert all(torch.equal(t, before[name]) for name, t in ours.state.tensors().items())
    ours.step([loss_of(ours.model, 1)])


def pieces(state: dict[str, torch.Tensor], *spans: tuple[int, int]) -> None:
    """Put pieces of a weight in place of it, as several processes would have saved them."""
    name = "master.decoder.final_layernorm.weight"
    whole = state.pop(name)
    state.update({f"{name}[{start}:{stop}]": whole[start:stop] for start, stop in spans})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.pop("exp_avg.decoder.final_layernorm.weight"), "lacks 1 tensors: exp_avg.decoder.final_layernorm.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "also holds 1 tensors: extra"),
        (lambda state: state.update({"master.decoder.final_layernorm.weight": torch.ones(65)}), r"shape \(65,\), not \(64,\)"),
        (lambda state: pieces(state, (0, 40), (32, 64)), "lacks 1 tensors: master.decoder.final_layernorm.weight"),
        (lambda state: pieces(state, (0, 32), (40, 64)), "lacks 1 tensors: master.decoder.final_layernorm.weight"),
    ],
    ids=["lost", "foreign", "too large", "pieces that overlap", "pieces with a hole"],
)
def test_state_of_another_model_is_refused(change, problem: str, moe_folder: Path) -> None:
    ours = trainable(moe_folder)
    state = copied(ours.state.tensors())
    change(state)
    with pytest.raises(CheckpointError, match=problem):
        ours.state.check_names(state)
        ours.load_state(state.items())


@pytest.mark.parametrize(
    ("layout", "world_size", "problem"),
    [
        (Layout(tensor=2), 2, "tensor parallelism trains the experts wrongly"),
        (Layout(context=2), 2, "context parallelism cuts the short convolution"),
        (Layout(pipeline=2), 2, "pipeline parallelism is not built"),
        (Layout(expert=4), 6, "expert parallelism 4 does not divide 6"),
        (Layout(expert=0), 1, "expert parallelism 0"),
    ],
)
def test_layouts_that_train_wrongly_are_refused(layout: Layout, world_size: int, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        check_layout(layout, world_size)


def test_experts_are_shared_by_as_many_as_divide_them() -> None:
    assert [expert_share(0, 32, ranks) for ranks in (1, 2, 3, 6, 8)] == [1, 2, 1, 2, 8]
    assert (expert_share(1, 32, 8), expert_share(4, 32, 8), expert_share(0, 0, 8)) == (1, 4, 1)
    with pytest.raises(LayoutError, match="expert parallelism 3 does not divide 32 experts"):
        expert_share(3, 32, 3)


def test_data_and_expert_parallel_layouts_are_accepted() -> None:
    check_layout(Layout(), 8)
    check_layout(Layout(expert=4), 8)
