"""The report's two pictures of the machine itself: one publish interval as a timeline, and the star with what went along its rays."""

import math
from typing import Final

from matplotlib.axes import Axes

from cli.report.drawing import INK, PAPER, SERIES, Drawn, legend
from cli.report.look import interval_bounds
from cli.report.record import RunRecord, SweepBar
from cli.say import bytes_text
from stoa.contracts.fleet_messages import SessionStatus

MOST_ROWS: Final = 14
"""Macs that are drawn; of more the ones that brought most."""
STEPS, PUBLISH, WAIT, SWEEP = SERIES[0], SERIES[3], SERIES[1], SERIES[2]
_GROUPS, _DELTAS = SERIES[2], SERIES[0]


def _timeline(record: RunRecord, axes: Axes) -> None:
    start, end = interval_bounds(record, record.interval)
    hosts = timeline_hosts(record)
    lane = {host: number for number, host in enumerate(reversed(hosts))}
    top = len(hosts)
    bars: list[tuple[float, float, float, str, str]] = []
    for row in record.steps:
        bars.append((top + 1, row.started_at - row.wait_seconds, row.wait_seconds, WAIT, "wait for groups"))
        bars.append((top + 1, row.started_at, row.train_seconds, STEPS, "optimizer step"))
    for version in record.versions:
        seconds = version.publish_seconds
        bars.append((top, version.published_at - seconds, seconds, PUBLISH, "publish, pull and apply"))
    for sweep in record.sweeps:
        if sweep.host in lane and sweep.started_at:
            bars.append((lane[sweep.host], sweep.started_at, sweep.ended_at - sweep.started_at, SWEEP, "sweep"))
    bars += [(lane[host], at, seconds, PUBLISH, "publish, pull and apply") for host, at, seconds in pulls(record) if host in lane]
    told: set[str] = set()
    for row, at, seconds, colour, label in bars:
        left, right = max(at, start), min(at + seconds, end)
        if right - left > (end - start) / 1000:  # less is not seen, and would stand in the legend all the same
            thin = colour == PUBLISH and row < top
            axes.barh(
                row + (0.3 if thin else 0.0), right - left, left=left - start, height=0.2 if thin else 0.5, color=colour, alpha=0.75,
                label=None if label in told else label,
            )  # fmt: skip
            told.add(label)
    for sweep in record.sweeps:
        if sweep.host in lane:
            at = [one.finished_at - start for one in sweep.landings if start <= one.finished_at <= end]
            axes.plot(at, [lane[sweep.host] - 0.34] * len(at), color=INK, marker="^", markersize=3, linestyle="none")
    axes.set(xlabel=f"seconds since version {record.interval} was published", xlim=(0, end - start), ylim=(-0.7, top + 1.6))
    axes.set_yticks(range(top + 2), [*reversed(hosts), "publishing", "trainer"])
    axes.grid(visible=False, axis="y")
    legend(axes)


def timeline_hosts(record: RunRecord) -> list[str]:
    """Macs in the timeline: those that brought most groups, by name."""
    count = {sweep.host: 0 for sweep in record.sweeps}
    for sweep in record.sweeps:
        count[sweep.host] += len(sweep.landings)
    return sorted(sorted(count, key=lambda host: (-count[host], host))[:MOST_ROWS])


def pulls(record: RunRecord) -> list[tuple[str, float, float]]:
    """Host, Unix seconds from which a version was on its way to this Mac, and seconds until it was served; each of a Mac once.

    That is when it was named; for a Mac that joined later, when it first looked: its sweep begins once the weights are there.
    """
    published = {row.version: row.published_at for row in record.versions}
    first: dict[tuple[str, int], SweepBar] = {}
    for sweep in sorted(record.sweeps, key=lambda one: one.sweep):
        if sweep.pull_latency_seconds > 0 and sweep.version in published:
            first.setdefault((sweep.host, sweep.version), sweep)
    return [
        (host, max(published[version], one.started_at - one.pull_latency_seconds), one.pull_latency_seconds)
        for (host, version), one in sorted(first.items())
    ]


def _star(record: RunRecord, axes: Axes) -> None:
    macs = sorted(record.sessions, key=lambda s: (-s.bytes_up, s.host))[:MOST_ROWS]
    pushed = sum(row.delta_bytes for row in record.versions) + sum({r.anchor_version: r.anchor_bytes for r in record.versions}.values())
    groups = sum(session.bytes_up for session in record.sessions)
    most = max([groups, pushed, *(s.bytes_down for s in macs), 1])
    axes.set_axis_off()
    axes.set(xlim=(-1.75, 1.75), ylim=(-1.25, 1.3))
    _ray(axes, (0.0, 1.0), groups, pushed, most, f"trainer\n{bytes_text(groups)} of groups in, {bytes_text(pushed)} of versions out")
    for number, session in enumerate(macs):
        _ray(axes, mac_place(number, len(macs)), session.bytes_down, session.bytes_up, most, _mac_label(session, len(macs)))
    axes.text(0, 0, "bucket", ha="center", va="center", bbox={"boxstyle": "circle,pad=0.55", "facecolor": PAPER, "edgecolor": INK})
    axes.plot([], [], color=_GROUPS, linewidth=3, label="groups")
    axes.plot([], [], color=_DELTAS, linewidth=3, label="versions: deltas and anchors")
    legend(axes)


def mac_place(number: int, count: int) -> tuple[float, float]:
    """Where a Mac stands: the lower three quarters of a circle, from the left."""
    angle = math.radians(160 + 220 * (number + 0.5) / count)
    return math.cos(angle), math.sin(angle)


def _mac_label(session: SessionStatus, count: int) -> str:
    if count > 8:
        return session.host
    return f"{session.host}\n{bytes_text(session.bytes_up)} up, {bytes_text(session.bytes_down)} down"


def _ray(axes: Axes, place: tuple[float, float], inward: int, outward: int, most: int, label: str) -> None:
    """Two lines side by side between the bucket and a machine, as wide as the bytes that went along them.

    inward: bytes that the machine took from the bucket; outward: that it gave. The trainer stands at the top: it takes groups.
    """
    x, y = place
    is_trainer = y == 1.0
    side = (0.035 * y, -0.035 * x)
    for sign, size, colour in ((1, inward, _GROUPS if is_trainer else _DELTAS), (-1, outward, _DELTAS if is_trainer else _GROUPS)):
        width = 0.8 + 7 * math.sqrt(size / most)
        start = (0.22 * x + sign * side[0], 0.22 * y + sign * side[1])
        end = (0.86 * x + sign * side[0], 0.86 * y + sign * side[1])
        axes.plot([start[0], end[0]], [start[1], end[1]], color=colour, linewidth=width, alpha=0.8, solid_capstyle="butt")
    align = "center" if abs(x) < 0.35 else "left" if x > 0 else "right"
    axes.text(1.0 * x, 1.0 * y, label, ha=align, va="bottom" if is_trainer else "top" if y < -0.8 else "center", fontsize=8)


PICTURES: Final = (
    Drawn(
        "timeline",
        "fleet",
        "One publish interval",
        "Triangles are groups that were finished; a thin bar is the time from HEAD naming a version to this Mac serving it "
        "(pull, stage, apply). Each machine by its own clock.",
        lambda record: bool(record.sweeps),
        _timeline,
        (10.0, 3.6),
    ),
    Drawn(
        "star",
        "bytes",
        "The star",
        "All bytes go by the bucket. A line is as wide as the square root of what went along it.",
        lambda record: bool(record.sessions),
        _star,
        (10.0, 4.2),
    ),
)
