"""Advantages are centred by group, exactly, whatever the order of episodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.contracts.errors import NonFiniteError
from stoa.learning.advantages import group_advantages, is_constant

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=8)


def test_mean_is_taken_off_and_nothing_else():
    found = group_advantages(np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    assert found.tolist() == [0.75, -0.25, -0.25, 0.75, -0.25, -0.25, -0.25, -0.25]


def test_a_group_of_five_has_its_own_mean():
    np.testing.assert_allclose(group_advantages(np.array([1.0, 1.0, 0.0, 0.0, 0.0])), [0.6, 0.6, -0.4, -0.4, -0.4], rtol=1e-15)


def test_normalised_advantages_are_divided_by_the_population_deviation():
    # Mean 0.25, deviation sqrt(3) / 4.
    found = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), normalise=True)
    np.testing.assert_allclose(found, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rtol=1e-15)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.3])
def test_equal_rewards_give_exactly_nothing(value, normalise):
    assert group_advantages(np.full(7, value), normalise=normalise).tolist() == [0.0] * 7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_an_error(bad):
    with pytest.raises(NonFiniteError):
        group_advantages(np.array([0.0, bad, 1.0]))


def test_constant_means_exactly_equal():
    assert is_constant(np.array([0.1, 0.1, 0.1]))
    assert not is_constant(np.array([0.1, 0.1, np.nextafter(0.1, 1.0)]))


@given(rewards, st.randoms())
def test_shuffling_episodes_changes_no_bit(values, chance):
    order = list(range(len(values)))
    chance.shuffle(order)
    straight = group_advantages(np.array(values))
    shuffled = group_advantages(np.array([values[i] for i in order]))
    assert shuffled.tolist() == [straight[i] for i in order]


@given(rewards)
def test_advantages_sum_to_zero(values):
    assert abs(group_advantages(np.array(values)).sum()) < 1e-12
