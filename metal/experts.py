"""K1, the experts of a MoE layer: each token's chosen SwiGLU blocks, weighed and summed.

The kernel gives a threadgroup one expert and 32 columns, reads the weights once for up to 32 of the expert's rows, and
computes 8-row tiles that never hold rows of two experts. Its sums do not depend on who else is in the batch.

Legend: N tokens, D width, I inner width, E experts, K experts a token.
"""

from typing import Final

import mlx.core as mx

from metal.int8 import Int8, expect_int8, silu
from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, launch_on_metal
from metal.routing import Routing
from stoa.weights.layout import BITS, GROUP_SIZE

COLUMNS: Final = 32
"""Columns of the output a threadgroup makes."""
THREADS: Final = 128
_NAME = "experts"


def experts_plain(x: mx.array, routing: Routing, gate: Int8, up: Int8, down: Int8, *, sort: bool = False) -> mx.array:
    """The layer's output [N, D] in the type of x, for x [N, D]; gate, up [E, I, D] and down [E, D, I].

    With `sort`, rows of one expert stand together, as MLX's own GPU kernel for many rows needs them.
    """
    top_k = routing.experts.shape[-1]
    rows, chosen = x[:, None, None], routing.experts
    if sort:
        rows, chosen = x[routing.order // top_k][:, None], routing.experts.reshape(-1)[routing.order]

    def project(x: mx.array, weight: Int8) -> mx.array:
        return mx.gather_qmm(
            x, *weight, rhs_indices=chosen, transpose=True, group_size=GROUP_SIZE, bits=BITS, sorted_indices=sort
        )  # fmt: skip

    out = project(silu(project(rows, gate)) * project(rows, up), down).squeeze(-2)
    if sort:
        out = out[mx.argsort(routing.order)].reshape(-1, top_k, out.shape[-1])
    return (out * routing.weights[..., None].astype(out.dtype)).sum(axis=1)


class ExpertsKernel:
    """As `experts_plain`, by experts_up.metal and experts_down.metal."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        both = [f"{matrix}_{part}" for matrix in ("gate", "up") for part in ("codes", "scales", "biases")]
        self._up = Kernel("experts_up", inputs=("x", "order", "offsets", *both), outputs=("inner",), uses="int8_tile", launcher=launcher)
        self._down = Kernel(
            "experts_down",
            inputs=("inner", "order", "offsets", "weights", "codes", "scales", "biases"),
            outputs=("shares",),
            uses="int8_tile",
            launcher=launcher,
        )

    def __call__(self, x: mx.array, routing: Routing, gate: Int8, up: Int8, down: Int8) -> mx.array:
        """As `experts_plain`. Raises KernelArgumentsError."""
        inner = self.inner(x, routing, gate, up)
        shares_NKD = self.shares(inner, routing, down).reshape(*routing.experts.shape, x.shape[1])
        # Written out, so that the order of additions is one and the same for every number of tokens.
        total_ND = shares_NKD[:, 0]
        for choice in range(1, shares_NKD.shape[1]):
            total_ND = total_ND + shares_NKD[:, choice]
        return total_ND

    def inner(self, x: mx.array, routing: Routing, gate: Int8, up: Int8) -> mx.array:
        """First half: silu(gate) * up of each place, [N * K, I], in the order of `routing.order`."""
        num_tokens, top_k = routing.experts.shape
        num_experts, width = gate.codes.shape[0], gate.codes.shape[1]
        expect(_NAME, "x", x, (num_tokens, -1), *FLOATS)
        _expect_routing(routing, num_experts)
        expect_int8(_NAME, "gate", gate, num_experts, width, x.shape[1])
        expect_int8(_NAME, "up", up, num_experts, width, x.shape[1])
        demand(_NAME, width % GROUP_SIZE == 0, f"inner width {width} is not a multiple of {GROUP_SIZE}")
        return self._up(
            inputs=[x, routing.order, routing.offsets, *gate, *up],
            template=[("T", x.dtype), ("D", x.shape[1]), ("I", width), ("TOP_K", top_k)],
            grid=(width // COLUMNS * THREADS, num_experts, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(num_tokens * top_k, width)],
            output_dtypes=[x.dtype],
        )[0]

    def shares(self, inner: mx.array, routing: Routing, down: Int8) -> mx.array:
        """Second half: weight * down(inner) of each place, [N * K, D], in the order of places."""
        num_experts, width = down.codes.shape[0], down.codes.shape[1]
        expect(_NAME, "inner", inner, (routing.experts.size, -1), *FLOATS)
        _expect_routing(routing, num_experts)
        expect_int8(_NAME, "down", down, num_experts, width, inner.shape[1])
        demand(_NAME, width % COLUMNS == 0, f"width {width} is not a multiple of {COLUMNS}")
        return self._down(
            inputs=[inner, routing.order, routing.offsets, routing.weights, *down],
            template=[("T", inner.dtype), ("D", width), ("I", inner.shape[1])],
            grid=(width // COLUMNS * THREADS, num_experts, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(routing.experts.size, width)],
            output_dtypes=[inner.dtype],
        )[0]


def _expect_routing(routing: Routing, num_experts: int) -> None:
    demand(_NAME, routing.experts.ndim == 2 and routing.experts.size > 0, "no rows")
    expect(_NAME, "order", routing.order, (routing.experts.size,), mx.int32)
    expect(_NAME, "offsets", routing.offsets, (num_experts + 1,), mx.int32)
    expect(_NAME, "weights", routing.weights, tuple(routing.experts.shape), mx.float32)
