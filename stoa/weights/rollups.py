"""Roll-ups: several versions' changes as one object, so that whoever is behind downloads less than the deltas in between.

The book keeps the bytes of recent deltas and roll-ups on disk, and makes a roll-up out of the fewest of them, one segment
in memory at a time. Uploading is `background.py`'s, choosing a way through them `chain.py`'s.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

from stoa.weights.container import DeltaHeader, delta_pieces, read_delta
from stoa.weights.layout import Layout
from stoa.weights.pulse import PCO, Change, Counts, encode_segments, merge

LONGEST_SPAN: Final = 16
"""Longest roll-up between two versions, a power of two; only the one from the newest anchor may be longer."""
ANCHOR_SPAN: Final = 4
"""Every this many versions there is a roll-up from the newest anchor."""
MOST_BYTES: Final = 384 << 20
"""Two inputs larger than this are not merged: it would take memory, and changes that large hardly cancel."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A delta or roll-up on disk."""

    path: Path
    header: DeltaHeader
    counts: Counts


class RollupBook:
    """Deltas and roll-ups of the newest versions, in `folder`. Not for two threads at once."""

    def __init__(self, folder: Path, run: str, layout: Layout) -> None:
        self._folder = folder
        self._run = run
        self._layout = layout
        self._edges: dict[tuple[int, int], Edge] = {}

    def keep(self, header: DeltaHeader, counts: Counts, pieces: Iterable[bytes | memoryview]) -> Edge:
        """Take over the bytes of a delta or roll-up."""
        path = self._folder / f"{header.base:08d}-{header.version:08d}"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.writelines(pieces)
        part.replace(path)
        edge = self._edges[header.base, header.version] = Edge(path, header, counts)
        return edge

    def drop(self, version: int) -> None:
        """Forget everything that leads to `version`: it was not published."""
        self._remove([span for span in self._edges if span[1] == version])

    def clear(self) -> None:
        """Forget everything."""
        self._remove(list(self._edges))

    def prune(self, version: int, anchor: int) -> None:
        """Forget what no roll-up to a version after `version` can be made of; `anchor` is the newest one's version."""
        oldest = version - 2 * LONGEST_SPAN  # uploads may be behind by as many versions again
        newest = max((end for base, end in self._edges if base == anchor), default=-1)
        self._remove([span for span in self._edges if span[0] < oldest and span != (anchor, newest)])

    def wanted(self, version: int, anchor: int) -> list[int]:
        """Versions that roll-ups to `version` start from, nearest first, as far as they can be made.

        They are version - 2^j for every 2^j up to the longest span that divides `version`, and every few versions the
        newest anchor's.
        """
        bases = [version - span for span in (2, 4, 8, 16) if span <= LONGEST_SPAN and version % span == 0]
        if version % ANCHOR_SPAN == 0 and anchor < version - 1 and anchor not in bases:
            bases.append(anchor)
        return [base for base in bases if self._path(base, version)]

    def make(self, base: int, version: int) -> Edge | None:
        """Make the roll-up from `base` to `version`. None if it is too large, or what it is made of was forgotten meanwhile."""
        path = self._path(base, version)
        if not path:
            return None
        made, *others = path
        for edge in others:
            if made.path.stat().st_size + edge.path.stat().st_size > MOST_BYTES:
                return None
            made = self._joined(made, edge)
        return made

    def _joined(self, first: Edge, second: Edge) -> Edge:
        """Two edges in a row as one, kept like them. Never both inputs, sections and output are in memory at once."""
        before = read_delta(first.path.read_bytes(), first.header, first.counts, self._layout)
        after = read_delta(second.path.read_bytes(), second.header, second.counts, self._layout)
        sections, counts = encode_segments(_merged(before, after), first.header.codec)
        start, end = first.header, second.header
        header = DeltaHeader(self._run, start.base, end.version, start.base_state_id, end.state_id, start.layout_id, PCO)
        return self.keep(header, counts, delta_pieces(header, sections, counts))

    def _path(self, base: int, version: int) -> Sequence[Edge]:
        """The fewest edges from `base` to `version`; none if there is no way."""
        best: dict[int, list[Edge]] = {base: []}
        for start, end in sorted(self._edges):
            if start in best and end <= version and (end not in best or len(best[end]) > len(best[start]) + 1):
                best[end] = [*best[start], self._edges[start, end]]
        return best.get(version, [])

    def _remove(self, spans: list[tuple[int, int]]) -> None:
        for span in spans:
            self._edges.pop(span).path.unlink(missing_ok=True)


def _merged(before: Iterator[Change], after: Iterator[Change]) -> Iterator[Change]:
    """Two changes in a row as one, segment by segment."""
    for first, second in zip_longest(before, after, fillvalue=Change()):
        yield merge(first, second)
