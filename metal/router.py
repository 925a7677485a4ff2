"""K4, the MoE router: hidden states to experts, their weights, and the order in which experts take their rows.

The plain-op form is the reference and runs everywhere. Logits are fp32 sums in both, but in another order of additions:
two scores closer than that difference may be chosen otherwise, equal rows of the gate never.

Legend: N tokens, D width, E experts, K experts chosen a token; a place is token * K + choice.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx

from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, launch_on_metal

MAX_EXPERTS: Final = 256
"""The kernel gives each of a simdgroup's 32 lanes at most 8 experts, and records an expert in one byte."""
EPSILON: Final = 1e-6
"""Added to the sum of weights before they are divided by it."""
_NAME = "router"


@dataclass(frozen=True, slots=True)
class RouterRule:
    """What config.json says of routing: `top_k` experts, weights normalised to sum to 1 or not, then scaled."""

    num_experts: int
    top_k: int
    normalise: bool
    scale: float


class Routing(NamedTuple):
    """Who computes what: experts uint32 [N, K] by falling biased score, weights float32 [N, K]; record uint8, the experts again."""

    experts: mx.array
    weights: mx.array
    record: mx.array


class Order(NamedTuple):
    """Places by expert: order int32 [N * K]; offsets int32 [E + 1], where each expert's begin in it; counts int32 [E]."""

    order: mx.array
    offsets: mx.array
    counts: mx.array


def route_plain(x: mx.array, gate: mx.array, bias: mx.array, rule: RouterRule) -> Routing:
    """Choose experts: top K of sigmoid(logits) + bias, the lower index first among equals; weigh them without the bias.

    Args:
        x: [N, D].
        gate: [E, D], both in any float type; logits are their product in float32.
        bias: float32 [E], used for the choice only.
        rule: the model's routing rule.
    """
    scores_NE = mx.sigmoid(_logits(x, gate))
    experts_NK = _best(scores_NE + bias, rule)
    weights_NK = mx.take_along_axis(scores_NE, experts_NK, axis=-1)
    if rule.normalise:
        weights_NK = weights_NK / (weights_NK.sum(axis=-1, keepdims=True) + EPSILON)
    weights_NK = weights_NK if rule.scale == 1.0 else weights_NK * rule.scale
    return Routing(experts_NK, weights_NK, experts_NK.astype(mx.uint8))


def route_by_softmax(x: mx.array, gate: mx.array, bias: mx.array, rule: RouterRule) -> Routing:
    """As `route_plain` for families that weigh experts by a softmax over all of them; no kernel computes it.

    bias: float32 [E], used for the choice only. Weights are normalised exactly.
    """
    scores_NE = mx.softmax(_logits(x, gate), axis=-1, precise=True)
    experts_NK = _best(scores_NE + bias, rule)
    weights_NK = mx.take_along_axis(scores_NE, experts_NK, axis=-1)
    if rule.normalise:
        weights_NK = weights_NK / weights_NK.sum(axis=-1, keepdims=True)
    weights_NK = weights_NK if rule.scale == 1.0 else weights_NK * rule.scale
    return Routing(experts_NK, weights_NK, experts_NK.astype(mx.uint8))


def _logits(x: mx.array, gate: mx.array) -> mx.array:
    """float32 [N, E]: a product a token, so that a token's logits do not depend on how many there are."""
    return (x.astype(mx.float32)[:, None] @ gate.astype(mx.float32).T[None])[:, 0]


def _best(scores_NE: mx.array, rule: RouterRule) -> mx.array:
    """uint32 [N, K]: the K highest, the first of equals first."""
    lanes_E = mx.arange(rule.num_experts, dtype=mx.uint32)
    chosen: list[mx.array] = []
    for _ in range(rule.top_k):
        best_N1 = mx.argmax(scores_NE, axis=-1, keepdims=True)
        chosen.append(best_N1)
        scores_NE = mx.where(lanes_E == best_N1, -mx.inf, scores_NE)
    return mx.concatenate(chosen, axis=-1)


def order_plain(experts: mx.array, num_experts: int) -> Order:
    """Places of uint32 [N, K] experts by expert, those of one expert in their order."""
    flat = experts.reshape(-1)
    # Equal keys would leave the order to the sort; these keys differ.
    order = mx.argsort(flat.astype(mx.int32) * flat.size + mx.arange(flat.size, dtype=mx.int32)).astype(mx.int32)
    counts_E = (flat[:, None] == mx.arange(num_experts, dtype=mx.uint32)).astype(mx.int32).sum(axis=0)
    return Order(order, mx.concatenate([mx.zeros((1,), mx.int32), mx.cumsum(counts_E).astype(mx.int32)]), counts_E)


class RouterKernel:
    """As `route_plain`, by router.metal."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        self._route = Kernel("router", inputs=("x", "gate", "bias", "scale"), outputs=("experts", "weights", "record"), launcher=launcher)

    def __call__(self, x: mx.array, gate: mx.array, bias: mx.array, rule: RouterRule) -> Routing:
        """As `route_plain`. Raises KernelArgumentsError."""
        expect(_NAME, "x", x, (-1, -1), *FLOATS)
        num_tokens, num_experts, top_k = x.shape[0], rule.num_experts, rule.top_k
        demand(_NAME, num_tokens > 0, "no tokens")
        expect(_NAME, "gate", gate, (num_experts, x.shape[1]), *FLOATS)
        expect(_NAME, "bias", bias, (num_experts,), mx.float32)
        demand(_NAME, 0 < top_k <= num_experts <= MAX_EXPERTS, f"top {top_k} of {num_experts} experts, of at most {MAX_EXPERTS}")
        experts, weights, record = self._route(
            inputs=[x, gate, bias, mx.array([rule.scale], dtype=mx.float32)],
            template=[("D", x.shape[1]), ("E", num_experts), ("K", top_k), ("NORMALISE", rule.normalise)],
            grid=(256, num_tokens, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(num_tokens, top_k)] * 3,
            output_dtypes=[mx.uint32, mx.float32, mx.uint8],
        )
        return Routing(experts, weights, record)


class OrderKernel:
    """As `order_plain`, by expert_order.metal."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        self._order = Kernel("expert_order", inputs=("experts", "size"), outputs=("order", "offsets", "counts"), launcher=launcher)

    def __call__(self, experts: mx.array, num_experts: int) -> Order:
        """As `order_plain`. Raises KernelArgumentsError."""
        expect(_NAME, "experts", experts, (-1, -1), mx.uint32)
        demand(_NAME, experts.size > 0 and 0 < num_experts <= MAX_EXPERTS, f"{experts.size} places of {num_experts} experts")
        return Order(
            *self._order(
                inputs=[experts, mx.array([experts.size], dtype=mx.int32)],
                template=[("E", num_experts)],
                grid=(1024, 1, 1),
                threadgroup=(1024, 1, 1),
                output_shapes=[(experts.size,), (num_experts + 1,), (num_experts,)],
                output_dtypes=[mx.int32] * 3,
            )
        )
