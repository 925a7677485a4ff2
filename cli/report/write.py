"""Writes a run's report into a folder: report.json, metrics.jsonl, report.html and one PNG a figure.

The page needs no network and no script. Numbers are `summary.py`'s, figures are `plots.py`'s.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cli.report.plots import Plot, draw_all
from cli.report.record import RunRecord
from cli.report.summary import Summary, Survived, summarise
from cli.say import bytes_text, counted, time_text
from stoa.telemetry.sinks import MetricRow

TEMPLATE: Final = "report.html.jinja"
METRICS_SECONDS: Final = 10.0


def write_report(record: RunRecord, folder: Path) -> Summary:
    """Write everything; returns the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(record)
    _write(folder / "report.json", json.dumps(summary.as_json(), indent=2, allow_nan=False) + "\n")
    write_metrics(record, folder / "metrics.jsonl")
    plots = draw_all(record, folder / "plots")
    _write(folder / "report.html", page(record, summary, plots))
    return summary


def write_metrics(record: RunRecord, path: Path) -> None:
    """One line a step, version and evaluation, in order of time."""
    _write(path, "".join(json.dumps(row.tree()) + "\n" for row in metric_rows(record)))


class MetricsFile:
    """metrics.jsonl of a run that is followed, written anew every `METRICS_SECONDS`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._due = 0.0

    def keep(self, record: RunRecord) -> None:
        """Write it if it is time, or the run has ended."""
        if self._clock() < self._due and record.state == "running":
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_metrics(record, self._path)
        self._due = self._clock() + METRICS_SECONDS


def metric_rows(record: RunRecord) -> Iterator[MetricRow]:
    """Rows in order of time; an evaluation stands where its version was published."""
    published = {row.version: row for row in record.versions}
    rows: list[MetricRow] = []
    for step in record.steps:
        metrics = {**step.metrics, "wait_seconds": step.wait_seconds, "train_seconds": step.train_seconds}
        rows.append(MetricRow(step.started_at + step.train_seconds, "step", step.step, step.version, metrics))
    for row in record.versions:
        metrics = {
            "delta_bytes": row.delta_bytes,
            "anchor_bytes": row.anchor_bytes if row.anchor_version == row.version else 0,
            "changed_fraction": row.changed_fraction,
            "publish_latency_seconds": row.latency_seconds,
        }
        rows.append(MetricRow(row.published_at, "version", row.step, row.version, metrics))
    for result in record.evaluations:
        version = published.get(result.version)
        at, step = (version.published_at, version.step) if version is not None else (record.started_at, 0)
        metrics = {name: value for name, value in asdict(result).items() if isinstance(value, int | float) and name != "version"}
        rows.append(MetricRow(at, "evaluation", step, result.version, metrics))
    yield from sorted(rows, key=lambda row: row.time)


def page(record: RunRecord, summary: Summary, plots: tuple[Plot, ...]) -> str:
    """The HTML page."""
    engine = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    engine.filters.update(
        percent=lambda share: f"{share:.1%}",
        fine_percent=lambda share: f"{share:.2%}",
        small=lambda value: f"{value:.4f}",
        size=bytes_text,
        duration=time_text,
        seconds=lambda value: f"{value:.2f} s" if value else "-",
        dollars=_dollars,
    )
    template = engine.get_template(TEMPLATE)
    return template.render(
        s=summary,
        plots=plots,
        evaluations=record.evaluations,
        settings=record.facts.settings,
        transcripts=record.transcripts,
        software=record.software,
        engines=record.engines,
        said_of=said_of,
    )


def said_of(survived: Survived) -> list[str]:
    """What went wrong, each in a few words."""
    counts = (
        (survived.trainers_replaced, "trainer", "took over from one before it"),
        (survived.workers_restarted, "worker", "started again"),
        (survived.sweeps_redone, "sweep", "redone"),
        (survived.sweeps_unasked, "sweep", "played while the control plane was silent"),
        (survived.groups_stale, "group", "too old when its turn came"),
        (survived.groups_refused, "group", "refused"),
    )
    said = [f"{counted(count, noun)} {what}" for count, noun, what in counts if count]
    if survived.macs_quarantined:
        said.append(f"quarantined: {', '.join(survived.macs_quarantined)}")
    if survived.macs_lost:
        said.append(f"away: {', '.join(survived.macs_lost)}")
    return said


def _dollars(value: float) -> str:
    return f"${value:.2f}" if value >= 0.01 or not value else "under 1 cent"


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, "utf-8")
    new.replace(path)
