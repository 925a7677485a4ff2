"""What `stoa run` says first: a promise of what was started, what it will send, when it ends, where it writes, how to stop it. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli import say
from stoa.config.run import RunConfig, Stop
from stoa.weights.layout import Layout

CHANGED_FRACTION: Final = 0.005
"""Share of the codes that a version of an 8 B model is expected to change (docs/concepts: PULSE)."""
BITS_A_CHANGE: Final = 10.3


@dataclass(frozen=True, slots=True)
class Promise:
    """What the first screen needs beside the settings. `macs`: hosts that are here already."""

    file: Path | None
    file_run: str
    """Name of the run that `file` itself gives: workers read it there."""
    macs: tuple[str, ...]
    folder: Path
    resume: bool = False
    detach: bool = False


def first_screen(settings: RunConfig, layout: Layout, promise: Promise) -> tuple[str, ...]:
    """Its lines."""
    run = settings.run
    named = f" {promise.file}" if promise.file is not None else ""
    report = f"`stoa report {run}`" if promise.detach else f"{promise.folder / 'report.html'} at the end; metrics.jsonl beside it meanwhile"
    lines = [
        f"run {run} {'goes on' if promise.resume else 'is started'}: {settings.model} on {settings.environment.name}",
        f"Macs      {macs_line(promise.macs)}",
        f"control   Temporal at {settings.temporal.address}, workflow run-{run}",
        f"bytes     {settings.bucket.endpoint}/{settings.bucket.name}; {version_line(settings, layout)}",
        f"ends at   {budget_line(settings.stop)}",
        f"needs     `python -m trainer_gpu.worker{named}` and one or more `python -m worker_mac.worker{named}`",
    ]
    if promise.file_run != run:
        lines.append(f'          with a file that says run = "{run}": workers take the name from theirs')
    return (
        *lines,
        "logs      of each worker: its own standard error; all in one file for a helper: `stoa bundle`",
        f"report    {report}",
        f"follow    `stoa live {run}`, or `stoa status {run} --follow`; Macs: `stoa fleet {run}`",
        f"stop      `stoa stop {run}` ends it after its step, `stoa pause {run}` holds it; Ctrl-C only ends this following",
    )


def macs_line(macs: tuple[str, ...]) -> str:
    """Which Macs are here."""
    if not macs:
        return "none yet: they join by themselves once they find the run"
    shown = ", ".join(macs[:8]) + (f" and {len(macs) - 8} more" if len(macs) > 8 else "")
    return f"{len(macs)}: {shown}"


def version_line(settings: RunConfig, layout: Layout) -> str:
    """Bytes that a version is expected to take, and how often all of the weights go along."""
    delta = layout.num_codes * CHANGED_FRACTION * BITS_A_CHANGE / 8
    often = settings.publish.anchor_every_versions
    return (
        f"about {say.bytes_text(delta)} a version if it changes {CHANGED_FRACTION:.1%} of the codes, "
        f"and {say.bytes_text(layout.num_bytes)} of full weights every {say.counted(often, 'version')}"
    )


def budget_line(stop: Stop) -> str:
    """When it ends by itself."""
    limits = [
        f"{stop.max_steps} steps" if stop.max_steps else "",
        f"version {stop.max_versions}" if stop.max_versions else "",
        say.counted(stop.max_minutes, "minute") if stop.max_minutes else "",
        f"pass@1 of {stop.target_pass_at_1:g}" if stop.target_pass_at_1 else "",
        say.counted(stop.max_gpu_hours, "GPU hour") if stop.max_gpu_hours else "",
        say.counted(stop.max_dollars, "dollar") if stop.max_dollars else "",
        "an alarm that pauses" if stop.on_alarm else "",
    ]
    return " or ".join(filter(None, limits)) or "`stoa stop`: no limit is set"
