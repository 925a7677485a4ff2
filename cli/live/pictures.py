"""One publish interval, and the star, as lines of text for a terminal: ASCII, so that every terminal has the marks. Pure."""

from collections.abc import Sequence

from cli.report.record import RunRecord, SweepBar
from cli.say import bytes_text, time_text

_SIDE = 36
"""Columns left of the bucket."""


def timeline_lines(record: RunRecord, sweeps: Sequence[SweepBar], bounds: tuple[float, float], width: int) -> tuple[str, ...]:
    """One publish interval: a line for the trainer, for publishing and for each Mac, each mark a slice of time.

    = optimizer step, . wait for groups, P publish, # sweep, o a group landed.
    """
    start, end = bounds
    if end <= start or width < 20:
        return ("no publish interval to show yet",)
    hosts = sorted({sweep.host for sweep in sweeps})
    left = max([10, *map(len, hosts)]) + 1
    num = width - left
    trainer, publishing = [" "] * num, [" "] * num
    for row in record.steps:
        _paint(trainer, ".", row.started_at - row.wait_seconds, row.started_at, bounds)
        _paint(trainer, "=", row.started_at, row.started_at + row.train_seconds, bounds)
    for version in record.versions:
        _paint(publishing, "P", version.published_at - version.publish_seconds, version.published_at, bounds)
    lines = [f"{'trainer':{left}}{''.join(trainer)}", f"{'publishing':{left}}{''.join(publishing)}"]
    for host in hosts:
        cells = [" "] * num
        for sweep in (one for one in sweeps if one.host == host):
            first = min(one.landed_at for one in sweep.landings)
            _paint(cells, "#", sweep.started_at or first, sweep.ended_at, bounds)
            for landing in sweep.landings:
                _paint(cells, "o", landing.landed_at, landing.landed_at, bounds)
        lines.append(f"{host:{left}}{''.join(cells)}")
    scale = f"0 s{time_text(end - start):>{num - 3}}"
    return (*lines, f"{'':{left}}{scale}")


def _paint(cells: list[str], mark: str, start: float, end: float, bounds: tuple[float, float]) -> None:
    """Put a mark on every slice that [start, end] touches."""
    low, high = bounds
    if end < low or start > high:
        return
    slice_seconds = (high - low) / len(cells)
    first = max(0, int((start - low) / slice_seconds))
    last = min(len(cells) - 1, int((end - low) / slice_seconds))
    for place in range(first, last + 1):
        cells[place] = mark


def star_lines(record: RunRecord) -> tuple[str, ...]:
    """The trainer above, the bucket in the middle, Macs on both sides; = are groups, - are versions."""
    groups = bytes_text(sum(s.bytes_up for s in record.sessions))
    anchors = {row.anchor_version: row.anchor_bytes for row in record.versions}
    versions = bytes_text(sum(row.delta_bytes for row in record.versions) + sum(anchors.values()))
    lines = [
        f"{'':{_SIDE}}trainer",
        f"{f'groups {groups}':>{_SIDE}} ^   |  versions {versions}",
        f"{'':{_SIDE}} |   v",
        f"{'':{_SIDE - 1}}[ bucket ]",
    ]
    macs = sorted(record.sessions, key=lambda s: s.host)
    for west, east in zip(macs[::2], [*macs[1::2], None], strict=False):
        right_groups = f"<== {bytes_text(east.bytes_up):>8} == {east.host}" if east is not None else ""
        right_versions = f"--- {bytes_text(east.bytes_down):>8} ->" if east is not None else ""
        lines.append(f"{west.host} == {bytes_text(west.bytes_up):>8} ==>".rjust(_SIDE) + f"   ||   {right_groups}")
        lines.append(f"<- {bytes_text(west.bytes_down):>8} ---".rjust(_SIDE) + f"   ||   {right_versions}")
    return tuple(line.rstrip() for line in lines)
