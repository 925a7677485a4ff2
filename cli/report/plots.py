"""The report's figures, by matplotlib: SVG for the page (colours follow the reader's theme) and PNG files.

Each figure is a function of the run's record that draws on axes; nothing here computes a number of the report.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cli.report.record import RunRecord
from cli.report.summary import wilson_95
from cli.say import bytes_text

# Colours that the page replaces by its own variables; a PNG shows them as they are.
INK: Final = "#2b2b2e"
SERIES: Final = ("#2f6fde", "#c2570c", "#0f8a7a", "#7a4fd0")
_VARIABLES: Final = {INK: "currentColor", **{colour: f"var(--series-{i + 1})" for i, colour in enumerate(SERIES)}}
_STYLE: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stoa",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
}
_SMOOTH_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure: `name` is its file, `caption` says what it shows and how."""

    name: str
    title: str
    caption: str
    svg: str


def draw_all(record: RunRecord, folder: Path) -> tuple[Plot, ...]:
    """Write `<name>.png` of every figure that has data into `folder`; returns them all as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: list[Plot] = []
    with mpl.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        for name, title, caption, has_data, draw in _FIGURES:
            if not has_data(record):
                continue
            figure = Figure(figsize=(5.0, 3.0), layout="constrained")
            draw(record, figure.subplots())
            figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
            plots.append(Plot(name, title, caption, _svg(figure, name)))
    return tuple(plots)


def _svg(figure: Figure, name: str) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # Ids of several figures on one page must differ, and the page decides the size.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\g<1>#{name}-", text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)


def _learning(record: RunRecord, axes: Axes) -> None:
    good = [e for e in record.evaluations if e.num_questions]
    versions = [e.version for e in good]
    rates = {"pass@1": [e.pass_at_1 for e in good], "search rate": [e.search_rate for e in good]}
    for colour, (label, values) in zip(SERIES, rates.items(), strict=False):
        bounds = [wilson_95(value, e.num_questions) for value, e in zip(values, good, strict=True)]
        axes.fill_between(versions, [low for low, _ in bounds], [high for _, high in bounds], color=colour, alpha=0.15, linewidth=0)
        axes.plot(versions, values, color=colour, marker="o", markersize=4, label=label)
    axes.set(xlabel="version", ylabel="share of held-out questions", ylim=(0, 1.02))
    _whole_numbers(axes)
    _legend(axes)


def _reward(record: RunRecord, axes: Axes) -> None:
    steps = [row.step for row in record.steps]
    values = np.array([row.metrics.get("reward_mean", np.nan) for row in record.steps])
    axes.plot(steps, values, color=SERIES[0], alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, _smooth(values), color=SERIES[0], linewidth=2, label=f"mean of {_SMOOTH_STEPS} steps")
    search = np.array([row.metrics.get("search_rate", np.nan) for row in record.steps])
    axes.plot(steps, _smooth(search), color=SERIES[1], linewidth=2, label="search rate")
    axes.set(xlabel="optimizer step", ylabel="mean over episodes", ylim=(0, 1.02))
    _whole_numbers(axes)
    _legend(axes)


def _distance(record: RunRecord, axes: Axes) -> None:
    steps = [row.step for row in record.steps]
    for colour, (name, label) in zip(
        SERIES, (("mismatch_mean", "mismatch, mean |pi - mu|"), ("gate_drop_rate", "gate drop rate")), strict=False
    ):
        axes.plot(steps, [row.metrics.get(name, np.nan) for row in record.steps], color=colour, label=label)
    axes.set(xlabel="optimizer step", ylabel="share of tokens", ylim=(0, None))
    _whole_numbers(axes)
    _legend(axes)


def _staleness(record: RunRecord, axes: Axes) -> None:
    steps = [row.step for row in record.steps]
    mean = [row.metrics.get("staleness_mean", np.nan) for row in record.steps]
    largest = [row.metrics.get("staleness_max", np.nan) for row in record.steps]
    axes.plot(steps, largest, color=SERIES[1], drawstyle="steps-mid", linewidth=1, label="oldest group")
    axes.plot(steps, mean, color=SERIES[0], label="mean of the step's groups")
    axes.set(xlabel="optimizer step", ylabel="staleness (versions)", ylim=(0, None))
    _whole_numbers(axes)
    _legend(axes)


def _bytes(record: RunRecord, axes: Axes) -> None:
    rows = [row for row in record.versions if row.delta_bytes]
    axes.bar([row.version for row in rows], [row.delta_bytes for row in rows], color=SERIES[0], width=0.8, label="delta")
    anchors = sorted({row.anchor_version: row.anchor_bytes for row in record.versions if row.anchor_bytes}.items())
    axes.plot(
        [v for v, _ in anchors], [b for _, b in anchors], color=SERIES[1], marker="D", linestyle="none", label="anchor (full weights)"
    )
    axes.set(xlabel="version", ylabel="bytes", ylim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    _whole_numbers(axes)
    _legend(axes)


def _trainer_time(record: RunRecord, axes: Axes) -> None:
    versions = sorted({row.version for row in record.steps})
    published = {row.version: row.latency_seconds for row in record.versions}
    spent = (
        (SERIES[0], "optimizer steps", [sum(r.train_seconds for r in record.steps if r.version == v) for v in versions]),
        (SERIES[2], "publishing", [published.get(v + 1, 0.0) for v in versions]),
        (SERIES[1], "waiting for groups", [sum(r.wait_seconds for r in record.steps if r.version == v) for v in versions]),
    )
    bottom = np.zeros(len(versions))
    for colour, label, seconds in spent:
        axes.bar(versions, seconds, bottom=bottom, color=colour, width=0.8, label=label)
        bottom += np.array(seconds)
    axes.set(xlabel="version the steps began from", ylabel="seconds", ylim=(0, None))
    _whole_numbers(axes)
    _legend(axes)


def _smooth(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> list[float]:
    means: list[float] = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - _SMOOTH_STEPS) : end]
        window = window[np.isfinite(window)]
        means.append(float(window.mean()) if len(window) else float("nan"))
    return means


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.2, handlelength=1.4, columnspacing=1.4)


def _whole_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


_Figure = tuple[str, str, str, Callable[[RunRecord], bool], Callable[[RunRecord, Axes], None]]
_FIGURES: Final[Sequence[_Figure]] = (
    (
        "learning",
        "Held-out questions",
        "One sampled answer a question, about entities no training question asks about; bands are 95 % Wilson intervals.",
        lambda record: any(e.num_questions for e in record.evaluations),
        _learning,
    ),
    ("reward", "Reward while training", "Over all episodes of the groups a step trained on.", lambda record: bool(record.steps), _reward),
    (
        "distance",
        "Distance between sampler and trainer",
        "The sampler is an older version in int8; the gate drops tokens whose probability has moved too far.",
        lambda record: bool(record.steps),
        _distance,
    ),
    (
        "staleness",
        "Staleness",
        "Trainer version minus the version a group was sampled from.",
        lambda record: bool(record.steps),
        _staleness,
    ),
    (
        "bytes",
        "What a version weighs",
        "Bytes a Mac pulls for each version, against the full weights.",
        lambda record: any(row.delta_bytes for row in record.versions),
        _bytes,
    ),
    (
        "trainer_time",
        "The trainer's time",
        "Of each version: its optimizer steps, publishing the version after it, and waits for groups.",
        lambda record: bool(record.steps),
        _trainer_time,
    ),
)
