"""What marks of held-out questions say, with how sure one may be: rates, pass@k, intervals, two versions compared.

Marks come from `stoa.bucket.evals`; who earns one is decided elsewhere. One sample a question gives Wilson's interval;
several give the bootstrap over questions, because samples of one question are no independent evidence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoa.bucket.evals import Mark
from stoa.contracts.errors import UsageError

Z_95: Final = NormalDist().inv_cdf(0.975)
Z_80: Final = NormalDist().inv_cdf(0.8)
"""Of 80 % power."""
BOOTSTRAP_ROUNDS: Final = 2000
SHARES: Final[dict[str, Callable[[Mark], float]]] = {
    "pass_at_1": lambda mark: mark.strict_cover,
    "strict_cover": lambda mark: mark.strict_cover,
    "cover": lambda mark: mark.cover,
    "exact_match": lambda mark: mark.exact_match,
    "search_rate": lambda mark: mark.searched,
    "truncated_rate": lambda mark: mark.truncated,
    "malformed_rate": lambda mark: mark.malformed,
}
"""Each mark gives 0 or 1."""
MEANS: Final[dict[str, Callable[[Mark], float]]] = {
    "turns_mean": lambda mark: float(mark.num_turns),
    "answer_words_mean": lambda mark: mark.answer_words,
    "tokens_mean": lambda mark: float(mark.num_tokens),
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measures:
    """What the marks of one evaluation say."""

    num_questions: int
    num_samples: int
    """Fewest samples that a question has: a lost episode is no sample."""
    interval: str
    """How intervals were made: wilson or bootstrap over questions."""
    estimates: dict[str, Estimate] = field(default_factory=dict[str, Estimate])


@dataclass(frozen=True, slots=True)
class Compared:
    """Two evaluations on the same questions; differences are `after` minus `before` in pass@1."""

    num_questions: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    """Of the bootstrap over questions, 95 %."""
    only_before: int
    """Questions that only `before` solved; with several samples, in the mean: that it solved more often."""
    only_after: int
    p_value: float
    """McNemar's exact test, two-sided, on those."""
    questions_needed: int
    """For a difference this large to be found in four of five evaluations; 0 where there is none."""


def wilson_95(num_right: float, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927); (0, 1) of nothing."""
    if num == 0:
        return 0.0, 1.0
    share, z2 = num_right / num, Z_95**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(num_right: int, num: int, k: int) -> float:
    """Chance that one of k samples is right, without bias from `num` >= k of them (Chen et al. 2021, equation 1)."""
    if not 1 <= k <= num or not 0 <= num_right <= num:
        raise ValueError(f"pass@{k} of {num_right} right in {num}")
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def bootstrap_95(values: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean by drawing as many of `values` again, float64 [num questions]; the same for a seed."""
    chance = np.random.default_rng(seed)
    means = np.array([values[chance.integers(len(values), size=len(values))].mean() for _ in range(BOOTSTRAP_ROUNDS)])
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def mcnemar(only_before: int, only_after: int) -> float:
    """Two-sided p of McNemar's exact test: how likely so uneven a split is if neither is better."""
    num, fewer = only_before + only_after, min(only_before, only_after)
    if not num:
        return 1.0
    tail = sum(math.comb(num, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**num)  # integers until here: exact also for thousands


def questions_needed(difference: float, discordant: float) -> int:
    """Questions for which McNemar's test finds a difference with 80 % power at 5 %, two-sided (Connor 1987).

    difference: of pass@1. discordant: share of questions on which the two differ.
    """
    if not 0.0 < abs(difference) <= discordant <= 1.0:
        raise ValueError(f"a difference of {difference} with {discordant} discordant")
    spread = Z_95 * math.sqrt(discordant) + Z_80 * math.sqrt(discordant - difference**2)
    return math.ceil((spread / difference) ** 2)


def measures(marks: Sequence[Mark]) -> Measures:
    """Everything an evaluation says of a policy. Raises UsageError without marks."""
    by_question = _by_question(marks)
    if not by_question:
        raise UsageError("an evaluation without a mark says nothing")
    num_samples = min(len(found) for found in by_question.values())
    single = max(len(found) for found in by_question.values()) == 1
    estimates: dict[str, Estimate] = {}
    for name, value in SHARES.items():
        means_Q = _means(by_question, value)
        interval = wilson_95(float(means_Q.sum()), len(means_Q)) if single else bootstrap_95(means_Q)
        estimates[name] = Estimate(float(means_Q.mean()), *interval)
    for name, value in MEANS.items():
        means_Q = _means(by_question, value)
        estimates[name] = Estimate(float(means_Q.mean()), *bootstrap_95(means_Q))
    for k in range(2, num_samples + 1):
        if k & (k - 1) == 0 or k == num_samples:  # powers of two, and all
            solved_Q = np.array([pass_at_k(round(sum(one.strict_cover for one in found)), len(found), k) for found in by_question.values()])
            estimates[f"pass_at_{k}"] = Estimate(float(solved_Q.mean()), *bootstrap_95(solved_Q))
    return Measures(len(by_question), num_samples, "wilson" if single else "bootstrap over questions", estimates)


def compare(before: Sequence[Mark], after: Sequence[Mark]) -> Compared:
    """Two evaluations, paired by question. Raises UsageError if they have no question in common."""
    first, second = _by_question(before), _by_question(after)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise UsageError("the two evaluations have no question in common", hint="evaluate both with the same --seed and task")
    before_Q, after_Q = (np.array([_mean(found[question]) for question in common]) for found in (first, second))
    difference_Q = after_Q - before_Q
    only_before, only_after = int((difference_Q < 0).sum()), int((difference_Q > 0).sum())
    difference, discordant = float(difference_Q.mean()), (only_before + only_after) / len(common)
    low, high = bootstrap_95(difference_Q)
    needed = questions_needed(difference, discordant) if difference else 0
    return Compared(
        len(common),
        float(before_Q.mean()),
        float(after_Q.mean()),
        difference,
        low,
        high,
        only_before,
        only_after,
        mcnemar(only_before, only_after),
        needed,
    )


def _by_question(marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    found: dict[str, list[Mark]] = {}
    for mark in marks:
        found.setdefault(mark.question_id, []).append(mark)
    return found


def _mean(marks: Sequence[Mark]) -> float:
    return sum(mark.strict_cover for mark in marks) / len(marks)


def _means(by_question: dict[str, list[Mark]], value: Callable[[Mark], float]) -> NDArray[np.float64]:
    """Of each question over its samples, float64 [Q]."""
    return np.array([sum(map(value, found)) / len(found) for found in by_question.values()], dtype=np.float64)
