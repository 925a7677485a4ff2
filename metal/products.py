"""Products of activations and int8 matrices: MLX's own on packed codes, or of unpacked ones where that is faster.

MLX's product of packed codes on a CPU takes one row at a time. There, fp32 rows are multiplied with the matrix unpacked to
fp32, a block of it at a time, so that little memory is taken beside the packed codes; small matrices of the same inputs
are unpacked as one. Which of both is used depends on the matrices alone, never on the number of rows, and on whether the
BLAS behind MLX gives a row the same bits alone and among others; that is tried once a process.

Legend: N rows, D inputs, O outputs, I inner size, E matrices of a stack, K chosen ones a row.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np

from metal.exponents import silu
from metal.sizes import BITS, GROUP_SIZE

BLOCK_WEIGHTS: Final = 1 << 18
"""Weights that are unpacked at once: 1 MiB."""
LEAST_WEIGHTS: Final = 1 << 12
"""Smaller matrices are not worth the unpacking."""
_TRIED_ROWS: Final = (1, 2, 5, 8, 33, 64, 256)
_TRIED_SHAPES: Final = ((64, 64), (192, 64), (40, 512), (7, 1792))


class Int8(NamedTuple):
    """An int8 matrix or stack of them: codes uint32 [.., out, in / 4], scales and biases bf16 [.., out, in / 64]."""

    codes: mx.array
    scales: mx.array
    biases: mx.array


def linear(x: mx.array, weight: Int8) -> mx.array:
    """X [.., in] times an int8 matrix [out, in], transposed: [.., out] in the type of x."""
    if x.dtype == mx.float32 and 4 * weight.codes.size >= LEAST_WEIGHTS and unpacks():
        return unpacked_product(x, weight)
    return mx.quantized_matmul(x, *weight, transpose=True, group_size=GROUP_SIZE, bits=BITS)


def linears(x: mx.array, weights: Sequence[Int8]) -> list[mx.array]:
    """As `linear` for several matrices of the same inputs."""
    if not _unpack_as_one(x, weights):
        return [linear(x, weight) for weight in weights]
    ends = list(accumulate(weight.codes.shape[0] for weight in weights))
    return list(mx.split(unpacked_product(x, _stacked(weights)), ends[:-1], axis=-1))


def gated(x: mx.array, gate: Int8, up: Int8, down: Int8) -> mx.array:
    """A gated block, down(silu(gate x) * up x): [N, D] in the type of x."""
    if not _unpack_as_one(x, (gate, up)):
        return linear(silu(linear(x, gate)) * linear(x, up), down)
    # Rows stay side by side from the first product to the last.
    gates_IN, ups_IN = mx.split(_product(_stacked((gate, up)), mx.contiguous(x.T)), 2)
    return mx.contiguous(_product(down, silu(gates_IN) * ups_IN).T)


def chosen_gated(x: mx.array, chosen: mx.array, gate: Int8, up: Int8, down: Int8) -> mx.array | None:
    """`gated` of each row by the chosen ones of a stack, where all of it is worth unpacking for any number of rows.

    Args:
        x: [N, D].
        chosen: uint32 [N, K].
        gate: int8 stack [E, I, D].
        up: int8 stack [E, I, D].
        down: int8 stack [E, D, I].

    Returns:
        [N, K, D], or None where packed codes are to be multiplied.
    """
    if not _unpack_as_one(x, (gate, up), least=0):
        return None
    # One product a row and choice, of the shape that the model says, however many rows there are.
    both_NK1I = mx.gather_mm(x[:, None, None], _transposed(_stacked((gate, up), axis=1)), rhs_indices=chosen)
    gates_NK1I, ups_NK1I = mx.split(both_NK1I, 2, axis=-1)
    return mx.gather_mm(silu(gates_NK1I) * ups_NK1I, _transposed(down), rhs_indices=chosen).squeeze(-2)


def unpacked_rows(weight: Int8, rows: mx.array | slice, dtype: mx.Dtype) -> mx.array:
    """Rows of an int8 matrix [O, D] in a float type: [.., D]."""
    codes, scales, biases = (array[rows] for array in weight)
    if dtype != mx.float32 or not unpacks():
        return mx.dequantize(codes, scales.astype(dtype), biases.astype(dtype), group_size=GROUP_SIZE, bits=BITS)
    return _unpacked(codes, scales, biases)


def unpacks() -> bool:
    """True where fp32 rows are multiplied with unpacked matrices: on a CPU whose BLAS treats every row alike."""
    return mx.default_device().type == mx.DeviceType.cpu and _treats_rows_alike()


def unpacked_product(x: mx.array, weight: Int8) -> mx.array:
    """As `linear`, in fp32, by `code * scale + bias` as `mx.dequantize` computes it; x is float32."""
    out_ON = _product(weight, mx.contiguous(x.reshape(-1, x.shape[-1]).T))
    return mx.contiguous(out_ON.T).reshape(*x.shape[:-1], weight.codes.shape[0])


def _product(weight: Int8, columns_DN: mx.array) -> mx.array:
    """[O, N]. Rows are side by side: a sum over inputs then adds whole lines of N numbers, in the order of the inputs."""
    num_outputs, block = weight.codes.shape[0], max(1, BLOCK_WEIGHTS // columns_DN.shape[0])
    parts = [_unpacked(*(array[start : start + block] for array in weight)) @ columns_DN for start in range(0, num_outputs, block)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _unpack_as_one(x: mx.array, weights: Sequence[Int8], least: int = LEAST_WEIGHTS) -> bool:
    """True if matrices, or stacks of them, are to be unpacked together and multiplied with fp32 rows."""
    num = 4 * sum(weight.codes.size for weight in weights)
    return x.dtype == mx.float32 and least <= num <= BLOCK_WEIGHTS and unpacks()


def _stacked(weights: Sequence[Int8], axis: int = 0) -> Int8:
    """Matrices of the same inputs one below the other."""
    return Int8(*(mx.concatenate(list(parts), axis=axis) for parts in zip(*weights, strict=True)))


def _transposed(weight: Int8) -> mx.array:
    """A stack unpacked, inputs by outputs: [E, D, O]."""
    return mx.contiguous(_unpacked(*weight).swapaxes(-1, -2))


def _unpacked(codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    grouped = codes.view(mx.uint8).reshape(*scales.shape, GROUP_SIZE).astype(mx.float32)
    return (grouped * scales[..., None].astype(mx.float32) + biases[..., None].astype(mx.float32)).reshape(*codes.shape[:-1], -1)


@cache
def _treats_rows_alike() -> bool:
    """True if a row's product has the same bits whatever number of rows it is computed with, and wherever it stands."""
    numbers = np.random.default_rng(0)
    for shape in _TRIED_SHAPES:
        packed = mx.quantize(mx.array(numbers.standard_normal(shape, np.float32)), group_size=GROUP_SIZE, bits=BITS)
        x_ND = mx.array(numbers.standard_normal((max(_TRIED_ROWS), shape[1]), np.float32))
        together = np.array(unpacked_product(x_ND, Int8(*packed)))
        for num in _TRIED_ROWS:
            first = np.array(unpacked_product(x_ND[:num], Int8(*packed)))
            last = np.array(unpacked_product(x_ND[-num:], Int8(*packed)))
            if not (np.array_equal(first, together[:num]) and np.array_equal(last, together[-num:])):
                return False
    return True
