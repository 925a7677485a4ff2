"""K1, the experts of a MoE layer: each token's chosen SwiGLU blocks, weighed and summed. `reference.experts_plain` says it in ops.

The kernel gives a threadgroup one expert and 32 columns, reads the weights once for up to 32 of the expert's rows, and
computes 8-row tiles that never hold rows of two experts. Its sums do not depend on who else is in the batch.

Legend: N tokens, D width, I inner width, E experts, K experts a token.
"""

from typing import Final

import mlx.core as mx

from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, expect_int8, launch_on_metal
from metal.products import Int8
from metal.router import Order, OrderKernel
from metal.sizes import GROUP_SIZE

COLUMNS: Final = 32
"""Columns of the output a threadgroup makes."""
THREADS: Final = 128
_NAME = "experts"


class ExpertsKernel:
    """As `experts_plain`, by expert_order.metal, experts_up.metal and experts_down.metal."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        both = [f"{matrix}_{part}" for matrix in ("gate", "up") for part in ("codes", "scales", "biases")]
        self._order = OrderKernel(launcher)
        self._up = Kernel("experts_up", inputs=("x", "order", "offsets", *both), outputs=("inner",), uses="int8_tile", launcher=launcher)
        self._down = Kernel(
            "experts_down",
            inputs=("inner", "order", "offsets", "weights", "codes", "scales", "biases"),
            outputs=("shares",),
            uses="int8_tile",
            launcher=launcher,
        )

    def __call__(self, x: mx.array, experts: mx.array, weights: mx.array, gate: Int8, up: Int8, down: Int8) -> mx.array:
        """X [N, D], experts uint32 [N, K], weights float32 [N, K]: [N, D] in the type of x. Raises KernelArgumentsError."""
        expect(_NAME, "gate's codes", gate.codes, (-1, -1, -1), mx.uint32)
        order = self._order(experts, gate.codes.shape[0])
        expect(_NAME, "weights", weights, tuple(experts.shape), mx.float32)
        shares_NKD = self.shares(self.inner(x, experts.shape[1], order, gate, up), weights, order, down)
        # Written out, so that the order of additions is one and the same for every number of tokens.
        total_ND = shares_NKD[:, 0]
        for choice in range(1, shares_NKD.shape[1]):
            total_ND = total_ND + shares_NKD[:, choice]
        return total_ND

    def inner(self, x: mx.array, top_k: int, order: Order, gate: Int8, up: Int8) -> mx.array:
        """First half: silu(gate) * up of each place, [N * K, I], in the order of `order`."""
        expect(_NAME, "gate's codes", gate.codes, (-1, -1, -1), mx.uint32)
        num_experts, width = gate.codes.shape[0], gate.codes.shape[1]
        expect(_NAME, "x", x, (-1, -1), *FLOATS)
        _expect_order(order, x.shape[0] * top_k, num_experts)
        expect_int8(_NAME, "gate", gate, num_experts, width, x.shape[1])
        expect_int8(_NAME, "up", up, num_experts, width, x.shape[1])
        demand(_NAME, width > 0 and width % GROUP_SIZE == 0, f"inner width {width} is not a multiple of {GROUP_SIZE}")
        return self._up(
            inputs=[x, order.order, order.offsets, *gate, *up],
            template=[("T", x.dtype), ("D", x.shape[1]), ("I", width), ("TOP_K", top_k)],
            grid=(width // COLUMNS * THREADS, num_experts, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(x.shape[0] * top_k, width)],
            output_dtypes=[x.dtype],
        )[0]

    def shares(self, inner: mx.array, weights: mx.array, order: Order, down: Int8) -> mx.array:
        """Second half: weight * down(inner) of each place, [N, K, D]."""
        expect(_NAME, "down's codes", down.codes, (-1, -1, -1), mx.uint32)
        num_experts, width = down.codes.shape[0], down.codes.shape[1]
        expect(_NAME, "weights", weights, (-1, -1), mx.float32)
        expect(_NAME, "inner", inner, (weights.size, -1), *FLOATS)
        _expect_order(order, weights.size, num_experts)
        expect_int8(_NAME, "down", down, num_experts, width, inner.shape[1])
        demand(_NAME, width > 0 and width % COLUMNS == 0, f"width {width} is not a multiple of {COLUMNS}")
        return self._down(
            inputs=[inner, order.order, order.offsets, weights, *down],
            template=[("T", inner.dtype), ("D", width), ("I", inner.shape[1])],
            grid=(width // COLUMNS * THREADS, num_experts, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(*weights.shape, width)],
            output_dtypes=[inner.dtype],
        )[0]


def _expect_order(order: Order, num_places: int, num_experts: int) -> None:
    demand(_NAME, num_places > 0, "no rows")
    expect(_NAME, "order", order.order, (num_places,), mx.int32)
    expect(_NAME, "offsets", order.offsets, (num_experts + 1,), mx.int32)
