"""What a fleet is to its simulation: the run's rules, the trainer, the Macs and their lines, absences; and what came of it.

Plain numbers: seconds, and bytes a second. Reading them from a file is `fleet_spec.py`'s, playing them `fleet.py`'s.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a run that shape the flow of groups."""

    groups: int = 8
    """Groups of a sweep."""
    groups_per_step: int = 8
    steps_per_version: int = 4
    max_staleness: int = 3
    max_staleness_hard: int = 8
    flat_fraction: float = 0.2
    """Share of groups whose rewards are all equal."""
    heartbeat_seconds: float = 30.0
    head_poll_seconds: float = 10.0

    @property
    def groups_per_version(self) -> int:
        """B of the admission rule."""
        return self.groups_per_step * self.steps_per_version


@dataclass(frozen=True, slots=True)
class Trainer:
    """The GPU box. `hold`: what a publish holds it for; `publish`: from then until HEAD names the version."""

    step_seconds: float = 60.0
    step_jitter: float = 0.05
    step_overhead_seconds: float = 0.3
    """Between two steps: the workflow's turn, the manifest."""
    hold_seconds: float = 3.0
    publish_seconds: float = 3.0
    intake_seconds: float = 0.5
    """From a group's arrival to its being admitted."""


@dataclass(frozen=True, slots=True)
class Mac:
    """One machine and its line; rates of 0 are no limit."""

    sweep_seconds: float
    down_rate: float = 0.0
    up_rate: float = 0.0
    round_trip_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of what passes."""

    full_bytes: float = 8.82e9
    delta_bytes: float = 52e6
    group_bytes: float = 250e3


@dataclass(frozen=True, slots=True)
class Absences:
    """How often a Mac is gone and for how long, both exponentially distributed: rates an hour of its life, means in seconds."""

    sleeps_per_hour: float = 0.0
    sleep_seconds: float = 1800.0
    crashes_per_hour: float = 0.0
    crash_seconds: float = 60.0
    leaves_per_hour: float = 0.0
    leave_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that is simulated."""

    rules: Rules
    trainer: Trainer
    macs: tuple[Mac, ...]
    sizes: Sizes = Sizes()
    absences: Absences = Absences()
    sweep_jitter: float = 0.1
    first_group: float = 0.4
    """Share of a sweep after which its first group ends; the others follow evenly."""
    turn_seconds: float = 0.3
    """Of the control plane between two sweeps, beside the line's round trips."""
    apply_seconds: float = 0.3
    max_ahead: int = 1
    """Sweeps granted beyond the one that is played."""
    full_sync: bool = False
    """Whole weights in place of deltas."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the simulated time brought, after the warm-up. Shares are of the machines' time."""

    seconds: float
    versions: int
    steps: int
    trainer_idle_share: float
    """Waits for groups over waits and steps."""
    mac_wait_share: float
    """Between sweeps, waiting for a grant."""
    mac_pull_share: float
    """Waiting for weights at the start of a sweep, and for the last upload at its end."""
    mac_away_share: float
    groups_trained: int
    groups_arrived: int
    groups_flat: int
    groups_stale: int
    staleness: dict[int, int]
    """Versions of lag at consumption -> groups."""
    bytes_down: float
    bytes_up: float
    sweeps: int

    @property
    def discarded_fraction(self) -> float:
        """Groups that came and were dropped for their age."""
        return self.groups_stale / max(1, self.groups_arrived)

    @property
    def staleness_mean(self) -> float:
        """Versions."""
        return sum(lag * num for lag, num in self.staleness.items()) / max(1, sum(self.staleness.values()))

    def per_hour(self, number: float) -> float:
        """A count of this outcome, an hour."""
        return number * 3600.0 / self.seconds
