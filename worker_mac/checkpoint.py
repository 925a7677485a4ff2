"""A checkpoint folder's weights on the int8 grid of a run's first version, brought into memory tensor by tensor.

Where the arrays stand is the state's business: here, or spread over the Macs of a wired set. Besides them there is never
more than one tensor in memory, in its checkpoint's type, in float32 and as codes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from stoa.contracts.errors import CheckpointError, NonFiniteError, WrongStateError
from stoa.contracts.ids import StateId
from stoa.weights import grid
from stoa.weights.digest import state_id_of
from stoa.weights.layout import BITS, GROUP_SIZE, Layout, TensorSpec
from stoa.weights.state import WeightState
from worker_mac.families import hub_name

_STACK: Final = 3
"""Axes of a tensor of experts, whose matrices are put on the grid one by one."""
Stored = NDArray[np.generic]


def state_of(folder: Path, layout: Layout) -> WeightState:
    """A checkpoint's weights in memory of their own. Raises as `bring_in`."""
    state = WeightState.empty(layout)
    bring_in(folder, state)
    return state


def bring_in(folder: Path, state: WeightState) -> StateId:
    """Fill a state with a checkpoint's weights, as a run would publish them first; returns their id.

    folder: a hub checkpoint that mlx_lm opens, or an export of ours at 8 bits and groups of 64, whose codes are taken as
    they are. Raises CheckpointError if it has others than the state's layout, WrongStateError if they do not stand as read.
    """
    layout, digests = state.layout, dict[str, str]()
    arrays, quantised, family = open_arrays(folder)
    for spec in layout.tensors:
        try:
            stored = _stored(folder, spec, arrays, family, quantised=quantised)
        except NonFiniteError as error:
            raise CheckpointError(f"{folder}: {spec.name}: {error.message}", hint="look whether its files are damaged") from error
        for array, bits in zip(spec.arrays, stored, strict=True):
            if bits.shape != array.shape:
                raise CheckpointError(f"{folder} has {array.name} with shape {bits.shape}; config.json makes it {array.shape}")
            digests[array.name] = state.fill(array.name, _reader(bits), array.name)
            if not digests[array.name]:
                raise WrongStateError(f"{array.name} does not stand in memory as it was read", hint="start again")
    mx.clear_cache()
    state_id = state_id_of(layout, digests)
    state.accept(digests, state_id, str(folder))
    return state_id


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a table")
    return found


def open_arrays(folder: Path) -> tuple[dict[str, mx.array], bool, str]:
    """A checkpoint's arrays by mlx_lm's names, none of them read yet, whether they are on our grid already, and the family.

    Raises CheckpointError for another grid, and for files that mlx_lm cannot open.
    """
    config = read_config(folder)
    quantised = config.get("quantization")
    if quantised is not None:
        said = quantised if isinstance(quantised, dict) else {}
        bits, size = said.get("bits"), said.get("group_size")
        if (bits, size) != (BITS, GROUP_SIZE):
            raise CheckpointError(f"{folder} is quantised to {bits} bits in groups of {size}, not {BITS} in {GROUP_SIZE}")
    try:
        model, _ = load_model(folder, lazy=True)
    except (ArithmeticError, AttributeError, ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be opened by mlx_lm: {error}", hint="look whether all its files are there") from error
    return dict(tree_flatten(model.parameters())), quantised is not None, str(config.get("model_type"))


def _stored(folder: Path, spec: TensorSpec, arrays: dict[str, mx.array], family: str, *, quantised: bool) -> Sequence[Stored]:
    """A tensor as `spec.arrays` are held in numpy. What was read of it is let go of."""

    def take(ours: str) -> mx.array:
        name = hub_name(family, ours)
        found = arrays.pop(name, None)
        if found is None:
            raise CheckpointError(f"{folder} has no tensor {name}")
        return found

    # Others leave what they like off the grid, and put a router on it.
    quantised = quantised and hub_name(family, spec.scales) in arrays
    if spec.kind != "int8":
        values = np.array(_plain(take, spec, quantised=quantised))
        if not np.isfinite(values).all():
            raise NonFiniteError("a weight is NaN or infinite")
        return (values if spec.dtype == "float32" else grid.bf16_bits(values),)
    if not quantised:
        return _on_grid(take(spec.name))
    codes = np.array(take(spec.name)).view(np.uint8)
    return (codes, *(np.array(take(name).astype(mx.bfloat16).view(mx.uint16)) for name in (spec.scales, spec.biases)))


def _plain(take: Callable[[str], mx.array], spec: TensorSpec, *, quantised: bool) -> mx.array:
    """A tensor that is not on the grid here, in float32."""
    if not quantised:
        return take(spec.name).astype(mx.float32)
    parts = (take(name) for name in (spec.name, spec.scales, spec.biases))
    return mx.dequantize(*parts, group_size=GROUP_SIZE, bits=BITS).astype(mx.float32)


def _on_grid(array: mx.array) -> Sequence[Stored]:
    """Codes, scales and biases of a tensor; a stack's matrices one after another, so that only one of them is in float32."""
    mx.eval(array)
    if array.ndim < _STACK:
        return grid.quantise(np.array(array.astype(mx.float32)))
    return [np.stack(part) for part in zip(*(_on_grid(array[index]) for index in range(array.shape[0])), strict=True)]


def _reader(bits: Stored) -> Callable[[memoryview], int]:
    """Gives an array's bytes piece by piece."""
    data, at = np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data, 0

    def read(buffer: memoryview) -> int:
        nonlocal at
        count = min(len(buffer), len(data) - at)
        buffer[:count] = data[at : at + count]
        at += count
        return count

    return read
