"""The vocabulary head and the grouped experts, each against plain operations; packed rows; the process itself."""

import socket

import psutil
import pytest
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_gpu import host
from trainer_gpu.experts import GroupedExperts
from trainer_gpu.head import token_logprobs
from trainer_gpu.packing import pack_row


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("max_logits_bytes", [1, 4 * 300 * 7, 2**20])
def test_head_equals_log_softmax_in_value_and_gradient(max_logits_bytes: int) -> None:
    hidden, weight = draw(50, 32).requires_grad_(), draw(300, 32, seed=1).requires_grad_()
    targets = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(2))
    upstream = draw(50, seed=3)
    plain = F.linear(hidden.double(), weight.double()).log_softmax(-1)
    expected = plain.gather(1, targets[:, None])[:, 0]
    expected_grads = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    logprob, entropy = token_logprobs(hidden, weight, targets, max_logits_bytes)
    grads = torch.autograd.grad((logprob * upstream).sum(), (hidden, weight))
    assert torch.allclose(logprob.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), -(plain.exp() * plain).sum(-1), atol=1e-5)
    assert not entropy.requires_grad
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert torch.allclose(grad, reference, atol=1e-5 * float(reference.detach().abs().max()))


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor any operation makes."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else [result]:
            if isinstance(out, torch.Tensor):
                self.num_bytes = max(self.num_bytes, out.numel() * out.element_size())
        return result


def test_head_never_holds_all_logits() -> None:
    hidden, weight = draw(256, 8).requires_grad_(), draw(8192, 8, seed=1).requires_grad_()
    targets = torch.zeros(256, dtype=torch.int64)
    with LargestTensor() as seen:
        token_logprobs(hidden, weight, targets, max_logits_bytes=2**19)[0].sum().backward()
    assert seen.num_bytes <= 2**19  # all logits would be 8 MiB
    with LargestTensor() as all_at_once:
        F.linear(hidden, weight)
    assert all_at_once.num_bytes == 2**23, "the measure must see a large tensor"


class PeakBytes(TorchDispatchMode):
    """The most bytes alive at once in tensors that operations inside the block made."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {StorageWeakRef(a.untyped_storage()) for a in args if isinstance(a, torch.Tensor)}
        for out in result if isinstance(result, tuple | list) else [result]:
            if isinstance(out, torch.Tensor) and (ref := StorageWeakRef(out.untyped_storage())) not in inputs:
                self._alive[ref] = out.untyped_storage().nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def test_head_of_128000_words_needs_256_mib_at_its_peak_with_gradient() -> None:
    """Of 8192 tokens, too: there `benchmarks.trainer` counts every allocation, and test_shows.py holds it to the same bound."""
    hidden, weight = draw(1024, 64).requires_grad_(), (0.1 * draw(128_000, 64, seed=1)).requires_grad_()
    targets = torch.randint(0, 128_000, (1024,), generator=torch.Generator().manual_seed(2))
    with PeakBytes() as seen:
        logprobs, _ = token_logprobs(hidden, weight, targets)
        logprobs.sum().backward()
    print(f"peak {seen.peak} bytes")
    assert seen.peak <= 268_435_456
    assert seen.peak > 2**26, "the measure must see a chunk of logits"
    row = F.linear(hidden[:1].detach(), weight.detach()).log_softmax(-1)[0, targets[0]]
    assert float(logprobs[0].detach()) == pytest.approx(float(row), abs=1e-4)


def test_head_of_no_rows_is_empty() -> None:
    logprob, entropy = token_logprobs(draw(0, 8).requires_grad_(), draw(16, 8).requires_grad_(), torch.zeros(0, dtype=torch.int64))
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("counts", [(5, 0, 17, 10), (0, 0, 32, 0), (0, 0, 0, 0)])
def test_grouped_experts_equal_megatrons_sequential_ones(counts: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        cuda_graph_scope=[],
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    sequential = SequentialMLP(4, config, linear, groups)
    grouped = GroupedExperts(4, config, groups)
    with torch.no_grad():
        for number, expert in enumerate(sequential.local_experts):
            grouped.fc1[number].copy_(expert.linear_fc1.weight)
            grouped.fc2[number].copy_(expert.linear_fc2.weight)

    def grads(experts) -> list[torch.Tensor]:
        """Of fc1 and fc2, stacked; zero where an expert had no token."""
        if experts is grouped:
            return [grouped.fc1.grad, grouped.fc2.grad]
        weights = [[getattr(e, name).weight for e in sequential.local_experts] for name in ("linear_fc1", "linear_fc2")]
        return [torch.stack([w.grad if w.grad is not None else torch.zeros_like(w) for w in each]) for each in weights]

    results = []
    for experts in (sequential, grouped):
        x = (4 * draw(sum(counts), 64, seed=5)).to(dtype).requires_grad_()
        probs = draw(sum(counts), seed=6).sigmoid().requires_grad_()
        out, _ = experts(x, torch.tensor(counts), probs)
        (out.float() * draw(sum(counts), 64, seed=7)).sum().backward()
        results.append([out, x.grad, probs.grad, *grads(experts)])
    for ours, reference in zip(results[1], results[0], strict=True):
        scale = float(reference.detach().abs().max()) if reference.numel() else 0.0
        assert torch.allclose(ours, reference, atol=tolerance * scale + 1e-12)
    if sum(counts):
        assert float(results[0][0].detach().abs().max()) > 0


def test_a_packed_row_knows_where_each_token_stands() -> None:
    row = pack_row([3, 1, 2], torch.device("cpu"))
    assert row.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert row.padded_slots.tolist() == [0, 1, 2, 3, 6, 7]
    assert row.cu_seqlens_q.tolist() == [0, 3, 4, 6]


def test_the_rotary_table_never_has_as_many_rows_as_the_packed_row() -> None:
    assert pack_row([64, 64], torch.device("cpu")).max_seqlen_q == 64
    assert pack_row([60, 4], torch.device("cpu")).max_seqlen_q == 128


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_an_empty_sequence_cannot_be_packed(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        pack_row(lengths, torch.device("cpu"))


def test_nothing_listens_outside_loopback() -> None:
    listening = [c.laddr for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert all(address.ip in ("127.0.0.1", "::1") for address in listening), listening
    with socket.create_server(("0.0.0.0", 0)):  # the test must be able to see such a socket
        seen = [c.laddr.ip for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        assert "0.0.0.0" in seen


def test_setting_up_twice_is_harmless() -> None:
    group = torch.distributed.group.WORLD
    host.setup_process(num_threads=1, seed=0)
    assert torch.distributed.group.WORLD is group
    assert host.device() == torch.device("cpu")


def test_the_cuda_spelling_is_the_cpu_inside_the_block_only() -> None:
    with host.cuda_literals():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"
