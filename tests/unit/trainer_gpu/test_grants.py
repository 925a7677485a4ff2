"""What the control process grants: from a real bucket, and again from it after a restart."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from stoa.bucket import keys
from stoa.bucket.head import HeadWriter
from stoa.bucket.keys import GroupKey
from stoa.bucket.steps import STEP_FORMAT, Dropped, StepManifest, write_drop_note, write_step
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError
from stoa.contracts.fleet_messages import Grant, GrantRequest
from stoa.learning.ledger import GrantRecord
from tests.unit.trainer_gpu.runs import Reports, config_of, start_run
from trainer_gpu.arrivals import Arrivals
from trainer_gpu.desk import StateKeeper
from trainer_gpu.grant_book import MAX_AHEAD, GrantBook
from trainer_gpu.grants import GrantKeeper
from trainer_gpu.run_handle import RunHandle

QUESTIONS = [f"q{i:03d}" for i in range(40)]


@pytest.fixture
def handle(store: Store) -> RunHandle:
    """B = 8 groups a version, S = 1: sixteen groups may be out. HEAD is at version 0."""
    config = config_of(store, groups_per_step=4, steps_per_version=2, max_staleness=1, max_staleness_hard=2)
    return start_run(store, config)


def head(handle: RunHandle, token: int = 1001, **changes: object) -> HeadWriter:
    writer = HeadWriter(handle.store, handle.run, handle.signer, owner="gpu", interval_seconds=0.0)
    writer.acquire(token)
    writer.swap(token, **{"version": 0, "manifest_key": "m", "manifest_sha256": "s", **changes})
    return writer


def keeper(handle: RunHandle, clock: Callable[[], float] = time.monotonic) -> GrantKeeper:
    return GrantKeeper(handle.store, handle.config, handle.signer.public_key, QUESTIONS, refresh_seconds=0.0, clock=clock)


def ask(keeper: GrantKeeper, host: str, sweep: int, num: int = 8) -> Grant:
    return keeper.grant(GrantRequest("test", host, sweep, num, wait_seconds=0.0), Reports())


def arrive(handle: RunHandle, grant: Grant, version: int = 0) -> list[str]:
    found = [keys.group("test", version, grant.host, grant.sweep, i) for i in range(len(grant.question_ids))]
    for key in found:
        handle.store.create(key, b"x")
    return found


def step(handle: RunHandle, number: int, consumed: list[str], *, epoch: int = 1001, parent: str = "", **more: object) -> str:
    manifest = StepManifest(STEP_FORMAT, "test", epoch, number, 0, parent, tuple(consumed), (), (), {}, {}, 0.0, 0.0, 0.0)
    return write_step(handle.store, replace(manifest, **more))


def test_nothing_is_granted_before_the_first_version(handle: RunHandle) -> None:
    answer = ask(keeper(handle), "a", 0)
    assert answer.question_ids == ()
    assert "no version is published" in answer.reason


def test_same_sweep_gets_the_same_grant_also_from_a_new_process(handle: RunHandle) -> None:
    head(handle)
    first = ask(keeper(handle), "a", 0)
    assert len(first.question_ids) == 8
    assert ask(keeper(handle), "a", 0) == first
    other = keeper(handle)
    assert ask(other, "a", 0, num=3) == first
    assert not set(ask(other, "b", 0).question_ids) & set(first.question_ids)


def test_bound_holds_until_groups_are_settled(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    grants = [ask(desk, "a", 0), ask(desk, "b", 0)]
    assert all(len(grant.question_ids) == 8 for grant in grants)
    full = ask(desk, "c", 0)
    assert full.question_ids == ()
    assert "16 is the most" in full.reason
    arrived = [key for grant in grants for key in arrive(handle, grant)]
    assert ask(desk, "c", 0).question_ids == ()
    # Consumed groups make room only with the next version; dropped ones at once.
    parent = step(handle, 1, arrived[:4])
    assert ask(desk, "c", 0).question_ids == ()
    step(handle, 2, arrived[4:7], parent=parent, dropped=(Dropped(arrived[7], "all_one"),))
    assert len(ask(desk, "c", 0).question_ids) == 8


def test_drop_note_makes_room_before_the_step_ends(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    arrived = arrive(handle, ask(desk, "a", 0)) + arrive(handle, ask(desk, "b", 0))
    assert ask(desk, "c", 0).question_ids == ()
    write_drop_note(handle.store, "test", 1001, 0, [Dropped(arrived[0], "all_zero")])
    assert len(ask(desk, "c", 0).question_ids) == 8


def test_steps_of_a_lost_lease_give_their_groups_back(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    arrived = arrive(handle, ask(desk, "a", 0)) + arrive(handle, ask(desk, "b", 0))
    step(handle, 1, arrived[:8])
    step_two = head(handle, 2001, version=1)
    # Lease 1001 took a step HEAD never named: all sixteen groups wait again, and version 1 adds no room for them.
    assert ask(desk, "c", 0).question_ids == ()
    key = step(handle, 1, arrived[:8], epoch=2001)
    step_two.swap(2001, version=2, step=1, step_manifest_key=key)
    assert len(ask(desk, "c", 0).question_ids) == 8
    assert len(ask(keeper(handle), "c", 0).question_ids) == 8


def test_lease_that_goes_back_to_an_older_checkpoint_gives_its_steps_back(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    arrived = arrive(handle, ask(desk, "a", 0)) + arrive(handle, ask(desk, "b", 0))
    key = step(handle, 1, arrived[:8])
    later = head(handle, 2001, version=1, step=1, step_manifest_key=key)
    assert desk.on_the_way() == (0, 8)
    later.swap(2001, step=0, step_manifest_key="", checkpoint_key="older")
    assert desk.on_the_way() == (0, 16)


def test_what_a_lost_mac_owed_is_free_until_it_asks_again(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    owed = ask(desk, "a", 0)
    ask(desk, "b", 0)
    assert ask(desk, "c", 0).question_ids == ()
    desk.host_left("a")
    assert len(ask(desk, "c", 0).question_ids) == 8
    assert ask(desk, "a", 0) == owed


def test_paused_run_grants_nothing_and_says_so(handle: RunHandle) -> None:
    from stoa.contracts.messages import HeadStateRequest

    head(handle)
    result = StateKeeper(handle).set_state(HeadStateRequest("test", "paused", "n1"), Reports())
    assert (result.state, result.version, result.epoch) == ("paused", 0, 1001)
    answer = ask(keeper(handle), "a", 0)
    assert (answer.question_ids, answer.run_state) == ((), "paused")


@pytest.mark.parametrize(("asked", "granted"), [(10**9, 8), (0, 1), (-5, 1)])
def test_mac_that_asks_for_an_absurd_number_of_groups_gets_what_a_stranger_may_have(handle: RunHandle, asked: int, granted: int) -> None:
    head(handle)
    assert len(ask(keeper(handle), "a", 0, num=asked).question_ids) == granted


def test_draining_run_waits_for_sweeps_that_are_played_and_not_for_those_granted_ahead(handle: RunHandle) -> None:
    writer = head(handle)
    desk = keeper(handle)
    played, ahead = ask(desk, "a", 0, num=4), ask(desk, "a", 1, num=4)
    assert (len(played.question_ids), len(ahead.question_ids)) == (4, 4)
    assert desk.on_the_way() == (8, 0)
    writer.set_state("draining", "n1")
    assert desk.on_the_way() == (8, 0)  # nobody knows yet which of them has begun
    assert ask(desk, "a", 1).run_state == "draining"  # asked for while sweep 0 is played
    assert desk.on_the_way() == (4, 0)
    arrive(handle, played)
    assert desk.on_the_way() == (0, 4)
    writer.set_state("running", "n2")
    assert ask(desk, "a", 1) == ahead
    assert desk.on_the_way() == (4, 4)


def test_session_that_begins_anew_is_told_the_sweep_to_go_on_with(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    for sweep in range(MAX_AHEAD + 2):
        assert len(ask(desk, "a", sweep, num=1).question_ids) == 1
    answer = ask(keeper(handle), "a", 0)
    assert (answer.question_ids, answer.newest_sweep) == ((), MAX_AHEAD + 1)
    # One sweep may be played while so many more are granted already: that one is not over.
    assert len(ask(desk, "a", 1).question_ids) == 1


def test_damaged_grant_and_strangers_cost_other_macs_nothing(handle: RunHandle) -> None:
    epoch = head(handle).read()[0].epoch
    assert len(ask(keeper(handle), "a", 0).question_ids) == 8
    store, damaged = handle.store, keys.grant("test", "b", 0)
    for key in (
        damaged,
        f"{keys.grants_prefix('test')}stray",
        f"{keys.steps_of_epoch('test', epoch)}zzz",
        f"{keys.groups_prefix('test')}x",
    ):
        store.create(key, b"{nonsense")
    begun_anew = keeper(handle)
    assert len(ask(begun_anew, "c", 0, num=4).question_ids) == 4
    with pytest.raises(FormatError, match="b/00000000"):
        ask(begun_anew, "b", 0)


def test_other_run_is_refused(handle: RunHandle) -> None:
    with pytest.raises(FormatError):
        keeper(handle).grant(GrantRequest("other", "a", 0, 8), Reports())


def test_answer_says_what_it_waits_for(handle: RunHandle) -> None:
    assert ask(keeper(handle), "a", 0).waits_for == "version"
    writer = head(handle)
    desk = keeper(handle)
    assert [ask(desk, host, 0).waits_for for host in "abc"] == ["", "", "room"]
    assert desk.on_the_way() == (16, 0)
    writer.set_state("paused", "n")
    assert ask(desk, "c", 0).waits_for == "run"


def test_mac_that_asks_ahead_does_not_take_the_room_of_an_idle_one(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    grants = ask(desk, "a", 0), ask(desk, "b", 0)
    arrived = [*arrive(handle, grants[0])[:7], *arrive(handle, grants[1])]
    handle.store.delete([keys.group("test", 0, "a", 0, 7)])  # a still plays its last group
    assert ask(desk, "c", 0).waits_for == "room"
    write_drop_note(handle.store, "test", 1001, 0, [Dropped(key, "all_zero") for key in arrived[:4]])
    ahead = ask(desk, "a", 1)
    assert (ahead.question_ids, ahead.waits_for) == ((), "turn")
    assert len(ask(desk, "c", 0, num=4).question_ids) == 4


def test_room_goes_first_to_the_mac_that_has_least_left_to_play(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    quick, slow = (arrive(handle, ask(desk, host, 0)) for host in ("quick", "slow"))
    handle.store.delete(slow[3:])  # 3 of 8 are there
    assert ask(desk, "quick", 1).waits_for == ask(desk, "slow", 1).waits_for == "room"
    write_drop_note(handle.store, "test", 1001, 0, [Dropped(key, "all_zero") for key in quick[:4]])
    assert ask(desk, "slow", 1, num=4).waits_for == "turn"
    # Nobody has said that quick's sweep is over, but all its groups are there: it has nothing to play.
    assert len(ask(desk, "quick", 1, num=4).question_ids) == 4
    write_drop_note(handle.store, "test", 1001, 1, [Dropped(key, "all_zero") for key in quick[4:]])
    # Now quick has 4 groups to play, and slow 5: who asks first gets it, since quick asks for nothing.
    assert len(ask(desk, "slow", 1, num=4).question_ids) == 4


def test_of_two_idle_macs_room_goes_to_the_one_that_has_waited_longer(handle: RunHandle) -> None:
    head(handle)
    clock = [1000.0]
    desk = keeper(handle, lambda: clock[0])
    fast = [key for sweep in (0, 1) for key in arrive(handle, ask(desk, "fast", sweep))]
    for clock[0] in (1000.0, 1006.0, 1012.0):
        assert ask(desk, "late", 0).waits_for == "room"
    write_drop_note(handle.store, "test", 1001, 0, [Dropped(key, "all_zero") for key in fast[:4]])
    # Room for four. fast has played all it had: it asks first, as it did each time before.
    assert ask(desk, "fast", 2).waits_for == "turn"
    assert len(ask(desk, "late", 0, num=4).question_ids) == 4
    write_drop_note(handle.store, "test", 1001, 1, [Dropped(key, "all_zero") for key in fast[4:8]])
    assert len(ask(desk, "fast", 2, num=4).question_ids) == 4  # late plays, and waits for nothing
    clock[0] = 1015.0
    assert ask(desk, "late", 1).waits_for == "room"


def test_a_mac_that_waits_no_longer_than_others_comes_before_none(handle: RunHandle) -> None:
    head(handle)
    clock = [1000.0]
    desk = keeper(handle, lambda: clock[0])
    fast = [key for sweep in (0, 1) for key in arrive(handle, ask(desk, "fast", sweep))]
    assert ask(desk, "late", 0).waits_for == "room"
    clock[0] = 1009.0
    assert ask(desk, "late", 0).waits_for == "room"
    write_drop_note(handle.store, "test", 1001, 0, [Dropped(key, "all_zero") for key in fast[:4]])
    assert len(ask(desk, "fast", 2, num=4).question_ids) == 4
    clock[0] = 1030.0  # late has not asked for long: nobody waits for it
    write_drop_note(handle.store, "test", 1001, 1, [Dropped(key, "all_zero") for key in fast[4:8]])
    assert len(ask(desk, "other", 0, num=4).question_ids) == 4


def test_more_than_one_sweep_ahead_is_granted_while_there_is_room_for_everybody(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    # Room for 16 groups. The second sweep ahead needs 2 groups for each of both Macs left beside it, the third 4.
    assert [len(ask(desk, host, 0, num=2).question_ids) for host in "ab"] == [2, 2]
    assert [len(ask(desk, "a", sweep, num=2).question_ids) for sweep in (1, 2)] == [2, 2]
    assert ask(desk, "a", 3, num=2).waits_for == "turn"
    assert [len(ask(desk, "b", sweep, num=2).question_ids) for sweep in (1, 2)] == [2, 2]
    assert ask(desk, "b", 3, num=2).waits_for == "turn"


def test_sweep_played_ahead_is_not_over_while_a_later_one_is_granted(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    for sweep in range(4):
        assert len(ask(desk, "a", sweep, num=2).question_ids) == 2
    assert desk.on_the_way() == (8, 0)
    assert len(ask(desk, "a", 0, num=2).question_ids) == 2  # a session that was reset asks for it again


def test_grants_given_between_two_looks_at_the_bucket_count_at_once(handle: RunHandle) -> None:
    head(handle)
    desk = GrantKeeper(handle.store, handle.config, handle.signer.public_key, QUESTIONS, refresh_seconds=3600.0)
    assert [len(ask(desk, host, 0, num=6).question_ids) for host in ("a", "b", "c")] == [6, 6, 6]  # 12 of 16 are out: one sweep more
    assert ask(desk, "d", 0).question_ids == ()
    desk.host_left("a")
    assert len(ask(desk, "d", 0, num=4).question_ids) == 4  # 12 are left, then 16
    assert ask(desk, "e", 0).question_ids == ()
    assert ask(desk, "a", 0).question_ids  # back, with what it had
    assert desk.on_the_way() == (22, 0)


def test_arrivals_are_told_once_and_all_of_them_a_few_pages_at_a_time(handle: RunHandle) -> None:
    made = {keys.group("test", version, "a", sweep, 0) for version in (1, 2) for sweep in range(4)}
    for key in {*made, f"{keys.groups_prefix('test')}v00000001/stray"}:
        handle.store.create(key, b"xyz")
    arrivals = Arrivals(handle.store, "test", keys_a_look=3)
    looks = [arrivals.look(0)]
    while not arrivals.has_seen_all:
        looks.append(arrivals.look(0))
    assert [len(look) for look in looks] == [3, 2, 3, 0]  # nine keys, one of them a stranger's; the last look finds the end
    assert {keys.group(*_parts(named)) for look in looks for named, _ in look} == made
    assert {size for look in looks for _, size in look} == {3}
    handle.store.create(keys.group("test", 1, "b", 0, 0), b"x")
    late = [named.host for _ in range(4) for named, _ in arrivals.look(1)]
    assert late == ["b"]


def test_window_that_moves_on_leaves_old_versions_out(handle: RunHandle) -> None:
    for version in (1, 2, 3):
        handle.store.create(keys.group("test", version, "a", 0, 0), b"x")
    arrivals = Arrivals(handle.store, "test", keys_a_look=1)
    assert [named.version for named, _ in arrivals.look(0)] == [1]
    assert [named.version for named, _ in arrivals.look(3)] == [3]


def test_groups_that_come_while_a_long_look_goes_on_are_not_lost_when_their_sweep_ends(handle: RunHandle) -> None:
    head(handle)
    desk = GrantKeeper(handle.store, handle.config, handle.signer.public_key, QUESTIONS, refresh_seconds=0.0)
    desk._arrivals = Arrivals(handle.store, "test", keys_a_look=2)
    a, b = ask(desk, "a", 0), ask(desk, "b", 0)
    arrive(handle, b)  # the look goes through b's groups now, and then begins again
    ask(desk, "c", 0)
    arrive(handle, a)
    for _ in range(3):
        assert ask(desk, "a", 1).question_ids == ()  # its first sweep is over, and its groups wait, seen or not
    while not desk._arrivals.has_seen_all:
        assert ask(desk, "c", 0).question_ids == ()
    assert sum(desk.on_the_way()) == 16


def test_step_that_cannot_be_read_is_read_at_the_next_look(handle: RunHandle) -> None:
    writer = head(handle)
    desk = keeper(handle)
    arrived = arrive(handle, ask(desk, "a", 0)) + arrive(handle, ask(desk, "b", 0))
    key = step(handle, 1, arrived[:8])
    writer.swap(1001, version=1, step=1, step_manifest_key=key)
    data = handle.store.get(key, max_bytes=1 << 20).data
    handle.store.delete([key])
    handle.store.create(key, b"{")
    begun_anew = keeper(handle)
    with pytest.raises(FormatError):
        ask(begun_anew, "c", 0)
    handle.store.delete([key])
    handle.store.create(key, data)
    assert ask(begun_anew, "c", 0).question_ids
    assert begun_anew.on_the_way() == (8, 8)


def test_outline_reads_little_and_knows_the_place_after_the_last_question(handle: RunHandle) -> None:
    book = GrantBook(handle.store, "test")
    for number in range(20):
        book.write(GrantRecord(f"m{number % 2}", number // 2, number * 3, ("q",) * 3, 0.0))
    assert GrantBook(handle.store, "test").outline() == (60, tuple((f"m{host}", sweep) for host in (0, 1) for sweep in range(2, 10)))
    assert [grant.sweep for grant in GrantBook(handle.store, "test").newest()] == 2 * list(range(2, 10))
    assert GrantBook(handle.store, "other").outline() == (0, ())


def _parts(named: GroupKey) -> tuple[str, int, str, int, int]:
    return named.run, named.version, named.host, named.sweep, named.group


def test_notes_count_after_a_new_lease_and_its_own_are_read_as_they_come(handle: RunHandle) -> None:
    head(handle)
    desk = keeper(handle)
    arrived = arrive(handle, ask(desk, "a", 0)) + arrive(handle, ask(desk, "b", 0))
    write_drop_note(handle.store, "test", 1001, 0, [Dropped(key, "all_zero") for key in arrived[:4]])
    assert desk.on_the_way() == (0, 12)
    head(handle, 2001, version=0)
    assert desk.on_the_way() == (0, 12)
    write_drop_note(handle.store, "test", 2001, 0, [Dropped(arrived[4], "all_zero")])
    assert desk.on_the_way() == (0, 11)
    handle.store.create(f"{keys.drop_notes_prefix('test', 2001)}zzz", b"a stranger's")
    write_drop_note(handle.store, "test", 2001, 1, [Dropped(arrived[5], "all_zero")])
    assert desk.on_the_way() == keeper(handle).on_the_way() == (0, 10)
