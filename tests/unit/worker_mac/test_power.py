"""The table of what a guest may do on somebody's Mac, and that it does not flap."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.config.host import MacHost
from worker_mac.power import PLAY, Decision, Senses, decide

QUIET = Senses(1e6, 600, True, 100.0, False, 4000.0, False, "nominal", "normal", False, 9000.0)
"""Ten in the morning, on mains, cool, nobody there."""


@pytest.mark.parametrize(
    ("change", "allowed", "state", "words"),
    [
        ({}, {}, "full", ""),
        ({"idle_seconds": 3.0}, {}, "gentle", "uses the Mac"),
        ({"idle_seconds": 3.0}, {"when": "idle_only"}, "pause", "uses the Mac"),
        ({"idle_seconds": 3.0}, {"when": "full"}, "full", ""),
        ({"idle_seconds": 299.0}, {"when": "idle_only"}, "pause", "uses the Mac"),
        ({"idle_seconds": 300.0}, {"when": "idle_only"}, "full", ""),
        ({"idle_seconds": 3.0, "screen_locked": True}, {"when": "idle_only"}, "full", ""),
        ({"on_mains": False}, {}, "finish", "on battery"),
        ({"on_mains": False}, {"on_battery": True}, "full", ""),
        ({"on_mains": False, "battery_percent": 49.9}, {"on_battery": True}, "finish", "starts again at 70 %"),
        ({"on_mains": False, "battery_percent": 50.0}, {"on_battery": True}, "full", ""),
        ({"on_mains": True, "battery_percent": 3.0}, {}, "full", ""),
        ({"low_power_mode": True}, {}, "finish", "Low Power Mode"),
        ({"low_power_mode": True}, {"in_low_power_mode": True}, "full", ""),
        ({"thermal": "fair"}, {}, "full", ""),
        ({"thermal": "serious"}, {}, "gentle", "hot"),
        ({"thermal": "critical"}, {"when": "full"}, "pause", "too hot"),
        ({"pressure": "warn"}, {}, "hold", "short of memory"),
        ({"pressure": "critical"}, {"when": "full"}, "pause", "out of memory"),
        ({"on_hotspot": True}, {}, "finish", "hotspot"),
        ({"on_hotspot": True}, {"on_hotspot": True}, "full", ""),
        ({"spent_budget": "today's network budget is spent"}, {}, "finish", "today's network budget"),
        ({"spool_bytes": 2 << 30}, {}, "hold", "disk"),
        ({"spool_bytes": (2 << 30) - 1}, {}, "full", ""),
        ({"shipping": "the disk is full: 2 finished groups wait in memory"}, {"when": "full"}, "hold", "2 finished groups"),
        ({"free_disk_bytes": 4_999_999_999}, {"when": "full"}, "hold", "disk is almost full"),
        ({"free_disk_bytes": 5_000_000_000}, {}, "full", ""),
        ({"free_disk_bytes": 0}, {"free_disk_bytes": 0}, "full", ""),
        ({"going_to_sleep": True}, {"when": "full"}, "pause", "going to sleep"),
        ({"crash": "this Mac crashed"}, {"when": "full"}, "pause", "crashed"),
        ({"awake_seconds": 14.0}, {"when": "full"}, "pause", "woken"),
        ({"awake_seconds": 15.0}, {}, "full", ""),
        ({"minute_of_day": 600}, {"hours": "22:00-07:30"}, "finish", "22:00 to 07:30"),
        ({"minute_of_day": 1320}, {"hours": "22:00-07:30"}, "full", ""),
        ({"minute_of_day": 449}, {"hours": "22:00-07:30"}, "full", ""),
        ({"minute_of_day": 450}, {"hours": "22:00-07:30"}, "finish", "22:00"),
        ({"minute_of_day": 600}, {"hours": "09:00-17:00"}, "full", ""),
        ({"minute_of_day": 1020}, {"hours": "09:00-17:00"}, "finish", "09:00"),
        ({"minute_of_day": 0}, {"hours": "09:00-09:00"}, "full", ""),
    ],
)
def test_table(change: dict, allowed: dict, state: str, words: str) -> None:
    decision = decide(replace(QUIET, **change), MacHost(**allowed))
    assert decision.state == state
    assert words in decision.reason
    assert bool(decision.reason) == (state != "full")


@pytest.mark.parametrize("when", ["idle_only", "gentle", "full"])
def test_what_is_not_known_stops_nobody(when: str) -> None:
    assert decide(Senses(5.0), MacHost(when=when, hours="22:00-07:00")).state == "full"


def test_the_strictest_row_wins_and_gives_the_reason() -> None:
    senses = replace(QUIET, idle_seconds=1.0, on_mains=False, pressure="critical", thermal="serious")
    decision = decide(senses, MacHost())
    assert (decision.state, decision.reason) == ("pause", "the Mac is out of memory")


@pytest.mark.parametrize("network", [{"on_hotspot": True}, {"spent_budget": "spent"}])
@pytest.mark.parametrize("other", [{"on_mains": False}, {"idle_seconds": 1.0}, {"pressure": "critical"}, {"crash": "it crashed"}, {}])
def test_a_network_that_is_not_ours_is_left_alone_whatever_else_is_the_reason(network: dict, other: dict) -> None:
    allowed = MacHost(when="idle_only")
    assert decide(replace(QUIET, **other), allowed).may_transfer
    kept = decide(replace(QUIET, **network, **other), allowed)
    assert not kept.may_transfer
    assert not decide(replace(QUIET, **network, **other, now_seconds=QUIET.now_seconds + 1.0), allowed, kept).may_transfer


def test_groups_in_hand_have_five_seconds_after_unplugging_and_none_when_the_owner_comes() -> None:
    unplugged = decide(replace(QUIET, on_mains=False), MacHost())
    assert not unplugged.starts
    assert not unplugged.leaves(QUIET.now_seconds + 4.9)
    later = decide(replace(QUIET, on_mains=False, now_seconds=QUIET.now_seconds + 5), MacHost(), unplugged)
    assert later.leaves(QUIET.now_seconds + 5)
    assert decide(replace(QUIET, idle_seconds=0.0), MacHost(when="idle_only")).leaves(QUIET.now_seconds)


def test_hold_lets_groups_in_hand_go_on() -> None:
    held = decide(replace(QUIET, pressure="warn"), MacHost())
    assert not held.starts
    assert not held.leaves(QUIET.now_seconds + 1e6)


def test_gentle_halves_time_and_width() -> None:
    assert (PLAY.duty, PLAY.width) == (1.0, 1.0)
    gentle = decide(replace(QUIET, idle_seconds=1.0), MacHost())
    assert (gentle.duty, gentle.width, gentle.starts) == (0.5, 0.5, True)


def test_after_a_crash_memory_is_planned_for_fewer_groups_whatever_else_is_so() -> None:
    assert decide(replace(QUIET, share=0.5), MacHost()).share == 0.5
    gentle = decide(replace(QUIET, share=0.5, idle_seconds=1.0), MacHost())
    assert (gentle.share, gentle.width) == (0.5, 0.5)
    settling = decide(replace(QUIET, on_mains=False, share=0.5), MacHost())
    assert decide(QUIET, MacHost(), settling).share == 1.0


def run(inputs: list[Senses], allowed: MacHost) -> list[tuple[float, Decision]]:
    """Every change between playing and not playing, as (second, decision)."""
    decision, changes = PLAY, []
    for senses in inputs:
        after = decide(senses, allowed, decision)
        if after.starts != decision.starts:
            changes.append((senses.now_seconds, after))
        decision = after
    return changes


def most_in_an_hour(seconds: list[float]) -> int:
    return max((sum(start <= other < start + 3600 for other in seconds) for start in seconds), default=0)


@settings(max_examples=60, deadline=None)
@given(half_period=st.integers(1, 1000), top=st.floats(50.0, 69.9), bottom=st.floats(30.0, 49.9))
def test_a_charge_that_saws_around_the_threshold_gives_one_change(half_period: int, top: float, bottom: float) -> None:
    inputs = [
        replace(QUIET, now_seconds=float(t), on_mains=False, battery_percent=bottom if (t // half_period) % 2 else top)
        for t in range(0, 7200, 5)
    ]
    assert len(run(inputs, MacHost(on_battery=True))) <= 1


@settings(max_examples=60, deadline=None)
@given(
    half_period=st.integers(1, 1500),
    change=st.sampled_from([{"on_mains": False}, {"low_power_mode": True}, {"thermal": "critical"}, {"on_hotspot": True}]),
)
def test_a_loose_plug_starts_the_worker_at_most_once_an_hour(half_period: int, change: dict) -> None:
    inputs = [replace(QUIET, now_seconds=float(t), **(change if (t // half_period) % 2 else {})) for t in range(0, 4 * 3600, 7)]
    starts = [second for second, decision in run(inputs, MacHost()) if decision.starts]
    assert most_in_an_hour(starts) <= 1


def test_a_plug_put_back_starts_the_worker_after_a_minute() -> None:
    inputs = [replace(QUIET, now_seconds=float(t), on_mains=not 100 <= t < 700) for t in range(1000)]
    assert [(second, decision.state) for second, decision in run(inputs, MacHost())] == [(100.0, "finish"), (760.0, "full")]


def test_an_owner_who_comes_back_pauses_at_once_and_one_who_leaves_is_waited_out() -> None:
    idle = [float(t + 1000) if t < 50 else float(max(0, t - 80)) for t in range(1000)]
    inputs = [replace(QUIET, now_seconds=float(t), idle_seconds=idle[t]) for t in range(1000)]
    assert [second for second, _ in run(inputs, MacHost(when="idle_only"))] == [50.0, 380.0]


def test_the_battery_restarts_only_at_its_second_threshold() -> None:
    charge = [60.0, 49.0, 55.0, 69.0, 70.0, 55.0]
    inputs = [replace(QUIET, now_seconds=t * 100.0, on_mains=False, battery_percent=percent) for t, percent in enumerate(charge)]
    decision, states = PLAY, []
    for senses in [*inputs, replace(inputs[-1], now_seconds=560.0)]:
        decision = decide(senses, MacHost(on_battery=True), decision)
        states.append(decision.state)
    assert states == ["full", "finish", "finish", "finish", "finish", "full", "full"]


def test_mains_ends_what_a_low_battery_began() -> None:
    low = decide(replace(QUIET, on_mains=False, battery_percent=40.0), MacHost(on_battery=True))
    plugged = decide(replace(QUIET, battery_percent=60.0), MacHost(on_battery=True), low)
    unplugged = replace(QUIET, on_mains=False, battery_percent=60.0, now_seconds=QUIET.now_seconds + 100.0)
    assert decide(unplugged, MacHost(on_battery=True), plugged).state == "full"
