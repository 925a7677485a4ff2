"""What the fleet's numbers are made of: sizes of messages, growth of histories, shares of time, what a plan draws."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.history.v1 import ActivityTaskScheduledEventAttributes, HistoryEvent

from benchmarks.fleet import Options, draw_members, mac_of
from benchmarks.fleet_figures import away_share, control_cost, shares, trained
from benchmarks.fleet_measure import History, Snapshot, growth, payloads, run_state_bytes
from benchmarks.fleet_play import Play
from stoa.bucket import keys
from stoa.contracts import names
from stoa.contracts.fleet_messages import SessionStatus
from tests.unit.cli.records import step

OPTIONS = Options(14, 2.0, 5.0, 2.0, 12.0, 4, 6.0, 0)


def test_every_payload_of_an_event_is_found() -> None:
    inputs = Payloads(payloads=[Payload(data=b"x" * 10), Payload(data=b"x" * 30)])
    attributes = ActivityTaskScheduledEventAttributes(input=inputs)
    attributes.header.fields["trace"].CopyFrom(Payload(data=b"x" * 20))
    event = HistoryEvent(activity_task_scheduled_event_attributes=attributes)
    assert sorted(len(one.data) for one in payloads(event)) == [10, 20, 30]


def session(host: str, **changes: object) -> SessionStatus:
    return replace(SessionStatus(host, "live", 1, 1), **changes)  # type: ignore[arg-type]


def snapshots() -> tuple[Snapshot, Snapshot]:
    run, one, two = names.run_workflow_id("rehearsal"), *(names.session_workflow_id("rehearsal", host) for host in ("a", "b"))
    before = Snapshot(
        1000.0,
        {run: History("r", 100, 1000), one: History("1", 50, 500), two: History("2", 1900, 9000)},
        {"a": session("a", num_sweeps=5, idle_seconds=10.0, decode_seconds=90.0), "b": session("b")},
        {"temporal": 1.0, "control": 2.0, "macs": 3.0},
    )
    after = Snapshot(
        1360.0,
        {run: History("r", 160, 1900), one: History("1", 120, 1900), two: History("2b", 30, 300)},
        {
            "a": session(
                "a",
                num_sweeps=15,
                num_groups=40,
                idle_seconds=20.0,
                decode_seconds=150.0,
                pull_seconds=30.0,
                waits={"room": 4.0, "turn": 1.0, "version": 3.0},
                bytes_up=5000,
                bytes_down=700,
            ),
            "b": session("b", num_sweeps=4),
        },
        {"temporal": 2.4, "control": 3.4, "macs": 10.0},
    )
    return before, after


def test_growth_leaves_out_histories_that_began_anew() -> None:
    before, after = snapshots()
    found = growth(before, after, [names.session_workflow_id("rehearsal", host) for host in ("a", "b", "c")])
    assert (found.events, found.size, found.num_workflows, found.num_continued) == (70, 1400, 1, 1)


def test_cost_counts_the_sweeps_of_the_sessions_whose_events_it_counts() -> None:
    found = control_cost(*snapshots(), sweeps=14, hosts=["a", "b"])
    assert found["events_per_sweep"] == 7.0  # 70 events, 10 sweeps of Mac a
    assert found["history_bytes_per_sweep"] == 140.0
    assert found["cpu_seconds_per_sweep"] == pytest.approx((1.4 + 1.4) / 14)
    assert found["history_per_hour"] == {"run_events": 600.0, "run_bytes": 9000, "session_events": 700.0, "session_bytes": 14000}


def test_shares_are_of_all_time_that_sessions_counted() -> None:
    found = shares(*snapshots())
    assert (found["sweeps"], found["groups"]) == (14, 40)
    assert found["mac_idle_share"] == 0.1  # 10 of 10 + 60 + 30
    assert found["waits"] == {"room": 0.04, "turn": 0.01, "version": 0.03}
    assert found["grant_wait_share"] == 0.05  # not what it waited for a version
    assert (found["bytes_up_per_hour"], found["bytes_down_per_hour"]) == (50_000, 7000)  # in six minutes


def test_trained_counts_ages_drops_and_waits() -> None:
    old, young = keys.group("rehearsal", 1, "a", 0, 0), keys.group("rehearsal", 3, "a", 1, 0)
    stale, twin = keys.group("rehearsal", 0, "b", 0, 0), keys.group("rehearsal", 2, "b", 1, 0)
    rows = [
        step(1, version=3, consumed=(old, young), wait_seconds=1.0, train_seconds=3.0, dropped={stale: "stale"}),
        step(2, version=4, consumed=(young,), wait_seconds=0.0, train_seconds=1.0, refused=((twin, "b", "slot_taken"),)),
    ]
    found = trained(rows, 60.0)
    assert found["trainer_idle_share"] == 0.2
    assert found["staleness"] == {"0": 0.3333, "1": 0.3333, "2": 0.3333}
    assert found["discarded_fraction"] == 0.4  # one too old and one refused of five that came
    assert found["groups_trained_per_hour"] == 180.0


def test_room_over_what_is_played_at_once_is_that_of_fourteen_real_macs() -> None:
    real = 4 * 4 * 8 / (14 * 8)  # S + 1 versions of 4 steps of 8 groups, over 14 sweeps of 8 groups
    for macs, groups in ((14, 4), (300, 1), (300, 2)):
        options = replace(OPTIONS, macs=macs, groups=groups)
        assert 4 * 4 * options.groups_per_step / (macs * groups) == pytest.approx(real, rel=0.05)


def test_members_are_drawn_from_the_seed_within_five_to_twenty_seconds() -> None:
    members = draw_members(OPTIONS)
    assert members == draw_members(OPTIONS) != draw_members(replace(OPTIONS, seed=1))
    assert all(5.0 <= mac_of(member).sweep_seconds <= 20.0 for member in members)
    assert len({member["host"] for member in members}) == 14
    assert Play(**members[3]["play"]).sweep_seconds == mac_of(members[3]).sweep_seconds


def test_run_state_of_a_thousand_macs_fits_one_message() -> None:
    assert 20_000 < run_state_bytes(1000, host_characters=48, place_characters=40) < names.MAX_RUN_STATE_BYTES
    assert run_state_bytes(1000) - run_state_bytes(500) > 10_000


def test_share_that_macs_were_away_counts_what_lies_in_the_window(tmp_path: Path) -> None:
    log = tmp_path / "swarm.log"
    told = [{"event": "mac_away", "at": at, "seconds": seconds} for at, seconds in ((90.0, 20.0), (150.0, 10.0), (195.0, 50.0))]
    log.write_text("not JSON\n" + "".join(json.dumps(one) + "\n" for one in told))
    # 10 of 20, 10 of 10 and 5 of 50 seconds lie between 100 and 200, of 5 Macs.
    assert away_share(log, 100.0, 200.0, 5) == pytest.approx(25 / 500)
