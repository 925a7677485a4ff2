"""The report's curves over steps and versions. Nothing here computes a number of the report.

Each is a function of the run's record that draws on axes; `FIGURES` says in which order they stand, and what they show.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from cli.report.cost import cost_curve
from cli.report.drawing import SERIES, Drawn, as_bytes, legend, whole_numbers
from cli.report.record import RunRecord
from cli.report.summary import wilson_95

_SMOOTH_STEPS: Final = 8
_SHARES: Final = {
    "trainer_wait_share": "trainer waits",
    "batch_occupancy_mean": "places filled",
}
_MOST_LINES: Final = 3
"""Macs that have a line of their own; of a larger fleet only the sum is drawn."""


def _learning(record: RunRecord, axes: Axes) -> None:
    good = [e for e in record.evaluations if e.num_questions]
    versions = [e.version for e in good]
    rates = {"pass@1": [e.pass_at_1 for e in good], "search rate": [e.search_rate for e in good]}
    for colour, (label, values) in zip(SERIES, rates.items(), strict=False):
        of_samples = label == "pass@1"  # with several samples a question its interval is the evaluation's own
        bounds = [
            e.interval_95 if of_samples and e.num_samples > 1 else wilson_95(value, e.num_questions)
            for value, e in zip(values, good, strict=True)
        ]
        axes.fill_between(versions, [low for low, _ in bounds], [high for _, high in bounds], color=colour, alpha=0.15, linewidth=0)
        axes.plot(versions, values, color=colour, marker="o", markersize=4, label=label)
    axes.set(xlabel="version", ylabel="share of held-out questions", ylim=(0, 1.02))
    whole_numbers(axes)
    legend(axes)


def _reward(record: RunRecord, axes: Axes) -> None:
    steps = [row.step for row in record.steps]
    values = np.array([row.metrics.get("reward_mean", np.nan) for row in record.steps])
    axes.plot(steps, values, color=SERIES[0], alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, _smooth(values), color=SERIES[0], linewidth=2, label=f"mean of {_SMOOTH_STEPS} steps")
    search = np.array([row.metrics.get("search_rate", np.nan) for row in record.steps])
    axes.plot(steps, _smooth(search), color=SERIES[1], linewidth=2, label="search rate")
    if _has("empty_retrieval_rate")(record):
        empty = np.array(_values(record, "empty_retrieval_rate"))
        axes.plot(steps, _smooth(empty), color=SERIES[2], linewidth=1.5, label="empty searches")
    axes.set(xlabel="optimizer step", ylabel="mean over episodes", ylim=(0, 1.02))
    whole_numbers(axes)
    legend(axes)


def _distance(record: RunRecord, axes: Axes) -> None:
    steps = [row.step for row in record.steps]
    for colour, (name, label) in zip(
        SERIES, (("mismatch_mean", "mismatch, mean |pi - mu|"), ("gate_drop_rate", "gate drop rate")), strict=False
    ):
        axes.plot(steps, [row.metrics.get(name, np.nan) for row in record.steps], color=colour, label=label)
    axes.set(xlabel="optimizer step", ylabel="share of tokens", ylim=(0, None))
    whole_numbers(axes)
    legend(axes)


def _staleness(record: RunRecord, axes: Axes) -> None:
    steps = [row.step for row in record.steps]
    mean = [row.metrics.get("staleness_mean", np.nan) for row in record.steps]
    largest = [row.metrics.get("staleness_max", np.nan) for row in record.steps]
    axes.plot(steps, largest, color=SERIES[1], drawstyle="steps-mid", linewidth=1, label="oldest group")
    axes.plot(steps, mean, color=SERIES[0], label="mean of the step's groups")
    axes.set(xlabel="optimizer step", ylabel="staleness (versions)", ylim=(0, None))
    whole_numbers(axes)
    legend(axes)


def _bytes(record: RunRecord, axes: Axes) -> None:
    rows = [row for row in record.versions if row.delta_bytes]
    axes.bar([row.version for row in rows], [row.delta_bytes for row in rows], color=SERIES[0], width=0.8, label="delta")
    anchors = sorted({row.anchor_version: row.anchor_bytes for row in record.versions if row.anchor_bytes}.items())
    axes.plot([v for v, _ in anchors], [b for _, b in anchors], color=SERIES[1], marker="D", linestyle="none", label="anchor (all weights)")
    axes.set(xlabel="version", ylabel="bytes", ylim=(0, None))
    axes.yaxis.set_major_formatter(as_bytes())
    whole_numbers(axes)
    legend(axes)


def _trainer_time(record: RunRecord, axes: Axes) -> None:
    versions = sorted({row.version for row in record.steps})
    published = {row.version: (row.publish_seconds, row.held_seconds) for row in record.versions}
    spent = (
        (SERIES[0], "optimizer steps", [sum(r.train_seconds for r in record.steps if r.version == v) for v in versions]),
        (SERIES[2], "publishing", [published.get(v + 1, (0.0, 0.0))[0] for v in versions]),
        (SERIES[1], "waiting for groups", [sum(r.wait_seconds for r in record.steps if r.version == v) for v in versions]),
        (SERIES[3], "held up", [published.get(v + 1, (0.0, 0.0))[1] for v in versions]),
    )
    bottom = np.zeros(len(versions))
    for colour, label, seconds in spent:
        if label != "held up" or any(seconds):
            axes.bar(versions, seconds, bottom=bottom, color=colour, width=0.8, label=label)
            bottom += np.array(seconds)
    axes.set(xlabel="version the steps began from", ylabel="seconds", ylim=(0, None))
    whole_numbers(axes)
    legend(axes)


def _entropy(record: RunRecord, axes: Axes) -> None:
    steps = [row.step for row in record.steps]
    axes.plot(steps, _values(record, "entropy"), color=SERIES[0])
    axes.set(xlabel="optimizer step", ylabel="nats a sampled token", ylim=(0, None))
    whole_numbers(axes)


def _staleness_histogram(record: RunRecord, axes: Axes) -> None:
    counts = staleness_histogram(record)
    axes.bar(list(counts), list(counts.values()), color=SERIES[0], width=0.8)
    axes.set(xlabel="staleness (versions)", ylabel="groups trained on", ylim=(0, None))
    whole_numbers(axes)


def _changed(record: RunRecord, axes: Axes) -> None:
    rows = [row for row in record.versions if row.delta_bytes]
    axes.plot([row.version for row in rows], [row.changed_fraction for row in rows], color=SERIES[0], marker="o", markersize=3)
    axes.set(xlabel="version", ylabel="share of int8 codes", ylim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1%}"))
    whole_numbers(axes)


def _fleet_speed(record: RunRecord, axes: Axes) -> None:
    speeds = fleet_speeds(record)
    axes.plot(list(speeds), [sum(of_host.values()) for of_host in speeds.values()], color=SERIES[0], linewidth=2, label="all Macs")
    hosts = sorted({host for of_host in speeds.values() for host in of_host})
    if 1 < len(hosts) <= _MOST_LINES:
        for colour, host in zip(SERIES[1:], hosts, strict=False):
            axes.plot(list(speeds), [of_host.get(host, 0.0) for of_host in speeds.values()], color=colour, linewidth=1, label=host)
    axes.set(xlabel="version the steps began from", ylabel="sampled tokens a second", ylim=(0, None))
    whole_numbers(axes)
    legend(axes)


def _busy(record: RunRecord, axes: Axes) -> None:
    steps = [row.step for row in record.steps]
    for colour, (metric, label) in zip(SERIES, _SHARES.items(), strict=False):
        if _has(metric)(record):
            axes.plot(steps, _smooth(np.array(_values(record, metric))), color=colour, linewidth=2, label=label)
    axes.set(xlabel="optimizer step", ylabel=f"share, mean of {_SMOOTH_STEPS} steps", ylim=(0, 1.02))
    whole_numbers(axes)
    legend(axes)


def _bytes_by_kind(record: RunRecord, axes: Axes) -> None:
    sizes = sorted(record.bucket_bytes.items(), key=lambda item: item[1])
    axes.barh([kind for kind, _ in sizes], [size for _, size in sizes], color=SERIES[0], height=0.7)
    axes.set(xlabel="bytes in the bucket")
    axes.xaxis.set_major_formatter(as_bytes())
    axes.tick_params(axis="x", labelrotation=30)
    axes.grid(visible=False, axis="y")


def _cost(record: RunRecord, axes: Axes) -> None:
    spent = cost_curve(record, sum(session.bytes_down for session in record.sessions))
    minutes = [one.minutes for one in spent]
    parts = (
        (SERIES[0], "GPUs", [one.gpu_usd for one in spent]),
        (SERIES[1], "requests", [one.requests_usd for one in spent]),
        (SERIES[2], "traffic", [one.egress_usd for one in spent]),
    )
    below = np.zeros(len(spent))
    for colour, label, dollars in parts:
        if any(dollars):
            axes.fill_between(minutes, below, below + dollars, color=colour, alpha=0.35, linewidth=0, label=label)
            below = below + dollars
    axes.plot(minutes, below, color=SERIES[0], linewidth=1.2)
    axes.set(xlabel="minutes", ylabel="dollars so far", ylim=(0, None))
    legend(axes)


def staleness_histogram(record: RunRecord) -> dict[int, int]:
    """Versions of lag -> groups that were trained on with it, over the whole run."""
    counts: Counter[int] = Counter()
    for row in record.steps:
        for name, value in row.metrics.items():
            lag = name.removeprefix("staleness_")
            if lag != name and lag.isdecimal():
                counts[int(lag)] += int(value)
    return dict(sorted(counts.items()))


def fleet_speeds(record: RunRecord) -> dict[int, dict[str, float]]:
    """Version -> host -> sampled tokens that reached the trainer a second, over the steps that began from that version."""
    found: dict[int, dict[str, float]] = {}
    before = min([record.started_at, *(row.started_at - row.wait_seconds for row in record.steps)])
    for version in sorted({row.version for row in record.steps}):
        rows = [row for row in record.steps if row.version == version]
        if before < record.started_at <= min(row.started_at for row in rows):
            before = record.started_at  # what lies between is time in which a resumed run stood still
        done = max(row.started_at + row.train_seconds for row in rows)
        tokens: Counter[str] = Counter()
        for row in rows:
            tokens.update({host: share.sampled_tokens for host, share in row.hosts.items()})
        if done > before:
            found[version] = {host: count / (done - before) for host, count in tokens.items()}
            before = done
    return found


def _values(record: RunRecord, metric: str) -> list[float]:
    return [row.metrics.get(metric, float("nan")) for row in record.steps]


def _has(metric: str) -> Callable[[RunRecord], bool]:
    return lambda record: any(metric in row.metrics for row in record.steps)


def _smooth(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> list[float]:
    means: list[float] = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - _SMOOTH_STEPS) : end]
        window = window[np.isfinite(window)]
        means.append(float(window.mean()) if len(window) else float("nan"))
    return means


FIGURES: Final = (
    Drawn(
        "learning",
        "learning",
        "Held-out questions",
        "One sampled answer a question, about entities no training question asks about; bands are 95 % Wilson intervals.",
        lambda record: any(e.num_questions for e in record.evaluations),
        _learning,
    ),
    Drawn(
        "reward",
        "learning",
        "Reward and search rate while training",
        "Over all episodes of the groups a step trained on; empty searches are the share of calls that found nothing.",
        lambda record: bool(record.steps),
        _reward,
    ),
    Drawn(
        "distance",
        "learning",
        "Distance between sampler and trainer",
        "The sampler is an older version in int8; the gate drops tokens whose probability has moved too far.",
        lambda record: bool(record.steps),
        _distance,
    ),
    Drawn("entropy", "learning", "Entropy", "Of the policy, mean over the places where it sampled a token.", _has("entropy"), _entropy),
    Drawn(
        "staleness",
        "fleet",
        "Staleness over time",
        "Trainer version minus the version a group was sampled from.",
        lambda record: bool(record.steps),
        _staleness,
    ),
    Drawn(
        "staleness_histogram",
        "fleet",
        "Staleness, all groups",
        "How many groups were trained on at which lag.",
        lambda record: bool(staleness_histogram(record)),
        _staleness_histogram,
    ),
    Drawn(
        "fleet_speed",
        "fleet",
        "What the fleet brings",
        "Sampled tokens of the groups that reached the trainer, over all time between its steps.",
        lambda record: any(share.sampled_tokens for row in record.steps for share in row.hosts.values()),
        _fleet_speed,
    ),
    Drawn(
        "trainer_time",
        "fleet",
        "The trainer's time",
        "Of each version: its optimizer steps, publishing the version after it, and waits for groups. Held up is what else lay between "
        "the last step and HEAD naming the version: a pause, an outage, the wait for HEAD's turn or for an anchor.",
        lambda record: bool(record.steps),
        _trainer_time,
    ),
    Drawn(
        "busy",
        "fleet",
        "How busy both sides are",
        "Share of its time that the trainer waits for groups; as Macs say, the share of their places for episodes that are filled.",
        lambda record: any(_has(metric)(record) for metric in _SHARES),
        _busy,
    ),
    Drawn(
        "bytes",
        "bytes",
        "What a version weighs",
        "Bytes a Mac pulls for each version, against an anchor.",
        lambda record: any(row.delta_bytes for row in record.versions),
        _bytes,
    ),
    Drawn(
        "changed",
        "bytes",
        "What a version changes",
        "Share of the int8 codes that differ from the version before.",
        lambda record: any(row.delta_bytes for row in record.versions),
        _changed,
    ),
    Drawn(
        "bytes_by_kind",
        "bytes",
        "What lies in the bucket",
        "All objects of the run, by kind.",
        lambda record: any(record.bucket_bytes.values()),
        _bytes_by_kind,
    ),
    Drawn(
        "cost",
        "bytes",
        "Cost so far",
        "GPU hours and requests at the prices of the run's settings.",
        lambda record: bool(record.steps) and record.seconds > 0,
        _cost,
    ),
)
