"""Rates, pass@k, intervals and paired tests against numbers worked out by hand or by scipy-free tables."""

import itertools
import math

import numpy as np
import pytest

from stoa.bucket.evals import Mark
from stoa.contracts.errors import UsageError
from stoa.learning.marks import bootstrap_95, compare, mcnemar, measures, pass_at_k, questions_needed, wilson_95


def mark(question: str, right: bool, sample: int = 0, **changes: float) -> Mark:
    fields: dict = {"strict_cover": float(right), "cover": float(right), "exact_match": 0.0, "searched": 1.0, "num_tokens": 10}
    return Mark(question, **{**fields, "sample": sample, **changes})


@pytest.mark.parametrize(("num_right", "num", "k"), [(2, 5, 1), (2, 5, 3), (0, 8, 8), (1, 8, 8), (3, 8, 4), (8, 8, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(num_right: int, num: int, k: int) -> None:
    draws = list(itertools.combinations([True] * num_right + [False] * (num - num_right), k))
    assert pass_at_k(num_right, num, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_at_more_than_was_sampled_is_no_number() -> None:
    with pytest.raises(ValueError, match="pass@9"):
        pass_at_k(1, 8, 9)


@pytest.mark.parametrize(
    ("num", "share", "low", "high"),
    [(300, 0.29, 0.242, 0.344), (500, 0.63, 0.587, 0.671), (5000, 0.29, 0.278, 0.303), (2000, 0.63, 0.609, 0.651)],
)
def test_wilson_interval_is_that_of_the_table(num: int, share: float, low: float, high: float) -> None:
    assert wilson_95(share * num, num) == pytest.approx((low, high), abs=6e-4)


@pytest.mark.parametrize(
    ("num", "at_20", "at_30"), [(300, 0.072, 0.089), (500, 0.056, 0.069), (1000, 0.040, 0.048), (2000, 0.028, 0.034), (5000, 0.018, 0.022)]
)
def test_questions_needed_are_those_of_the_table(num: int, at_20: float, at_30: float) -> None:
    assert questions_needed(at_20, 0.2) == pytest.approx(num, rel=0.04)
    assert questions_needed(-at_30, 0.3) == pytest.approx(num, rel=0.04)


def test_questions_needed_by_hand() -> None:
    """(1.959964 sqrt(0.3) + 0.841621 sqrt(0.3 - 0.04))**2 / 0.04 = 56.45."""
    assert questions_needed(0.2, 0.3) == 57


def test_mcnemar_is_the_binomial_test() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(1, 7) == pytest.approx(2 * (1 + 8) / 256)
    assert mcnemar(7, 1) == mcnemar(1, 7)
    assert 0.0 <= mcnemar(400, 2000) < 1e-200


def test_bootstrap_over_questions_is_wider_than_if_samples_were_independent() -> None:
    """300 questions of 8 samples whose chance of success differs from question to question: a known standard error."""
    chance = np.random.default_rng(0)
    success = chance.beta(0.5, 0.5, 300)
    shares = chance.binomial(8, success) / 8
    low, high = bootstrap_95(shares)
    error = float(shares.std(ddof=1)) / math.sqrt(300)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.08)
    mean = shares.mean()
    naive = math.sqrt(mean * (1 - mean) / 2400)
    assert (high - low) / 2 > 1.5 * 1.96 * naive
    assert bootstrap_95(shares) == (low, high)


def test_single_samples_have_wilson_intervals_and_all_measures() -> None:
    marks = [mark(f"q{i}", i < 30, num_turns=2 + i % 2, answer_words=1.0, truncated=float(i < 5)) for i in range(100)]
    found = measures(marks)
    assert (found.num_questions, found.num_samples, found.interval) == (100, 1, "wilson")
    assert found.estimates["pass_at_1"].value == 0.3
    assert (found.estimates["pass_at_1"].low, found.estimates["pass_at_1"].high) == pytest.approx((0.2189, 0.3958), abs=1e-4)
    assert found.estimates["strict_cover"] == found.estimates["pass_at_1"]
    assert found.estimates["truncated_rate"].value == 0.05
    assert found.estimates["turns_mean"].value == 2.5
    assert found.estimates["search_rate"].value == 1.0
    assert "pass_at_2" not in found.estimates


def test_several_samples_give_pass_at_k_up_to_the_fewest() -> None:
    marks = [mark("a", i < 2, i) for i in range(8)] + [mark("b", False, i) for i in range(4)]
    found = measures(marks)
    assert (found.num_questions, found.num_samples, found.interval) == (2, 4, "bootstrap over questions")
    assert found.estimates["pass_at_1"].value == pytest.approx((0.25 + 0.0) / 2)
    # Of 8 with 2 right, 4 drawn: 1 - C(6,4)/C(8,4) = 1 - 15/70.
    assert found.estimates["pass_at_4"].value == pytest.approx((1 - 15 / 70) / 2)
    assert "pass_at_8" not in found.estimates


def test_two_versions_are_compared_question_by_question() -> None:
    before = [mark(f"q{i}", i < 40) for i in range(100)]
    after = [mark(f"q{i}", 4 <= i < 60) for i in range(100)] + [mark("new", True)]
    found = compare(before, after)
    assert (found.num_questions, found.before, found.after) == (100, 0.4, 0.56)
    assert found.difference == pytest.approx(0.16)
    assert (found.only_before, found.only_after) == (4, 20)
    assert found.p_value == pytest.approx(2 * sum(math.comb(24, i) for i in range(5)) / 2**24)
    assert found.low < 0.16 < found.high
    assert found.questions_needed == questions_needed(0.16, 0.24)


def test_evaluations_of_other_questions_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="no question in common"):
        compare([mark("a", True)], [mark("b", True)])
