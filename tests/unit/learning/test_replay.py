"""Every group leaves the buffer once: trained on in order, or dropped with a reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.learning.replay import Choice, Drop, ReplayBuffer, Waiting, choose, flatness
from tests.fakes import toy

MIXED = (toy.RIGHT, toy.WRONG, toy.WRONG, toy.WRONG)
ALL_RIGHT = (toy.RIGHT,) * 4
ALL_WRONG = (toy.WRONG,) * 4


def buffer(num_wanted: int = 2, max_looked: int = 8, **changes) -> ReplayBuffer:
    return ReplayBuffer(num_wanted=num_wanted, max_looked=max_looked, max_staleness_hard=8, **changes)


def offer(replay: ReplayBuffer, key: str, *, version: int = 3, plays=MIXED) -> bool:
    return replay.offer(key, toy.group(version=version, plays=plays))


def test_oldest_version_goes_first_and_arrival_breaks_ties():
    replay = buffer(num_wanted=3)
    for key, version in [("a", 4), ("b", 3), ("c", 4), ("d", 3)]:
        offer(replay, key, version=version)
    choice, groups = replay.take(version=4)
    assert choice.taken == ("b", "d", "a")
    assert [group.version for group in groups] == [3, 3, 4]


def test_nothing_is_taken_until_there_is_enough_for_a_step():
    replay = buffer()
    offer(replay, "a")
    assert replay.take(version=3) == (Choice("waiting", (), ()), ())
    offer(replay, "b")
    assert replay.take(version=3)[0].taken == ("a", "b")


def test_a_group_is_used_once():
    replay = buffer(num_wanted=1, settled=["old"])
    assert not offer(replay, "old")
    assert offer(replay, "a")
    assert not offer(replay, "a")
    replay.take(version=3)
    assert not offer(replay, "a")
    replay.settle()
    assert not offer(replay, "a")
    assert replay.take(version=3)[0].status == "waiting"


def test_groups_without_signal_are_dropped_by_kind():
    replay = buffer()
    offer(replay, "right", plays=ALL_RIGHT)
    offer(replay, "wrong", plays=ALL_WRONG)
    choice, _ = replay.take(version=3)
    assert choice.dropped == (Drop("right", "all_one"), Drop("wrong", "all_zero"))
    assert replay.num_waiting == 0
    assert [(drop.key, drop.reason) for drop in replay.drops] == [(drop.key, drop.reason) for drop in choice.dropped]
    assert all(drop.num_tokens > 0 for drop in replay.drops), "how long they were is known"


def test_equal_rewards_other_than_zero_and_one_are_flat_too():
    group = toy.group(plays=ALL_RIGHT)
    halves = toy.with_reward(group, 0.5)
    assert flatness(halves) == "all_equal"
    assert flatness(toy.group()) == ""


def test_a_group_beyond_the_hard_bound_is_dropped_even_if_it_has_signal():
    replay = buffer(num_wanted=1)
    offer(replay, "a", version=1)
    offer(replay, "b", version=2)
    choice, groups = replay.take(version=10)
    assert choice.dropped == (Drop("a", "stale"),)
    assert choice.taken == ("b",)
    assert groups[0].version == 2


def test_a_stale_group_is_dropped_unread():
    replay = buffer()
    assert replay.drop_stale("a")
    assert not replay.drop_stale("a")
    assert not offer(replay, "a")
    assert replay.drops == (Drop("a", "stale"),)


def test_too_many_flat_groups_end_the_search_for_signal_and_begin_a_new_one():
    replay = buffer(num_wanted=2, max_looked=4)
    for key in "abc":
        offer(replay, key, plays=ALL_WRONG)
    assert replay.take(version=3)[0].status == "waiting"
    offer(replay, "d")
    assert replay.take(version=3)[0].status == "no_signal"
    assert replay.take(version=3)[0].status == "waiting"
    offer(replay, "e")
    choice, _ = replay.take(version=3)
    assert choice.taken == ("d", "e")
    assert [drop.key for drop in replay.drops] == ["a", "b", "c"]
    replay.settle()
    assert replay.drops == ()


def test_what_is_dropped_while_a_step_is_taken_is_told_by_the_next():
    replay = buffer(num_wanted=1)
    offer(replay, "flat", plays=ALL_WRONG)
    offer(replay, "a")
    replay.take(version=3)
    assert replay.drop_stale("late")
    replay.settle()
    assert [drop.key for drop in replay.drops] == ["late"]


def test_enough_usable_groups_make_a_step_however_many_are_flat():
    replay = buffer(num_wanted=2, max_looked=4)
    for number in range(20):
        offer(replay, f"flat{number}", plays=ALL_WRONG)
    offer(replay, "a")
    offer(replay, "b")
    assert replay.take(version=3)[0].status == "ready"


def test_a_failed_step_gives_its_groups_back_in_their_places():
    replay = buffer()
    for key in "abc":
        offer(replay, key)
    assert replay.take(version=3)[0].taken == ("a", "b")
    with pytest.raises(RuntimeError, match="settled or put back"):
        replay.take(version=3)
    replay.put_back()
    assert replay.take(version=3)[0].taken == ("a", "b")
    replay.settle()
    assert replay.num_waiting == 1


queues = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["", "", "all_zero", "all_one", "all_equal"])), max_size=30)


@given(queues, st.integers(1, 5), st.integers(1, 20), st.integers(0, 9), st.integers(0, 6))
def test_a_choice_splits_the_queue_without_loss(rows, num_wanted, max_looked, hard_bound, num_before):
    queue = [Waiting(f"k{i}", version, flat) for i, (version, flat) in enumerate(rows)]
    choice = choose(
        queue, version=12, num_wanted=num_wanted, max_looked=max_looked, max_staleness_hard=hard_bound, num_flat_before=num_before
    )
    by_key = {waiting.key: waiting for waiting in queue}
    dropped = {drop.key: drop.reason for drop in choice.dropped}
    assert len(dropped) == len(choice.dropped)
    assert not set(dropped) & set(choice.taken)
    for key, waiting in by_key.items():
        stale = 12 - waiting.version > hard_bound
        assert dropped.get(key, "") == ("stale" if stale else waiting.flat)
    left = [w for w in queue if w.key not in dropped]
    assert len(choice.taken) == (num_wanted if len(left) >= num_wanted else 0)
    assert (choice.status == "ready") == bool(choice.taken)
    if choice.taken:
        oldest_left = min((by_key[w.key].version for w in left if w.key not in choice.taken), default=99)
        assert max(by_key[key].version for key in choice.taken) <= oldest_left


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_over_any_history_no_group_is_trained_twice_or_lost(data):
    """Offers, steps, failures, versions and restarts in any order; a restart remembers only what was settled."""
    groups = {"mixed": toy.group(plays=MIXED), "flat": toy.group(plays=ALL_WRONG)}
    settled: dict[str, str] = {}
    offered: dict[str, tuple[str, int]] = {}
    version = 3
    replay = buffer()
    for number in range(data.draw(st.integers(0, 40))):
        event = data.draw(st.sampled_from(["offer", "offer", "offer", "step", "fail", "version", "restart", "repeat"]))
        if event == "offer":
            kind, age = data.draw(st.sampled_from(["mixed", "mixed", "flat"])), data.draw(st.integers(0, 10))
            offered[f"k{number}"] = (kind, max(0, version - age))
            assert replay.offer(f"k{number}", toy.with_version(groups[kind], max(0, version - age)))
        elif event == "repeat" and offered:
            key = data.draw(st.sampled_from(sorted(offered)))
            assert not replay.offer(key, groups["mixed"])
        elif event in ("step", "fail"):
            choice, taken = replay.take(version)
            assert len(taken) == len(choice.taken)
            if choice.status == "ready" and event == "fail":
                replay.put_back()
            elif choice.status == "ready":
                for key in choice.taken:
                    assert key not in settled
                    assert offered[key][0] == "mixed"
                    settled[key] = "trained"
                for drop in replay.drops:
                    assert drop.key not in settled
                    settled[drop.key] = drop.reason
                replay.settle()
        elif event == "version":
            version += 1
        elif event == "restart":
            replay = buffer(settled=settled)
            for key, (kind, of_version) in offered.items():
                assert replay.offer(key, toy.with_version(groups[kind], of_version)) == (key not in settled)
    waiting_or_dropped = replay.num_waiting + len(replay.drops)
    assert waiting_or_dropped + len(settled) == len(offered)


def test_more_drops_than_a_step_may_tell_of_are_told_by_the_next() -> None:
    replay = ReplayBuffer(num_wanted=1, max_looked=8, max_staleness_hard=8, max_told=2)
    for key in "abcde":
        replay.drop_stale(key)
    told: list[str] = []
    for _ in range(3):
        replay.take(9)
        told += [drop.key for drop in replay.told]
        assert len(replay.told) <= 2
        replay.settle()
    assert told == list("abcde")
    assert replay.drops == ()
