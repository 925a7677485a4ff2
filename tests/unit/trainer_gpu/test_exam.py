"""Held-out examinations: marked from ids, whatever the Mac claims, and written once."""

from dataclasses import replace

import numpy as np
import pytest

from stoa.bucket import keys
from stoa.bucket.evals import all_summaries, read_summary
from stoa.bucket.store import Store
from stoa.chat.render import ChatRenderer
from stoa.contracts.errors import FormatError, GroupRefusedError
from stoa.contracts.evaluation_messages import SummariseRequest
from stoa.rollouts.records import Episode, Fingerprint, Group, Turn
from stoa.rollouts.shard import encode_group
from tests.unit.trainer_gpu.player import POLICY, search, vocab_size
from tests.unit.trainer_gpu.runs import Reports, config_of
from trainer_gpu.exam import Examiner


def answer_of(question_id: str, *, right: bool) -> Episode:
    """An episode that answers at once, without a search."""
    environment = search()
    question = environment.question(question_id)
    other = next(q for q in environment.question_ids("held_out") if environment.question(q).answers != question.answers)
    word = question.answers[0] if right else environment.question(other).answers[0]
    renderer = ChatRenderer((POLICY / "tokenizer.json").read_bytes())
    turn = [*renderer.encode(f"Answer: {word}"), *environment.stop_ids]
    prompt = list(environment.prompt_ids(question_id))
    ids = np.array(prompt + turn, np.int32)
    mask = np.array([0] * len(prompt) + [1] * len(turn), np.uint8)
    outcome = environment.score(question_id, [turn])
    return Episode(
        question_id,
        ids,
        mask,
        np.full(len(turn), -0.5, np.float32),
        (Turn(len(prompt), len(ids), True),),
        outcome.reward,
        dict(outcome.parts),
        "answered",
    )


def part_of(episodes: list[Episode], *, host: str = "mac", version: int = 3) -> Group:
    return Group("test", host, 7, 0, "eval", "", version, f"state-{version}", 1.0, 0, tuple(episodes), Fingerprint("e", "b"))


@pytest.fixture
def examiner(store: Store) -> Examiner:
    known = {3: "state-3"}
    return Examiner(store, config_of(store), search(), vocab_size=vocab_size(), known=known.get)


def put(store: Store, group: Group, part: int) -> str:
    key = keys.eval_part("test", group.version, "ev", part, group.host)
    store.create(key, encode_group(group))
    return key


def summarise(examiner: Examiner, parts: list[str], num: int):
    return examiner.summarise(SummariseRequest("test", "ev", 3, tuple(parts), num), Reports())


def test_questions_are_the_same_each_time_and_held_out(examiner: Examiner) -> None:
    chosen = examiner.held_out("test", 128, 0)
    assert len(set(chosen)) == 128
    assert chosen == examiner.held_out("test", 512, 0)[:128]
    assert chosen != examiner.held_out("test", 128, 1)
    assert set(chosen) <= set(search().question_ids("held_out"))
    assert len(examiner.held_out("test", 10_000, 0)) == len(search().question_ids("held_out"))


def test_marks_come_from_ids_and_the_summary_is_written_once(store: Store, examiner: Examiner) -> None:
    questions = examiner.held_out("test", 6, 0)
    episodes = [answer_of(q, right=i < 4) for i, q in enumerate(questions)]
    parts = [put(store, part_of(episodes[:3]), 0), put(store, part_of(episodes[3:]), 1)]
    # A part that came twice, from another Mac: its questions are not counted again.
    parts.append(put(store, part_of(episodes[:3], host="other"), 0))
    result = summarise(examiner, parts, 6)
    assert (result.num_questions, result.pass_at_1, result.search_rate) == (6, 4 / 6, 0.0)
    assert result.cover == result.exact_match == 4 / 6
    assert result.interval_95 == pytest.approx((0.29999, 0.90323), abs=1e-5)
    assert result.error == ""
    assert read_summary(store, result.key).result == result
    assert [mark.strict_cover for mark in read_summary(store, result.key).marks] == [1, 1, 1, 1, 0, 0]
    assert summarise(examiner, parts[:1], 6) == result
    assert [summary.result for summary in all_summaries(store, "test")] == [result]


def test_missing_questions_are_told(store: Store, examiner: Examiner) -> None:
    questions = examiner.held_out("test", 2, 0)
    result = summarise(examiner, [put(store, part_of([answer_of(questions[0], right=True)]), 0)], 2)
    assert (result.num_questions, result.error) == (1, "1 questions have no episode")


@pytest.mark.parametrize(
    ("reason", "spoil"),
    [
        ("wrong_reward", lambda e: replace(e, reward=1.0 - e.reward)),
        ("wrong_prompt", lambda e: replace(e, ids=np.concatenate([[9], e.ids[1:]]).astype(np.int32))),
        ("logprob", lambda e: replace(e, logprobs=e.logprobs * np.float32(np.nan))),
    ],
)
def test_part_that_lies_is_refused(store: Store, examiner: Examiner, reason: str, spoil) -> None:
    episode = spoil(answer_of(examiner.held_out("test", 1, 0)[0], right=False))
    with pytest.raises(GroupRefusedError) as caught:
        summarise(examiner, [put(store, part_of([episode]), 0)], 1)
    assert caught.value.reason == reason


def test_a_part_that_lies_costs_its_own_questions_only(store: Store, examiner: Examiner) -> None:
    questions = examiner.held_out("test", 4, 0)
    honest = put(store, part_of([answer_of(question, right=True) for question in questions[:3]]), 0)
    lie = put(store, part_of([replace(answer_of(questions[3], right=False), reward=1.0)], host="liar"), 1)
    garbage = keys.eval_part("test", 3, "ev", 2, "liar")
    store.create(garbage, b"garbage")
    elsewhere = keys.eval_part("test", 3, "other", 0, "liar")
    store.create(elsewhere, store.get(honest, max_bytes=1 << 20).data)
    missing = keys.eval_part("test", 3, "ev", 3, "liar")
    result = summarise(examiner, [elsewhere, garbage, honest, lie, missing], 4)
    assert (result.num_questions, result.pass_at_1) == (3, 1.0)
    assert result.error == f"1 questions have no episode; 4 parts were refused: {elsewhere} is no part of evaluation ev"


def test_parts_with_a_question_unanswered_are_named_and_nothing_is_written_until_it_is_final(store: Store, examiner: Examiner) -> None:
    questions = examiner.held_out("test", 5, 0)
    first, third = ([answer_of(question, right=True) for question in of] for of in (questions[:2], questions[4:]))
    honest = put(store, part_of(first), 0)
    lie = put(store, part_of([replace(answer_of(question, right=False), reward=1.0) for question in questions[2:4]], host="liar"), 1)
    again = put(store, part_of(first, host="liar"), 2)  # another part's questions in place of its own
    request = SummariseRequest("test", "ev", 3, (honest, lie, again), 5, questions_a_part=2)
    assert examiner.summarise(request, Reports()).redeal == (1, 2)
    assert not store.exists(keys.eval_summary("test", 3, "ev"))
    nothing = examiner.summarise(replace(request, keys=(lie,)), Reports())
    assert (nothing.redeal, nothing.num_questions) == ((0, 1, 2), 0)
    second = [answer_of(question, right=True) for question in questions[2:4]]
    redone = (honest, put(store, part_of(second), 1), put(store, part_of(third), 2), lie, again)
    result = examiner.summarise(replace(request, keys=redone), Reports())
    assert (result.redeal, result.error, result.num_questions, result.pass_at_1) == ((), "", 5, 1.0)
    assert read_summary(store, result.key).result == result


def test_part_of_other_weights_or_version_is_refused(store: Store, examiner: Examiner) -> None:
    episode = answer_of(examiner.held_out("test", 1, 0)[0], right=True)
    for group in (replace(part_of([episode]), state_id="x"), part_of([episode], version=2)):
        with pytest.raises(GroupRefusedError):
            key = keys.eval_part("test", 3, "ev", group.version, f"mac{len(group.state_id)}")
            store.create(key, encode_group(group))
            summarise(examiner, [key], 1)


def test_training_question_is_refused(store: Store, examiner: Examiner) -> None:
    episode = answer_of(search().question_ids("train")[0], right=True)
    with pytest.raises(GroupRefusedError):
        summarise(examiner, [put(store, part_of([episode]), 0)], 1)


def test_other_run_is_refused(examiner: Examiner) -> None:
    with pytest.raises(FormatError):
        examiner.held_out("other", 1, 0)


def test_several_samples_of_a_question_are_all_marked(store: Store, examiner: Examiner) -> None:
    first, second = examiner.held_out("test", 2, 0)
    episodes = [answer_of(first, right=i < 3) for i in range(4)] + [answer_of(second, right=False) for _ in range(4)]
    request = SummariseRequest(
        "test", "ev", 3, (put(store, part_of(episodes), 0), put(store, part_of(episodes[:4], host="other"), 0)), 2, 4
    )
    result = examiner.summarise(request, Reports())
    assert (result.num_questions, result.num_samples, result.error) == (2, 4, "")
    assert result.pass_at_1 == (3 / 4 + 0) / 2
    assert result.pass_at_k == 0.5, "one of four is right for one of the two questions"
    assert result.mean_turns == 1.0
    assert result.truncated_rate == 0.0
    assert result.mean_answer_words > 0
    marks = read_summary(store, result.key).marks
    assert [mark.sample for mark in marks] == [0, 1, 2, 3] * 2


def test_more_samples_than_were_asked_for_are_refused(store: Store, examiner: Examiner) -> None:
    """Else a Mac could send many and be counted for the best."""
    (question,) = examiner.held_out("test", 1, 0)
    with pytest.raises(GroupRefusedError) as caught:
        summarise(examiner, [put(store, part_of([answer_of(question, right=True)] * 2), 0)], 1)
    assert caught.value.reason == "group_size"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"garbage",
        lambda data: data[:-5],
        lambda data: data.replace(b'"pass_at_1":1.0', b'"pass_at_1":7.5'),
        lambda data: data.replace(b'"pass_at_1":1.0', b'"pass_at_1":NaN'),
        lambda data: data.replace(b'"run":"test"', b'"run":"other"'),
    ],
)
def test_garbled_summary_is_left_out_and_the_others_are_read(store: Store, examiner: Examiner, spoil) -> None:
    (question,) = examiner.held_out("test", 1, 0)
    result = summarise(examiner, [put(store, part_of([answer_of(question, right=True)]), 0)], 1)
    spoilt = spoil(store.get(result.key, max_bytes=1 << 20).data)
    store.create(keys.eval_summary("test", 3, "planted"), spoilt)
    assert [summary.result for summary in all_summaries(store, "test")] == [result]
