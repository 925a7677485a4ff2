"""The simulation's word on a fleet that is being measured: the same Macs, rules, sizes and pauses, none of the servers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from cli.plan.fleet import simulate
from cli.plan.fleet_model import Absences, Fleet, Mac, Outcome, Rules, Sizes, Trainer

SEEDS: Final = (0, 1, 2, 3)
HOURS: Final = 2.0
BUSY_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Facts:
    """What is measured of the machines and given to the simulation: pauses, in seconds; sweeps take `stretch` as long as asked."""

    step_overhead_seconds: float
    hold_seconds: float
    turn_seconds: float
    stretch: float = 1.0
    step_seconds: float = 1.0
    intake_seconds: float = 0.25
    full_bytes: float = 92_000.0
    """Of an anchor."""
    delta_bytes: float = 1000.0
    """Of what a Mac reads for one version: HEAD, manifest and delta."""
    group_bytes: float = 1500.0


@dataclass(frozen=True, slots=True)
class Cast:
    """The Macs of a run, how they come and go, and its rules."""

    macs: tuple[Mac, ...]
    absences: Absences
    rules: Rules


def forecast(cast: Cast, facts: Facts, hours: float = HOURS, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """What a run of this fleet should measure, the mean of a few seeds."""
    outcomes = simulate(_fleet(cast, facts), hours * 3600.0, seeds)
    ages = [age for one in outcomes for age in one.staleness]
    total = sum(sum(one.staleness.values()) for one in outcomes)
    return {
        "trainer_idle_share": round(_mean(outcomes, lambda one: one.trainer_idle_share), 4),
        "grant_wait_share": round(_mean(outcomes, lambda one: one.mac_wait_share), 4),
        "mac_away_share": round(_mean(outcomes, lambda one: one.mac_away_share), 4),
        "staleness_mean": round(_mean(outcomes, lambda one: one.staleness_mean), 3),
        "staleness": {
            str(age): round(sum(one.staleness.get(age, 0) for one in outcomes) / max(1, total), 4)
            for age in range(max(ages, default=0) + 1)
        },
        "discarded_fraction": round(_mean(outcomes, lambda one: one.discarded_fraction), 4),
        "steps_per_hour": round(_mean(outcomes, lambda one: one.per_hour(one.steps)), 1),
        "groups_trained_per_hour": round(_mean(outcomes, lambda one: one.per_hour(one.groups_trained)), 1),
        "bytes_up_per_hour": round(_mean(outcomes, lambda one: one.per_hour(one.bytes_up))),
        "bytes_down_per_hour": round(_mean(outcomes, lambda one: one.per_hour(one.bytes_down))),
    }


def _fleet(cast: Cast, facts: Facts) -> Fleet:
    return Fleet(
        cast.rules,
        Trainer(facts.step_seconds, 0.0, facts.step_overhead_seconds, facts.hold_seconds, 0.0, facts.intake_seconds),
        tuple(replace(mac, sweep_seconds=mac.sweep_seconds * facts.stretch) for mac in cast.macs),
        Sizes(facts.full_bytes, facts.delta_bytes, facts.group_bytes),
        cast.absences,
        sweep_jitter=0.1,
        turn_seconds=facts.turn_seconds,
        apply_seconds=0.0,
    )


def macs_to_saturate(cast: Cast, facts: Facts) -> int:
    """Fewest of these Macs, then of Macs like them, that keep the trainer busy; 0 if three times as many do not."""
    fleet, num = _fleet(cast, facts), len(cast.macs)
    macs = fleet.macs * 3
    low, high = 0, len(macs)
    if _idle(replace(fleet, macs=macs)) > BUSY_SHARE:
        return 0
    while high - low > max(1, num // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if _idle(replace(fleet, macs=macs[:middle])) <= BUSY_SHARE else (middle, high)
    return high


def _idle(fleet: Fleet) -> float:
    return _mean(simulate(fleet, HOURS * 1800.0, SEEDS[:2]), lambda one: one.trainer_idle_share)


def _mean(outcomes: Sequence[Outcome], number: Callable[[Outcome], float]) -> float:
    return fmean(number(one) for one in outcomes)
