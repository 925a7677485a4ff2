"""Groups on their way to a step: fetched beside the trainer, admitted or refused with a reason, dropped and told early."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from stoa.bucket import keys
from stoa.bucket.steps import Dropped
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError
from stoa.rollouts.admit import Replayed
from stoa.rollouts.records import Group, Timings
from stoa.rollouts.shard import encode_group
from tests.unit.trainer_gpu.player import search, vocab_size
from tests.unit.trainer_gpu.runs import Reports, config_of
from tests.unit.trainer_gpu.test_exam import answer_of
from trainer_gpu.intake import Intake, Starved, Taken
from trainer_gpu.referee import Referee, rules_of
from trainer_gpu.versions import KnownVersions

QUESTIONS = search().question_ids("train")


def group(slot: int, num_right: int = 2, *, version: int = 3, host: str = "mac", **changes: object) -> Group:
    episodes = [answer_of(QUESTIONS[slot], right=i < num_right) for i in range(4)]
    made = replace(_empty(slot, version, host), episodes=tuple(episodes), question_id=QUESTIONS[slot])
    return replace(made, **changes)


def _empty(slot: int, version: int, host: str) -> Group:
    from stoa.rollouts.records import Fingerprint

    return Group("test", host, 0, slot, "train", "", version, f"state-{version}", 1.0, 0, (), Fingerprint("e", "b"))


@pytest.fixture
def noted() -> list[Dropped]:
    return []


@pytest.fixture
def intake(store: Store, noted: list[Dropped]) -> Iterator[Intake]:
    """Two groups a step, at most eight looked at; newest version 5, hard bound 2, versions 3 to 5 known."""
    yield from _made(store, noted, settled=())


def _made(
    store: Store,
    noted: list[Dropped],
    settled: Sequence[str],
    granted: Callable[[keys.GroupKey], str | None] | None = None,
    referee: Referee | None = None,
) -> Iterator[Intake]:
    config = config_of(store, groups_per_step=2, max_staleness_hard=2, starved_seconds=4.0, intake_poll_seconds=0.05)
    versions = KnownVersions(store, "test", "", window=2)
    for version in (3, 4, 5):
        versions.add(version, f"state-{version}", 4 * version)
    rules = rules_of(config, search(), vocab_size(), versions.state_of, granted)
    referee = referee or Referee(search())
    made = Intake(store, rules, referee, versions, config.learning, settled=settled, note=lambda found: noted.extend(found))
    made.start()
    yield made
    made.close()


def put(store: Store, sent: Group, data: bytes | None = None) -> str:
    key = keys.group("test", sent.version, sent.host, sent.sweep, sent.group)
    store.create(key, encode_group(sent) if data is None else data)
    return key


def judged(intake: Intake, *sent: str) -> None:
    """Returns once the thread has accepted, dropped or refused these keys."""
    deadline = time.monotonic() + 20
    while missing := {*sent} - {*intake._offered_at, *(r.key for r in intake.refused), *(d.key for d in intake._buffer.drops)}:
        assert time.monotonic() < deadline, missing
        time.sleep(0.02)


def test_oldest_groups_come_first_and_what_goes_with_the_step_is_told(store: Store, intake: Intake) -> None:
    sent = {slot: put(store, group(slot, version=version)) for slot, version in ((0, 5), (1, 3), (2, 4))}
    judged(intake, *sent.values())
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert taken.keys == (sent[1], sent[2])
    assert taken.groups[0].question_id == QUESTIONS[1]
    assert taken.hosts["mac"].accepted == 3
    assert taken.dropped == taken.refused == ()
    intake.settle()
    put(store, group(3, version=5))
    again = intake.take(5, Reports())
    assert isinstance(again, Taken)
    assert again.keys[0] == sent[0]
    assert again.hosts["mac"].accepted == 1


def test_dishonest_torn_and_stale_groups_are_kept_out_with_a_reason(store: Store, intake: Intake) -> None:
    lie = group(4)
    lie = replace(lie, episodes=tuple(replace(e, reward=1.0) for e in lie.episodes))
    refused = {
        put(store, lie): "wrong_reward",
        put(store, group(5), data=b"no group"): "malformed",
        put(store, group(6, state_id="x")): "wrong_state",
        put(store, group(7), data=encode_group(group(7, run="other"))): "wrong_owner",
    }
    stale = put(store, group(8, version=2))
    flat = {put(store, group(9, 0)): "all_zero", put(store, group(10, 4)): "all_one"}
    good = {put(store, group(slot)) for slot in (0, 1)}
    judged(intake, *refused, stale, *flat, *good)
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert set(taken.keys) == good
    assert {r.key: r.reason for r in taken.refused} == refused
    assert {d.key: d.reason for d in taken.dropped} == {stale: "stale", **flat}
    assert taken.hosts["mac"].refused == dict.fromkeys(refused.values(), 1)


def test_group_whose_grant_is_damaged_is_refused_and_holds_nothing_up(store: Store, noted: list[Dropped]) -> None:
    """It was asked for again for ever, as fast as the bucket answers."""
    num_asked = 0

    def granted(named: keys.GroupKey) -> str:
        nonlocal num_asked
        if named.group == 2:
            num_asked += 1
            raise FormatError("the grant is not JSON")
        return QUESTIONS[named.group]

    for intake in _made(store, noted, settled=(), granted=granted):
        damaged = put(store, group(2))
        good = {put(store, group(slot)) for slot in (0, 1)}
        judged(intake, damaged, *good)
        taken = intake.take(5, Reports())
        assert isinstance(taken, Taken)
        assert set(taken.keys) == good
        assert [(r.key, r.reason) for r in taken.refused] == [(damaged, "unreadable")]
        assert num_asked == 2


def test_settled_groups_are_never_taken_again(store: Store, noted: list[Dropped]) -> None:
    done = [put(store, group(slot)) for slot in (0, 1)]
    for intake in _made(store, noted, settled=done):
        answer = intake.take(5, Reports())
        assert isinstance(answer, Starved)
        assert "0 of 2 groups" in answer.reason
        redone = put(store, group(0, version=5))  # the sweep was played again after its group had been trained on
        judged(intake, redone)
        assert [(r.key, r.reason) for r in intake.refused] == [(redone, "slot_taken")]


def test_groups_of_versions_long_past_are_not_looked_at(store: Store, intake: Intake) -> None:
    """They were settled by steps whose keys a resumed trainer no longer carries: counting them as dropped would be wrong."""
    put(store, group(0, version=0))
    good = {put(store, group(slot)) for slot in (1, 2)}
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert (set(taken.keys), taken.dropped) == (good, ())


def test_put_back_groups_are_taken_again(store: Store, intake: Intake) -> None:
    for slot in (0, 1):
        put(store, group(slot))
    first = intake.take(5, Reports())
    intake.put_back()
    assert isinstance(first, Taken)
    assert intake.take(5, Reports()).keys == first.keys  # pyright: ignore[reportAttributeAccessIssue]


def test_dropped_groups_are_noted_while_the_step_waits(store: Store, intake: Intake, noted: list[Dropped]) -> None:
    flat = put(store, group(0, 0))
    progress = Reports()
    assert isinstance(intake.take(5, progress), Starved)
    assert noted == [Dropped(flat, "all_zero")]
    assert intake.take(5, Reports(), 0.5).equal_rewards == {"all_zero": 1}, "also told by the next part of the same wait"  # pyright: ignore[reportAttributeAccessIssue]
    assert any("waiting for groups" in seen for seen in progress.seen)


def test_many_flat_groups_are_no_signal(store: Store, intake: Intake) -> None:
    for slot in range(8):
        put(store, group(slot, 4))
    answer = intake.take(5, Reports())
    assert isinstance(answer, Starved)
    assert "equal rewards" in answer.reason
    assert answer.equal_rewards == {"all_one": 8}


def test_fault_of_the_thread_reaches_the_step(store: Store, intake: Intake) -> None:
    """A bucket that vanishes is no outage to ride out: the step fails with what the thread met."""
    from stoa.contracts.errors import SetupMissingError

    store._client.delete_bucket(Bucket=store.settings.name)
    try:
        with pytest.raises(SetupMissingError):
            for _ in range(50):
                intake.take(5, Reports(stopping=True))
                time.sleep(0.1)
    finally:
        store.ensure_bucket()


def test_numbers_of_a_group_arrive_unchanged(store: Store, intake: Intake) -> None:
    sent = [group(slot) for slot in (0, 1)]
    for one in sent:
        put(store, one)
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    for before, after in zip(sent, taken.groups, strict=True):
        for ours, theirs in zip(before.episodes, after.episodes, strict=True):
            assert np.array_equal(ours.ids, theirs.ids)
            assert np.array_equal(ours.logprobs, theirs.logprobs)


def test_quarantined_host_is_refused_unread_and_what_waited_of_it_is_dropped(store: Store, intake: Intake) -> None:
    waiting = put(store, group(0, host="bad"))
    judged(intake, waiting)
    intake.quarantine(("bad",))
    late = put(store, group(1, host="bad"), b"not even a group")
    judged(intake, late)
    honest = [put(store, group(slot)) for slot in (2, 3)]
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert taken.keys == tuple(honest)
    assert taken.dropped == (Dropped(waiting, "quarantined"),)
    assert [(refused.key, refused.reason) for refused in taken.refused] == [(late, "quarantined")]
    assert taken.hosts["bad"].quarantined
    assert not taken.hosts["mac"].quarantined
    intake.settle()
    intake.quarantine(())  # released: what comes from here on counts again
    freed = [put(store, group(slot, host="bad")) for slot in (4, 5)]
    again = intake.take(5, Reports())
    assert isinstance(again, Taken)
    assert again.keys == tuple(freed)


def test_host_on_trial_is_judged_like_all_others_and_never_trained_on(store: Store, intake: Intake) -> None:
    waiting = put(store, group(0, host="tried"))
    judged(intake, waiting)
    intake.quarantine(("tried", "bad"), on_trial=("tried",))
    lie = group(2, host="tried")
    lie = replace(lie, episodes=tuple(replace(e, reward=1.0) for e in lie.episodes))
    seen, lied, unread = put(store, group(1, host="tried")), put(store, lie), put(store, group(3, host="bad"), b"no group")
    judged(intake, seen, lied, unread)
    honest = [put(store, group(slot)) for slot in (4, 5)]
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert taken.keys == tuple(honest)
    assert taken.dropped == (Dropped(waiting, "quarantined"),)
    assert {one.key: one.reason for one in taken.refused} == {seen: "canary", lied: "wrong_reward", unread: "quarantined"}
    assert taken.hosts["tried"].quarantined
    assert taken.hosts["tried"].refused == {"canary": 1, "wrong_reward": 1}
    ((key, canary),) = intake.canaries()
    assert (key, canary.question_id, canary.host) == (seen, QUESTIONS[1], "tried")
    assert intake.canaries() == []
    judged(intake, put(store, group(6, host="tried")))
    intake.quarantine(())  # released meanwhile: nothing of it is judged any more
    assert intake.canaries() == []


class _SlowReferee(Referee):
    """Judges when it is let."""

    def __init__(self) -> None:
        super().__init__(search())
        self.asked, self.let = threading.Event(), threading.Event()

    def rescore(self, question_id: str, turns: Sequence[Sequence[int]]) -> Replayed:
        self.asked.set()
        assert self.let.wait(10)
        return super().rescore(question_id, turns)


def test_host_quarantined_while_its_group_is_judged_is_not_trained_on(store: Store, noted: list[Dropped]) -> None:
    referee = _SlowReferee()
    made = _made(store, noted, settled=(), referee=referee)
    intake = next(made)
    late = put(store, group(0, host="bad"))
    assert referee.asked.wait(10)
    intake.quarantine(("bad",))
    referee.let.set()
    honest = [put(store, group(slot)) for slot in (1, 2)]
    taken = intake.take(5, Reports())
    made.close()
    assert isinstance(taken, Taken)
    assert taken.keys == tuple(honest)
    assert [(refused.key, refused.reason) for refused in taken.refused] == [(late, "quarantined")]


def test_queue_says_how_long_groups_waited_and_how_many_of_the_hosts_are_shut_out(store: Store, intake: Intake) -> None:
    judged(intake, *(put(store, group(slot, host=host)) for slot, host in enumerate(("one", "two", "three"))))
    time.sleep(0.3)  # the time that is measured
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert 0.2 < taken.metrics["queue_seconds_mean"] < 30
    assert taken.metrics["quarantined_share"] == 0.0
    intake.settle()
    for number, (banned, share) in enumerate(((("two",), 0.0), (("two", "three"), 2 / 3), (("two", "three", "four"), 3 / 4))):
        intake.quarantine(banned)
        for slot in (4 + 2 * number, 5 + 2 * number):
            put(store, group(slot, host="one"))
        taken = intake.take(5, Reports())
        assert isinstance(taken, Taken)
        assert taken.metrics["quarantined_share"] == pytest.approx(share), "one alone may be at fault by itself"
        intake.settle()


def test_groups_that_grew_stale_in_the_queue_say_how_long_they_were(store: Store, intake: Intake) -> None:
    judged(intake, put(store, group(0, version=3)))
    fresh = [put(store, group(slot, version=5)) for slot in (1, 2)]
    judged(intake, *fresh)
    taken = intake.take(6, Reports())
    assert isinstance(taken, Taken)
    assert taken.keys == tuple(fresh)
    assert taken.metrics["stale_group_tokens_mean"] > 0


def test_short_wait_says_how_many_groups_are_missing_and_how_old_they_may_be(store: Store, intake: Intake) -> None:
    put(store, group(0))
    started = time.monotonic()
    starved = intake.take(5, Reports(), wait_seconds=1.0)
    assert time.monotonic() - started < 3.0
    assert isinstance(starved, Starved)
    assert (starved.num_missing, starved.oldest_version, starved.stopping) == (1, 3, False)
    put(store, group(1))
    assert isinstance(intake.take(5, Reports()), Taken)


def test_object_larger_than_any_group_is_refused_unread(store: Store, intake: Intake) -> None:
    key = put(store, group(5), data=bytes(2 << 20))
    good = {put(store, group(slot)) for slot in (0, 1)}
    judged(intake, key, *good)
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert set(taken.keys) == good
    assert [(r.key, r.reason) for r in taken.refused] == [(key, "too_large")]
    assert intake.refused == taken.refused


def test_what_comes_again_under_the_key_of_one_that_was_too_large_is_counted_and_neither_read_nor_trained(
    store: Store, intake: Intake
) -> None:
    """Its ticket outlives the clearing of it."""
    key = put(store, group(5), data=bytes(2 << 20))
    judged(intake, key)
    good = {put(store, group(slot)) for slot in (0, 1)}
    judged(intake, *good)
    assert isinstance(intake.take(5, Reports()), Taken)
    intake.settle()
    before = store.meters.by_kind()["groups"].requests_down
    for version in (4, 5):
        store.delete([key])
        put(store, group(5), data=encode_group(group(5)) + bytes(version - 4))  # the first is a group like any other
        deadline = time.monotonic() + 20
        while not intake.refused:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert [(one.key, one.host, one.reason) for one in intake.refused] == [(key, "mac", "too_large")]
        more = {put(store, group(slot)) for slot in (2 * version, 2 * version + 1)}
        judged(intake, *more)
        taken = intake.take(5, Reports())
        assert isinstance(taken, Taken)
        assert set(taken.keys) == more
        assert taken.hosts["mac"].refused == {"too_large": 1}
        intake.settle()
    assert store.meters.by_kind()["groups"].requests_down - before == 4


def test_copy_that_claims_an_older_version_is_refused_and_not_the_original(store: Store, noted: list[Dropped]) -> None:
    """Both are met in one look: the copy would come first by version, but it came later."""
    original = replace(group(0, version=5), episodes=tuple(answer_of(QUESTIONS[0], right=i < 2) for i in range(4)))
    rare = tuple(replace(e, logprobs=np.full(len(e.logprobs), -40.0, np.float32)) for e in (original.episodes[0], original.episodes[2]))
    original = replace(original, episodes=(*rare, *original.episodes[:2]))
    first = put(store, original)
    time.sleep(1.1)  # the bucket's clock counts seconds
    copy = put(store, replace(original, host="thief", version=3, state_id="state-3"))
    put(store, group(1))
    for intake in _made(store, noted, settled=()):
        taken = intake.take(5, Reports())
        assert isinstance(taken, Taken)
        assert first in taken.keys
        deadline = time.monotonic() + 10
        while not intake.refused and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [(r.key, r.host, r.reason) for r in intake.refused] == [(copy, "thief", "duplicate")]


def test_those_shut_out_are_named_with_every_step(store: Store, intake: Intake) -> None:
    intake.quarantine(["liar"])
    for slot in (0, 1):
        put(store, group(slot))
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert (taken.hosts["liar"].quarantined, taken.hosts["liar"].accepted) == (True, 0)
    assert not taken.hosts["mac"].quarantined


def test_what_is_refused_or_dropped_while_a_step_is_taken_is_told_by_the_next(store: Store, intake: Intake) -> None:
    """It was forgotten when the step was settled: its group never left the ledger, and its host was not blamed."""
    for slot in (0, 1):
        put(store, group(slot))
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    assert (taken.refused, taken.dropped) == ((), ())
    lie = group(2, host="liar")
    key = put(store, replace(lie, episodes=tuple(replace(e, reward=1.0) for e in lie.episodes)))
    flat = put(store, group(3, 0, host="flat"))
    deadline = time.monotonic() + 10
    while not intake.refused and time.monotonic() < deadline:
        time.sleep(0.05)
    intake.settle()
    assert [r.key for r in intake.refused] == [key]
    for slot in (4, 5):
        put(store, group(slot))
    after = intake.take(5, Reports())
    assert isinstance(after, Taken)
    assert [(r.key, r.reason) for r in after.refused] == [(key, "wrong_reward")]
    assert after.hosts["liar"].refused == {"wrong_reward": 1}
    assert [d.key for d in after.dropped] == [flat]
    intake.put_back()
    again = intake.take(5, Reports())
    assert isinstance(again, Taken)
    assert again.hosts["liar"].refused == {"wrong_reward": 1}, "a step that failed has told nobody"
    assert again.hosts["mac"].accepted == after.hosts["mac"].accepted


def test_fleet_is_told_by_what_came_since_the_step_before(store: Store, intake: Intake) -> None:
    """Two Macs, one of which says how busy it is; all groups have four of the eight episodes that are planned."""
    said = Timings(0.0, 2.0, 0.5, 0.25, 12, batch_occupancy=0.75, prefix_hit_share=0.5, peak_memory_bytes=3_000_000)
    sent = [group(0, timings=said), group(1, host="mac-b"), group(2, host="mac-b")]
    began = time.monotonic()
    judged(intake, *(put(store, one) for one in sent))
    taken = intake.take(5, Reports())
    assert isinstance(taken, Taken)
    metrics, seconds = taken.metrics, time.monotonic() - began
    assert (metrics["groups_accepted"], metrics["groups_waiting"]) == (3.0, 1.0)
    assert (metrics["batch_occupancy_mean"], metrics["prefix_hit_mean"], metrics["peak_memory_bytes_max"]) == (0.75, 0.5, 3e6)
    num_tokens = sum(len(e.logprobs) for one in sent for e in one.episodes)
    assert metrics["fleet_tokens_per_second"] == pytest.approx(num_tokens / seconds, rel=0.5)
    assert metrics["fleet_episodes_per_hour"] / metrics["fleet_tokens_per_second"] == pytest.approx(3600 * 12 / num_tokens)
    told = taken.hosts["mac"]
    assert (told.batch_occupancy, told.prefix_hit_share, told.peak_memory_bytes) == (0.75, 0.5, 3_000_000)
    assert (taken.hosts["mac-b"].num_missing_episodes, taken.hosts["mac-b"].peak_memory_bytes) == (8, 0)
