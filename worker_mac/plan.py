"""What one step computes, in integers: which tokens of which sequences, where they are written, and what each may read.

Pure numpy. `Work` says what to do in terms of sequences; `lay_out` turns it into the arrays a forward pass indexes with.
Tokens of all sequences are packed into one row of N: first the sequences that get one token, then the others, one after
the other. Nothing here decides what is to be done: that is `schedule.py`'s.

Legend: N tokens, S sequences that get several tokens, X tiles of queries, W queries a tile, M pages of a table,
T taps kept of a convolution, R rows to sample from.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from metal.sizes import PAGE_TOKENS, RANGE_PAGES
from worker_mac.pages import SCRAP

TILE_TOKENS: Final = 32
"""Most queries of one sequence that share one reading of its pages."""
Ints = NDArray[np.int32]
Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, start + count) of some sequences; those that `samples` are to be followed by a drawn token.

    A row of `tables` holds the pages of a sequence. Copies, as (from, to), are made before anything is written.
    """

    sequences: NDArray[np.intp]
    starts: Ints
    counts: Ints
    samples: NDArray[np.bool_]
    tokens: Ints
    """All tokens, one sequence after the other."""
    tables: Ints
    slots: Ints
    """Where each sequence's tails of convolutions are kept."""
    page_copies: Pairs = field(default_factory=list)
    slot_copies: Pairs = field(default_factory=list)
    prompts: Ints | None = None
    """Tokens that each sequence begins with and others may too, in the same pages; the same number at each step."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries that are computed together: tile x is W tokens of one sequence.

    tables int32 [X, M]; lengths int32 [X, W], what each query sees; queries int32 [X, W], places in the packed row, or
    None if the tiles are the row's next X tokens; prompts int32 [X], as in `Work`. Places of padding repeat a query and are
    not read.
    """

    tables: Ints
    lengths: Ints
    queries: Ints | None = None
    prompts: Ints | None = None


@dataclass(frozen=True, slots=True)
class Stretches:
    """Sequences that get several tokens, as the convolutions see them.

    Lines are S x T tails followed by the gated values of the sequences' tokens. taps int32 [tokens, T + 1]: what each
    token's kernel covers; tails int32 [S, T]: what is kept.
    """

    slots: Ints
    taps: Ints
    tails: Ints


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything a forward pass indexes with. Tokens beyond the last sequence's are there for the shape only."""

    tokens: Ints
    positions: Ints
    pages: Ints
    tiles: tuple[Tiles, ...]
    unpack: Ints | None
    """int32 [N], where each token's output is among the tiles' outputs; None if they are in order."""
    num_single: int
    single_slots: Ints
    stretches: Stretches | None
    sampled: Ints | None
    """int32 [R], rows to sample from; None if it is every row."""
    order: NDArray[np.intp]
    """Which of the work's sequences each sampled row belongs to."""
    token_places: NDArray[np.intp]
    """Which of the work's tokens each one is, without padding."""


def lay_out(work: Work, num_taps: int, *, pad_to: int = 1) -> Layout:
    """Arrays for a piece of work. `num_taps` of each convolution are kept; numbers of rows are multiples of `pad_to`."""
    pages_of = -(-(work.starts + work.counts) // PAGE_TOKENS)
    ranges = -(-pages_of // RANGE_PAGES)
    is_single = work.counts == 1
    # Sequences of one token by how many ranges they read, so that each class of tiles is a stretch of the row.
    order = np.lexsort((ranges, ~is_single))
    num_single = int(is_single.sum())
    offsets = np.cumsum(work.counts) - work.counts
    counts = work.counts[order]
    firsts = np.cumsum(counts) - counts
    of_segment = np.repeat(order, counts)
    within = np.arange(len(of_segment)) - np.repeat(firsts, counts)
    places = offsets[of_segment] + within
    tokens = work.tokens[places]
    positions = (work.starts[of_segment] + within).astype(np.int32)
    pages = work.tables[of_segment, positions // PAGE_TOKENS]
    tiles = _single_tiles(work, order[:num_single], ranges, pages_of, whole_ranges=pad_to > 1)
    unpack: Ints | None = None
    if num_single < len(order):
        more, unpack = _stretch_tiles(work, order[num_single:], firsts[num_single:], num_single, whole_ranges=pad_to > 1)
        tiles += more
    # Where nothing is padded no kernel computes: one convolution for all is less work than two.
    num_apart = num_single if pad_to > 1 or num_single == len(order) else 0
    stretches = _stretches(work, order[num_apart:], num_taps) if num_apart < len(order) else None
    sampling = work.samples[order]
    last_rows = (firsts + counts - 1)[sampling].astype(np.int32)
    padding = -len(tokens) % pad_to
    if padding:
        tokens, positions = (np.concatenate([array, np.zeros(padding, np.int32)]) for array in (tokens, positions))
        pages = np.concatenate([pages, np.full(padding, SCRAP, np.int32)])
        last = len(of_segment) - 1 if unpack is None else int(unpack[-1])
        head = np.arange(len(of_segment), dtype=np.int32) if unpack is None else unpack
        unpack = np.concatenate([head, np.full(padding, last, np.int32)])
    everyone = not padding and len(last_rows) == len(tokens)
    sample_padding = -len(last_rows) % pad_to if len(last_rows) else 0
    sampled = None if everyone else np.concatenate([last_rows, np.zeros(sample_padding, np.int32)])
    return Layout(
        tokens, positions, pages, tuple(tiles), unpack, num_apart, work.slots[order[:num_apart]], stretches, sampled,
        order[sampling], places,
    )  # fmt: skip


def _width(num_pages: int, *, whole_ranges: bool) -> int:
    return -(-num_pages // RANGE_PAGES) * RANGE_PAGES if whole_ranges else num_pages


def _tables(tables: Ints, num_pages: int) -> Ints:
    """The first columns, filled up with the scrap page."""
    missing = num_pages - tables.shape[1]
    return np.ascontiguousarray(tables[:, :num_pages]) if missing <= 0 else np.pad(tables, ((0, 0), (0, missing)))


def _prompts(work: Work, sequences: NDArray[np.intp]) -> Ints | None:
    return None if work.prompts is None else work.prompts[sequences]


def _single_tiles(work: Work, order: NDArray[np.intp], ranges: Ints, pages_of: Ints, *, whole_ranges: bool) -> list[Tiles]:
    found: list[Tiles] = []
    if not len(order):
        return found
    edges = np.flatnonzero(np.diff(ranges[order])) + 1
    for rows in np.split(order, edges):
        width = _width(int(pages_of[rows].max()), whole_ranges=whole_ranges)
        found.append(Tiles(_tables(work.tables[rows], width), work.starts[rows, None] + np.int32(1), None, _prompts(work, rows)))
    return found


def _stretch_tiles(
    work: Work, order: NDArray[np.intp], firsts: NDArray[np.intp], num_before: int, *, whole_ranges: bool
) -> tuple[list[Tiles], Ints]:
    """Tiles of the sequences `order`, whose tokens begin at `firsts` of the row; and the row's `unpack`."""
    counts = work.counts[order]
    num_tiles = -(-counts // TILE_TOKENS)
    of_sequence = np.repeat(np.arange(len(order)), num_tiles)
    number = np.arange(len(of_sequence)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    skipped = number * TILE_TOKENS
    sizes = np.minimum(counts[of_sequence] - skipped, TILE_TOKENS)
    starts = work.starts[order][of_sequence] + skipped
    rows = firsts[of_sequence] + skipped
    pages_of = -(-(starts + sizes) // PAGE_TOKENS)
    ranges = -(-pages_of // RANGE_PAGES)
    found: list[Tiles] = []
    unpack = np.arange(num_before + int(counts.sum()), dtype=np.int32)
    num_out = num_before
    for number_of_ranges in np.unique(ranges):
        chosen = np.flatnonzero(ranges == number_of_ranges)
        width = int(sizes[chosen].max())
        columns = np.minimum(np.arange(width), sizes[chosen, None] - 1)
        queries = (rows[chosen, None] + columns).astype(np.int32)
        sequences = order[of_sequence[chosen]]
        table = _tables(work.tables[sequences], _width(int(pages_of[chosen].max()), whole_ranges=whole_ranges))
        found.append(Tiles(table, (starts[chosen, None] + columns + 1).astype(np.int32), queries, _prompts(work, sequences)))
        real = np.arange(width) < sizes[chosen, None]
        unpack[queries[real]] = num_out + np.flatnonzero(real).astype(np.int32)
        num_out += queries.size
    return found, unpack


def _stretches(work: Work, order: NDArray[np.intp], num_taps: int) -> Stretches:
    counts = work.counts[order]
    num = len(order)
    of_sequence = np.repeat(np.arange(num), counts)
    firsts = np.cumsum(counts) - counts
    within = np.arange(len(of_sequence)) - firsts[of_sequence]

    def place(sequence: NDArray[np.intp], source: NDArray[np.intp]) -> Ints:
        """Where value `source` of a sequence's stretch is among the lines; below 0 it is one of its tails."""
        tail = sequence * num_taps + num_taps + source
        return np.where(source < 0, tail, num * num_taps + firsts[sequence] + source).astype(np.int32)

    taps = place(of_sequence[:, None], within[:, None] + np.arange(-num_taps, 1))
    tails = place(np.arange(num)[:, None], counts[:, None] + np.arange(-num_taps, 0))
    return Stretches(work.slots[order], taps, tails)
