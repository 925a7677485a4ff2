"""What a person asks of a fleet, answered by simulating it: how fast, how old, what it costs, what would change it.

Each answer is a mean over a few seeds, which draw both the Macs and their days.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Final

from cli.plan.fleet import simulate
from cli.plan.fleet_model import Fleet, Mac, Outcome
from cli.plan.fleet_spec import LAN_RATE, LAN_ROUND_TRIP_SECONDS, FleetPlan, draw_macs, fleet_of
from stoa.config.run import RunConfig

SEEDS: Final = (0, 1, 2)
BUSY_SHARE: Final = 0.05
"""A trainer that waits less than this is saturated."""
MOST_MACS: Final = 20_000
LISTS_A_SECOND: Final = 1.0
"""Looks at the bucket by the control process: at most one in 0.3 s, and only while somebody asks."""
OBJECTS_A_VERSION: Final = 6
"""Delta, manifest, HEAD, and a checkpoint's parts and manifest."""


@dataclass(frozen=True, slots=True)
class Bill:
    """US dollars an hour."""

    trainer: float
    bucket_requests: float
    egress: float
    storage_gb_a_day: float
    """Not in dollars: what groups, deltas and anchors add in a day if nothing is deleted."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to generate: hours that 100 versions take, and dollars an hour and in all."""

    hours: float
    usd_an_hour: float
    usd: float


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers for one plan. Counts are an hour, shares of time."""

    num_macs: int
    hours_simulated: float
    steps: float
    versions: float
    groups_trained: float
    trainer_idle_share: float
    mac_wait_share: float
    """Waiting for a grant."""
    mac_pull_share: float
    """Waiting for weights and for the last upload."""
    mac_away_share: float
    discarded_fraction: float
    staleness: dict[int, float]
    """Versions of lag -> share of the groups that were trained on."""
    staleness_mean: float
    gb_down: float
    gb_up: float
    bill: Bill
    internet: Way
    lan: Way
    gpu_box: Way
    internet_costs_share: float
    """How much longer than on one LAN 100 versions take."""
    macs_to_saturate: int
    """Fewest Macs of this mix with which the trainer waits less than 5 % of its time; 0: not even the most that were tried."""
    one_more_mac: float
    """Share by which one Mac more would raise the number of steps."""


def answer(plan: FleetPlan, config: RunConfig, hours: float, seeds: Sequence[int] = SEEDS) -> Answers:
    """Everything about a plan."""
    num = plan.num_macs
    ours = _outcomes(plan, config, num, hours, seeds)
    lan = [simulate(_on_lan(_fleet(plan, config, num, seed)), hours * 3600.0, (seed,))[0] for seed in seeds]
    more = _outcomes(plan, config, num + 1, hours, seeds)
    bill = bill_of(plan, config, ours)
    own_rate = bill.trainer + bill.bucket_requests + bill.egress
    ages = _staleness(ours)
    steps = _mean(ours, lambda one: one.per_hour(one.steps))
    on_line, on_lan = _way(ours, own_rate), _way(lan, bill.trainer + bill.bucket_requests)
    return Answers(
        num_macs=num,
        hours_simulated=hours,
        steps=steps,
        versions=_mean(ours, lambda one: one.per_hour(one.versions)),
        groups_trained=_mean(ours, lambda one: one.per_hour(one.groups_trained)),
        trainer_idle_share=_mean(ours, lambda one: one.trainer_idle_share),
        mac_wait_share=_mean(ours, lambda one: one.mac_wait_share),
        mac_pull_share=_mean(ours, lambda one: one.mac_pull_share),
        mac_away_share=_mean(ours, lambda one: one.mac_away_share),
        discarded_fraction=_mean(ours, lambda one: one.discarded_fraction),
        staleness=ages,
        staleness_mean=sum(lag * share for lag, share in ages.items()),
        gb_down=_mean(ours, lambda one: one.per_hour(one.bytes_down)) / 1e9,
        gb_up=_mean(ours, lambda one: one.per_hour(one.bytes_up)) / 1e9,
        bill=bill,
        internet=on_line,
        lan=on_lan,
        gpu_box=box_way(plan, config, hours, seeds),
        internet_costs_share=on_line.hours / on_lan.hours - 1.0 if on_lan.hours else 0.0,
        macs_to_saturate=saturating(plan, config, hours, seeds),
        one_more_mac=_mean(more, lambda one: one.per_hour(one.steps)) / steps - 1.0 if steps else 0.0,
    )


def as_tree(answers: Answers) -> dict[str, object]:
    """For JSON."""
    return asdict(answers)


def saturating(plan: FleetPlan, config: RunConfig, hours: float, seeds: Sequence[int] = SEEDS) -> int:
    """Fewest Macs of this mix that keep the trainer busy, 0 if `MOST_MACS` do not."""

    def idle(num: int) -> float:
        return _mean(_outcomes(plan, config, num, hours, seeds), lambda one: one.trainer_idle_share)

    high = 1
    while idle(high) > BUSY_SHARE:
        high *= 2
        if high > MOST_MACS:
            return 0
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if idle(middle) <= BUSY_SHARE else (middle, high)
    return high


def _outcomes(plan: FleetPlan, config: RunConfig, num: int, hours: float, seeds: Sequence[int]) -> list[Outcome]:
    return [simulate(_fleet(plan, config, num, seed), hours * 3600.0, (seed,))[0] for seed in seeds]


def _fleet(plan: FleetPlan, config: RunConfig, num: int, seed: int) -> Fleet:
    return fleet_of(plan, config, draw_macs(plan, num, seed))


def _on_lan(fleet: Fleet) -> Fleet:
    lines = (LAN_RATE, LAN_RATE, LAN_ROUND_TRIP_SECONDS)
    return replace(fleet, macs=tuple(Mac(mac.sweep_seconds, *lines) for mac in fleet.macs))


def box_way(plan: FleetPlan, config: RunConfig, hours: float, seeds: Sequence[int] = SEEDS) -> Way:
    """The stated GPU box in the Macs' place, beside the trainer: as one Mac that is never away and has no line."""
    seconds = config.rollout.usual_groups * 3600.0 / plan.gpu_box.groups_an_hour
    never = plan.absences.model_copy(update={"sleeps_a_day": 0.0, "crashes_a_day": 0.0, "leaves_a_day": 0.0})
    box = fleet_of(plan.model_copy(update={"absences": never, "turn_seconds": 0.0}), config, (Mac(seconds),))
    outcomes = [simulate(box, hours * 3600.0, (seed,))[0] for seed in seeds]
    return _way(outcomes, plan.trainer.usd_an_hour + plan.gpu_box.usd_an_hour)


def bill_of(plan: FleetPlan, config: RunConfig, outcomes: Sequence[Outcome]) -> Bill:
    """What an hour costs. Writes: groups, grants, steps, versions, and listings; reads: HEAD, groups, deltas."""
    sweeps, groups = _mean(outcomes, lambda o: o.per_hour(o.sweeps)), _mean(outcomes, lambda o: o.per_hour(o.groups_arrived))
    steps, versions = _mean(outcomes, lambda o: o.per_hour(o.steps)), _mean(outcomes, lambda o: o.per_hour(o.versions))
    down, up = (_mean(outcomes, lambda o, name=name: o.per_hour(getattr(o, name))) / 1e9 for name in ("bytes_down", "bytes_up"))
    present = plan.num_macs * (1.0 - _mean(outcomes, lambda o: o.mac_away_share))
    lists = 3600.0 / max(config.learning.intake_poll_seconds, 0.3) + 3600.0 * LISTS_A_SECOND
    writes = groups + sweeps + steps + OBJECTS_A_VERSION * versions + lists
    reads = present * (3600.0 / config.timeouts.head_poll_seconds + versions) + groups + sweeps
    requests = writes * plan.bucket.writes_usd_a_million / 1e6 + reads * plan.bucket.reads_usd_a_million / 1e6
    anchors = versions / config.publish.anchor_every_versions * plan.sizes.full_mb / 1e3
    kept = up + versions * plan.sizes.delta_mb / 1e3 + anchors
    return Bill(plan.trainer.usd_an_hour, requests, down * plan.bucket.egress_usd_a_gb, kept * 24.0)


def _way(outcomes: Sequence[Outcome], usd_an_hour: float) -> Way:
    versions = _mean(outcomes, lambda one: one.per_hour(one.versions))
    hours = 100.0 / versions if versions else 0.0
    return Way(hours, usd_an_hour, hours * usd_an_hour)


def _staleness(outcomes: Sequence[Outcome]) -> dict[int, float]:
    counts: Counter[int] = Counter()
    for one in outcomes:
        counts.update(one.staleness)
    return {lag: num / counts.total() for lag, num in sorted(counts.items())}


def _mean(outcomes: Sequence[Outcome], number: Callable[[Outcome], float]) -> float:
    return fmean(number(one) for one in outcomes)
