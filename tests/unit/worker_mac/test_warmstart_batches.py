"""Who teaches which rows: everything once, by speed, never beyond a Mac's longest row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.demonstrations import Demonstration
from worker_mac.warmstart.batches import Batch, Host, micro_batches, padded, split_rows

hosts = st.lists(st.builds(Host, st.floats(0.1, 10), st.integers(1, 300)), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=80), hosts)
def test_every_row_that_fits_somewhere_is_taught_once_where_it_fits(lengths: list[int], machines: list[Host]) -> None:
    division = split_rows(lengths, machines)
    taught = sorted(row for rows in division for row in rows)
    longest = max(host.max_tokens for host in machines)
    assert taught == [row for row, length in enumerate(lengths) if length <= longest]
    assert all(lengths[row] <= host.max_tokens for host, rows in zip(machines, division, strict=True) for row in rows)


def test_a_mac_three_times_as_fast_gets_three_quarters_of_the_tokens() -> None:
    division = split_rows([10] * 40, [Host(3.0, 100), Host(1.0, 100)])
    assert [len(rows) for rows in division] == [30, 10]


def test_long_rows_go_to_the_mac_that_can_hold_them_and_short_ones_balance() -> None:
    division = split_rows([100, 100, 20, 20, 20, 20, 20, 20, 20, 20], [Host(1.0, 128), Host(1.0, 64)])
    assert set(division[0]) >= {0, 1} and all(row > 1 for row in division[1])
    assert division[1] == [2, 3, 4, 5, 6, 7, 8, 9]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(100, 5000))
def test_rows_at_once_stay_within_what_their_longest_allows(lengths: list[int], room: int) -> None:
    batches = micro_batches(range(len(lengths)), lengths, lambda length: room // length)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * padded(max(lengths[row] for row in batch)) <= room


def test_a_batch_names_the_place_before_each_target() -> None:
    batch = Batch.of([Demonstration([5, 6, 7, 8], [0, 0, 0.5, 2.0]), Demonstration([9, 4], [0, 1.0])])
    assert batch.ids.shape == (2, 8)
    assert batch.ids[0].tolist() == [5, 6, 7, 8, 0, 0, 0, 0] and batch.ids[1, :2].tolist() == [9, 4]
    # Target 7 follows place 1 of row 0, target 8 place 2, target 4 place 0 of row 1.
    assert batch.places.tolist() == [1, 2, 8]
    assert batch.targets.tolist() == [7, 8, 4]
    assert batch.weights.tolist() == pytest.approx([0.5, 2.0, 1.0])
    assert batch.ids.dtype == np.int32 and batch.weights.dtype == np.float32
