"""Dollars by hand: hours at their price, requests at a million's, gigabytes where they are charged for."""

from dataclasses import replace

import pytest

from cli.report.cost import cost_curve, cost_of, gone_on
from cli.report.curves import fleet_speeds, staleness_histogram
from cli.report.record import HostShare, RunRecord
from stoa.config.run import Prices
from tests.unit.cli.records import FACTS, record, step, version


def priced(**changes: object) -> RunRecord:
    prices = Prices(writes_usd_a_million=1e6, reads_usd_a_million=1e5, egress_usd_a_gb=2.0)
    return record(facts=replace(FACTS, prices=prices, gpu_usd_an_hour=3.0, head_poll_seconds=4.0), gpu_hours=0.5, **changes)


def test_cost_of_a_small_run() -> None:
    """11 objects and 3 swaps of HEAD at a dollar; reads at 10 cents: 8 groups, 2 objects x 3 versions x 2 Macs, 2 Macs x 3 looks."""
    found = cost_of(priced(), 500_000_000, 0.5)
    assert (found.gpu_usd, found.writes, found.writes_usd_r2) == (1.5, 14, 14.0)
    assert (found.reads_estimated, found.reads_usd) == (26, pytest.approx(2.6))
    assert (found.egress_usd_r2, found.egress_usd_elsewhere) == (1.0, pytest.approx(0.045))
    assert found.total_usd == pytest.approx(1.5 + 14 + 2.6 + 1)
    assert found.usd_a_point == pytest.approx(19.1 / 50)


def test_run_that_gained_nothing_has_no_price_a_point() -> None:
    assert cost_of(priced(), 0, 0.0).usd_a_point == 0.0


def test_curve_ends_at_the_whole_cost_and_never_falls() -> None:
    curve = cost_curve(priced(), 500_000_000)
    totals = [one.gpu_usd + one.requests_usd + one.egress_usd for one in curve]
    assert totals == sorted(totals)
    assert totals[-1] == pytest.approx(19.1)
    assert curve[0].minutes == pytest.approx(0.5 / 60), "version 0 came half a second after the start"


def test_speed_is_tokens_over_all_time_between_steps() -> None:
    """Steps end at 103.5, 105.5, 107.5, 109.5; two a version: 100 to 105.5 and 105.5 to 109.5."""
    hosts = {"mac-1": HostShare(sampled_tokens=55), "mac-2": HostShare(sampled_tokens=11)}
    steps = tuple(step(n, version=(n - 1) // 2, hosts=hosts) for n in (1, 2, 3, 4))
    assert fleet_speeds(record(steps=steps)) == {0: {"mac-1": 20.0, "mac-2": 4.0}, 1: {"mac-1": 27.5, "mac-2": 5.5}}


def test_time_in_which_a_resumed_run_stood_still_counts_nowhere() -> None:
    """Steps 1 and 2 end at 103.5 and 105.5; it stood still until 1000; steps 3 and 4 end at 1003.5 and 1005.5."""
    hosts = {"mac-1": HostShare(sampled_tokens=55)}
    later = tuple(step(n, version=1, hosts=hosts, started_at=996.0 + 2 * n) for n in (3, 4))
    steps = (*(step(n, version=0, hosts=hosts) for n in (1, 2)), *later)
    resumed = record(steps=steps, started_at=1000.0, ended_at=1006.0, seconds_before=7.0, facts=replace(FACTS, created_at=100.0))
    assert fleet_speeds(resumed) == {0: {"mac-1": 110 / 4.0}, 1: {"mac-1": 110 / 5.5}}  # from 101.5 and from 1000 on
    versions = (version(0), version(1, published_at=1004.0))
    curve = cost_curve(replace(resumed, versions=versions), 0)
    assert [60 * one.minutes for one in curve] == pytest.approx([0.5, 11.0, 13.0])
    assert gone_on(resumed, 500.0) == 7.0


def test_histogram_adds_up_lags_and_takes_no_other_metric() -> None:
    metrics = {"staleness_mean": 1.5, "staleness_max": 2.0, "staleness_0": 3.0, "staleness_2": 1.0}
    assert staleness_histogram(record(steps=(step(1, metrics=metrics), step(2, metrics=metrics)))) == {0: 6, 2: 2}
