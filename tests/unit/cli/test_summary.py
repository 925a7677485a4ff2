"""The numbers of report.json against values worked out by hand."""

import json
import math
from dataclasses import replace

import pytest

from cli.report.summary import mac_idle_fraction, summarise, wilson_95
from tests.unit.cli.records import evaluation, record, session, step, version

ISSUE_KEYS = {
    "pass_at_1", "search_rate", "versions", "steps", "groups_trained", "gate_drop_rate", "staleness_mean", "mismatch_mean",
    "delta_bytes_median", "anchor_bytes", "changed_fraction_median", "workers", "seconds", "trainer_idle_fraction",
    "mac_idle_fraction", "rollout_time_share", "cover", "exact_match", "publish_latency_seconds", "pull_latency_seconds",
    "join_seconds", "bytes_pulled", "bytes_pushed", "cost", "alarms", "audit",
}  # fmt: skip


def test_report_holds_every_promised_key_as_finite_json() -> None:
    tree = json.loads(json.dumps(summarise(record()).as_json(), allow_nan=False))
    assert set(tree) >= ISSUE_KEYS
    for name in ("pass_at_1", "cover", "exact_match", "search_rate"):
        assert set(tree[name]) == {"start", "end", "num_questions", "interval_95"}


def test_empty_run_has_the_same_keys() -> None:
    empty = record(steps=(), versions=(), evaluations=(), sessions=(), version=-1, step=0, bucket_objects={})
    assert set(summarise(empty).as_json()) == set(summarise(record()).as_json())


def test_numbers_of_a_small_run() -> None:
    s = summarise(record())
    assert (s.versions, s.steps, s.workers, s.seconds) == (2, 4, 2, 12.0)
    assert (s.pass_at_1.start, s.pass_at_1.end, s.pass_at_1.num_questions) == (0.29, 0.8, 100)
    assert s.groups_trained == 8
    assert s.gate_drop_rate == pytest.approx((0.01 + 0.02 + 0.03 + 0.04) / 4)
    assert s.delta_bytes_median == 1500.0  # of 1000 and 2000
    assert s.anchor_bytes == 40_000
    assert s.anchor_to_delta_ratio == 26.67
    assert s.changed_fraction_median == pytest.approx(0.015)
    assert (s.publish_latency_seconds.median, s.publish_latency_seconds.max) == (0.375, 0.5)
    assert s.bytes_pulled == 2 * 45_000
    assert s.bytes_pushed == 2 * 500 + 3000 + 40_000
    assert s.rollout_time_share == pytest.approx(4 / (4 + 6))
    assert s.macs[0].tokens_per_second == 2000.0


def test_trainer_idle_counts_steady_steps_only() -> None:
    steps = (step(1, version=0, wait_seconds=30.0), step(2, version=2, wait_seconds=0.5, train_seconds=1.5))
    assert summarise(record(steps=steps)).trainer_idle_fraction == 0.25


def test_trainer_idle_of_a_run_that_never_became_steady_counts_all() -> None:
    assert summarise(record(steps=(step(1, version=0, wait_seconds=3.0, train_seconds=1.0),))).trainer_idle_fraction == 0.75


def test_mac_idle_leaves_out_what_was_counted_before() -> None:
    early = session("a", decode_seconds=1.0, pull_seconds=0.0, apply_seconds=0.0, idle_seconds=10.0)
    late = session("a", decode_seconds=9.0, pull_seconds=1.0, apply_seconds=0.0, idle_seconds=11.0)
    assert mac_idle_fraction([late], [early]) == pytest.approx(1 / 10)
    assert mac_idle_fraction([late]) == pytest.approx(11 / 21)


def test_idle_above_five_percent_is_explained() -> None:
    said = summarise(record(waits={"no room": 3, "asks": 1})).idle_reason
    assert "trainer waited for groups 25%" in said
    assert "no room" in said


def told(trainer_wait: float, mac_idle: float, waits: dict[str, float], early: dict[str, float] | None = None) -> str:
    """A run whose steps train 1.5 s each and whose Mac is busy 3 s."""
    steps = tuple(step(n, version=2, wait_seconds=trainer_wait) for n in (1, 2))
    before = (
        () if early is None else (session("mac-1", decode_seconds=0.0, pull_seconds=0.0, apply_seconds=0.0, idle_seconds=0.0, waits=early),)
    )
    mac = session("mac-1", idle_seconds=mac_idle, waits=waits)
    return summarise(record(steps=steps, sessions=(mac,), sessions_early=before)).idle_reason


def test_pace_is_told_by_the_measured_shares() -> None:
    assert told(0.0, 1.0, {"room": 1.0}, early={}) == (
        "Macs waited 25% of their time between sweeps, for room within the staleness bound; the trainer set the pace"
    )
    said = told(4.5, 1.0, {"room": 3.0, "turn": 1.0})
    assert "trainer waited for groups 75%" in said
    assert "75% of it for room within the staleness bound" in said
    assert "set the pace" not in said, "a trainer that waits three quarters of its time sets no pace"
    assert said.endswith("on the whole the Macs are the slower side: more of them would help")
    assert told(0.3, 3.0, {"room": 3.0}).endswith("on the whole the trainer is the slower side")
    assert told(4.5, 0.0, {}).endswith("the Macs set the pace: more of them would help")
    assert told(0.0, 1.0, {"answer": 1.0}).endswith("for an answer of the control process"), "that is nobody's pace"


def test_run_that_made_no_step_says_that_all_rewards_were_equal() -> None:
    facts = replace(record().facts, groups_per_step=8, equal_rewards_alarm=0.9)
    noted = {f"g{n}": "all_zero" for n in range(73)} | {"h": "stale"}
    mac = session("mac-1", idle_seconds=30.0, waits={"version": 25.0})
    none = record(facts=facts, steps=(), step=0, evaluations=(), sessions=(mac,), noted_dropped=noted, noted_refused={"x": "wrong_state"})
    found = summarise(none)
    assert found.groups_dropped == {"all_zero": 73, "stale": 1}
    assert (found.groups_refused, found.survived.groups_refused, found.survived.groups_stale) == ({"wrong_state": 1}, 1, 1)
    assert found.idle_reason == "no step could be made: 73 groups had equal rewards and taught nothing (73 all 0)"
    assert [(one.step, one.alarm) for one in found.alarms] == [(1, "zero_variance_fraction")]
    del noted["g0"]  # 72 of 80 is the bound itself
    assert summarise(none).alarms == ()


def test_more_macs_do_not_help_a_run_whose_groups_teach_nothing() -> None:
    steps = tuple(step(n, version=2, wait_seconds=4.5) for n in (1, 2))
    calm = session("mac-1", idle_seconds=0.0)
    used = sum(len(row.consumed) for row in steps)
    few = record(steps=steps, sessions=(calm,), noted_dropped={f"g{n}": "all_one" for n in range(used)})
    assert summarise(few).idle_reason.endswith("more of them would help")
    most = replace(few, noted_dropped={f"g{n}": "all_one" for n in range(used + 1)})
    assert summarise(most).idle_reason.endswith("other questions would help more than other Macs")


def test_idle_of_a_run_opened_after_its_end_says_that_its_start_counts() -> None:
    assert "25% of their time between sweeps, start-up counted, for room" in told(0.0, 1.0, {"room": 1.0})
    assert summarise(record()).mac_idle_from_start
    assert not summarise(record(sessions_early=(session("mac-1"),))).mac_idle_from_start


def test_waits_of_the_start_are_left_out() -> None:
    assert "their turn among the Macs" in told(0.0, 1.0, {"version": 9.0, "turn": 1.0}, early={"version": 9.0})


def test_idle_below_five_percent_is_not() -> None:
    calm = record(steps=(step(1, wait_seconds=0.01),), sessions=(session("mac-1", idle_seconds=0.01),))
    assert summarise(calm).idle_reason == ""


def test_failed_evaluation_is_not_the_end() -> None:
    broken = evaluation(3, 0.0, num_questions=0)
    assert summarise(record(evaluations=(evaluation(0, 0.3), evaluation(2, 0.8), broken))).pass_at_1.end == 0.8


def test_evaluation_that_a_person_asked_for_is_neither_start_nor_end() -> None:
    """In order of version and name: one of version 0 by hand sorts before the run's own first."""
    asked, first = replace(evaluation(0, 0.9), evaluation="v0-asked"), replace(evaluation(0, 0.3), evaluation="v0-first")
    last, after = replace(evaluation(2, 0.8), evaluation="v2-last"), replace(evaluation(2, 0.7), evaluation="v2-zasked")
    found = summarise(record(evaluations=(asked, first, last, after))).pass_at_1
    assert (found.start, found.end) == (0.3, 0.8)


def test_versions_do_not_count_the_base() -> None:
    assert summarise(record(versions=(version(0),), version=0)).versions == 0


# R, binom::binom.confint(x, n, methods = "wilson") to four digits.
@pytest.mark.parametrize(("rate", "count", "low", "high"), [(0.5, 10, 0.2366, 0.7634), (0.0, 10, 0.0, 0.2775), (0.81, 100, 0.7222, 0.8749)])
def test_wilson_interval(rate: float, count: int, low: float, high: float) -> None:
    found = wilson_95(rate, count)
    assert found == pytest.approx((low, high), abs=6e-5)
    assert all(map(math.isfinite, found))
