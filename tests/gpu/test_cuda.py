"""The trainer on one CUDA device: the reference library's numbers in fp32, and one DPPO step in bf16.

Written for, and not yet run on, a machine with CUDA; the same checks on the CPU are in tests/unit/trainer_gpu.
"""

from pathlib import Path

import pytest
import torch
from transformers import Lfm2MoeForCausalLM

from stoa.config.run import Learning
from tests.unit.trainer_gpu import checkpoints
from tests.unit.trainer_gpu.checkpoints import SEQ_LENS
from trainer_gpu import host
from trainer_gpu.head import token_logprobs
from trainer_gpu.loss import dppo_loss
from trainer_gpu.model import forward_packed, recorded_routing, replayed_routing, token_logprobs_packed
from trainer_gpu.parallel import build_optimizer


def test_logits_of_a_packed_row_equal_the_reference_library_one_sequence_at_a_time(
    moe_hub: Lfm2MoeForCausalLM, moe_folder: Path, ids: torch.Tensor
) -> None:
    """The largest difference is 1e-5 on the CPU; a GPU's fp32 products may be rounded to TF32 unless that is off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    _, model = checkpoints.load(moe_folder)
    with torch.no_grad():
        ours = forward_packed(model, ids.to(host.device()), SEQ_LENS).cpu()
        theirs = torch.cat([moe_hub(input_ids=part[None]).logits[0] for part in ids.split(SEQ_LENS)])
    assert float((ours - theirs).abs().max()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_dppo_step_moves_every_weight_and_makes_rewarded_tokens_likelier(
    dtype: torch.dtype, moe_folder: Path, ids: torch.Tensor
) -> None:
    _, model = checkpoints.load(moe_folder, dtype)
    trainable = build_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=1.0)
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
    with torch.no_grad():
        after, _ = token_logprobs_packed(model, row, SEQ_LENS)
    assert float(((after - mu)[where] * advantages).sum()) > 0
    still = [name for name, tensor in trainable.masters().items() if torch.equal(tensor, before[name]) and ".local_experts." not in name]
    assert still == []


def test_a_resumed_trainer_goes_on_with_the_same_state(moe_folder: Path, ids: torch.Tensor) -> None:
    """Fused or not, the optimizer must take back its moments and its count of steps."""
    row = ids.to(host.device())

    def made():
        _, model = checkpoints.load(moe_folder, torch.bfloat16)
        return build_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=1.0)

    first = made()
    first.step([lambda: -token_logprobs_packed(first.model, row, SEQ_LENS)[0].sum() / len(row)])
    state = {name: tensor.detach().cpu().clone() for name, tensor in first.state.tensors().items()}
    second = made()
    second.load_state(state.items())
    assert all(torch.equal(tensor.cpu(), state[name]) for name, tensor in second.state.tensors().items())


def test_logits_are_never_held_whole_in_device_memory() -> None:
    hidden = torch.randn(8192, 64, device=host.device(), dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(128_000, 64, device=host.device(), dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 128_000, (8192,), device=host.device())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(hidden, weight, targets)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 268_435_456
