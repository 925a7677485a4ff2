"""The invented world: what depends on what, and where the facts are to be found."""

import random
import re
from collections import Counter

import pytest

from environments.search.corpus import MAX_ENTITIES, RELATIONS, build_world
from environments.search.env import FIRST_WARM_START_SEED
from environments.search.index import SearchIndex
from environments.search.questions import WORDINGS, build_questions
from stoa.contracts.errors import ConfigError

WORLD = build_world(0, 600)
QUESTIONS = build_questions(WORLD, 200)


def test_world_follows_from_its_seed() -> None:
    assert build_world(7, 40) == build_world(7, 40)
    assert build_world(7, 40) != build_world(8, 40)


def test_world_of_the_demo_is_the_recorded_one() -> None:
    assert [entity.abstract for entity in WORLD[:2]] == [
        "tulver marks liver , encodes synthase , regulates inflammation .",
        "gixdex inhibits helicase , treats asthma , causes headache .",
    ]


def test_names_are_unique_and_half_are_drugs() -> None:
    assert len({entity.name for entity in WORLD}) == 600
    assert sum("treats" in entity.facts for entity in WORLD) == 300


def test_held_out_entities_appear_in_no_training_question() -> None:
    names = {entity.id: entity.name for entity in WORLD}
    held_out = {names[q.source] for q in QUESTIONS if q.split == "held_out"}
    training_words = {word for q in QUESTIONS if q.split == "train" for word in q.text.split()}
    assert len(held_out) == 200
    assert not held_out & training_words


def test_every_fact_is_asked_in_two_wordings() -> None:
    assert len(QUESTIONS) == 600 * 3 * 2
    assert len({q.text for q in QUESTIONS}) == len(QUESTIONS)
    assert len({q.id for q in QUESTIONS}) == len(QUESTIONS)


def test_facts_stand_in_the_abstracts_only() -> None:
    abstracts = {entity.id: entity.abstract for entity in WORLD}
    for question in QUESTIONS:
        (answer,) = question.answers
        assert answer in abstracts[question.source].split()
        assert answer not in question.text.split()


def test_wordings_share_no_relation_word_with_abstracts() -> None:
    for wordings in WORDINGS.values():
        assert not set(RELATIONS) & {word for wording in wordings for word in wording.split()}


def test_guessing_is_right_one_time_in_six() -> None:
    counts = Counter((q.id.split("-")[1], q.answers[0]) for q in QUESTIONS)
    best_guess = sum(max(counts[relation, answer] for answer in answers) for relation, answers in RELATIONS.items())
    draw = random.Random(1)
    blind = sum(draw.choice(RELATIONS[q.id.split("-")[1]]) == q.answers[0] for q in QUESTIONS)
    # Three standard deviations of a share of 3,600 at 1/6 are 0.019.
    assert abs(blind / len(QUESTIONS) - 1 / 6) < 0.019
    assert best_guess / len(QUESTIONS) < 0.22


def test_a_name_says_nothing_about_facts_of_another_world() -> None:
    other = {entity.name: entity.facts for entity in build_world(FIRST_WARM_START_SEED, 600)}
    shared = [(entity.facts, other[entity.name]) for entity in WORLD if entity.name in other]
    pairs = [(facts[r], others[r]) for facts, others in shared for r in facts]
    assert len(pairs) > 200
    assert sum(a == b for a, b in pairs) / len(pairs) < 0.3


@pytest.mark.parametrize("num_entities", [0, 1, MAX_ENTITIES + 1])
def test_world_of_an_impossible_size_is_refused(num_entities: int) -> None:
    with pytest.raises(ConfigError):
        build_world(0, num_entities)


def test_a_name_finds_its_own_abstract_and_nothing_else() -> None:
    index = SearchIndex([entity.abstract for entity in WORLD], 2)
    assert all(index.search(entity.name) == (number,) for number, entity in enumerate(WORLD))


def test_a_vague_query_finds_arbitrary_papers_and_always_the_same() -> None:
    abstracts = [entity.abstract for entity in WORLD]
    first, second = SearchIndex(abstracts, 2), SearchIndex(abstracts, 2)
    queries = ["treats", "treats asthma", "asthma treats", "causes", "kinase"]
    assert [first.search(q) for q in queries] == [second.search(q) for q in queries]
    assert all(len(first.search(q)) == 2 for q in queries)
    assert first.search("treats asthma") != first.search("asthma treats")
    assert all(re.search("treats asthma", abstracts[n]) for n in first.search("treats asthma"))


def test_scores_agree_with_bm25_by_hand() -> None:
    # Lucene's BM25 with k1 1.5, b 0.75 over two words a document: tf part 1 / (1 + 1.5), idf ln(1 + (N - n + .5) / (n + .5)).
    # "b" is in one of three documents, "a" in two: so a document with b beats one with a, and both tie only by hash.
    index = SearchIndex(["a x", "a y", "b z"], 3)
    assert index.search("a b")[0] == 2
    assert set(index.search("a b")) == {0, 1, 2}
    assert set(index.search("a")) == {0, 1}


def test_query_without_a_known_word_finds_nothing() -> None:
    index = SearchIndex(["a x", "a y"], 2)
    assert index.search("unheard of") == index.search("") == index.search("?!") == ()
