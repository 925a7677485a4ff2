"""AdamW over pieces: against torch's own, in every type and place its state may have, and what bf16 moments cannot follow."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, save

from stoa.config.load import load_run
from stoa.config.run import MAX_BETA2_BFLOAT16, Learning
from stoa.contracts.errors import ConfigError
from tests.unit.trainer_gpu.player import POLICY
from tests.unit.trainer_gpu.test_parallel import loss_of
from tests.unit.trainer_gpu.test_policy import layout_id
from trainer_gpu.adam import BLOCK, Adam
from trainer_gpu.policy import Policy

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
SIZES = (7, 300)


def draw(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def groups_of(weights: list[torch.Tensor]) -> list[dict]:
    """The first weight is decayed, the rest are not, as Megatron groups matrices and norms."""
    return [{"params": weights[:1], "lr": LR, "weight_decay": DECAY}, {"params": weights[1:], "lr": LR, "weight_decay": 0.0}]


def adam_of(weights: list[torch.Tensor], *, moment_dtype: torch.dtype = torch.float32, on_host: bool = False, beta2: float = 0.95) -> Adam:
    return Adam(groups_of(weights), betas=(0.9, beta2), eps=EPS, moment_dtype=moment_dtype, on_host=on_host)


def train(adam: Adam, weights: list[torch.Tensor], num_steps: int, dtype: torch.dtype = torch.float32) -> None:
    for number in range(num_steps):
        for place, weight in enumerate(weights):
            weight.decoupled_grad = draw(len(weight), 100 * number + place).to(dtype)
        adam.step()


def torchs(starts: list[torch.Tensor], num_steps: int) -> list[torch.Tensor]:
    """The same steps by torch's AdamW, one tensor at a time."""
    theirs = [torch.nn.Parameter(start.clone()) for start in starts]
    reference = torch.optim.AdamW(groups_of(theirs), betas=BETAS, eps=EPS, foreach=False, fused=False)
    for number in range(num_steps):
        for place, weight in enumerate(theirs):
            weight.grad = draw(len(weight), 100 * number + place)
        reference.step()
    return [weight.detach() for weight in theirs]


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_steps_equal_those_of_torch_wherever_the_state_is(dtype: torch.dtype, on_host: bool) -> None:
    starts = [draw(size, seed).to(dtype) for seed, size in enumerate(SIZES)]
    weights = [start.clone() for start in starts]
    adam = adam_of(weights, on_host=on_host)
    train(adam, weights, 5)
    assert adam.num_steps == 5
    for weight, theirs in zip(weights, torchs([start.float() for start in starts], 5), strict=True):
        assert torch.allclose(adam.piece(weight).master, theirs, rtol=0, atol=1e-6)
        assert torch.equal(weight, adam.piece(weight).master.to(dtype))


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_norm_of_an_update_is_that_of_what_moved(on_host: bool) -> None:
    """Adam's first step moves every element by the learning rate; decay comes on top and is left out."""
    weights = [draw(size, seed) for seed, size in enumerate(SIZES)]
    adam = adam_of(weights, on_host=on_host)
    assert adam.update_norm() == 0.0
    train(adam, weights, 1)
    assert adam.update_norm() == pytest.approx(LR * sum(SIZES) ** 0.5, rel=1e-5)
    before = weights[1].clone()
    weights[0].decoupled_grad = torch.zeros(SIZES[0])
    adam.param_groups[0]["lr"] = 0.0
    adam.step()
    assert adam.update_norm() == pytest.approx(float((weights[1] - before).norm()), rel=1e-4)


def test_bf16_gradients_and_moments_stay_near_the_exact_ones() -> None:
    starts = [draw(size, seed) for seed, size in enumerate(SIZES)]
    weights = [start.clone() for start in starts]
    adam = adam_of(weights, moment_dtype=torch.bfloat16)
    train(adam, weights, 8, torch.bfloat16)
    for weight, start, theirs in zip(weights, starts, torchs(starts, 8), strict=True):
        assert adam.piece(weight).exp_avg.dtype == adam.piece(weight).exp_avg_sq.dtype == torch.bfloat16
        assert 0 < float((weight - theirs).norm() / (theirs - start).norm()) < 0.02


def test_blocks_of_a_large_weight_are_each_updated_once() -> None:
    size = BLOCK + 3
    whole, cut = draw(size, 1), draw(size, 1)
    plain, blocks = adam_of([whole]), adam_of([cut], on_host=True)
    for adam, weight in ((plain, whole), (blocks, cut)):
        weight.decoupled_grad = draw(size, 2)
        adam.step()
    assert torch.allclose(whole, cut, rtol=0, atol=1e-7)
    assert float((whole - draw(size, 1)).abs().min()) > 0


def test_second_moment_in_bf16_follows_down_to_the_allowed_beta2_and_not_above() -> None:
    """It should rise to 1, the gradient's square, and then fall to 0.25."""

    def settled(beta2: float) -> tuple[float, float]:
        weight = torch.zeros(4)
        adam = adam_of([weight], moment_dtype=torch.bfloat16, beta2=beta2)
        seen: list[float] = []
        for gradient in (1.0, 0.5):
            weight.decoupled_grad = torch.full((4,), gradient)
            for _ in range(2000):
                adam.step()
            seen.append(float(adam.piece(weight).exp_avg_sq[0]))
        return seen[0], seen[1]

    for beta2, off in ((0.95, 0.1), (MAX_BETA2_BFLOAT16, 0.4)):
        high, low = settled(beta2)
        assert 1 - off < high <= 1
        assert 0.25 <= low < 0.25 * (1 + off)
    assert settled(0.999)[0] < 0.3, "it stops rising at a quarter of the way"


def test_setting_that_would_stall_the_moments_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"at most 0\.99 works"):
        Learning(moment_dtype="bfloat16", beta2=0.999)
    with pytest.raises(ConfigError, match=r"demo\.toml.*at most 0\.99 works"):
        load_run(None, ["learning.moment_dtype=bfloat16", "learning.beta2=0.999"])
    with pytest.raises(ConfigError, match="'float32' or 'bfloat16'"):
        load_run(None, ["learning.moment_dtype=float16"])
    Learning(moment_dtype="bfloat16", beta2=0.99)
    Learning(moment_dtype="float32", beta2=0.999)


def test_weights_filled_anew_are_the_masters_of_an_optimizer_that_never_stepped() -> None:
    weights = [draw(size, seed).bfloat16() for seed, size in enumerate(SIZES)]
    adam = adam_of(weights)
    train(adam, weights, 2)
    for weight in weights:
        weight.copy_(draw(len(weight), 9))
    adam.forget()
    assert adam.num_steps == 0
    for weight in weights:
        piece = adam.piece(weight)
        assert torch.equal(piece.master, weight.float())
        assert not piece.exp_avg.any() and not piece.exp_avg_sq.any()


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "moment_dtype": "bfloat16"},
        {"dtype": "bfloat16", "optimizer_on_host": True},
        {"dtype": "float32", "moment_dtype": "bfloat16", "optimizer_on_host": True},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_run_with_a_smaller_optimizer_resumes_bit_for_bit(settings: dict[str, object], tmp_path: Path) -> None:
    learning = Learning(**settings)

    def made() -> Policy:
        return Policy(POLICY, learning, seed=0, layout_id=layout_id(learning.dtype))

    def step(policy: Policy, number: int) -> None:
        policy.trainable.step([loss_of(policy.trainable.model, number)])

    steady, first, second = made(), made(), made()
    for number in range(3):
        step(steady, number)
    for number in range(2):
        step(first, number)
    stored = load(save({name: t.clone() for name, t in first.state().items()}))
    second.trainable.load_state(stored.items())
    step(second, 2)
    expected, found = steady.state(), second.state()
    assert [name for name, t in expected.items() if not torch.equal(t, found[name])] == []
    moments = {t.dtype for name, t in expected.items() if name.startswith(("exp_avg.", "exp_avg_sq."))}
    assert moments == {getattr(torch, learning.moment_dtype)}
    assert {t.dtype for name, t in expected.items() if name.startswith("master.")} == {torch.float32}
