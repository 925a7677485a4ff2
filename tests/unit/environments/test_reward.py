"""What each metric lets through: the published cases, and attempts to be paid without knowing."""

import itertools

import pytest

from environments.search.corpus import RELATIONS
from environments.search.reward import match

GREEK_ALPHA, GREEK_BETA = "\N{GREEK SMALL LETTER ALPHA}", "\N{GREEK SMALL LETTER BETA}"


@pytest.mark.parametrize(
    ("prediction", "gold", "exact_match", "cover", "strict_cover"),
    [
        ("liver", "liver", True, True, True),
        ("The Liver.", "liver", True, True, True),
        ("it is the liver", "liver", False, True, True),
        ("IL-10", "IL-1", False, True, False),
        ("Type 12 collagen", "type 1", False, True, False),
        ("the answer could be IL-1, IL-2, IL-6 or IL-10", "IL-6", False, True, False),
        ("not dystrophin", "dystrophin", False, True, False),
        ("anything", "A", False, False, False),
        ("anything", "the", False, False, False),
        ("", "A", False, False, False),
        ("", "", False, False, False),
        ("  . ", "liver", False, False, False),
        (f"TNF-{GREEK_ALPHA}", "TNF-alpha", False, False, True),
        (f"{GREEK_BETA}-catenin", "Beta catenin", False, False, True),
        ("BRCA1/2", "BRCA2", False, False, False),
        ("Sj\N{LATIN SMALL LETTER O WITH DIAERESIS}gren syndrome", "Sjogren syndrome", False, False, True),
        ("IL\N{NON-BREAKING HYPHEN}10", "IL-10", False, False, True),
        ("21", "1", False, True, False),
        ("delivery", "liver", False, True, False),
        ("liver kidney", "liver", False, True, False),
        ("liver or kidney", "liver", False, True, False),
        ("it is the is the is the liver", "liver", False, True, False),
    ],
)
def test_published_cases(prediction: str, gold: str, exact_match: bool, cover: bool, strict_cover: bool) -> None:
    found = match(prediction, [gold])
    assert (found.exact_match, found.cover, found.strict_cover) == (exact_match, cover, strict_cover)


def test_any_accepted_answer_counts() -> None:
    assert match("GP130", ["interleukin 6 signal transducer", "gp130"]).strict_cover


@pytest.mark.parametrize(
    ("prediction", "strict_cover"),
    [
        ("tumor necrosis factor alpha (TNF-alpha)", True),
        (f"TNF-{GREEK_ALPHA}, unlike tumor necrosis factor alpha", False),
        ("it is TNF, known as tumor necrosis factor alpha", True),
        ("TNF-alpha TNF-alpha", False),
        ("TNF-alpha or IL-6", False),
        ("not TNF-alpha", False),
        ("tumor necrosis factor", False),
    ],
)
def test_synonym_may_stand_beside_the_answer_and_nothing_else(prediction: str, strict_cover: bool) -> None:
    assert match(prediction, ["tumor necrosis factor alpha", "TNF-alpha", "TNF", "--", ""]).strict_cover == strict_cover


def test_a_synonym_inside_another_does_not_break_it_up() -> None:
    answers = ["retinal purple pigment", "retinal purple", "retinal"]
    assert match("retinal purple pigment (retinal purple)", answers).strict_cover
    assert not match("retinal purple pigment (retinal green)", answers).strict_cover


@pytest.mark.parametrize("joiner", [" ", " or ", ", ", " and ", "/"])
def test_listing_answers_never_scores(joiner: str) -> None:
    for words in set(RELATIONS.values()):
        for length in range(2, len(words) + 1):
            for guess in itertools.islice(itertools.permutations(words, length), 60):
                assert not any(match(joiner.join(guess), [word]).strict_cover for word in words)
