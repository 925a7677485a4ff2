"""Packing puts each sequence in one row, keeps to the budget and depends on the lengths alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.learning.batching import pack

lengths = st.lists(st.integers(1, 120), max_size=60)


def test_longest_first_into_the_first_row_with_room():
    # 7 opens row 0; 5 row 1; 4 row 2 (no room in 10 - 7 or in 10 - 5? 5 has room for 4); 3 fills row 0; 1 row 1.
    assert pack([3, 7, 5, 1, 4], 10) == [[0, 1], [2, 3, 4]]


def test_equal_lengths_stay_in_order():
    assert pack([5, 5, 5, 5, 5], 10) == [[0, 1], [2, 3], [4]]


def test_a_sequence_longer_than_the_budget_is_alone():
    assert pack([12, 3, 11], 10) == [[0], [2], [1]]


def test_nothing_packs_into_nothing():
    assert pack([], 10) == []


@pytest.mark.parametrize(("values", "budget"), [([0, 3], 10), ([-1], 10), ([3], 0), ([], 0)])
def test_impossible_lengths_and_budgets_are_errors(values, budget):
    with pytest.raises(ValueError, match="cannot be packed"):
        pack(values, budget)


@given(lengths, st.integers(1, 100))
def test_each_sequence_is_in_one_row_within_the_budget(values, budget):
    rows = pack(values, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(values)))
    for row in rows:
        assert row == sorted(row)
        assert len(row) == 1 or sum(values[index] for index in row) <= budget


@given(lengths, st.integers(120, 300))
def test_at_most_one_row_is_half_empty(values, budget):
    """What first fit promises: two rows that are at most half full would have become one."""
    totals = [sum(values[index] for index in row) for row in pack(values, budget)]
    assert sum(2 * total <= budget for total in totals) <= 1
