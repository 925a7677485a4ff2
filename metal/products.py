"""Products of activations and int8 matrices: MLX's own on packed codes, or of unpacked ones where that is faster.

MLX's product of packed codes on a CPU takes one row at a time. There, fp32 rows are multiplied with the matrix unpacked to
fp32, a block of it at a time, so that little memory is taken beside the packed codes. Which of both is used depends on the
matrix alone, never on the number of rows, and on whether the BLAS behind MLX gives a row the same bits alone and among
others; that is tried once a process.

Legend: N rows, D inputs, O outputs.
"""

from functools import cache
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np

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
    # Rows side by side: a sum over inputs then adds whole lines of N numbers, in the order of the inputs.
    columns_DN = mx.contiguous(x.reshape(-1, x.shape[-1]).T)
    num_outputs, block = weight.codes.shape[0], max(1, BLOCK_WEIGHTS // x.shape[-1])
    parts = [_unpacked(*(array[start : start + block] for array in weight)) @ columns_DN for start in range(0, num_outputs, block)]
    out_ON = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return mx.contiguous(out_ON.T).reshape(*x.shape[:-1], num_outputs)


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
