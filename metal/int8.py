"""int8 matrices as `stoa.weights.layout` packs them, and plain products with them."""

from typing import NamedTuple

import mlx.core as mx

from metal.kernels import demand, expect
from stoa.weights.layout import BITS, GROUP_SIZE


class Int8(NamedTuple):
    """An int8 matrix or stack of them: codes uint32 [.., out, in / 4], scales and biases bf16 [.., out, in / 64]."""

    codes: mx.array
    scales: mx.array
    biases: mx.array


def linear(x: mx.array, weight: Int8) -> mx.array:
    """X [.., in] times an int8 matrix [out, in], transposed: [.., out] in the type of x."""
    return mx.quantized_matmul(x, *weight, transpose=True, group_size=GROUP_SIZE, bits=BITS)


def silu(x: mx.array) -> mx.array:
    """X * sigmoid(x)."""
    return x * mx.sigmoid(x)


def expect_int8(kernel: str, name: str, weight: Int8, *shape: int) -> None:
    """Raise KernelArgumentsError unless `weight` is int8 of this shape, unpacked, with inner dimensions of whole groups."""
    *outer, inner = shape
    demand(kernel, inner > 0 and inner % GROUP_SIZE == 0, f"{name} has inner dimension {inner}, not a multiple of {GROUP_SIZE}")
    expect(kernel, f"{name}'s codes", weight.codes, (*outer, inner // 4), mx.uint32)
    for part in (weight.scales, weight.biases):
        expect(kernel, f"{name}'s scales and biases", part, (*outer, inner // GROUP_SIZE), mx.bfloat16, mx.float32)
    demand(kernel, weight.scales.dtype == weight.biases.dtype, f"{name} has scales and biases of two types")
