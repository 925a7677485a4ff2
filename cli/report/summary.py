"""The numbers of report.json, worked out from a run's record. Pure; each is defined where it is computed.

Rates and fractions are in [0, 1]; times are seconds; sizes are bytes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Final

from cli.audit import Audit, audit
from cli.report.cost import Cost, cost_of
from cli.report.noted import EQUAL_REWARDS
from cli.report.record import RunRecord, StepRow
from stoa.contracts.evaluation_messages import EvaluationResult
from stoa.contracts.fleet_messages import SessionStatus

STEADY_FROM_VERSION: Final = 2
"""Idle shares are measured from the steps on this version on: before it processes start and the first groups arrive."""
_WAITS: Final = {
    "room": "room within the staleness bound",
    "turn": "their turn among the Macs",
    "version": "a first version",
    "run": "a run that was paused or ended",
    "answer": "an answer of the control process",
}
"""What a session counts its waits by -> in words."""


@dataclass(frozen=True, slots=True)
class Change:
    """A held-out rate at the first and at the last evaluation; the interval is Wilson's, 95 %, of `end`."""

    start: float
    end: float
    num_questions: int
    interval_95: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, largest and number of some measured times or sizes."""

    median: float
    max: float
    count: int


@dataclass(frozen=True, slots=True)
class MacRow:
    """One Mac over the run."""

    host: str
    place: str
    state: str
    sweeps: int
    sweeps_redone: int
    groups: int
    episodes: int
    tokens_per_second: float
    pull_latency_seconds: float
    join_seconds: float
    idle_fraction: float
    bytes_up: int
    bytes_down: int
    waited_for: str
    groups_accepted: int
    groups_refused: dict[str, int]
    """Reason -> groups."""
    heat: str


@dataclass(frozen=True, slots=True)
class Alarmed:
    """A metric that crossed its bound."""

    step: int
    alarm: str


@dataclass(frozen=True, slots=True)
class Survived:
    """Faults that the run went on from."""

    trainers_replaced: int
    workers_restarted: int
    sweeps_redone: int
    sweeps_unasked: int
    """Played from grants held ahead while the control plane was silent."""
    groups_refused: int
    groups_stale: int
    macs_quarantined: tuple[str, ...]
    macs_lost: tuple[str, ...]
    """Macs that are away now."""

    @property
    def nothing(self) -> bool:
        """True if there was no fault that anybody told of."""
        return not any(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Summary:
    """report.json."""

    run: str
    state: str
    end_reason: str
    seed: int
    model: str
    environment: str
    seconds: float
    workers: int
    versions: int
    steps: int
    pass_at_1: Change
    cover: Change
    exact_match: Change
    search_rate: Change
    groups_trained: int
    groups_dropped: dict[str, int]
    groups_refused: dict[str, int]
    gate_drop_rate: float
    staleness_mean: float
    mismatch_mean: float
    delta_bytes_median: float
    anchor_bytes: int
    anchor_to_delta_ratio: float
    changed_fraction_median: float
    publish_latency_seconds: Spread
    pull_latency_seconds: Spread
    join_seconds: Spread
    bytes_pulled: int
    bytes_pushed: int
    cost: Cost
    trainer_idle_fraction: float
    mac_idle_fraction: float
    mac_idle_from_start: bool
    """True where nobody counted when the first versions were out, as of a run that was opened after its end: starting counts then."""
    idle_reason: str
    rollout_time_share: float
    macs: tuple[MacRow, ...]
    alarms: tuple[Alarmed, ...]
    restarts: dict[str, int]
    audit: Audit
    survived: Survived
    bucket_bytes: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """The tree that is written to report.json."""
        return {**asdict(self), "audit": {**asdict(self.audit), "clean": self.audit.clean}}


def summarise(record: RunRecord) -> Summary:
    """All numbers of a run up to now. A rate that was never measured is NaN-free: start and end are 0 with 0 questions."""
    steps, versions = record.steps, record.versions
    deltas = [row.delta_bytes for row in versions if row.delta_bytes]
    anchors = [row.anchor_bytes for row in versions if row.anchor_bytes]
    macs = tuple(_mac(session, steps) for session in sorted(record.sessions, key=lambda s: s.host))
    pulled = sum(mac.bytes_down for mac in macs)
    pushed = sum(mac.bytes_up for mac in macs) + sum(deltas) + sum({r.anchor_version: r.anchor_bytes for r in versions}.values())
    gained = exam_change(record.evaluations)
    trainer_idle, mac_idle = trainer_idle_fraction(steps), mac_idle_fraction(record.sessions, record.sessions_early)
    return Summary(
        run=record.facts.run,
        state=record.state,
        end_reason=record.end_reason,
        seed=record.facts.seed,
        model=record.facts.model,
        environment=record.facts.environment,
        seconds=round(record.seconds, 3),
        workers=len(macs),
        versions=max(0, record.version),
        steps=len(steps),
        pass_at_1=gained,
        cover=change(record.evaluations, lambda e: e.cover),
        exact_match=change(record.evaluations, lambda e: e.exact_match),
        search_rate=change(record.evaluations, lambda e: e.search_rate),
        groups_trained=sum(len(row.consumed) for row in steps),
        groups_dropped=dict(_dropped(record)),
        groups_refused=dict(Counter([*(reason for row in steps for _, _, reason in row.refused), *record.noted_refused.values()])),
        gate_drop_rate=step_mean(steps, "gate_drop_rate"),
        staleness_mean=step_mean(steps, "staleness_mean"),
        mismatch_mean=step_mean(steps, "mismatch_mean"),
        delta_bytes_median=median(deltas) if deltas else 0.0,
        anchor_bytes=anchors[-1] if anchors else 0,
        anchor_to_delta_ratio=round(anchors[-1] / median(deltas), 2) if anchors and deltas else 0.0,
        changed_fraction_median=_median([row.changed_fraction for row in versions if row.delta_bytes]),
        publish_latency_seconds=spread(row.latency_seconds for row in versions if row.latency_seconds > 0),
        pull_latency_seconds=spread(pull_latencies(record)),
        join_seconds=spread(mac.join_seconds for mac in macs if mac.join_seconds > 0),
        bytes_pulled=pulled,
        bytes_pushed=pushed,
        cost=cost_of(record, pulled, max(0.0, gained.end - gained.start)),
        trainer_idle_fraction=trainer_idle,
        mac_idle_fraction=mac_idle,
        mac_idle_from_start=not record.sessions_early,
        idle_reason=idle_reason(record, trainer_idle, mac_idle),
        rollout_time_share=rollout_time_share(record),
        macs=macs,
        alarms=alarms(steps) + starved_alarm(record),
        restarts=dict(record.restarts),
        audit=audit(record),
        survived=survived(record),
        bucket_bytes=dict(record.bucket_bytes),
    )


def change(evaluations: Sequence[EvaluationResult], rate: Callable[[EvaluationResult], float]) -> Change:
    """The run's first and last evaluation; the interval is of the last."""
    ends = _first_and_last(evaluations)
    if ends is None:
        return Change(0.0, 0.0, 0, (0.0, 0.0))
    first, last = ends
    end = rate(last)
    return Change(rate(first), end, last.num_questions, wilson_95(end, last.num_questions))


def exam_change(evaluations: Sequence[EvaluationResult]) -> Change:
    """Of pass@1: with several samples a question the interval is the evaluation's own, by the bootstrap over questions."""
    found, ends = change(evaluations, lambda e: e.pass_at_1), _first_and_last(evaluations)
    return replace(found, interval_95=ends[1].interval_95) if ends is not None and ends[1].num_samples > 1 else found


def _first_and_last(evaluations: Sequence[EvaluationResult]) -> tuple[EvaluationResult, EvaluationResult] | None:
    """Of those with a result the run's own of its beginning and end, not one that a person asked for beside them; else by version."""
    good = [e for e in evaluations if not e.error and e.num_questions]
    if not good:
        return None
    first = next((e for e in good if e.evaluation.endswith("-first")), good[0])
    return first, next((e for e in reversed(good) if e.evaluation.endswith("-last")), good[-1])


def wilson_95(rate: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927): centre (p + z^2/2n) / (1 + z^2/n), z = 1.96."""
    z = 1.959963984540054
    width = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    centre, scale = rate + z * z / (2 * count), 1 + z * z / count
    return max(0.0, (centre - width) / scale), min(1.0, (centre + width) / scale)


def step_mean(steps: Sequence[StepRow], metric: str) -> float:
    """Mean of a step metric over the steps that have it."""
    values = [row.metrics[metric] for row in steps if metric in row.metrics]
    return sum(values) / len(values) if values else 0.0


def trainer_idle_fraction(steps: Sequence[StepRow]) -> float:
    """Share of the trainer's time spent waiting for groups, over steady steps: waits / (waits + optimizer steps)."""
    steady = [row for row in steps if row.version >= STEADY_FROM_VERSION] or list(steps)
    waits = sum(row.wait_seconds for row in steady)
    busy = sum(row.train_seconds for row in steady)
    return waits / (waits + busy) if waits + busy else 0.0


def mac_idle_fraction(sessions: Sequence[SessionStatus], early: Sequence[SessionStatus] = ()) -> float:
    """Share of the Macs' time between sweeps: idle / (idle + pull + apply + decode), all Macs together.

    `early` are the same sessions once start-up was over; what they had counted by then is left out.
    """
    before = {s.host: s for s in early}
    idle = busy = 0.0
    for session in sessions:
        start = before.get(session.host)
        idle += session.idle_seconds - (start.idle_seconds if start else 0.0)
        busy += _busy(session) - (_busy(start) if start else 0.0)
    return idle / (idle + busy) if idle + busy > 0 else 0.0


def rollout_time_share(record: RunRecord) -> float:
    """Share of all machines' busy time that went into decoding: decode / (decode + optimizer steps)."""
    decode = sum(s.decode_seconds for s in record.sessions)
    train = sum(row.train_seconds for row in record.steps)
    return decode / (decode + train) if decode + train else 0.0


def _dropped(record: RunRecord) -> Counter[str]:
    """Reason -> groups, those that only notes tell of too."""
    return Counter([*(reason for row in record.steps for reason in row.dropped.values()), *record.noted_dropped.values()])


def idle_reason(record: RunRecord, trainer: float, mac: float) -> str:
    """What was waited for when a share is above 5 %, and who set the pace by these shares; empty when neither is."""
    said: list[str] = []
    flat = {what: num for reason, what in EQUAL_REWARDS.items() if (num := _dropped(record)[reason])}
    equal, used = sum(flat.values()), sum(len(row.consumed) for row in record.steps)
    if equal and not record.steps:
        kinds = ", ".join(f"{num} all {what}" for what, num in flat.items())
        return f"no step could be made: {equal} groups had equal rewards and taught nothing ({kinds})"
    if trainer > 0.05:
        said.append(f"the trainer waited for groups {trainer:.0%} of its time ({equal} groups had equal rewards and taught nothing)")
    what, share = main_wait(record)
    if mac > 0.05:
        whole = "" if record.sessions_early else ", start-up counted"
        said.append(f"Macs waited {mac:.0%} of their time between sweeps{whole}" + (f", {share}for {what}" if what else ""))
    if trainer > 0.05 and mac > 0.05 and equal <= used:
        slower = "the Macs are the slower side: more of them would help" if trainer > mac else "the trainer is the slower side"
        said.append(f"they waited for each other in turns; on the whole {slower}")
    elif trainer > 0.05 and equal > used:
        said.append("more than half of the groups taught nothing: other questions would help more than other Macs")
    elif trainer > 0.05:
        said.append("the Macs set the pace: more of them would help")
    elif mac > 0.05 and what in ("", _WAITS["room"]):
        said.append("the trainer set the pace")
    return "; ".join(said)


def main_wait(record: RunRecord) -> tuple[str, str]:
    """What the Macs waited for most once start-up was over, by the seconds their sessions counted; and its share, if of several."""
    before = {s.host: s.waits for s in record.sessions_early}
    counted: dict[str, float] = {}
    for session in record.sessions:
        for kind, seconds in session.waits.items():
            counted[kind] = counted.get(kind, 0.0) + max(0.0, seconds - before.get(session.host, {}).get(kind, 0.0))
    whole = sum(counted.values())
    if whole <= 0:
        heard = Counter(record.waits).most_common(1)
        return (heard[0][0], "mostly ") if heard else ("", "")
    kind, seconds = max(counted.items(), key=lambda item: item[1])
    share = "" if seconds > 0.995 * whole else f"{seconds / whole:.0%} of it "
    return _WAITS.get(kind, kind), share


def pull_latencies(record: RunRecord) -> list[float]:
    """From HEAD naming a version to a Mac serving it: each value of each Mac once, else the last one of each session."""
    measured: list[float] = []
    last: dict[str, float] = {}
    for row in record.steps:
        for host, share in row.hosts.items():
            if share.pull_latency_seconds > 0 and share.pull_latency_seconds != last.get(host):
                last[host] = share.pull_latency_seconds
                measured.append(share.pull_latency_seconds)
    return measured or [s.pull_latency_seconds_last for s in record.sessions if s.pull_latency_seconds_last > 0]


def alarms(steps: Sequence[StepRow]) -> tuple[Alarmed, ...]:
    """Alarms of step metrics: every `alarm_<name>` that is not 0."""
    return tuple(
        Alarmed(row.step, name.removeprefix("alarm_"))
        for row in steps
        for name, value in row.metrics.items()
        if name.startswith("alarm_") and value
    )


def starved_alarm(record: RunRecord) -> tuple[Alarmed, ...]:
    """That of equal rewards for a step that was not made: its share, had all its groups come at last, is beyond the bound."""
    facts, flat = record.facts, sum(reason in EQUAL_REWARDS for reason in record.noted_dropped.values())
    fires = flat and flat > facts.equal_rewards_alarm * (flat + facts.groups_per_step)
    return (Alarmed(record.step + 1, "zero_variance_fraction"),) if fires else ()


def survived(record: RunRecord) -> Survived:
    """What went wrong and did not end the run, by what steps, sessions and whoever started the workers tell."""
    drops = _dropped(record)
    bad = {host for row in record.steps for host, share in row.hosts.items() if share.quarantined}
    return Survived(
        trainers_replaced=max(0, len({row.epoch for row in record.steps}) - 1),
        workers_restarted=sum(record.restarts.values()),
        sweeps_redone=sum(session.num_redone for session in record.sessions),
        sweeps_unasked=sum(session.num_unasked for session in record.sessions),
        groups_refused=sum(len(row.refused) for row in record.steps) + len(record.noted_refused),
        groups_stale=sum(count for reason, count in drops.items() if "stale" in reason),
        macs_quarantined=tuple(sorted(bad | {session.host for session in record.sessions if session.state == "quarantined"})),
        macs_lost=tuple(sorted(session.host for session in record.sessions if session.state == "away")),
    )


def spread(values: Iterable[float]) -> Spread:
    """Median, largest and count."""
    kept = list(values)
    return Spread(median(kept), max(kept), len(kept)) if kept else Spread(0.0, 0.0, 0)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _busy(session: SessionStatus) -> float:
    return session.decode_seconds + session.pull_seconds + session.apply_seconds


def _mac(session: SessionStatus, steps: Sequence[StepRow]) -> MacRow:
    total = _busy(session) + session.idle_seconds
    shares = [row.hosts[session.host] for row in steps if session.host in row.hosts]
    refused: Counter[str] = Counter()
    for share in shares:
        refused.update(share.refused)
    return MacRow(
        host=session.host,
        place=session.place,
        state=session.state,
        sweeps=session.num_sweeps,
        sweeps_redone=session.num_redone,
        groups=session.num_groups,
        episodes=session.num_episodes,
        tokens_per_second=session.num_sampled_tokens / session.decode_seconds if session.decode_seconds else 0.0,
        pull_latency_seconds=session.pull_latency_seconds_last,
        join_seconds=session.join_seconds,
        idle_fraction=session.idle_seconds / total if total else 0.0,
        bytes_up=session.bytes_up,
        bytes_down=session.bytes_down,
        waited_for=session.reason,
        groups_accepted=sum(share.accepted for share in shares),
        groups_refused=dict(refused),
        heat=session.heat,
    )
