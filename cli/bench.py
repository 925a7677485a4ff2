"""Runs the measuring of this Mac in a process of its own and puts its numbers into words.

What is measured is `worker_mac/bench.py`'s; this process never loads MLX.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cli.doctor.bucket import measure_line
from cli.doctor.machine import memory_plan, our_bytes
from cli.doctor.open import open_scene, scene_of
from cli.doctor.scene import Scene
from cli.say import bytes_text, counted, talk
from stoa.bucket.head import read_head
from stoa.bucket.steps import lineage
from stoa.config.load import state_folder
from stoa.contracts.errors import ModelMissingError, StoaError, UsageError
from worker_mac.identity import lock_holder, locked_error
from worker_mac.invited import INVITE_FILE

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
    update: dict[str, float]
    """What `worker_mac.bench_update.Update` holds."""
    watts: float | None = None
    line: tuple[float, float | None] | None = None
    """Bytes a second down from the run's bucket and up to it; none that was not measured."""
    run_tokens_per_second: float | None = None
    """Of the run's newest step, all Macs together."""


def measure(file: Path | None, groups: int, state: Path | None) -> Rates | None:
    """Measure; None if it failed, which it has said by itself. Raises UsageError for what cannot be measured."""
    scene = open_scene(file, "mac", state)
    if scene.model_config is None or scene.layout is None:
        raise ModelMissingError(
            f"{scene.config.model}: its config.json is not here", hint="name a configuration whose model is, or join first"
        )
    plan = memory_plan(scene, MOST_GROUPS)
    if plan is not None and plan.weights_bytes + plan.step_bytes > our_bytes(scene):
        raise UsageError(
            f"weights of {bytes_text(plan.weights_bytes)} do not fit the {bytes_text(our_bytes(scene))} that may be ours here",
            hint="use a Mac with more memory, or wire several together",
        )
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
    except subprocess.TimeoutExpired:
        raise UsageError(f"measuring took longer than {LIMIT_SECONDS:.0f} s", hint="measure fewer groups with --groups") from None
    finally:
        config.unlink()
    if done.returncode:
        return None
    invited = file is None and (scene.folder / INVITE_FILE).is_file()
    return read(done.stdout, **_of_run(scene if invited else scene_of(scene.config, "all", scene.folder)) if invited or file else {})


def _of_run(scene: Scene) -> dict[str, Any]:
    """What this machine's line and the run itself tell; nothing where the bucket does not answer, or has no such run."""
    found: dict[str, Any] = {}
    try:
        found["line"] = measure_line(scene)
        if scene.store is not None and scene.run is not None:
            head, _ = read_head(scene.store, scene.run.run, scene.run.public_key)
            newest = next(lineage(scene.store, head), None)
            found["run_tokens_per_second"] = newest.metrics.get("fleet_tokens_per_second") if newest is not None else None
    except StoaError as problem:
        talk(f"the run's bucket: {problem.message}")
    return found


def read(text: str, *, line: tuple[float, float | None] | None = None, run_tokens_per_second: float | None = None) -> Rates:
    """The line that the measuring process prints, and what was found beside it."""
    tree = json.loads(text)
    rates = {int(width): float(rate) for width, rate in tree["tokens_per_second"].items()}
    down, up = line or (None, None)
    beside = {"down_bytes_per_second": down, "up_bytes_per_second": up, "run_tokens_per_second": run_tokens_per_second}
    return Rates(
        json.dumps({**tree, **beside}), rates, tree["knee_groups"], tree["group_size"], tree["step_seconds"], tree["peak_bytes"],
        tree["device"], tree["update"], tree["watts"], line, run_tokens_per_second,
    )  # fmt: skip


def sentences(rates: Rates) -> Iterator[str]:
    """What a person reads."""
    at_knee, best = rates.tokens_per_second[rates.knee_groups], max(rates.tokens_per_second.values())
    groups = counted(rates.knee_groups, "group")
    yield f"knee        {groups} of {rates.group_size}: {at_knee:.0f} tokens/s, {at_knee / best:.0%} of the best"
    yield f"a step      {rates.step_seconds * 1e3:.0f} ms on {rates.device}; at most {bytes_text(rates.peak_bytes)} in use"
    update = rates.update
    yield (
        f"an update   of {update['num_changed']:.0f} codes, {bytes_text(update['num_bytes'])}: "
        f"encoded in {update['encode_seconds']:.2f} s, "
        f"applied in {update['apply_seconds']:.2f} s, checked in {update['rescan_seconds']:.2f} s beside decoding"
    )
    if rates.watts is None:
        yield "power       not told: `macmon` tells it where it is installed, `powermetrics` tells root alone"
    else:
        yield f"power       {rates.watts:.0f} W at the knee: {at_knee / rates.watts:.1f} tokens a joule"
    if rates.line is None:
        yield "line        not measured: name the configuration of a run, or join first"
    else:
        down, up = rates.line
        told = "up not measured: this key writes nothing without a ticket" if up is None else f"up {bytes_text(up)}/s"
        yield f"line        down {bytes_text(down)}/s, {told}; such an update comes in {update['num_bytes'] / down:.1f} s"
    hourly = at_knee * 3600 / (EPISODE_TOKENS * rates.group_size)
    more = f"; {at_knee / rates.run_tokens_per_second:.0%} of what the run's Macs sample now" if rates.run_tokens_per_second else ""
    yield f"it adds     about {hourly:.0f} groups an hour of {EPISODE_TOKENS} sampled tokens an episode, while it plays{more}"
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
