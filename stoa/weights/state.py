"""The weights of one version in memory, and how a change is applied to them in place.

The arrays may be the engine's own memory (numpy views of it): nothing here copies them or makes them anew. Whether a
change belongs to these weights is checked by the caller through state ids; here it is only made sure that a change
that cannot be applied writes nothing.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoa.contracts.errors import FormatError, LayoutError, WrongStateError
from stoa.contracts.ids import StateId
from stoa.weights import grid
from stoa.weights.digest import array_digest, state_id_of
from stoa.weights.layout import GROUP_SIZE, ArraySpec, Layout, TensorSpec
from stoa.weights.pulse import Change, Int64s, RawBits

_Item = TypeVar("_Item", bound=np.generic)
_BLOCK: Final = 1 << 15
READ_BYTES: Final = 1 << 20
"""Read at a time into an array, and hashed while a processor's cache still has it."""
NUM_APPLIERS: Final = min(4, os.cpu_count() or 1)
"""Segments of an update that are written at once: each waits for memory most of the time."""

NUMPY_TYPES: Final = {"uint8": np.dtype(np.uint8), "bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.float32)}
"""How each stored type is held in numpy; bf16 as bit patterns."""


@dataclass(frozen=True, slots=True)
class Undo:
    """What an applied change overwrote: enough to take it back."""

    change: Change
    codes: NDArray[np.uint8]
    raw_values: RawBits
    scales: NDArray[np.uint16]
    biases: NDArray[np.uint16]
    group_codes: NDArray[np.uint8]


class WeightState:
    """Arrays of a layout by name (`X.weight` codes, `X.scales`, `X.biases`, raw tensors). Mutable, in place only."""

    def __init__(self, layout: Layout, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Raises LayoutError if names, shapes or types are not the layout's, or an array is not contiguous."""
        specs = {array.name: array for array in layout.arrays}
        if arrays.keys() != specs.keys():
            odd = sorted(arrays.keys() ^ specs.keys())
            raise LayoutError(f"weights have other arrays than the layout: {', '.join(odd[:3])}")
        for name, array in arrays.items():
            check_array(specs[name], array)
        self.layout = layout
        self.verified_id: StateId | None = None
        """The id of these weights as last scanned; None once something was written since."""
        self.arrays: Mapping[str, NDArray[np.generic]] = dict(arrays)

    @classmethod
    def empty(cls, layout: Layout) -> "WeightState":
        """Arrays of zeros."""
        return cls(layout, {array.name: np.zeros(array.shape, NUMPY_TYPES[array.dtype]) for array in layout.arrays})

    def copy(self) -> "WeightState":
        """The same weights in memory of their own."""
        return WeightState(self.layout, {name: array.copy() for name, array in self.arrays.items()})

    def copy_from(self, other: "WeightState") -> None:
        """Overwrite these arrays, in place, with those of another state of the same layout."""
        if other.layout.layout_id != self.layout.layout_id:
            raise LayoutError("the other weights have another layout")
        self.verified_id = None
        for name, array in self.arrays.items():
            np.copyto(array, other.arrays[name])

    def fill(self, name: str, read: Callable[[memoryview], int | None], what: str) -> str:
        """Read an array's bytes straight into it; returns the xxh3-128 of what stands there then.

        `read` fills a buffer and says how much it had. Raises FormatError if it has nothing before the array is full.
        """
        view, digest, at = self.arrays[name].reshape(-1).view(np.uint8).data, xxhash.xxh3_128(), 0
        while at < len(view):
            count = read(view[at : at + READ_BYTES])
            if not count:
                raise FormatError(f"{what} is torn")
            digest.update(view[at : at + count])
            at += count
        return digest.hexdigest()

    def tensor_digests(self) -> dict[str, str]:
        """xxh3-128 of every array: a full rescan of memory."""
        return {name: array_digest(array) for name, array in self.arrays.items()}

    def state_id(self) -> StateId:
        """The id of these exact weights, by a full rescan."""
        self.verified_id = state_id_of(self.layout, self.tensor_digests())
        return self.verified_id

    def verify(self, expected: str, what: str) -> None:
        """Full rescan. Raises WrongStateError unless these weights have the `expected` id."""
        self.accept(self.tensor_digests(), expected, what)

    def accept(self, digests: Mapping[str, str], expected: str, what: str) -> None:
        """As `verify`, by the digests of every array, taken since the last of them was written."""
        self.verified_id = None
        found = state_id_of(self.layout, digests)
        if found != expected:
            raise WrongStateError(
                f"{what}: the weights in memory are {found[:16]}.., not {expected[:16]}..", hint="rebuild them from anchor and deltas"
            )
        self.verified_id = found

    def quantised(self, spec: TensorSpec) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint16]]:
        """Codes, scales and biases of an int8 tensor."""
        return (
            self.arrays[spec.name].view(np.uint8),
            self.arrays[spec.scales].view(np.uint16),
            self.arrays[spec.biases].view(np.uint16),
        )

    def bits(self, spec: TensorSpec) -> RawBits:
        """A raw tensor as flat bit patterns: uint16 or uint32, a view."""
        array = self.arrays[spec.name].reshape(-1)
        return array.view(np.uint32 if array.dtype == np.float32 else np.uint16)

    def dequantise(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32, in its own shape. Raises LayoutError for an unknown name."""
        spec = self.layout.by_name.get(name)
        if spec is None:
            raise LayoutError(f"the layout has no tensor {name!r}")
        if spec.kind == "int8":
            return grid.dequantise(*self.quantised(spec))
        array = self.arrays[name]
        return array.astype(np.float32) if array.dtype == np.float32 else grid.bf16_values(array.view(np.uint16))

    def apply(self, change: Change) -> Undo:
        """Apply a change in place; returns what it overwrote.

        Raises FormatError if a code would leave 0..255; the weights are as they were then.
        """
        undo = Undo(change, np.empty(len(change.positions), dtype=np.uint8), *self.values_at(change))
        self.verified_id = None
        for codes, part, local in self._code_blocks(change):
            old, difference = codes.take(local), change.differences[part]
            undo.codes[part] = old
            new = old + difference  # int16
            if int(new.min()) < 0 or int(new.max()) > 255:
                self._restore_codes(undo, part.start)
                raise FormatError(f"position {change.positions[part.start]}: a change leaves the codes 0..255: made from other weights")
            codes[local] = new.astype(np.uint8)  # scattered bytes of the codes' own type: twice as fast
        self._write_absolute(change, change.raw_values, change.scales, change.biases, change.codes)
        return undo

    def apply_segments(self, changes: Iterable[Change]) -> None:
        """Apply a change that comes segment by segment, several segments at once: none touches what another one does.

        Raises:
            FormatError: a code would leave 0..255, or what `changes` raises; the weights are as they were.
            WrongStateError: the same, and some of it was written.
        """
        num_written, fault = 0, None
        with ThreadPoolExecutor(NUM_APPLIERS, thread_name_prefix="apply") as pool:
            pending: deque[Future[Undo]] = deque()
            try:
                for change in changes:
                    pending.append(pool.submit(self.apply, change))
                    if len(pending) > NUM_APPLIERS:
                        pending.popleft().result()
                        num_written += 1
            except FormatError as error:
                fault = error
            for one in pending:
                try:
                    one.result()
                    num_written += 1
                except FormatError as error:
                    fault = fault or error
        if fault is not None and num_written:
            raise WrongStateError(f"an update was applied in part: {fault.message}", hint="rebuild the weights") from fault
        if fault is not None:
            raise fault

    def undo(self, undo: Undo) -> None:
        """Take back the change applied last."""
        self.verified_id = None
        self._restore_codes(undo, len(undo.change.positions))
        self._write_absolute(undo.change, undo.raw_values, undo.scales, undo.biases, undo.group_codes)

    def _restore_codes(self, undo: Undo, count: int) -> None:
        """Put back the codes at the first `count` positions of an applied change."""
        for codes, part, local in self._code_blocks(undo.change):
            if part.start < count:
                codes[local] = undo.codes[part]

    def _code_blocks(self, change: Change) -> Iterator[tuple[NDArray[np.uint8], slice, Int64s]]:
        """The changed codes in blocks that fit a processor's cache: flat codes of a tensor, slice of the change, positions."""
        for spec, part, start in _spans(self.layout.quantised, change.positions, 1):
            codes = self.arrays[spec.name].view(np.uint8).reshape(-1)
            for first in range(part.start, part.stop, _BLOCK):
                block = slice(first, min(first + _BLOCK, part.stop))
                yield codes, block, change.positions[block] - start

    def values_at(self, change: Change) -> tuple[RawBits, NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint8]]:
        """Present raw values, scales, biases and codes where `change` will write."""
        raw = [self.bits(spec)[local] for spec, _, local in _pieces(self.layout.raw, change.raw_positions, 1)]
        scales: list[NDArray[np.uint16]] = []
        biases: list[NDArray[np.uint16]] = []
        codes: list[NDArray[np.uint8]] = []
        for spec, _, local in _pieces(self.layout.quantised, change.groups, GROUP_SIZE):
            tensor_codes, tensor_scales, tensor_biases = self.quantised(spec)
            codes.append(tensor_codes.reshape(-1, GROUP_SIZE)[local])
            scales.append(tensor_scales.reshape(-1)[local])
            biases.append(tensor_biases.reshape(-1)[local])
        old_raw = np.concatenate(raw) if raw else change.raw_values
        old_codes = np.concatenate(codes) if codes else change.codes
        return old_raw, _joined(scales, np.uint16), _joined(biases, np.uint16), old_codes

    def _write_absolute(
        self,
        change: Change,
        raw_values: RawBits,
        scales: NDArray[np.uint16],
        biases: NDArray[np.uint16],
        codes: NDArray[np.uint8],
    ) -> None:
        for spec, part, local in _pieces(self.layout.raw, change.raw_positions, 1):
            self.bits(spec)[local] = raw_values[part]
        for spec, part, local in _pieces(self.layout.quantised, change.groups, GROUP_SIZE):
            tensor_codes, tensor_scales, tensor_biases = self.quantised(spec)
            tensor_codes.reshape(-1, GROUP_SIZE)[local] = codes[part]
            tensor_scales.reshape(-1)[local] = scales[part]
            tensor_biases.reshape(-1)[local] = biases[part]


def check_array(spec: ArraySpec, array: NDArray[np.generic]) -> None:
    """Raises LayoutError unless `array` is what `spec` says, and contiguous."""
    if array.shape != spec.shape or array.dtype != NUMPY_TYPES[spec.dtype] or not array.flags.c_contiguous:
        raise LayoutError(f"{spec.name} is {array.dtype} {array.shape}, not contiguous {NUMPY_TYPES[spec.dtype]} {spec.shape}")


def _spans(specs: tuple[TensorSpec, ...], positions: Int64s, size: int) -> Iterator[tuple[TensorSpec, slice, int]]:
    """For each tensor that `positions` touch: it, its slice of `positions`, and where it begins, in units of `size` elements."""
    start = 0
    offset = 0
    for spec in specs:
        offset_after = offset + spec.num_elements // size
        stop = int(np.searchsorted(positions, offset_after))
        if stop > start:
            yield spec, slice(start, stop), offset
        start, offset = stop, offset_after


def _pieces(specs: tuple[TensorSpec, ...], positions: Int64s, size: int) -> Iterator[tuple[TensorSpec, slice, Int64s]]:
    """As `_spans`, with the positions within the tensor."""
    for spec, part, offset in _spans(specs, positions, size):
        yield spec, part, positions[part] - offset


def _joined(parts: Sequence[NDArray[_Item]], dtype: type[_Item]) -> NDArray[_Item]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
