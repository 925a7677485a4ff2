"""The layers of LFM2 that Megatron does not have, made to fit its spec slots: norm, short convolution, attention, router.

Linear layers, residuals, dispatch and experts stay Megatron's. Modules here hold no weights in an order of their own
except where the docstring says so; `trainer_gpu/convert.py` knows the order.

Shapes: S sequence (T packed tokens in one row), B rows, D hidden, N heads, H head size, K experts a token, E experts.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch.nn.attention.varlen import varlen_attn

from trainer_gpu.packing import PackedRow

# Beside the router's sum of chosen scores, as in the reference model (Megatron's own router uses 1e-20).
_ROUTER_EPS = 1e-6


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape that ends in D, unchanged."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ShortConv(MegatronModule):
    """Gated causal depthwise convolution: out_proj(c * conv(b * x)), (b, c, x) = in_proj(h).

    The rows of in_proj are channel-major, [D, 3] (the hub's are [3, D]), so that a slice of rows is whole channels.
    In a packed row, taps that would reach into the previous sequence are zero.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        kernel_size: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        size = config.hidden_size
        into, out_of = not_none(config.init_method), not_none(config.output_layer_init_method)
        shared: dict[str, Any] = {
            "config": config,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        self.in_proj = ColumnParallelLinear(size, 3 * size, init_method=into, gather_output=False, **shared)
        self.out_proj = RowParallelLinear(size, size, init_method=out_of, input_is_parallel=True, **shared)
        weight = torch.empty(size, kernel_size, dtype=config.params_dtype)
        self.conv_weight = torch.nn.Parameter(weight.uniform_(-(kernel_size**-0.5), kernel_size**-0.5))

    def forward(self, hidden_states: torch.Tensor, packed_seq_params: PackedRow | None = None, **_: object) -> tuple[torch.Tensor, None]:
        """[S, B, D] -> ([S, B, D], no bias)."""
        bcx, _bias = self.in_proj(hidden_states)
        b, c, x = bcx.unflatten(-1, (-1, 3)).unbind(-1)
        gated = b * x
        num_steps, kernel_size = gated.shape[0], self.conv_weight.shape[1]
        y = gated * self.conv_weight[:, -1]
        for back in range(1, min(kernel_size, num_steps)):
            earlier = F.pad(gated, (0, 0, 0, 0, back, 0))[:num_steps]
            if packed_seq_params is not None:
                earlier = earlier * (packed_seq_params.positions >= back).view(-1, 1, 1)
            y = y + earlier * self.conv_weight[:, -1 - back]
        return self.out_proj(c * y)[0], None


class CausalAttention(MegatronModule):
    """Softmax attention over heads that are already split, normed and rotated.

    CPU and dense inputs run torch's SDPA; a packed row on the CPU, or in fp32, is spread over a right-padded batch first,
    which a causal mask makes exact. On CUDA a packed row in bf16 runs torch's variable-length kernel, which has no fp32
    (not run here: no GPU).
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        /,
        *,
        packed_seq_params: PackedRow | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Query [S, B, N, H], key and value [S, B, groups, H] -> [S, B, N * H]; packed: without B -> [T, N, H]."""
        if packed_seq_params is None:
            heads = [t.permute(1, 2, 0, 3) for t in (query, key, value)]
            return _sdpa(*heads).permute(2, 0, 1, 3).flatten(2)
        if query.is_cuda and query.dtype != torch.float32:
            return _varlen(query, key, value, packed_seq_params)
        row = packed_seq_params
        heads = [_spread(t, row) for t in (query, key, value)]
        return _sdpa(*heads).transpose(1, 2).flatten(0, 1).index_select(0, row.padded_slots)


def _spread(x: torch.Tensor, row: PackedRow) -> torch.Tensor:
    """[T, N, H] -> [B, N, longest, H], zeros after each sequence's end."""
    padded = x.new_zeros(row.num_sequences * row.longest, *x.shape[1:])
    padded = padded.index_copy(0, row.padded_slots, x)
    return padded.unflatten(0, (row.num_sequences, row.longest)).transpose(1, 2)


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention on [B, heads, S, H]; scale 1 / sqrt(H)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow) -> torch.Tensor:
    """Causal attention on a packed row, CUDA only."""
    offsets, longest = row.cu_seqlens_q, row.longest
    out = varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=(-1, 0), enable_gqa=True)
    return cast(torch.Tensor, out)  # a tuple only when asked for more


class SigmoidRouter(TopKRouter):
    """Scores are sigmoids in fp32; `expert_bias` takes part in choosing the experts, not in weighing them.

    The bias is a frozen fp32 buffer of our own: `moe_router_enable_expert_bias` stays off, so that nothing of
    Megatron's counts tokens for it or moves it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        use_expert_bias: bool,
        norm_topk_prob: bool,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.norm_topk_prob = norm_topk_prob
        del self.expert_bias
        bias = torch.zeros(not_none(config.num_moe_experts), dtype=torch.float32) if use_expert_bias else None
        self.register_buffer("expert_bias", bias)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[S, B, D] -> fp32 logits [S, B, E]."""
        return F.linear(input.float(), self.weight.float())

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits -> (weights [T, E], zero where not chosen; chosen bool [T, E])."""
        scores = torch.sigmoid(logits.flatten(0, -2))
        ranked = scores.detach() if self.expert_bias is None else scores.detach() + self.expert_bias
        chosen_TK = self._choose(ranked)
        weights_TK = scores.gather(1, chosen_TK)
        if self.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _ROUTER_EPS)
        if self.config.moe_router_topk_scaling_factor is not None:
            weights_TK = weights_TK * self.config.moe_router_topk_scaling_factor
        weights = torch.zeros_like(scores).scatter(1, chosen_TK, weights_TK)
        return weights, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen_TK, True)

    def _choose(self, ranked: torch.Tensor) -> torch.Tensor:
        """Expert numbers [T, K]: the best by `ranked` [T, E], or the replayed ones."""
        if self.router_replay is None:
            return _topk(ranked, self.topk)[1]
        return self.router_replay.get_replay_topk(ranked, self.topk, None, None, _topk)[1]


def _topk(
    scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of each row and where they are, the lower index first among equals, which `torch.topk` does not promise."""
    values, indices = torch.sort(scores, dim=1, descending=True, stable=True)
    return values[:, :topk], indices[:, :topk]
