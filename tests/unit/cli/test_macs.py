"""Which Macs a run has now: what it lists itself, put right by the sessions that are open."""

from dataclasses import replace

import pytest

from cli.macs import Macs, doing, held_by, macs_of, macs_or_left, with_revoked
from stoa.contracts.errors import RunMissingError, ServiceUnavailableError
from stoa.contracts.fleet_messages import FleetMember, FleetPage, SessionStatus
from tests.unit.cli.records import record, session


class Control:
    """What a run lists, whose sessions are open, and what these say."""

    def __init__(self, listed: tuple[FleetMember, ...] = (), num_macs: int = 0, said: tuple[SessionStatus, ...] = ()) -> None:
        self._page = FleetPage(listed, num_macs, "", "as of the census")
        self._said = {one.host: one for one in said}
        self.open = tuple(self._said)
        self.asked: tuple[str, ...] = ()

    def fleet_view(self, run: str) -> FleetPage:
        return self._page

    def present(self, run: str) -> tuple[str, ...]:
        return self.open

    def sessions(self, run: str, hosts: tuple[str, ...]) -> tuple[SessionStatus, ...]:
        self.asked = hosts
        return tuple(self._said[host] for host in hosts if host in self._said)


def playing(host: str, speed: float) -> SessionStatus:
    return SessionStatus(host, "live", 4, 7, num_groups=30, tokens_per_second=speed)


def test_macs_that_play_are_there_before_the_run_has_met_them() -> None:
    macs = macs_of(Control(said=(playing("mac-2", 50.0), playing("mac-1", 100.0))), "demo")
    assert [(one.host, one.version, one.tokens_per_second) for one in macs.sessions] == [("mac-1", 7, 100.0), ("mac-2", 7, 50.0)]
    assert (macs.num_macs, macs.num_unlisted) == (2, 0)


def test_what_a_session_says_is_newer_than_the_census_but_not_than_what_the_run_decided() -> None:
    listed = (
        FleetMember("mac-1", "s", 0),
        FleetMember("mac-2", "s", 3, "quarantined", 6, slow_because="edited rewards"),
        FleetMember("mac-3", "s", 2, "live", 5, 33.0, "attic", "60% of its time waiting"),
        FleetMember("mac-9", "s", state="drained", slow_because="thanks"),
    )
    said = (playing("mac-1", 100.0), playing("mac-2", 50.0), replace(playing("mac-4", 0.0), state="away", reason="lost"))
    macs = macs_of(Control(listed, 3, said), "demo")
    rows = {one.host: (one.state, one.version, one.tokens_per_second, one.reason, one.slow_because) for one in macs.sessions}
    assert rows == {
        "mac-1": ("live", 7, 100.0, "", ""),
        "mac-2": ("quarantined", 7, 50.0, "edited rewards", ""),
        "mac-3": ("live", 5, 33.0, "", "60% of its time waiting"),  # it does not answer now
        "mac-4": ("away", 7, 0.0, "lost", ""),
        "mac-9": ("drained", -1, 0.0, "thanks", ""),
    }
    assert (macs.num_macs, macs.num_unlisted) == (2, 0)  # the run has not taken off yet whom it quarantined


def test_macs_beyond_those_a_run_lists_are_counted() -> None:
    macs = macs_of(Control((FleetMember("mac-1", "s"),), 5000), "demo")
    assert (macs.num_macs, macs.num_unlisted, macs.slowest) == (5000, 4999, "as of the census")


def test_mac_that_does_not_answer_keeps_what_was_known_of_it() -> None:
    known = {"mac-1": playing("mac-1", 100.0), "mac-2": playing("mac-2", 1.0)}
    control = Control((FleetMember("mac-1", "s"),), 1)
    assert macs_of(control, "demo", known).sessions == (known["mac-1"], known["mac-2"])
    assert set(control.asked) == {"mac-1", "mac-2"}


class Silent(Control):
    """Its control process does not answer."""

    def fleet_view(self, run: str) -> FleetPage:
        raise ServiceUnavailableError(f"run {run}: its control process does not answer")


def test_of_a_run_that_has_ended_the_macs_last_words_are_told() -> None:
    left = (session("mac-1"), session("mac-2"))
    macs, note = macs_or_left(Silent(), "demo", lambda: record(state="stopped", sessions=left))
    assert (macs.sessions, macs.num_unlisted, note) == (left, 0, "run demo is stopped: this is what its Macs said last")
    assert macs_or_left(Control(said=(playing("mac-1", 100.0),)), "demo", record)[1] == ""


def test_run_that_was_resumed_without_workers_is_answered_for() -> None:
    begins = record(state="created", waiting_for="waiting for the trainer's control process to start", sessions=())
    macs, note = macs_or_left(Silent(), "demo", lambda: begins)
    assert (macs.sessions, note) == ((), "run demo is created: waiting for the trainer's control process to start")


def test_macs_of_a_run_whose_control_process_is_away_are_named() -> None:
    silent = Silent(said=(playing("mac-1", 0.0), playing("mac-3", 0.0)))
    known = (session("mac-1"), session("mac-2", state="ended", reason="told by the bucket alone"))
    macs, note = macs_or_left(silent, "demo", lambda: record(state="running", waiting_for="it is silent", sessions=known))
    assert [(one.host, one.state, one.num_groups, one.reason) for one in macs.sessions] == [
        ("mac-1", "live", 32, "its session does not answer"),
        ("mac-2", "ended", 32, "told by the bucket alone"),
        ("mac-3", "live", 0, "its session does not answer"),
    ]
    assert (macs.num_macs, note) == (2, "run demo is running: it is silent")


class Forgetful(Control):
    """A Temporal that knows no such run."""

    def fleet_view(self, run: str) -> FleetPage:
        raise RunMissingError(f"run {run}: Temporal knows no such run")


class Away(Control):
    """No Temporal at all."""

    def fleet_view(self, run: str) -> FleetPage:
        raise ServiceUnavailableError("Temporal at somewhere does not answer")


def test_run_that_temporal_has_forgotten_is_answered_for_and_a_temporal_that_is_away_is_an_error() -> None:
    going = record(state="running", waiting_for="nothing: Temporal knows no such run", sessions=())
    assert macs_or_left(Forgetful(), "demo", lambda: going)[1] == "run demo is running: nothing: Temporal knows no such run"
    with pytest.raises(ServiceUnavailableError):
        macs_or_left(Away(), "demo", lambda: going)
    assert macs_or_left(Away(), "demo", lambda: record(state="stopped"))[0].sessions == record().sessions


def test_macs_of_a_paused_run_wait_or_play_ahead_and_the_reason_is_told() -> None:
    mac, gone = playing("mac-1", 100.0), replace(playing("mac-2", 0.0), state="away", reason="lost")
    assert (held_by("running", "running"), held_by("paused", "paused"), held_by("paused", "running")) == ("", "waits", "ahead")
    assert held_by("paused", "") == "waits", "before a first version there is nothing to play"
    assert doing(mac, "") == ("live", "")
    assert doing(mac, "waits") == ("waits", "the run is paused")
    assert doing(mac, "ahead") == ("ahead", "plays on while the trainer is paused")
    assert doing(replace(mac, reason="room: 4 groups ahead"), "ahead") == ("ahead", "room: 4 groups ahead")
    assert doing(gone, "waits") == ("away", "lost"), "a pause is not why it is away"


def test_revoked_macs_are_shown_as_refused_with_the_reason() -> None:
    away = SessionStatus("mac-2", "away", 3, 7, reason="said goodbye")
    macs = Macs((playing("mac-1", 50.0), away), 1, "")
    why = {
        "mac-3": "mac-3 was revoked: sold",
        "mac-2.0123abcd": "mac-2.0123abcd was revoked",
        "mac-1.0123abcd": "mac-1.0123abcd was revoked",
    }
    shown = with_revoked(macs, why).sessions
    # mac-1 plays on, with another invitation
    assert [(one.host, one.state, one.reason) for one in shown] == [
        ("mac-1", "live", ""),
        ("mac-2", "refused", "mac-2.0123abcd was revoked"),
        ("mac-3", "refused", "mac-3 was revoked: sold"),
    ]
    assert with_revoked(macs, {"mac-1": "mac-1 was revoked"}).sessions[0].state == "refused"
