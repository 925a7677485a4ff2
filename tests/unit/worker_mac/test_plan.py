"""The integers of a step against what they stand for, for random pieces of work."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.sizes import PAGE_TOKENS, RANGE_PAGES
from worker_mac.pages import SCRAP
from worker_mac.plan import TILE_TOKENS, Work, lay_out

TAPS = 3
SEGMENTS = st.lists(
    st.tuples(st.integers(0, 1200), st.sampled_from([1, 1, 1, 2, 3, 31, 32, 33, 70]), st.booleans()), min_size=1, max_size=12
)


def work_of(segments: list[tuple[int, int, bool]]) -> Work:
    starts, counts, samples = (np.array(column) for column in zip(*segments, strict=True))
    width = -(-int((starts + counts).max()) // PAGE_TOKENS)
    tables = 1 + np.arange(len(segments) * width, dtype=np.int32).reshape(len(segments), width)
    tokens = np.arange(counts.sum(), dtype=np.int32) + 1000
    sequences = np.arange(len(segments)) * 7
    return Work(
        sequences, starts.astype(np.int32), counts.astype(np.int32), samples.astype(bool), tokens, tables,
        np.arange(1, len(segments) + 1, dtype=np.int32), prompts=np.arange(len(segments), dtype=np.int32),
    )  # fmt: skip


def owners(work: Work) -> list[tuple[int, int]]:
    """(sequence's row in the work, position) of each of its tokens."""
    spans = enumerate(zip(work.starts.tolist(), work.counts.tolist(), strict=True))
    return [(row, start + place) for row, (start, count) in spans for place in range(count)]


@settings(max_examples=80, deadline=None)
@given(SEGMENTS, st.sampled_from([1, 8]))
def test_every_token_is_written_read_and_sampled_where_it_belongs(segments: list[tuple[int, int, bool]], pad_to: int) -> None:
    work = work_of(segments)
    layout = lay_out(work, TAPS, pad_to=pad_to)
    whose, num = owners(work), len(work.tokens)
    assert len(layout.tokens) % pad_to == 0
    assert sorted(layout.token_places.tolist()) == list(range(num))
    packed = [whose[place] for place in layout.token_places]
    for row, (sequence, position) in enumerate(packed):
        assert layout.tokens[row] == work.tokens[layout.token_places[row]]
        assert layout.positions[row] == position
        assert layout.pages[row] == work.tables[sequence, position // PAGE_TOKENS]
    assert (layout.pages[num:] == SCRAP).all()
    # What each token's query reads, by way of the tiles and back.
    outputs: list[tuple[list[int], int]] = []
    taken = 0
    for tiles in layout.tiles:
        size, width = tiles.lengths.shape
        assert tiles.tables.shape[1] % (RANGE_PAGES if pad_to > 1 else 1) == 0
        if tiles.queries is not None:
            assert width <= TILE_TOKENS
        for tile in range(size):
            for place in range(width):
                row = taken if tiles.queries is None else int(tiles.queries[tile, place])
                taken += tiles.queries is None
                sequence, position = packed[row]
                length = int(tiles.lengths[tile, place])
                assert length == position + 1
                assert tiles.prompts[tile] == work.prompts[sequence]
                pages = tiles.tables[tile, : -(-length // PAGE_TOKENS)].tolist()
                outputs.append((pages, row))
    back = range(num) if layout.unpack is None else layout.unpack[:num]
    for row, place in enumerate(back):
        pages, source = outputs[place]
        sequence, position = packed[row]
        assert source == row
        assert pages == work.tables[sequence, : position // PAGE_TOKENS + 1].tolist()
    assert layout.unpack is None or len(layout.unpack) == len(layout.tokens)
    sampled = list(range(len(layout.order))) if layout.sampled is None else layout.sampled[: len(layout.order)].tolist()
    assert [packed[row] for row in sampled] == [(row, int(work.starts[row] + work.counts[row]) - 1) for row in layout.order]
    assert sorted(layout.order.tolist()) == np.flatnonzero(work.samples).tolist()


@settings(max_examples=60, deadline=None)
@given(SEGMENTS)
def test_convolutions_see_each_tokens_predecessors_and_keep_the_last(segments: list[tuple[int, int, bool]]) -> None:
    work = work_of(segments)
    layout = lay_out(work, TAPS)
    rows_of_slot = {int(slot): row for row, slot in enumerate(work.slots)}
    assert [rows_of_slot[int(slot)] for slot in layout.single_slots] == [
        row for row in np.array(layout.token_places)[: layout.num_single].tolist() for row in [owners(work)[row][0]]
    ]
    if layout.stretches is None:
        assert (work.counts == 1).all()
        return
    stretches = layout.stretches
    chosen = [rows_of_slot[int(slot)] for slot in stretches.slots]
    # Each sequence's line as (its row, position); tails are the positions before its start.
    tails = [(row, int(work.starts[row]) - TAPS + tap) for row in chosen for tap in range(TAPS)]
    values = [(row, int(work.starts[row]) + place) for row in chosen for place in range(int(work.counts[row]))]
    lines = tails + values
    for (row, position), taps in zip(values, stretches.taps, strict=True):
        assert [lines[tap] for tap in taps] == [(row, position - TAPS + tap) for tap in range(TAPS + 1)]
    for row, kept in zip(chosen, stretches.tails, strict=True):
        end = int(work.starts[row] + work.counts[row])
        assert [lines[tap] for tap in kept] == [(row, end - TAPS + tap) for tap in range(TAPS)]
