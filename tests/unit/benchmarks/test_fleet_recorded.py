"""The simulation held against recorded runs of real servers: what it says of a fleet is what that fleet measured.

A recording is the JSON that `python -m benchmarks.fleet --json` printed, with the conditions it ran under. The machine's own
pauses are in it and given to the simulation; who waits for whom, how old groups get and what passes is the simulation's word.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import Options, cast_of, draw_members
from benchmarks.fleet_forecast import Facts, forecast
from cli.plan.fleet_model import Rules

GOLDEN = Path(__file__).parents[2] / "golden"
RECORDED = sorted(path.stem for path in GOLDEN.glob("fleet-*.json"))


def recording(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))


def foretold(found: dict[str, Any], window: str) -> dict[str, Any]:
    options = Options(**{one.name: found["conditions"][one.name] for one in fields(Options)})
    facts = Facts(**found["facts_given_to_the_simulation"])
    cast = cast_of(draw_members(options), Rules(**found["rules"]), options.absent)
    return forecast(cast, replace(facts, step_seconds=found[window]["measured"]["step_seconds"]), 1.0, (0, 1))


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Share of groups that would have to be of another age to make two histograms equal."""
    return sum(abs(one.get(age, 0.0) - other.get(age, 0.0)) for age in one.keys() | other.keys()) / 2


def test_there_are_recordings() -> None:
    assert "fleet-14" in RECORDED


@pytest.mark.parametrize("name", RECORDED)
def test_simulation_foretells_a_balanced_fleet(name: str) -> None:
    found = recording(name)
    measured, said = found["balanced"]["measured"], foretold(found, "balanced")
    assert said["trainer_idle_share"] == pytest.approx(measured["trainer_idle_share"], abs=0.06)
    assert said["grant_wait_share"] == pytest.approx(found["grant_wait_share"], abs=0.05)
    assert said["groups_trained_per_hour"] == pytest.approx(measured["groups_trained_per_hour"], rel=0.1)
    assert said["staleness_mean"] == pytest.approx(measured["staleness_mean"], abs=0.5)
    assert distance(said["staleness"], measured["staleness"]) < 0.35
    assert said["discarded_fraction"] == pytest.approx(measured["discarded_fraction"], abs=0.01)
    assert said["bytes_up_per_hour"] == pytest.approx(found["bytes_per_hour"]["up"], rel=0.1)
    # Manifests that a Mac reads on its way from one version to the next are left out; a toy's are as large as its deltas.
    assert said["bytes_down_per_hour"] < found["bytes_per_hour"]["down"]


@pytest.mark.parametrize("name", RECORDED)
def test_simulation_foretells_a_fleet_beyond_the_trainers_appetite(name: str) -> None:
    found = recording(name)
    measured, said = found["hungry"]["measured"], foretold(found, "hungry")
    assert measured["trainer_idle_share"] <= 0.05
    assert said["trainer_idle_share"] == pytest.approx(measured["trainer_idle_share"], abs=0.05)
    assert said["staleness_mean"] == pytest.approx(measured["staleness_mean"], abs=0.5)
