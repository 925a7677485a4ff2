"""The weights of a wired set: each Mac holds its layers' arrays, the first one hands on what is written to the others'.

To whoever brings weights in, the first Mac's state looks like the whole one: anchors are read into it, deltas applied to
it, digests taken of it. An array of another Mac's is never held here, nor an update of it kept.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import FormatError, WrongStateError
from stoa.weights.digest import array_digest
from stoa.weights.layout import GROUP_SIZE, ArraySpec, Layout, TensorSpec
from stoa.weights.pulse import Change, Int64s
from stoa.weights.state import NUMPY_TYPES, READ_BYTES, Undo, WeightState
from worker_mac.weights import LiveWeights, adopt


class Elsewhere(Protocol):
    """The other Macs of the set, by rank; calls wait until it is done there, `put` until its bytes are on their way."""

    def put(self, rank: int, name: str, at: int, data: memoryview) -> None: ...  # noqa: D102

    def apply(self, rank: int, change: Change) -> None: ...  # noqa: D102

    def digests(self, rank: int, names: Sequence[str]) -> dict[str, str]: ...  # noqa: D102


def apply_elsewhere(elsewhere: Elsewhere, parts: Iterable[Change]) -> None:
    """Apply to Mac 1, 2, ... its part of a change, where it has one. Raises WrongStateError if one could not."""
    for rank, part in enumerate(parts, start=1):
        if not (len(part.positions) or len(part.raw_positions) or len(part.groups)):
            continue
        try:
            elsewhere.apply(rank, part)
        except FormatError as error:
            raise WrongStateError(f"Mac {rank} could not apply its part: {error.message}", hint="rebuild the weights") from error


class PartState(WeightState):
    """Some of a layout's arrays. Changes must be of these only; see `part_of`."""

    def __init__(self, layout: Layout, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        super().__init__(Layout(layout.layout_id, (), layout.raw_dtype), {})
        self.layout, self.arrays = layout, dict(arrays)

    def put(self, name: str, at: int, data: bytes) -> None:
        """Overwrite bytes of an array from `at` on. Raises FormatError beyond its end."""
        view = self.arrays[name].reshape(-1).view(np.uint8)
        if at < 0 or at + len(data) > len(view):
            raise FormatError(f"{name} has {len(view)} bytes, {len(data)} were to be put at {at}")
        self.verified_id = None
        view[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def get(self, name: str, at: int, count: int) -> NDArray[np.uint8]:
        """`count` bytes of an array from `at` on, a view. Raises FormatError beyond its end."""
        view = self.arrays[name].reshape(-1).view(np.uint8)
        if at < 0 or count < 0 or at + count > len(view):
            raise FormatError(f"{name} has {len(view)} bytes, {count} were asked for at {at}")
        return view[at : at + count]

    def digests_of(self, names: Sequence[str]) -> dict[str, str]:
        """xxh3-128 of these arrays; of all that are here for none."""
        return {name: array_digest(self.arrays[name]) for name in names or self.arrays}


class SpreadState(PartState):
    """All of a layout's arrays to its user: those of this Mac, and through `elsewhere` those of the others."""

    def __init__(
        self, layout: Layout, arrays: Mapping[str, NDArray[np.generic]], holders: Sequence[Collection[str]], elsewhere: Elsewhere
    ) -> None:
        """holders: names of the tensors of each rank, this one's first."""
        super().__init__(layout, arrays)
        self._elsewhere = elsewhere
        self._tensors = [frozenset(names) for names in holders]
        self._arrays_at = [
            {array.name: array for spec in layout.tensors if spec.name in held for array in spec.arrays} for held in self._tensors
        ]

    def fill(self, name: str, read: Callable[[memoryview], int | None], what: str) -> str:
        """As `WeightState.fill`; the digest is of what stands on every Mac that holds the array."""
        if name in self.arrays and not any(name in held for held in self._arrays_at[1:]):
            return super().fill(name, read, what)
        spec, at, buffer = self.layout.arrays_by_name[name], 0, memoryview(bytearray(READ_BYTES))
        ranks = [rank for rank, held in enumerate(self._arrays_at) if name in held]
        while at < spec.num_bytes:
            count = read(buffer[: min(READ_BYTES, spec.num_bytes - at)])
            if not count:
                raise FormatError(f"{what} is torn")
            for rank in ranks:
                if rank:
                    self._elsewhere.put(rank, name, at, buffer[:count])
                else:
                    self.put(name, at, bytes(buffer[:count]))
            at += count
        found = {self._digests_at(rank, (name,))[name] for rank in ranks}
        # Copies of one array that differ have the digest of neither.
        return found.pop() if len(found) == 1 else ""

    def apply(self, change: Change) -> Undo:
        """Apply each Mac's part there. What comes back undoes this Mac's part only.

        Raises FormatError if the part here cannot be applied and nothing was written, WrongStateError if one elsewhere cannot.
        """
        undo = super().apply(part_of(change, self.layout, self._tensors[0]))
        apply_elsewhere(self._elsewhere, (part_of(change, self.layout, tensors) for tensors in self._tensors[1:]))
        return undo

    def tensor_digests(self) -> dict[str, str]:
        """Of every array, taken where it is held; one that differs between two Macs has the digest ""."""
        digests: dict[str, str] = {}
        for rank in range(len(self._tensors)):
            for name, digest in self._digests_at(rank, ()).items():
                digests[name] = digest if digests.get(name, digest) == digest else ""
        return digests

    def _digests_at(self, rank: int, names: Sequence[str]) -> dict[str, str]:
        return self._elsewhere.digests(rank, names) if rank else self.digests_of(names)


class PartWeights(LiveWeights):
    """Some arrays of a layout in MLX's memory. `make_state` makes the state over their views."""

    def __init__(self, specs: Sequence[ArraySpec], make_state: Callable[[Mapping[str, NDArray[np.generic]]], PartState]) -> None:
        self.arrays: dict[str, mx.array] = {}
        views: dict[str, NDArray[np.generic]] = {}
        for spec in specs:
            self.arrays[spec.name], views[spec.name] = adopt(spec, np.zeros(spec.shape, NUMPY_TYPES[spec.dtype]))
        self.part = make_state(views)
        self.state = self.part
        self._check_shared()


def part_of(change: Change, layout: Layout, names: Collection[str]) -> Change:
    """What of a change touches the tensors of these names; positions still count through the whole layout."""
    codes = _kept(change.positions, layout.quantised, 1, names)
    raws = _kept(change.raw_positions, layout.raw, 1, names)
    groups = _kept(change.groups, layout.quantised, GROUP_SIZE, names)
    return Change(
        change.positions[codes],
        change.differences[codes],
        change.raw_positions[raws],
        change.raw_values[raws],
        change.groups[groups],
        change.scales[groups],
        change.biases[groups],
        change.codes[groups],
    )


def _kept(positions: Int64s, specs: Sequence[TensorSpec], size: int, names: Collection[str]) -> NDArray[np.bool_]:
    """Bool [positions]: those inside a tensor of these names, in units of `size` elements."""
    ends = np.cumsum([spec.num_elements // size for spec in specs])
    held = np.array([spec.name in names for spec in specs], bool)
    return held[np.searchsorted(ends, positions, side="right")] if len(positions) else np.zeros(0, bool)
