"""The weights of a wired set whose every layer is dealt out: each Mac holds its rows or columns of the dealt tensors.

To whoever brings weights in, the first Mac's state looks like the whole one, as in `parts.py`. Bytes of an anchor are dealt
out as they are read, and each Mac's part is checked against what was sent to it. After an update the digest of a dealt
array is taken over its parts in their order: those of the other Macs cross the wire for it.

Legend: R rows, C columns of a tensor [.., R, C]; a line is one row of all leading axes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Final, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoa.contracts.errors import FormatError
from stoa.weights.layout import GROUP_SIZE, Layout, TensorSpec
from stoa.weights.pulse import Change, Int64s
from stoa.weights.state import READ_BYTES, Undo
from worker_mac.cluster.parts import Elsewhere, PartState, apply_elsewhere
from worker_mac.cluster.tensor import Kind, kind_of, share_layout

ANSWER_SECONDS: Final = 120.0
BLOCKS_AHEAD: Final = 4
Bytes = NDArray[np.uint8]
_NOTHING: Final = np.empty(0, np.uint8)


class ElsewhereToo(Elsewhere, Protocol):
    """As `parts.Elsewhere`, which can also be read from."""

    def get(self, rank: int, name: str, at: int, count: int) -> "Future[Bytes]": ...  # noqa: D102


class DealtState(PartState):
    """All of a layout's arrays to its user; of the dealt ones this Mac holds its part, `elsewhere` the others."""

    def __init__(self, layout: Layout, arrays: Mapping[str, NDArray[np.generic]], ranks: int, elsewhere: ElsewhereToo) -> None:
        """arrays: this Mac's, of the shapes of `share_layout`."""
        super().__init__(layout, arrays)
        self._shares, self._ranks, self._elsewhere = share_layout(layout, ranks), ranks, elsewhere
        self._own = PartState(self._shares, arrays)
        self._kinds: dict[str, Kind] = {array.name: kind_of(spec.name) for spec in layout.tensors for array in spec.arrays}

    def fill(self, name: str, read: Callable[[memoryview], int | None], what: str) -> str:
        """As `WeightState.fill`: the digest of what was read; "" if a Mac's part is not what was sent to it."""
        self.verified_id = None
        digest, parts = xxhash.xxh3_128(), [xxhash.xxh3_128() for _ in range(self._ranks)]
        ends = [0] * self._ranks
        for cut in self._cuts(name):
            block = np.empty(cut.num_bytes, np.uint8)
            _read_all(read, block.data, what)
            digest.update(block.data)
            for rank in range(self._ranks):
                part = cut.take(block, rank)
                if not part.size:
                    continue
                parts[rank].update(part.data)
                if rank:
                    self._elsewhere.put(rank, name, ends[rank], part.data)
                else:
                    self.put(name, ends[rank], part.tobytes())
                ends[rank] += part.size
        found = [self.digests_of((name,))[name], *(self._elsewhere.digests(rank, (name,))[name] for rank in range(1, self._ranks))]
        return digest.hexdigest() if found == [part.hexdigest() for part in parts] else ""

    def apply(self, change: Change) -> Undo:
        """Apply each Mac's part there. What comes back undoes this Mac's part only.

        Raises FormatError if the part here cannot be applied and nothing was written, WrongStateError if one elsewhere cannot.
        """
        self.verified_id = None
        undo = self._own.apply(self.share_of(change, 0))
        apply_elsewhere(self._elsewhere, (self.share_of(change, rank) for rank in range(1, self._ranks)))
        return undo

    def share_of(self, change: Change, rank: int) -> Change:
        """What of a change is a Mac's, its positions counted through `share_layout`."""
        codes, positions = self._moved(change.positions, rank, 1)
        groups, numbers = self._moved(change.groups, rank, GROUP_SIZE)
        return Change(
            positions,
            change.differences[codes],
            change.raw_positions,
            change.raw_values,
            numbers,
            change.scales[groups],
            change.biases[groups],
            change.codes[groups],
        )

    def tensor_digests(self) -> dict[str, str]:
        """Of every array: of one that all hold where it stands, "" if two differ; of a dealt one over all its parts."""
        whole = tuple(name for name, kind in self._kinds.items() if kind == "whole")
        digests = self.digests_of(whole)
        for rank in range(1, self._ranks):
            for name, found in self._elsewhere.digests(rank, whole).items():
                digests[name] = found if digests[name] == found else ""
        return digests | {name: self._digest_dealt(name) for name, kind in self._kinds.items() if kind != "whole"}

    def _digest_dealt(self, name: str) -> str:
        digest, ends = xxhash.xxh3_128(), [0] * self._ranks
        own = self.arrays[name].reshape(-1).view(np.uint8)
        asked: deque[tuple[Cut, list[Bytes | Future[Bytes]]]] = deque()

        def hash_first() -> None:
            cut, parts = asked.popleft()
            block = np.empty(cut.num_bytes, np.uint8)
            for rank, part in enumerate(parts):
                cut.put(block, rank, part.result(ANSWER_SECONDS) if isinstance(part, Future) else part)
            digest.update(block.data)

        for cut in self._cuts(name):
            parts: list[Bytes | Future[Bytes]] = []
            for rank in range(self._ranks):
                at, count = ends[rank], cut.size(rank)
                parts.append(own[at : at + count] if rank == 0 else _NOTHING if not count else self._elsewhere.get(rank, name, at, count))
                ends[rank] += count
            asked.append((cut, parts))
            # Some are on their way while one is hashed.
            if len(asked) > BLOCKS_AHEAD:
                hash_first()
        while asked:
            hash_first()
        return digest.hexdigest()

    def _cuts(self, name: str) -> "Iterator[Cut]":
        """An array's bytes in blocks of whole lines, each with who holds what of it."""
        spec, kind = self.layout.arrays_by_name[name], self._kinds[name]
        line_bytes = spec.num_bytes // max(1, spec.num_elements // spec.shape[-1])
        num_lines = spec.num_bytes // line_bytes
        each = max(1, READ_BYTES // line_bytes)
        rows = spec.shape[-2] if len(spec.shape) > 1 else 1
        for first in range(0, num_lines, each):
            yield Cut(kind, self._ranks, rows, line_bytes, first, min(each, num_lines - first))

    def _moved(self, positions: Int64s, rank: int, size: int) -> tuple[NDArray[np.bool_], Int64s]:
        """Bool [positions]: those that are a Mac's; and where these are in its share; in units of `size` elements."""
        mine = np.zeros(len(positions), np.bool_)
        found: list[Int64s] = []
        start, offset, offset_here = 0, 0, 0
        for spec, here in zip(self.layout.quantised, self._shares.quantised, strict=True):
            end = offset + spec.num_elements // size
            stop = int(np.searchsorted(positions, end))
            if stop > start:
                keep, moved = _in_share(spec, here, positions[start:stop] - offset, rank, size)
                mine[start:stop] = keep
                found.append(moved + offset_here)
            start, offset, offset_here = stop, end, offset_here + here.num_elements // size
        return mine, np.concatenate(found) if found else np.empty(0, np.int64)


class Cut:
    """Consecutive lines of an array's bytes, and which of them are whose."""

    def __init__(self, kind: Kind, ranks: int, rows: int, line_bytes: int, first: int, num_lines: int) -> None:
        self._kind, self._ranks, self._line_bytes, self._num_lines = kind, ranks, line_bytes, num_lines
        self._owners = (first + np.arange(num_lines)) % rows // max(1, rows // ranks)

    @property
    def num_bytes(self) -> int:
        """Of the block."""
        return self._num_lines * self._line_bytes

    def size(self, rank: int) -> int:
        """Bytes of a Mac's part."""
        if self._kind == "rows":
            return int((self._owners == rank).sum()) * self._line_bytes
        return self.num_bytes // (self._ranks if self._kind == "columns" else 1)

    def take(self, block: Bytes, rank: int) -> Bytes:
        """A Mac's part of the block's bytes: uint8, flat."""
        lines = block.reshape(self._num_lines, self._line_bytes)
        return np.ascontiguousarray(lines[self._place(rank)]).reshape(-1)

    def put(self, block: Bytes, rank: int, part: Bytes) -> None:
        """Write a Mac's part into the block's bytes. Raises FormatError for one of another size."""
        if part.size != self.size(rank):
            raise FormatError(f"Mac {rank} gave {part.size} bytes of its part, not {self.size(rank)}")
        lines = block.reshape(self._num_lines, self._line_bytes)
        place = self._place(rank)
        lines[place] = part.reshape(-1, self._line_bytes // (self._ranks if self._kind == "columns" else 1))

    def _place(self, rank: int) -> tuple[NDArray[np.bool_] | slice, slice]:
        if self._kind == "rows":
            return self._owners == rank, slice(None)
        if self._kind == "columns":
            width = self._line_bytes // self._ranks
            return slice(None), slice(rank * width, (rank + 1) * width)
        return slice(None), slice(None)


def _in_share(spec: TensorSpec, here: TensorSpec, positions: Int64s, rank: int, size: int) -> tuple[NDArray[np.bool_], Int64s]:
    """Of positions in a tensor: which are a Mac's, and where these are in its part; in units of `size` elements."""
    kind = kind_of(spec.name)
    if kind == "whole":
        return np.ones(len(positions), np.bool_), positions
    columns, rows = spec.shape[-1] // size, spec.shape[-2]
    columns_here, rows_here = here.shape[-1] // size, here.shape[-2]
    line, column = np.divmod(positions, columns)
    leading, row = np.divmod(line, rows)
    keep = row // rows_here == rank if kind == "rows" else column // columns_here == rank
    leading, row, column = leading[keep], row[keep] % rows_here, column[keep] % columns_here
    return keep, (leading * rows_here + row) * columns_here + column


def _read_all(read: Callable[[memoryview], int | None], buffer: memoryview, what: str) -> None:
    at = 0
    while at < len(buffer):
        count = read(buffer[at:])
        if not count:
            raise FormatError(f"{what} is torn")
        at += count
