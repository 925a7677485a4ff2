"""Decides if an answer was right, in three ways.

*exact_match* and *cover* are the usual metrics, kept for comparison. *strict_cover* is what trains: the gold answer
must stand in the prediction as whole words, and every other word must be a filler, so neither a longer number, nor a
list of guesses, nor a negation scores; a synonym among the accepted answers may stand beside it, as in `tumor necrosis
factor alpha (TNF-alpha)`. Nothing empty ever scores, on either side.
"""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from environments.search.terms import terms_of

MAX_FILLER_WORDS = 4
_FILLERS = frozenset(("a", "an", "the", "is", "it", "its", "this", "that", "answer", "called", "known", "as", "named", "of", "by", "in"))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Match:
    """How a prediction compares with the accepted answers."""

    exact_match: bool
    cover: bool
    strict_cover: bool


METRICS = ("exact_match", "cover", "strict_cover")


def match(prediction: str, answers: Sequence[str]) -> Match:
    """Compare a prediction with every accepted answer; the best counts."""
    return Match(
        exact_match=any(_exact_match(prediction, answer) for answer in answers),
        cover=any(_cover(prediction, answer) for answer in answers),
        strict_cover=any(_strict_cover(prediction, answer, answers) for answer in answers),
    )


def _exact_match(prediction: str, answer: str) -> bool:
    gold = _normalised(answer)
    return bool(gold) and _normalised(prediction) == gold


def _cover(prediction: str, answer: str) -> bool:
    gold = _normalised(answer)
    return bool(gold) and gold in _normalised(prediction)


def _strict_cover(prediction: str, answer: str, answers: Sequence[str]) -> bool:
    if not says_something(answer):
        return False
    others = _without(terms_of(prediction), terms_of(answer))
    if others is None:
        return False
    # Longest first, so that a synonym inside another does not break it up.
    synonyms = {tuple(terms_of(one)) for one in answers} - {tuple(terms_of(answer)), ()}
    for synonym in sorted(synonyms, key=lambda words: (-len(words), words)):
        rest = _without(others, list(synonym))
        others = others if rest is None else rest
    return len(others) <= MAX_FILLER_WORDS and _FILLERS.issuperset(others)


def _without(said: list[str], gold: list[str]) -> list[str] | None:
    """What is said besides the first place where `gold` stands; None if it stands nowhere."""
    for start in range(len(said) - len(gold) + 1):
        if said[start : start + len(gold)] == gold:
            return said[:start] + said[start + len(gold) :]
    return None


def says_something(answer: str) -> bool:
    """Whether anything is left of an accepted answer in its normal form; one that says nothing would match anything."""
    return bool(_normalised(answer)) and bool(terms_of(answer))


def _normalised(text: str) -> str:
    """The normal form of SQuAD v1.1 (Rajpurkar et al. 2016): lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
