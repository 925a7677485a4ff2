"""The file that describes a fleet to plan, `configs/fleet.toml` by default: Macs by kind, lines, absences, trainer, prices.

Numbers in people's units; `fleet_model.py` has them in seconds and bytes. The rules of the run itself come from the
run's own configuration. Macs are drawn from the file with a seed, one by one, so that a larger fleet contains the smaller.
"""

import random
from typing import Annotated, Final

from pydantic import Field

from cli.plan.fleet_model import Absences, Fleet, Mac, Rules, Sizes, Trainer
from stoa.config.load import SHIPPED
from stoa.config.run import RunConfig, Section

DEFAULT_FLEET: Final = SHIPPED / "configs" / "fleet.toml"
LAN_RATE: Final = 1.25e9
"""Bytes a second of a 10 Gbit/s network."""
LAN_ROUND_TRIP_SECONDS: Final = 0.0005
_MBIT: Final = 1e6 / 8
_DAY_HOURS: Final = 24.0

Rate = Annotated[float, Field(ge=0.0, le=1e9)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Spread = Annotated[float, Field(ge=0.0, le=2.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e15)]


class MacKind(Section):
    """Macs of one kind."""

    count: Annotated[int, Field(ge=0, le=100_000)] = 1
    """How many there are."""
    sweep_seconds: Positive = 180.0
    """Time of a whole sweep, the middle of their distribution."""


class LinePlan(Section):
    """Lines of the Macs: the middle of their distribution."""

    down_mbit: Rate = 100.0
    """Megabits a second towards the Mac; 0 for no limit."""
    up_mbit: Rate = 20.0
    """Megabits a second from the Mac; 0 for no limit."""
    round_trip_ms: Annotated[float, Field(ge=0.0, le=60_000.0)] = 50.0
    """To the bucket and to Temporal and back."""


class SpreadPlan(Section):
    """How far Macs of one kind differ: sigma of a lognormal; 0 makes them all alike."""

    speed: Spread = 0.15
    """Of the time of a sweep, from Mac to Mac."""
    line: Spread = 0.5
    """Of both rates of a line."""
    sweep: Spread = 0.15
    """Of the time of a sweep, from sweep to sweep of one Mac."""


class AbsencePlan(Section):
    """How often a Mac is away, by day, and for how long; both exponentially distributed."""

    sleeps_a_day: Rate = 2.0
    """Times a lid is closed without a word."""
    sleep_minutes: Positive = 60.0
    """Mean length of a sleep."""
    crashes_a_day: Rate = 0.2
    """Times a Mac or its worker dies."""
    crash_minutes: Positive = 3.0
    """Mean time until it is back."""
    leaves_a_day: Rate = 0.5
    """Times a Mac says goodbye."""
    leave_minutes: Positive = 240.0
    """Mean time until it comes again."""


class TrainerPlan(Section):
    """The GPU box that trains."""

    step_seconds: Positive = 16.0
    """An optimizer step."""
    hold_seconds: Annotated[float, Field(ge=0.0, le=86_400.0)] = 3.0
    """What publishing a version holds it for: the scan, and a checkpoint where one is due."""
    publish_seconds: Annotated[float, Field(ge=0.0, le=86_400.0)] = 10.0
    """From then until HEAD names the version: encoding and upload."""
    usd_an_hour: Rate = 3.5
    """Its price."""


class BytesPlan(Section):
    """Sizes of what passes, in megabytes of 1e6 bytes."""

    full_mb: Positive = 8820.0
    """Whole int8 weights."""
    delta_mb: Positive = 52.0
    """One version's change."""
    group_mb: Positive = 0.25
    """One group."""


class BucketPlan(Section):
    """Prices of the bucket; the defaults are Cloudflare R2's."""

    writes_usd_a_million: Rate = 4.5
    """Writes and listings."""
    reads_usd_a_million: Rate = 0.36
    """Reads."""
    egress_usd_a_gb: Rate = 0.0
    """Bytes pulled; others charge about 0.09."""


class BoxPlan(Section):
    """A GPU box that would generate in the Macs' place, beside the trainer."""

    groups_an_hour: Positive = 4000.0
    """Groups it plays: measure or look it up; nothing here can tell."""
    usd_an_hour: Rate = 25.0
    """Its price."""


class FleetPlan(Section):
    """A fleet to plan."""

    macs: dict[str, MacKind] = Field(default_factory=lambda: {"mac": MacKind(count=14)})
    """Kinds of Macs, by a name of your choice."""
    line: LinePlan = Field(default_factory=LinePlan)
    spread: SpreadPlan = Field(default_factory=SpreadPlan)
    absences: AbsencePlan = Field(default_factory=AbsencePlan)
    trainer: TrainerPlan = Field(default_factory=TrainerPlan)
    sizes: BytesPlan = Field(default_factory=BytesPlan)
    bucket: BucketPlan = Field(default_factory=BucketPlan)
    gpu_box: BoxPlan = Field(default_factory=BoxPlan)
    flat_fraction: Share = 0.3
    """Share of groups that teach nothing because their rewards are equal."""
    turn_seconds: Annotated[float, Field(ge=0.0, le=60.0)] = 0.3
    """Of the control plane between two sweeps of a Mac."""

    @property
    def num_macs(self) -> int:
        """All of them."""
        return sum(kind.count for kind in self.macs.values())


def draw_macs(plan: FleetPlan, num: int, seed: int) -> tuple[Mac, ...]:
    """The first `num` Macs of the plan: its own in a drawn order, then more of the same mix."""
    own = [name for name, kind in sorted(plan.macs.items()) for _ in range(kind.count)]
    random.Random(f"order {seed}").shuffle(own)
    names, weights = zip(*((name, kind.count) for name, kind in sorted(plan.macs.items()) if kind.count), strict=True)
    return tuple(
        _draw_mac(plan, own[index] if index < len(own) else random.Random(f"kind {seed} {index}").choices(names, weights)[0], index, seed)
        for index in range(num)
    )


def _draw_mac(plan: FleetPlan, name: str, index: int, seed: int) -> Mac:
    chance = random.Random(f"mac {seed} {index}")
    speed, line = chance.lognormvariate(0.0, plan.spread.speed), chance.lognormvariate(0.0, plan.spread.line)
    return Mac(
        plan.macs[name].sweep_seconds * speed,
        plan.line.down_mbit * _MBIT * line,
        plan.line.up_mbit * _MBIT * line,
        plan.line.round_trip_ms / 1000.0,
    )


def fleet_of(plan: FleetPlan, config: RunConfig, macs: tuple[Mac, ...]) -> Fleet:
    """What the simulation is given, for a run of these settings."""
    absences = plan.absences
    return Fleet(
        rules=rules_of(config, plan.flat_fraction),
        trainer=Trainer(
            step_seconds=plan.trainer.step_seconds,
            hold_seconds=plan.trainer.hold_seconds,
            publish_seconds=plan.trainer.publish_seconds,
            intake_seconds=config.learning.intake_poll_seconds,
        ),
        macs=macs,
        sizes=Sizes(plan.sizes.full_mb * 1e6, plan.sizes.delta_mb * 1e6, plan.sizes.group_mb * 1e6),
        absences=Absences(
            absences.sleeps_a_day / _DAY_HOURS,
            absences.sleep_minutes * 60.0,
            absences.crashes_a_day / _DAY_HOURS,
            absences.crash_minutes * 60.0,
            absences.leaves_a_day / _DAY_HOURS,
            absences.leave_minutes * 60.0,
        ),
        sweep_jitter=plan.spread.sweep,
        turn_seconds=plan.turn_seconds,
    )


def rules_of(config: RunConfig, flat_fraction: float) -> Rules:
    """The rules of a run."""
    learning = config.learning
    return Rules(
        config.rollout.usual_groups,
        learning.groups_per_step,
        learning.steps_per_version,
        learning.max_staleness,
        learning.max_staleness_hard,
        flat_fraction,
        config.timeouts.heartbeat_seconds,
        config.timeouts.head_poll_seconds,
    )
