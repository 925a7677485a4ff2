"""Parts of an examination are claimed once, taken over when their Mac falls silent, and answered once."""

import time

import pytest

from stoa.bucket import keys
from stoa.bucket.exams import EXAM_FORMAT, ExamPlan, answered, claim, give_back, open_exam, read_exam
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError, ObjectExistsError, ObjectMissingError, RunMismatchError


def plan(exam: str = "mine", **changes: object) -> ExamPlan:
    fields: dict = {
        "format": EXAM_FORMAT,
        "exam": exam,
        "state_id": "a" * 64,
        "environment": '["search", {}]',
        "question_ids": tuple(f"q{i}" for i in range(10)),
        "num_samples": 2,
        "questions_a_part": 4,
        "seed": 0,
        "sampling": (1.0, 0, 1.0, 0.0),
    }
    return ExamPlan(**{**fields, **changes})


def test_questions_are_cut_into_parts_without_a_rest() -> None:
    mine = plan()
    assert mine.num_parts == 3
    assert [len(mine.part(number)) for number in range(3)] == [4, 4, 2]
    assert sum((mine.part(number) for number in range(3)), ()) == mine.question_ids


def test_each_part_goes_to_one_mac(store: Store) -> None:
    mine = plan("once")
    taken = [claim(store, mine, f"mac-{i % 2}", now=time.time(), expires_seconds=600) for i in range(5)]
    assert taken == [0, 1, 2, None, None]


def test_part_of_a_silent_mac_is_taken_over_once_and_counts_once(store: Store) -> None:
    mine = plan("silent", question_ids=("q0",))
    assert claim(store, mine, "mac-a", now=time.time(), expires_seconds=600) == 0
    assert claim(store, mine, "mac-b", now=time.time(), expires_seconds=600) is None
    later = time.time() + 605
    assert claim(store, mine, "mac-b", now=later, expires_seconds=600) == 0
    assert claim(store, mine, "mac-c", now=time.time(), expires_seconds=600) is None, "the second claim is fresh"
    store.create(keys.exam_answer("silent", 0), b"of mac-b")
    with pytest.raises(ObjectExistsError):
        store.create(keys.exam_answer("silent", 0), b"of mac-a, which came back")
    assert answered(store, mine) == {0: keys.exam_answer("silent", 0)}
    assert claim(store, mine, "mac-c", now=later + 9999, expires_seconds=600) is None


def test_what_a_mac_that_ended_had_claimed_is_free_at_once_and_what_it_answered_is_kept(store: Store) -> None:
    mine = plan("ended")
    hosts = ["mac-a", "mac-b", "mac-a"]
    assert [claim(store, mine, host, now=time.time(), expires_seconds=600) for host in hosts] == [0, 1, 2]
    store.create(keys.exam_answer("ended", 0), b"of mac-a")
    assert give_back(store, mine, ["mac-a"]) == (2,)
    assert claim(store, mine, "mac-c", now=time.time(), expires_seconds=600) == 2
    assert claim(store, mine, "mac-c", now=time.time(), expires_seconds=600) is None, "part 1 is still mac-b's"
    assert give_back(store, mine, ["mac-a"]) == ()
    assert answered(store, mine) == {0: keys.exam_answer("ended", 0)}


def test_macs_with_another_checkpoint_or_task_may_not_take_part(store: Store) -> None:
    open_exam(store, plan("shared"))
    open_exam(store, plan("shared"))
    assert read_exam(store, "shared") == plan("shared")
    with pytest.raises(RunMismatchError, match="num_samples, sampling"):
        open_exam(store, plan("shared", num_samples=4, sampling=(0.5, 0, 1.0, 0.0)))
    with pytest.raises(ObjectMissingError):
        read_exam(store, "another")


def test_what_a_stranger_puts_beside_claims_is_passed_over(store: Store) -> None:
    mine = plan("junk")
    store.create(keys.exam_claims_prefix("junk") + "000000-zz.json", b"x")
    store.create(keys.exam_answers_prefix("junk") + "999999.safetensors.zst", b"x")
    assert claim(store, mine, "mac-a", now=time.time(), expires_seconds=600) == 0
    assert answered(store, mine) == {}
    with pytest.raises(FormatError):
        keys.exam_answer("../x", 0)
