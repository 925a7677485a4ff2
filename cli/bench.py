"""Runs the measuring of this Mac in a process of its own and puts its numbers into words.

What is measured is `worker_mac/bench.py`'s; this process never loads MLX.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli.doctor.machine import memory_plan
from cli.doctor.open import open_scene
from cli.say import bytes_text
from stoa.config.load import state_folder
from stoa.contracts.errors import ModelMissingError, UsageError
from worker_mac.identity import lock_holder, locked_error

LIMIT_SECONDS: Final = 900.0
MOST_GROUPS: Final = 16
EPISODE_TOKENS: Final = 1000
"""An episode of so many sampled tokens, to say what a rate means."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the measuring process printed."""

    json: str
    tokens_per_second: dict[int, float]
    knee_groups: int
    group_size: int
    step_seconds: float
    peak_bytes: int
    device: str


def measure(file: Path | None, groups: int, state: Path | None) -> Rates | None:
    """Measure; None if it failed, which it has said by itself. Raises UsageError for what cannot be measured."""
    scene = open_scene(file, "mac", state)
    if scene.model_config is None or scene.layout is None:
        raise ModelMissingError(
            f"{scene.config.model}: its config.json is not here", hint="name a configuration whose model is, or join first"
        )
    plan = memory_plan(scene, MOST_GROUPS)
    widest = groups or (plan.groups if plan is not None else 1)
    if not 1 <= widest <= 64:
        raise UsageError(f"--groups {groups}: from 1 to 64")
    scene.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = scene.folder / "bench.json"
    config.write_text(json.dumps(scene.model_config), "utf-8")
    command = [
        sys.executable, "-m", "worker_mac.bench", str(config), "--state", str(scene.folder), "--dtype", scene.config.learning.dtype,
        "--groups", str(widest), "--group-size", str(scene.config.rollout.group_size),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False)
    finally:
        config.unlink()
    return read(done.stdout) if done.returncode == 0 else None


def read(text: str) -> Rates:
    """The line that the measuring process prints."""
    tree = json.loads(text)
    rates = {int(width): float(rate) for width, rate in tree["tokens_per_second"].items()}
    return Rates(text.strip(), rates, tree["knee_groups"], tree["group_size"], tree["step_seconds"], tree["peak_bytes"], tree["device"])


def sentences(rates: Rates) -> Iterator[str]:
    """What a person reads."""
    at_knee, best = rates.tokens_per_second[rates.knee_groups], max(rates.tokens_per_second.values())
    yield f"knee        {rates.knee_groups} groups of {rates.group_size}: {at_knee:.0f} tokens/s, {at_knee / best:.0%} of the best"
    yield f"a step      {rates.step_seconds * 1e3:.0f} ms on {rates.device}; at most {bytes_text(rates.peak_bytes)} in use"
    hourly = at_knee * 3600 / (EPISODE_TOKENS * rates.group_size)
    yield f"it adds     about {hourly:.0f} groups an hour of {EPISODE_TOKENS} sampled tokens an episode, while it plays"
    yield "weights     random ones of the model's shapes; trained ones choose experts less evenly"


def measure_kernels(state: Path | None) -> str | None:
    """The report of `metal.bench` as JSON; None if it failed, which it has said by itself. Raises WorkerLockedError."""
    folder = state or state_folder("mac")
    holder = lock_holder(folder)
    if holder is not None:
        raise locked_error(folder, holder)
    command = [sys.executable, "-m", "metal.bench"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def kernel_lines(report: str) -> Iterator[str]:
    """What a person reads of the kernels: milliseconds of one decode step, measured and worked out."""
    tree = json.loads(report)
    what = "measured" if tree["measured"] else "nothing measured, there is no Metal back end; metal/README.md has the limits by chip"
    yield f"{tree['chip'] or 'no Apple chip'}: {what}"
    yield "ms a step of 64 rows of 4,096 tokens, all layers of LFM2.5-8B-A1B; limits are worked out from the chip's public figures"
    yield f"{'':<11}{'our kernel':>12}{'MLX':>10}{'our limit':>12}{'MLX limit':>12}"
    for row in tree["rows"]:
        cells = [row[key] for key in ("kernel_seconds", "plain_seconds", "roofline_seconds", "stock_roofline_seconds")]
        ours, plain, limit, stock = ("-" if cell is None else f"{cell * 1e3:.2f}" for cell in cells)
        yield f"{row['kernel']:<11}{ours:>12}{plain:>10}{limit:>12}{stock:>12}"
    for one in tree["verdicts"]:
        if tree["measured"] and one["reason"]:
            yield f"{one['kernel']} is not used: {one['reason']}"
