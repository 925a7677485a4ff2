"""The weights a Mac serves: MLX arrays, and the same memory as a numpy `WeightState` that updates are written into.

What an update says, and whether it is right, is `stoa.weights`'s business; the file knows neither bucket nor versions.
An update is written between sweeps, with no graph in flight, and needs no second copy: MLX reads the new bytes at the
next evaluation.
"""

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import WeightsError
from stoa.weights.layout import ArraySpec, Layout
from stoa.weights.state import NUMPY_TYPES, WeightState


class LiveWeights:
    """Weights in MLX's memory.

    `arrays`: by the layout's array names; codes are packed uint32 [.., rows, cols / 4], scales and biases bf16, raw
    tensors in their type. `state`: a WeightState whose numpy arrays are writable views of the same memory.
    """

    def __init__(self, layout: Layout) -> None:
        """Weights of zeros, to be built in place: a Mac has no room for a second copy."""
        self.arrays: dict[str, mx.array] = {}
        views: dict[str, NDArray[np.generic]] = {}
        for spec in layout.arrays:
            self.arrays[spec.name], views[spec.name] = adopt(spec, np.zeros(spec.shape, NUMPY_TYPES[spec.dtype]))
        self.state = WeightState(layout, views)
        self._check_shared()

    @classmethod
    def of(cls, state: WeightState) -> "LiveWeights":
        """A copy of `state` in MLX's memory."""
        live = cls(state.layout)
        live.state.copy_from(state)
        return live

    def settle(self) -> None:
        """Wait until MLX reads the weights no more; to be called before they are written."""
        mx.synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def _check_shared(self) -> None:
        """Raise WeightsError unless a byte written through a view is what MLX reads."""
        name = next(spec.name for spec in self.state.layout.arrays if spec.dtype == "uint8" and spec.name in self.arrays)
        view, array = self.state.arrays[name].reshape(-1), self.arrays[name].reshape(-1)
        before = int(view[0])
        view[0] = before ^ 0xFF
        seen = int(np.array(array[:1])[0]) & 0xFF
        view[0] = before
        if seen != before ^ 0xFF:
            raise WeightsError(
                "this MLX copies arrays where it should share them, so updates would not be served",
                hint="install the MLX version that the extra `mac` names",
            )


def adopt(spec: ArraySpec, values: NDArray[np.generic]) -> tuple[mx.array, NDArray[np.generic]]:
    """Copy one stored array into MLX's memory: the array as MLX computes with it, and a writable view as numpy stores it."""
    if values.shape != spec.shape:
        raise WeightsError(f"{spec.name} has shape {values.shape}, the layout says {spec.shape}")
    flat = np.ascontiguousarray(values)
    if spec.dtype == "uint8":
        packed = mx.array(flat.view("<u4"))
        mx.eval(packed)
        return packed, np.array(packed, copy=False).view(np.uint8)
    held = mx.array(flat)  # pyright: ignore[reportArgumentType] - uint16 or float32 by the layout
    array = held.view(mx.bfloat16) if spec.dtype == "bfloat16" else held
    mx.eval(held, array)
    return array, np.array(held, copy=False)


def dequantise(arrays: Mapping[str, mx.array], module: str) -> mx.array:
    """float32 values of an int8 tensor, scale * code + bias in fp32: the MLX twin of `stoa.weights.grid`'s."""
    scales, biases = (arrays[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    return mx.dequantize(arrays[f"{module}.weight"], scales, biases, group_size=64, bits=8)
