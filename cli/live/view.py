"""What the live view says, as plain lines and rows worked out from two looks at a run. Pure: no terminal, no server.

Rates are differences between two looks, by this machine's clock. `app.py` draws what stands here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Final

from cli.macs import doing
from cli.report.cost import cost_of
from cli.report.record import RunRecord
from cli.say import bytes_text, time_text
from stoa.contracts.fleet_messages import SessionStatus

ENDED: Final = ("stopped", "failed", "gone")
MIN_SPAN_SECONDS: Final = 0.5
"""Two looks closer together make no rate."""
ALARM_STEPS: Final = 20
"""Alarms of so many last steps are shown."""
MOST_ALARMS: Final = 6
FLOW_STEPS: Final = 8
"""What flows is the mean of so many last steps."""


@dataclass(frozen=True, slots=True)
class Look:
    """A run as it was found at a moment of this machine's steady clock, in seconds."""

    at: float
    record: RunRecord


@dataclass(frozen=True, slots=True)
class MacLine:
    """One Mac of the fleet table, in words."""

    host: str
    place: str
    state: str
    version: str
    staleness: str
    tokens_per_second: str
    up: str
    down: str
    heat: str
    accepted: str
    refused: str
    pull: str
    join: str
    idle: str
    reason: str

    def cells(self) -> tuple[str, ...]:
        """In the order of `COLUMNS`."""
        return tuple(getattr(self, one.name) for one in fields(self)[: len(COLUMNS)])


COLUMNS: Final[tuple[str, ...]] = (
    "Mac",
    "place",
    "state",
    "v",
    "lag",
    "tok/s",
    "up/s",
    "down/s",
    "heat",
    "ok",
    "no",
    "pull",
    "join",
    "idle",
)
"""One for each field of a line but its reason, which is a sentence: see `reason_lines`."""
MOST_REASONS: Final = 3
MOST_NAMES: Final = 4


@dataclass(frozen=True, slots=True)
class View:
    """One picture: every line a person sees, without colour."""

    run: tuple[str, ...]
    fleet: tuple[MacLine, ...]
    slowest: str
    bandwidth: tuple[str, ...]
    alarms: tuple[str, ...]
    done: float
    """Share of the run's steps that are done; 0 where it has no limit."""
    paused: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of each host and of all together; empty before the second look."""

    up: Mapping[str, float] = field(default_factory=dict)
    down: Mapping[str, float] = field(default_factory=dict)


def view_of(now: Look, before: Look | None, max_steps: int) -> View:
    """The picture of `now`, with rates since `before`. max_steps: for a record that names no limit."""
    record = now.record
    max_steps = record.max_steps or max_steps
    ended = record.state in ENDED
    rates = Rates() if ended else rates_between(before, now)
    done = max(record.step, record.live_step)
    return View(
        run=run_lines(record, max_steps),
        fleet=fleet_lines(record, rates),
        slowest="" if record.held == "waits" else slowest_line(record.sessions),
        bandwidth=bandwidth_lines(record, rates),
        alarms=alarm_lines(record),
        done=min(1.0, done / max_steps) if max_steps else 0.0,
        paused=record.state == "paused",
        ended=ended,
    )


def run_lines(record: RunRecord, max_steps: int) -> tuple[str, ...]:
    """State and time; version, step and what the last steps and evaluations showed; what is waited for; what it cost."""
    # A pause is younger than its run.
    since = "after" if record.state in ENDED else "at" if record.state == "paused" else "for"
    head = f"run {record.facts.run}: {record.state} {since} {time_text(record.seconds)}"
    steps = f"step {max(record.step, record.live_step)}" + (f" of {max_steps}" if max_steps else "")
    numbers = [f"version {record.version}" if record.version >= 0 else "no version yet", steps]
    if record.steps:
        metrics = record.steps[-1].metrics
        named = (("reward_mean", "reward"), ("search_rate", "search"), ("gate_drop_rate", "gate drops"), ("staleness_mean", "staleness"))
        numbers += [f"{label} {metrics[name]:.2f}" for name, label in named if name in metrics]
    exam = "pass@1 not measured yet"
    good = [e for e in record.evaluations if e.num_questions and not e.error]
    if good:
        low, high = good[-1].interval_95
        exam = f"pass@1 {good[-1].pass_at_1:.3f} ({low:.3f} to {high:.3f}) at version {good[-1].version}"
    return (head, "  ".join(numbers), exam, _waits(record), *_flow_line(record), _cost_line(record))


def _flow_line(record: RunRecord) -> tuple[str, ...]:
    """What the fleet brings, how busy it is, and what the trainer waits, over the newest steps; nothing of a run that has none."""
    recent = [row.metrics for row in record.steps[-FLOW_STEPS:]]
    forms = (
        ("fleet_tokens_per_second", "fleet {:.0f} tokens/s"),
        ("batch_occupancy_mean", "places {:.0%} full"),
        ("trainer_wait_share", "trainer waits {:.0%}"),
        ("empty_retrieval_rate", "empty searches {:.0%}"),
    )
    values = {name: [metrics[name] for metrics in recent if name in metrics] for name, _ in forms}
    said = [form.format(sum(values[name]) / len(values[name])) for name, form in forms if values[name]]
    return ("  ".join(said),) if said else ()


def _waits(record: RunRecord) -> str:
    if record.state in ENDED:
        return f"ended: {record.end_reason or 'no reason told'}"
    what = record.waiting_for or "for nothing"
    return what if "waiting" in what else f"waits: {what}"


def _cost_line(record: RunRecord) -> str:
    cost = cost_of(record, sum(session.bytes_down for session in record.sessions), 0.0)
    latency = [row.latency_seconds for row in record.versions if row.latency_seconds > 0]
    publish = f"   publish {latency[-1]:.1f} s, median {median(latency):.1f} s" if latency else ""
    price = f"{cost.total_usd:.2f} dollars" if cost.total_usd >= 0.01 else "under a cent"
    what = "cost" if record.state in ENDED else "cost so far"
    return f"{what}: {cost.gpu_hours:.2f} GPU hours, {price}{publish}"


def rates_between(before: Look | None, now: Look) -> Rates:
    """Bytes a second of each host since the look before; a Mac that began anew counts from 0."""
    if before is None or now.at - before.at < MIN_SPAN_SECONDS:
        return Rates()
    seconds = now.at - before.at
    old = {session.host: session for session in before.record.sessions}
    up: dict[str, float] = {}
    down: dict[str, float] = {}
    for session in now.record.sessions:
        was = old.get(session.host)
        up[session.host] = max(0, session.bytes_up - (was.bytes_up if was else 0)) / seconds
        down[session.host] = max(0, session.bytes_down - (was.bytes_down if was else 0)) / seconds
    return Rates(up, down)


def fleet_lines(record: RunRecord, rates: Rates) -> tuple[MacLine, ...]:
    """A row a Mac, the fastest first."""
    accepted: dict[str, int] = {}
    refused: dict[str, int] = {}
    for row in record.steps:
        for host, share in row.hosts.items():
            accepted[host] = accepted.get(host, 0) + share.accepted
            refused[host] = refused.get(host, 0) + sum(share.refused.values())
    rows = sorted(record.sessions, key=lambda s: (-s.tokens_per_second, s.host))
    return tuple(
        MacLine(
            host=s.host,
            place=s.place,
            state=doing(s, record.held)[0],
            version=str(s.version) if s.version >= 0 else "-",
            staleness=str(record.version - s.version) if s.version >= 0 else "-",
            tokens_per_second=f"{s.tokens_per_second:.0f}" if s.tokens_per_second else "-",
            up=f"{bytes_text(rates.up[s.host])}" if s.host in rates.up else "-",
            down=f"{bytes_text(rates.down[s.host])}" if s.host in rates.down else "-",
            heat=s.heat or "-",
            accepted=str(accepted.get(s.host, 0)),
            refused=str(refused.get(s.host, 0)),
            pull=f"{s.pull_latency_seconds_last:.1f} s" if s.pull_latency_seconds_last else "-",
            join=f"{s.join_seconds:.1f} s" if s.join_seconds else "-",
            idle=_idle(s),
            reason=doing(s, record.held)[1] or s.slow_because,
        )
        for s in rows
    )


def columns_of(lines: Sequence[MacLine]) -> tuple[str, ...]:
    """The columns that tell something of these Macs: the others would only push those off a narrow terminal."""
    cells = [line.cells() for line in lines]
    always = ("Mac", "state", "v", "tok/s")
    return tuple(name for place, name in enumerate(COLUMNS) if name in always or any(row[place] not in ("", "-") for row in cells))


def reason_lines(lines: Sequence[MacLine], chosen: str, slowest: str = "") -> tuple[str, ...]:
    """Why Macs are as they are, each reason once with those it is of: that of the `chosen` host first, then what most have.

    slowest: a line that is shown besides, and tells of one Mac already.
    """
    hosts: dict[str, list[str]] = {}
    for line in lines:
        told = slowest.startswith(f"slowest: {line.host} ") and slowest.endswith(f": {line.reason}")
        if line.reason and not told:
            hosts.setdefault(line.reason, []).append(line.host)
    order = sorted(hosts, key=lambda reason: (chosen not in hosts[reason], -len(hosts[reason]), hosts[reason][0]))
    said = [f"{_names(sorted(hosts[reason], key=lambda host: host != chosen))}: {reason}" for reason in order[:MOST_REASONS]]
    left = sum(len(hosts[reason]) for reason in order[MOST_REASONS:])
    return (*said, f"and {left} more with reasons of their own: see `stoa fleet`") if left else tuple(said)


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - MOST_NAMES
    return ", ".join(hosts[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _idle(session: SessionStatus) -> str:
    total = session.decode_seconds + session.pull_seconds + session.apply_seconds + session.idle_seconds
    return f"{session.idle_seconds / total:.0%}" if total else "-"


def slowest_line(sessions: Sequence[SessionStatus]) -> str:
    """The slowest Mac that plays, and why; empty with fewer than two."""
    playing = [s for s in sessions if s.state == "live" and s.tokens_per_second]
    if len(playing) < 2:
        return ""
    slow = min(playing, key=lambda s: (s.tokens_per_second, s.host))
    # Of two there is no middle one.
    what, than = ("the other", max) if len(playing) == 2 else ("the middle one", median)
    why = f": {slow.slow_because}" if slow.slow_because else ""
    return f"slowest: {slow.host} at {slow.tokens_per_second:.0f} tokens/s, {what} {than(s.tokens_per_second for s in playing):.0f}{why}"


def bandwidth_lines(record: RunRecord, rates: Rates) -> tuple[str, ...]:
    """Bytes by kind, now and in all, beside what an anchor of every version would have been."""
    up, down = sum(s.bytes_up for s in record.sessions), sum(s.bytes_down for s in record.sessions)
    deltas = sum(row.delta_bytes for row in record.versions)
    anchors = {row.anchor_version: row.anchor_bytes for row in record.versions if row.anchor_bytes}
    now_up, now_down = (f", {bytes_text(sum(now.values()))}/s" if now else "" for now in (rates.up, rates.down))
    lines = [
        f"groups up      {bytes_text(up)}{now_up}",
        f"versions down  {bytes_text(down)}{now_down}",
        f"published      {bytes_text(deltas)} of deltas,",
        f"               {bytes_text(sum(anchors.values()))} of anchors",
    ]
    full = max(anchors.values(), default=0) * len(record.versions)
    if full and deltas:
        lines.append(f"only anchors   {bytes_text(full)}, {full / (deltas + sum(anchors.values())):.1f} times")
    return tuple(lines)


def alarm_lines(record: RunRecord) -> tuple[str, ...]:
    """Alarms and warnings of the last steps, the newest first, each kind once; Macs that are shut out."""
    found: dict[str, str] = {}
    for row in reversed(record.steps[-ALARM_STEPS:]):
        for kind in ("alarm", "warning"):
            for name, value in row.metrics.items():
                metric = name.removeprefix(f"{kind}_")
                if value and metric != name and metric not in found:
                    found[metric] = f"{kind}: {metric.replace('_', ' ')} at step {row.step}{_value(row.metrics, metric)}"
    shut = [f"{s.host} is quarantined" + (f": {s.reason}" if s.reason else "") for s in record.sessions if s.state == "quarantined"]
    return tuple((shut + list(found.values()))[:MOST_ALARMS])


def _value(metrics: Mapping[str, float], name: str) -> str:
    return f" ({metrics[name]:.3g})" if name in metrics else ""
