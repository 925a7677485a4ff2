"""The trainer on one CUDA device: the reference library's numbers, kernels against plain ops, and DPPO steps in fp32 and bf16.

Written for, and not yet run on, a machine with CUDA; the same checks on the CPU are in tests/unit/trainer_gpu. Bounds are
those seen on the CPU, times three.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from transformers import Lfm2MoeForCausalLM

from stoa.config.run import Learning
from stoa.weights import grid
from stoa.weights.layout import GROUP_SIZE
from tests.unit.trainer_gpu import checkpoints
from tests.unit.trainer_gpu.checkpoints import SEQ_LENS
from tests.unit.trainer_gpu.player import POLICY, group_of, play, search
from tests.unit.trainer_gpu.test_policy import layout_id
from trainer_gpu import host, rng
from trainer_gpu.adam import Adam
from trainer_gpu.experts import GroupedExperts
from trainer_gpu.head import token_logprobs
from trainer_gpu.loss import dppo_loss
from trainer_gpu.model import forward_packed, recorded_routing, replayed_routing, token_logprobs_packed, transformer_config
from trainer_gpu.parallel import build_optimizer
from trainer_gpu.policy import Policy
from trainer_gpu.publish import scan

LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """A GPU may round fp32 products to TF32, which is no fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def test_logits_of_a_packed_row_equal_the_reference_library_one_sequence_at_a_time(
    moe_hub: Lfm2MoeForCausalLM, moe_folder: Path, ids: torch.Tensor
) -> None:
    _, model = checkpoints.load(moe_folder)
    with torch.no_grad():
        ours = forward_packed(model, ids.to(host.device()), SEQ_LENS).cpu()
        theirs = torch.cat([moe_hub(input_ids=part[None]).logits[0] for part in ids.split(SEQ_LENS)])
    assert float((ours - theirs).abs().max()) < 1e-4


def test_gradients_on_cuda_are_those_of_the_cpu_reference(moe_hub: Lfm2MoeForCausalLM, moe_folder: Path, ids: torch.Tensor) -> None:
    """Of the embedding and of an expert: through attention, convolution, dispatch and the grouped product."""
    _, model = checkpoints.load(moe_folder)
    logprobs, _ = token_logprobs_packed(model, ids.to(host.device()), SEQ_LENS)
    (-logprobs.sum() / len(ids)).backward()
    moe_hub.zero_grad()
    parts = [part for part in ids.split(SEQ_LENS) if len(part) > 1]
    losses = [F.cross_entropy(moe_hub(input_ids=part[None]).logits[0, :-1], part[1:], reduction="sum") for part in parts]
    (torch.stack(losses).sum() / len(ids)).backward()
    norm = torch.cat([p.grad.flatten() for p in moe_hub.parameters() if p.grad is not None]).norm()
    theirs = dict(moe_hub.named_parameters())
    pairs = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"].grad,
        "decoder.layers.1.mlp.experts.fc1": theirs["model.layers.1.feed_forward.experts.gate_up_proj"].grad,
        "decoder.layers.5.mlp.experts.fc2": theirs["model.layers.5.feed_forward.experts.down_proj"].grad,
        "decoder.layers.2.self_attention.linear_proj.weight": theirs["model.layers.2.self_attn.out_proj.weight"].grad,
    }
    for name, expected in pairs.items():
        found = model.get_parameter(name).grad
        assert found is not None and expected is not None
        assert float((found.cpu() - expected).abs().max() / norm) < 1e-5, name


def test_bf16_logits_stay_near_fp32_ones_on_the_same_experts(moe_folder: Path, ids: torch.Tensor) -> None:
    """Weights rounded to bf16 in both; the CPU's mean difference is 0.02 at a standard deviation of 1.3."""
    _, exact = checkpoints.load(moe_folder)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    _, rounded = checkpoints.load(moe_folder, torch.bfloat16)
    row = ids.to(host.device())
    with torch.no_grad():
        with recorded_routing(exact) as recorded:
            expected = forward_packed(exact, row, SEQ_LENS)
        with replayed_routing(rounded, recorded[0]):
            found = forward_packed(rounded, row, SEQ_LENS)
    far = (found - expected).abs()
    assert float(far.mean()) < 0.06
    assert float(far.max()) < 0.6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "counts", [(5, 0, 17, 10, 1, 0, 0, 31), (0, 0, 64, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0, 0, 0), (8, 8, 8, 8, 8, 8, 8, 8)]
)
def test_grouped_product_equals_one_expert_at_a_time(
    counts: tuple[int, ...], dtype: torch.dtype, tolerance: float, moe_folder: Path
) -> None:
    """Rows of any number: the kernel must not want them padded."""
    config = transformer_config(checkpoints.load(moe_folder)[0], dtype)
    experts = GroupedExperts(8, config, ProcessGroupCollection.use_mpu_process_groups())
    draw = torch.Generator(host.device()).manual_seed(0)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=draw, device=host.device()))
    x = torch.randn(sum(counts), 64, generator=draw, device=host.device()).to(dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=draw, device=host.device()).requires_grad_()
    slope = torch.randn(sum(counts), 64, generator=draw, device=host.device())
    out, _ = experts(x, torch.tensor(counts), probs)
    (out.float() * slope).sum().backward()
    found = [out, x.grad, probs.grad, experts.fc1.grad, experts.fc2.grad]

    leaves = [t.detach().float().requires_grad_() for t in (x, probs, experts.fc1, experts.fc2)]
    parts = []
    for expert, rows in enumerate(torch.arange(sum(counts), device=host.device()).split(counts)):
        gate, up = (leaves[0][rows] @ leaves[2][expert].T).chunk(2, dim=-1)
        parts.append((F.silu(gate) * up * leaves[1][rows, None]) @ leaves[3][expert].T)
    expected = torch.cat(parts)
    (expected * slope).sum().backward()
    for ours, reference in zip(found, [expected, *(leaf.grad for leaf in leaves)], strict=True):
        assert ours is not None and reference is not None
        assert float((ours.float() - reference).abs().max()) <= tolerance * float(reference.abs().max()) + 1e-6


def loss_of(model, row: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: -token_logprobs_packed(model, row, SEQ_LENS)[0].sum() / len(row)


def test_steps_equal_torch_adamw_with_clipping(moe_folder: Path, ids: torch.Tensor) -> None:
    row = ids.to(host.device())
    _, model = checkpoints.load(moe_folder)
    _, plain = checkpoints.load(moe_folder)
    ours = build_optimizer(model, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, clip_grad=0.5)
    adam = torch.optim.AdamW(plain.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, foreach=False)
    start = torch.cat([p.detach().flatten() for p in plain.parameters()])
    for _ in range(3):
        norm = ours.step([loss_of(model, row)])
        adam.zero_grad()
        loss_of(plain, row)().backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)), rel=1e-4)
        adam.step()
    assert norm > 0.5, "clipping must have taken part"
    found, expected = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (model, plain))
    assert float((found - expected).norm() / (expected - start).norm()) < 1e-3


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32 moments", "bf16 moments"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_optimizer_makes_of_cuda_weights_what_it_makes_of_cpu_ones(dtype: torch.dtype, moments: torch.dtype, on_host: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    start, grads = torch.randn(5000, generator=draw).to(dtype), torch.randn(4, 5000, generator=draw)
    reference = torch.nn.Parameter(start.float().clone())
    adam = torch.optim.AdamW([reference], lr=LR, betas=BETAS, eps=EPS, weight_decay=0.1)
    weight = start.clone().to(host.device())
    groups = [{"params": [weight], "lr": LR, "weight_decay": 0.1}]
    ours = Adam(groups, betas=BETAS, eps=EPS, moment_dtype=moments, on_host=on_host)
    for grad in grads:
        reference.grad = grad.clone()
        adam.step()
        weight.decoupled_grad = grad.to(host.device())
        ours.step()
    master = ours.piece(weight).master
    assert torch.equal(weight, master.to(host.device(), dtype))
    assert master.is_cuda != on_host
    error = float((master.cpu() - reference.detach()).norm() / (reference.detach() - start.float()).norm())
    assert error < (1e-5 if moments == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_dppo_step_moves_every_weight_and_makes_rewarded_tokens_likelier(
    dtype: torch.dtype, moe_folder: Path, ids: torch.Tensor
) -> None:
    _, model = checkpoints.load(moe_folder, dtype)
    trainable = build_optimizer(model, lr=1e-3, betas=BETAS, eps=EPS, weight_decay=0.0, clip_grad=1.0)
    row = ids.to(host.device())
    with torch.no_grad(), recorded_routing(model) as recorded:
        mu, _ = token_logprobs_packed(model, row, SEQ_LENS)
    before = {name: tensor.clone() for name, tensor in trainable.masters().items()}
    where = mu != 0
    advantages = torch.where(torch.arange(len(row), device=row.device) < 33, 1.0, -0.25)[where]

    def loss() -> torch.Tensor:
        with replayed_routing(model, recorded[0]):
            log_pi, _ = token_logprobs_packed(model, row, SEQ_LENS)
        return dppo_loss(log_pi[where], mu[where], advantages, denominator=float(len(row)), gate=Learning().gate)

    norm = trainable.step([loss])
    assert 0 < norm < float("inf")
    assert trainable.update_norm() > 0
    with torch.no_grad():
        after, _ = token_logprobs_packed(model, row, SEQ_LENS)
    assert float(((after - mu)[where] * advantages).sum()) > 0
    still = [name for name, tensor in trainable.masters().items() if torch.equal(tensor, before[name]) and ".experts." not in name]
    assert still == []


@pytest.mark.parametrize(
    "settings", [{}, {"moment_dtype": "bfloat16"}, {"optimizer_on_host": True}], ids=["default", "bf16 moments", "on the host"]
)
def test_policy_trains_on_played_groups_in_bf16_and_resumes_bit_for_bit(settings: dict[str, object]) -> None:
    """The demo policy as a run trains it, sampled by itself: no gate, no mismatch beyond rounding."""
    learning = Learning(dtype="bfloat16", learning_rate=1e-4, micro_batch_tokens=2048, **settings)

    def made() -> Policy:
        return Policy(POLICY, learning, seed=0, layout_id=layout_id("bfloat16"))

    steady, second = made(), made()
    played = play(steady.trainable.model, search(), list(search().question_ids("train"))[:16], num_episodes=8, seed=0)
    uneven = [episodes for episodes in played if 0 < sum(e.reward for e in episodes) < 8][:3]
    groups = [group_of(episodes, run="r", host="mac", sweep=0, group=i, version=0, state_id="s") for i, episodes in enumerate(uneven)]

    def train(policy: Policy, step: int) -> dict[str, float]:
        return policy.train(groups, version=0, step=step, planned_sequences=24, on_row=lambda row: None).metrics

    metrics = train(steady, 1)
    assert metrics["mismatch_mean"] < 0.02
    assert metrics["gate_drop_rate"] < 0.05
    assert metrics["grad_norm"] > 0
    saved = {name: tensor.detach().cpu().clone() for name, tensor in steady.state().items()}
    second.trainable.load_state(saved.items())
    assert all(torch.equal(tensor.cpu(), saved[name]) for name, tensor in second.state().items())
    # Sums of atomics are no longer bit-equal in a backward pass; the update must be the same all the same.
    for policy in (steady, second):
        train(policy, 2)
    moved, other = (
        torch.cat([t.flatten().cpu() - saved[n].flatten() for n, t in p.state().items() if n.startswith("master.")])
        for p in (steady, second)
    )
    assert float((moved - other).norm() / moved.norm()) < 0.05


def test_scan_on_the_accelerator_gives_the_bits_of_the_reference() -> None:
    draw = np.random.default_rng(0)
    weights = draw.standard_normal((96, 640)).astype(np.float32)
    scales, biases = grid.make_grid(weights.reshape(-1, GROUP_SIZE))
    codes = grid.codes_of(grid.place(weights.reshape(-1, GROUP_SIZE), scales, biases)).reshape(weights.shape)
    moved = (weights + 0.01 * draw.standard_normal(weights.shape)).astype(np.float32)
    for hysteresis in (0.0, 0.02):
        ours, reference = (one(moved, codes, scales, biases, hysteresis) for one in (scan, grid.scan))
        for name in ("positions", "codes", "groups", "scales", "biases", "group_codes"):
            assert np.array_equal(getattr(ours, name), getattr(reference, name)), name


def test_logits_are_never_held_whole_in_device_memory() -> None:
    hidden = torch.randn(8192, 64, device=host.device(), dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(128_000, 64, device=host.device(), dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 128_000, (8192,), device=host.device())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(hidden, weight, targets)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 268_435_456


def test_played_groups_carry_logprobs_of_the_weights_they_were_played_with(moe_folder: Path) -> None:
    """A group whose sampler is the trainer itself must not differ from it, or every later comparison is off."""
    learning = Learning(dtype="float32", micro_batch_tokens=2048, learning_rate=0.0)
    policy = Policy(POLICY, learning, seed=0, layout_id=layout_id("float32"))
    played = play(policy.trainable.model, search(), list(search().question_ids("train"))[:2], num_episodes=8, seed=0)
    group = group_of(played[0], run="r", host="mac", sweep=0, group=0, version=0, state_id="s")
    outcome = policy.train([replace(group)], version=0, step=1, planned_sequences=8, on_row=lambda row: None)
    assert outcome.metrics["mismatch_max"] < 1e-3


def test_generators_of_the_device_and_of_megatron_come_back_with_the_others(moe_folder: Path) -> None:
    """Megatron's trackers are seeded with the process's layout; what they fork draws from the device."""
    checkpoints.load(moe_folder)
    (name, *_) = get_cuda_rng_tracker().get_states()

    def draw() -> list[object]:
        with get_cuda_rng_tracker().fork(name):
            forked = torch.rand(2, device="cuda").tolist()
        return [forked, torch.rand(2, device="cuda").tolist(), torch.rand(2).tolist()]

    draw()
    text = rng.as_text([rng.capture()])
    drawn = draw()
    assert draw() != drawn
    rng.restore(text, 0)
    assert draw() == drawn
