"""Lag is counted at consumption."""

import pytest

from stoa.learning.staleness import histogram, is_stale, lag_versions


def test_lag_is_the_versions_published_since():
    assert lag_versions(7, 7) == 0
    assert lag_versions(7, 4) == 3


def test_a_group_of_a_version_to_come_is_an_error():
    with pytest.raises(ValueError, match="version 8"):
        lag_versions(7, 8)


def test_the_hard_bound_is_inclusive():
    assert not is_stale(8, 0, 8)
    assert is_stale(9, 0, 8)


def test_histogram_counts_by_rising_lag():
    assert list(histogram([2, 0, 2, 1]).items()) == [(0, 1), (1, 1), (2, 2)]
    assert histogram([]) == {}
