"""The MoE router: fp32 logits to the chosen experts and their weights, as plain MLX ops and as a Metal kernel.

The plain-op form is the reference and runs everywhere; `Router` uses the kernel of `router.metal` where there is a
Metal back end and a start-up self-test agrees, else the reference. The matmul that makes the logits is the model's.

Legend: N tokens, E experts, K experts chosen a token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from metal.kernels import Kernel, Switch, metal_works

MAX_EXPERTS = 256
"""The kernel gives each of a simdgroup's 32 lanes at most 8 experts."""
_EPSILON = 1e-6
_SIMD_WIDTH = 32
_SELF_TEST_SHAPES = ((3, 8, 2), (65, 32, 4), (33, 64, 6))


@dataclass(frozen=True, slots=True)
class RouterRule:
    """What config.json says of routing: `top_k` experts, weights normalised to sum to 1 or not, then scaled."""

    num_experts: int
    top_k: int
    normalise: bool
    scale: float


def route_plain(logits: mx.array, bias: mx.array, rule: RouterRule) -> tuple[mx.array, mx.array]:
    """Choose experts: top K of sigmoid(logits) + bias, the lower index first among equals; weigh them without the bias.

    Args:
        logits: float32 [N, E].
        bias: float32 [E], used for the choice only.
        rule: the model's routing rule.

    Returns:
        experts uint32 [N, K] in order of falling biased score, weights float32 [N, K].
    """
    scores_NE = mx.sigmoid(logits)
    left_NE = scores_NE + bias
    lanes_E = mx.arange(rule.num_experts, dtype=mx.uint32)
    chosen: list[mx.array] = []
    for _ in range(rule.top_k):
        best_N1 = mx.argmax(left_NE, axis=-1, keepdims=True)  # the first of equals
        chosen.append(best_N1)
        left_NE = mx.where(lanes_E == best_N1, -mx.inf, left_NE)
    experts_NK = mx.concatenate(chosen, axis=-1)
    weights_NK = mx.take_along_axis(scores_NE, experts_NK, axis=-1)
    if rule.normalise:
        weights_NK = weights_NK / (weights_NK.sum(axis=-1, keepdims=True) + _EPSILON)
    return experts_NK, weights_NK if rule.scale == 1.0 else weights_NK * rule.scale


class Router:
    """Chooses experts for one model; `switch` tells whether the kernel or the plain ops do it, and why."""

    def __init__(self, rule: RouterRule, *, available: Callable[[], bool] = metal_works) -> None:
        self.rule = rule
        self._kernel = Kernel("router", inputs=("logits", "bias", "scale"), outputs=("experts", "weights"))
        fits = rule.num_experts <= MAX_EXPERTS and rule.top_k <= rule.num_experts
        self.switch = Switch("router", available=lambda: fits and available(), self_test=lambda: self_test(self._kernel))

    def __call__(self, logits: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
        """As `route_plain`, by the kernel where it is used."""
        if self.switch.uses_kernel:
            return route_kernel(self._kernel, logits, bias, self.rule)
        return route_plain(logits, bias, self.rule)


def route_kernel(kernel: Kernel, logits: mx.array, bias: mx.array, rule: RouterRule) -> tuple[mx.array, mx.array]:
    """As `route_plain`, by `kernel`: one simdgroup a token."""
    num_tokens = logits.shape[0]
    experts, weights = kernel(
        inputs=[logits, bias, mx.array([rule.scale], dtype=mx.float32)],
        template=[("E", rule.num_experts), ("K", rule.top_k), ("NORMALISE", rule.normalise)],
        grid=(_SIMD_WIDTH, num_tokens, 1),
        threadgroup=(_SIMD_WIDTH, 1, 1),
        output_shapes=[(num_tokens, rule.top_k)] * 2,
        output_dtypes=[mx.uint32, mx.float32],
    )
    return experts, weights


def self_test(kernel: Kernel) -> str:
    """Compare kernel and reference on seeded cases with exact ties; "" if they agree, else what differs."""
    for num_tokens, num_experts, top_k in _SELF_TEST_SHAPES:
        for normalise in (True, False):
            rule = RouterRule(num_experts, top_k, normalise, 1.0 if normalise else 2.5)
            logits, bias = tied_case(num_tokens, num_experts)
            ours, wanted = route_kernel(kernel, logits, bias, rule), route_plain(logits, bias, rule)
            case = f"{num_tokens} tokens, {num_experts} experts, top {top_k}"
            if not mx.array_equal(ours[0], wanted[0]).item():
                return f"other experts at {case}"
            if not mx.allclose(ours[1], wanted[1], rtol=1e-5, atol=1e-6).item():
                return f"other weights at {case}"
    return ""


def tied_case(num_tokens: int, num_experts: int) -> tuple[mx.array, mx.array]:
    """Seeded logits float32 [N, E] on a coarse grid, so that many scores are equal, and a bias float32 [E] of halves."""
    keys = mx.random.split(mx.random.key(num_tokens * 1000 + num_experts))
    logits = mx.round(mx.random.normal((num_tokens, num_experts), key=keys[0]) * 2.0) / 2.0
    bias = mx.floor(mx.random.uniform(shape=(num_experts,), key=keys[1]) * 3.0) / 2.0
    return logits.astype(mx.float32), bias.astype(mx.float32)
