"""What `stoa run` says first: a promise of what was started, what it will send, when it ends, where it writes, how to stop it. Pure."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli import say
from stoa.config.run import RunConfig, Stop
from stoa.weights.layout import Layout

CHANGED_FRACTION: Final = 0.005
"""Share of the codes that a version of an 8 B model is expected to change (docs/concepts: PULSE)."""
RAW_FINER: Final = 4
"""A bf16 value moves this many times as often as a code: its step is 1/256 to 1/128 of itself, that of a code about 1/40 of the
spread of its 64 weights."""
CONTAINER_BYTES: Final = 800
"""Header, metadata and the codec's own beginnings of a delta: 690 to 950 in the demo."""


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
        "logs      of each worker: its standard error, and events.log in its state folder; `stoa bundle` packs them for a helper",
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
    delta = delta_bytes(layout, CHANGED_FRACTION)
    often = settings.publish.anchor_every_versions
    return (
        f"about {say.bytes_text(delta)} a version if it changes {CHANGED_FRACTION:.1%} of the codes, "
        f"and an anchor, {say.bytes_text(layout.num_bytes)} of weights and headers, every {say.counted(often, 'version')}"
    )


def delta_bytes(layout: Layout, changed: float) -> float:
    """Bytes a delta is expected to take when the share `changed` of the codes moves, in (0, 1).

    Codes cost Shannon's bound (places: H(p) bits a code; a sign: one bit a change), as the codec reaches to about 1 %. fp32 raw values
    move at every step; of bf16 ones a share does, and its places cost bits as well. With a small model raw values are most of it.
    """
    codes = layout.num_codes * (_entropy(changed) + changed)
    wide = layout.raw_dtype == "float32"
    moved = 1.0 if wide else min(1.0, RAW_FINER * changed)
    raw = layout.num_raw * (moved * (32 if wide else 16) + _entropy(moved))
    return (codes + raw) / 8 + CONTAINER_BYTES


def _entropy(share: float) -> float:
    """Bits a place costs of which this share is chosen."""
    return 0.0 if share in (0.0, 1.0) else -share * math.log2(share) - (1 - share) * math.log2(1 - share)


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
