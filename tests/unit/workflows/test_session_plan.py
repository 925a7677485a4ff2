"""What a session makes of hellos, goodbyes, results and failures."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.contracts.fleet_messages import Goodbye, Grant, Hello, SessionInput, SweepResult
from workflows import session_plan as plan
from workflows.state import SessionProgress, dump, first_session_progress

GIVEN = SessionInput("demo", "mac-1", away_expiry_seconds=100)


def live(**changes: object) -> SessionProgress:
    state = plan.on_hello(SessionProgress(), Hello("mac-1", "one"), 10.0)
    return replace(state, **changes)  # type: ignore[arg-type]


def test_hello_makes_live_and_again_changes_nothing_but_the_time() -> None:
    state = live()
    assert (state.state, state.nonce) == ("live", "one")
    assert plan.on_hello(state, Hello("mac-1", "one"), 20.0) == replace(state, seen_at=20.0)


def test_hello_of_nobody_changes_nothing() -> None:
    """An empty nonce is the one that a new session has admitted: its Mac would play without being asked about."""
    assert plan.on_hello(SessionProgress(), Hello("mac-1", ""), 10.0) == SessionProgress()
    assert plan.on_hello(live(), Hello("mac-1", ""), 10.0) == live()


def test_what_a_mac_says_can_be_written_down_whatever_it_is() -> None:
    foul = "a\ud800b"
    result = SweepResult("paused", 3, reason=foul, heat=foul, unsent=(foul, "k\u00e9", "groups/a"), resting=True)
    state = plan.on_result(live(), result, 20.0)
    assert (state.reason, state.heat, state.unsent) == ("a?b", "a?b", ("groups/a",))
    assert plan.on_goodbye(live(), Goodbye("mac-1", "one", foul), 20.0).reason == "said goodbye: a?b"
    assert plan.facts_of(state, plan.within_bounds(SessionInput("demo", "mac-1", place=foul))).place == "a?b"


def test_a_sweep_that_took_no_time_at_all_has_a_speed() -> None:
    state = plan.on_result(live(), SweepResult("done", 0, num_sampled_tokens=10**15, decode_seconds=5e-324), 20.0)
    assert (state.tokens_per_second, plan.wanted_ahead(state)) == (1e9, 5)


def test_another_worker_waits_while_the_first_is_live_and_takes_over_when_it_is_lost() -> None:
    state = plan.on_hello(live(), Hello("mac-1", "two"), 20.0)
    assert (state.nonce, state.candidate) == ("one", "two")
    lost = plan.on_failure(state, "timeout", "heartbeat", 26.0)
    assert (lost.state, lost.nonce, lost.candidate) == ("live", "two", "")
    assert lost.sweep == state.sweep


def test_another_worker_takes_over_after_goodbye_and_its_own_goodbye_withdraws_it() -> None:
    state = plan.on_hello(live(), Hello("mac-1", "two"), 20.0)
    assert plan.on_goodbye(state, Goodbye("mac-1", "one"), 21.0).nonce == "two"
    withdrawn = plan.on_goodbye(state, Goodbye("mac-1", "two"), 21.0)
    assert (withdrawn.state, withdrawn.nonce, withdrawn.candidate) == ("live", "one", "")


def test_waiting_worker_takes_over_from_a_silent_one_after_a_heartbeat_timeout() -> None:
    state = plan.on_hello(live(), Hello("mac-1", "two"), 20.0)
    repeated = plan.on_hello(state, Hello("mac-1", "two"), 25.0)
    assert plan.take_over_if_due(repeated, 30.0, 49.9).nonce == "one"
    assert plan.take_over_if_due(repeated, 30.0, 50.0).nonce == "two"
    alive = plan.on_hello(repeated, Hello("mac-1", "one"), 45.0)
    assert plan.take_over_if_due(alive, 30.0, 50.0).nonce == "one"


def test_away_mac_comes_back_under_any_nonce_with_the_same_sweep() -> None:
    away = plan.on_failure(live(sweep=7), "timeout", "schedule_to_start", 20.0)
    assert (away.state, away.reason) == ("away", "lost: schedule_to_start timeout")
    back = plan.on_hello(away, Hello("mac-1", "two"), 30.0)
    assert (back.state, back.nonce, back.sweep) == ("live", "two", 7)


def test_failures_wait_twice_as_long_each_time_up_to_five_minutes() -> None:
    state, waits = live(), []
    for _ in range(11):
        state = plan.on_failure(state, "FormatError", "torn", 0.0)
        waits.append(state.hold_until)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert state.state == "live"
    assert state.totals.num_redone == 11
    assert plan.on_result(state, SweepResult("done", 0, num_groups=8), 0.0).num_failures == 0


def test_slow_sweep_is_redone_without_sending_the_mac_away() -> None:
    assert plan.on_failure(live(), "timeout", "start_to_close", 0.0).state == "live"


def test_only_a_finished_training_sweep_moves_the_number() -> None:
    for status, purpose, sweep in (
        ("done", "train", 4),
        ("partial", "train", 4),
        ("paused", "train", 3),
        ("stopped", "train", 3),
        ("draining", "train", 3),
        ("done", "eval", 3),
    ):
        result = SweepResult(status, 3, purpose, version=9)  # type: ignore[arg-type]
        assert plan.on_result(live(sweep=3), result, 0.0).sweep == sweep, (status, purpose)


def test_grant_that_waited_itself_is_asked_again_at_once_and_a_quick_one_after_a_growing_while() -> None:
    empty = Grant("demo", "mac-1", 0, (), reason="no room")
    assert plan.on_wait(live(), empty, GIVEN, asked_at=10.0, now=20.0).hold_until == 20.0
    state, waits = live(), []
    for _ in range(7):
        state = plan.on_wait(state, empty, GIVEN, asked_at=100.0, now=100.0)
        waits.append(state.hold_until - 100.0)
    assert waits == [0.5, 1, 2, 4, 8, 10, 10]
    assert state.reason == "no room"


def test_run_that_stays_stopped_ends_the_session_and_one_that_is_resumed_does_not() -> None:
    stopped = Grant("demo", "mac-1", 0, (), run_state="stopped")
    state = plan.on_wait(live(), stopped, GIVEN, 10.0, 10.0)
    assert state.state == "live"
    resumed = plan.on_wait(state, Grant("demo", "mac-1", 0, (), reason="no room"), GIVEN, 60.0, 60.0)
    assert plan.on_wait(resumed, stopped, GIVEN, 115.0, 115.0).state == "live"
    assert plan.on_wait(state, stopped, GIVEN, 110.0, 110.0).state == "ended"


def test_mac_that_may_take_part_no_longer_is_told_so_at_once_and_its_worker_ends() -> None:
    refused = Grant("demo", "mac-1", 0, (), reason="mac-1 was revoked: sold", run_state="stopped", refused=True)
    state = plan.on_wait(live(), refused, GIVEN, 10.0, 10.0)
    assert (state.state, state.owed) == ("refused", "revoked")
    notice = plan.notice_of(state, state.owed, GIVEN)
    assert (notice.kind, notice.ends) == ("revoked", True)
    assert notice.text == "this Mac may not take part any more: mac-1 was revoked: sold"


def test_grant_of_a_draining_run_is_not_played() -> None:
    assert plan.may_play(Grant("demo", "mac-1", 0, ("q",)))
    assert not plan.may_play(Grant("demo", "mac-1", 0, ("q",), run_state="draining"))
    assert not plan.may_play(Grant("demo", "mac-1", 0, ()))


EVENTS = st.lists(
    st.one_of(
        st.sampled_from(["one", "two", "three"]).map(lambda nonce: Hello("mac-1", nonce)),
        st.sampled_from(["one", "two", "three"]).map(lambda nonce: Goodbye("mac-1", nonce)),
        st.sampled_from(["done", "partial", "draining", "paused"]).map(lambda status: SweepResult(status, 0)),  # type: ignore[arg-type]
        st.sampled_from(["heartbeat", "schedule_to_start", "start_to_close"]),
    ),
    max_size=40,
)


@given(EVENTS)
def test_any_order_of_events_keeps_one_live_worker_and_never_loses_a_sweep_number(events: list[object]) -> None:
    state, now = SessionProgress(), 0.0
    for event in events:
        now += 1.0
        before = state
        match event:
            case Hello():
                state = plan.on_hello(state, event, now)
                assert state.state == "live"
            case Goodbye():
                state = plan.on_goodbye(state, event, now)
            case SweepResult() if state.state == "live":
                state = plan.on_result(state, event, now)
            case str() if state.state == "live":
                state = plan.on_failure(state, "timeout", event, now)
            case _:
                pass
        assert state.sweep - before.sweep in (0, 1)
        assert state.candidate == "" or state.candidate != state.nonce
        assert (state.state == "live") <= bool(state.nonce)
        carried = replace(GIVEN, totals=dump(state))
        assert first_session_progress(carried) == state


@pytest.mark.parametrize(
    ("heat", "because"), [("", ""), ("nominal", ""), ("fair", ""), ("serious", "the Mac is hot"), ("critical", "the Mac is too hot")]
)
def test_a_mac_that_is_slow_because_it_is_hot_says_so_and_keeps_its_sweeps(heat: str, because: str) -> None:
    result = SweepResult("done", 0, num_groups=8, num_sampled_tokens=100, decode_seconds=500.0, heat=heat)
    after = plan.on_result(live(), result, 600.0)
    status = plan.status_of(after, GIVEN)
    assert (status.heat, status.slow_because, status.tokens_per_second) == (heat, because, 0.2)
    assert (status.state, status.sweep, status.num_redone) == ("live", 1, 0)


@pytest.mark.parametrize(
    ("told", "counted"),
    [
        ((), {"answer": 4.0}),
        ((Grant("r", "mac-1", 1, ("q",), waits_for="room"),), {"room": 4.0}),
        ((Grant("r", "mac-1", 1, (), waits_for="room"), Grant("r", "mac-1", 1, ("q",))), {"room": 4.0}),
        ((Grant("r", "mac-1", 1, (), waits_for="room"), Grant("r", "mac-1", 1, ("q",), waits_for="turn")), {"turn": 4.0}),
    ],
)
def test_time_between_two_sweeps_is_counted_for_what_the_grant_waited_for(told: tuple[Grant, ...], counted: dict[str, float]) -> None:
    state = plan.on_result(live(), SweepResult("done", 0, num_groups=8), 100.0)
    for grant in told:
        state = plan.on_grant(state, grant) if plan.may_play(grant) else plan.on_wait(state, grant, GIVEN, 101.0, 101.0)
    assert dict(plan.on_start(state, 104.0).totals.waits) == counted


@pytest.mark.parametrize("sweep_seconds", [24.0, 25.0, 40.0, 60.0, 119.0, 120.0, 900.0])
def test_grants_held_ahead_last_through_two_minutes_without_the_control_plane(sweep_seconds: float) -> None:
    """The next sweep's grant and those beyond it are on the Mac: an outage that begins just before a sweep ends costs no decoding.

    The Mac's messages hold them with the questions of a wide sweep; how much may be granted at all is the staleness bound's.
    """
    state = SessionProgress(sweep_seconds=sweep_seconds)
    num_ahead = plan.wanted_ahead(state)
    assert num_ahead * sweep_seconds >= 120.0
    assert (num_ahead - 1) * sweep_seconds < 120.0, "no more than that: what is held ahead is older when it is played"
    grants = tuple(Grant("demo", "mac-1", number, tuple(f"question-{number}-{g:03d}" for g in range(16)), 1) for number in range(7))
    assert len(plan.fitting_ahead(grants[0], grants[1 : 2 + num_ahead])) == num_ahead + 1


def test_short_sweeps_are_held_ahead_as_far_as_a_message_and_the_ledger_go() -> None:
    assert plan.wanted_ahead(SessionProgress(sweep_seconds=1.0)) == plan.MAX_HELD_AHEAD == 5
    assert plan.wanted_ahead(SessionProgress()) == 1


def test_numbers_that_a_mac_made_up_are_brought_within_bounds() -> None:
    """A time of 0 makes an activity that the server does not take, and a session that tries for ever."""
    honest = SessionInput("demo", "mac-1", groups=64, group_size=8, sweep_timeout_seconds=900.0, heartbeat_seconds=30.0)
    assert plan.within_bounds(honest) == honest
    absurd = SessionInput("demo", "mac-1", 10**9, -3, 0.0, float("nan"), 1e300, continue_after_events=0)
    told = plan.within_bounds(absurd)
    assert (told.groups, told.group_size, told.sweep_timeout_seconds, told.heartbeat_seconds) == (64, 1, 1.0, 1.0)
    assert (told.away_expiry_seconds, told.continue_after_events) == (365 * 86_400.0, 10)
    state = plan.on_hello(SessionProgress(), Hello("mac-1", "one", groups=10**9), 1.0)
    assert state.groups == 64
    assert plan.on_result(state, SweepResult("done", 0, groups=-7), 2.0).groups == 1
    assert plan.on_result(state, SweepResult("done", 0), 2.0).groups == 64
