"""How many tokens a second this Mac samples at each width, and from which width on more groups hardly help.

    python -m worker_mac.bench CONFIG.json --state DIR --groups 16 --group-size 8     prints `Measured` as JSON

Weights are random ones of the model's shapes: speed depends on shapes alone, but for how evenly experts are chosen, which
random weights do more evenly than trained ones. The knee is kept in the state folder, where the worker looks for it:

    knee.json   {"format": 1, "model": <layout_id>, "knee_groups": N, "tokens_per_second": {"1": 51.2, ...}, "measured_at": <Unix s>}
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np

from environments.base import Limits, Outcome, Question, Reply, Split
from stoa.config.host import MacHost
from stoa.config.load import load_mac_host
from stoa.config.run import Rollout
from stoa.contracts.errors import StoaError, UsageError
from stoa.telemetry import log as telemetry
from stoa.weights.grid import bf16_bits
from stoa.weights.layout import Layout, RawType, layout_of
from worker_mac import selftest
from worker_mac.bench_update import Update, measure_update
from worker_mac.ending import leave
from worker_mac.guest import Guest
from worker_mac.identity import Identity
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.player import Player
from worker_mac.senses import read_battery
from worker_mac.sweep import Casting
from worker_mac.versions import Served
from worker_mac.watts import Meter, metered, watts_here
from worker_mac.weights import LiveWeights
from worker_mac.width import KNEE_FILE, KNEE_FORMAT

WIDTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""In groups."""
ENOUGH: Final = 0.9
"""The knee is the narrowest width with this share of the best rate."""
PROMPT_TOKENS: Final = 512
"""Of each group, once for its episodes."""
NUM_STEPS: Final = 24
NUM_WARM: Final = 2
_BLOCK_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Patience:
    """How long measuring may take."""

    width_seconds: float = 8.0
    """A width is measured for `NUM_STEPS`, or this long from where all its episodes decode."""
    prompt_seconds: float = 60.0
    """In which a width has to have read its prompts."""
    most_seconds: float = 600.0
    """No wider one is begun after so long."""


PATIENCE: Final = Patience()


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates by width in groups; what one step took at the knee; the most memory that was in use; what an update takes."""

    model: str
    group_size: int
    tokens_per_second: dict[int, float]
    knee_groups: int
    step_seconds: float
    peak_bytes: int
    fingerprint: str
    device: str
    update: Update
    watts: float | None = None
    """Of this machine while it sampled at the knee; none where nobody tells."""


def knee(tokens_per_second: Mapping[int, float], enough: float = ENOUGH) -> int:
    """The narrowest width, in groups, that has at least `enough` of the best rate."""
    best = max(tokens_per_second.values())
    return min(width for width, rate in tokens_per_second.items() if rate >= enough * best)


def random_weights(layout: Layout) -> LiveWeights:
    """Weights of a layout in MLX's memory, random and harmless: written in place, so that they are there once."""
    live, numbers = LiveWeights(layout), np.random.default_rng(0)
    block = numbers.integers(0, 256, _BLOCK_BYTES, dtype=np.uint8)
    for spec in layout.tensors:
        if spec.kind == "int8":
            flat = live.state.arrays[spec.name].reshape(-1)
            for start in range(0, flat.size, _BLOCK_BYTES):
                piece = flat[start : start + _BLOCK_BYTES]
                piece[:] = block[: piece.size]
            live.state.arrays[spec.scales][...] = bf16_bits(np.full(1, 2.0**-10, np.float32))[0]
            live.state.arrays[spec.biases][...] = bf16_bits(np.full(1, -127.5 * 2.0**-10, np.float32))[0]
        else:
            values = numbers.normal(1.0 if "norm" in spec.name else 0.0, 0.05, spec.shape).astype(np.float32)
            live.state.arrays[spec.name][...] = values if spec.dtype == "float32" else bf16_bits(values)
    return live


class Chatter:
    """A task without tools: each question has a prompt of its own, each episode one turn of the same length."""

    name = "chatter"
    limits = Limits(1, NUM_STEPS, PROMPT_TOKENS + NUM_STEPS)
    stop_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def question_ids(self, split: Split) -> Sequence[str]:
        """As many as the widest sweep has groups."""
        return [str(number) for number in range(WIDTHS[-1])]

    def question(self, question_id: str) -> Question:
        """Nobody asks."""
        return Question(question_id, "", (), "train", "")

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """Random ids."""
        return tuple(np.random.default_rng(int(question_id)).integers(0, self._vocab_size, PROMPT_TOKENS).tolist())

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """One turn is all."""
        return Reply((), True, "answered")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """Nothing is learned here."""
        return Outcome(0.0, {})


def measure(player: Player, served: Served, num_groups: int, group_size: int, patience: Patience = PATIENCE) -> tuple[float, float]:
    """Tokens a second of `num_groups` groups in one batch, and the seconds of one step in which all of them decode.

    Raises UsageError if memory does not hold them at once, or their prompts take too long.
    """
    castings = [Casting(group, str(group), group * group_size + one) for group in range(num_groups) for one in range(group_size)]
    num_rows, took = len(castings), list[float]()
    began, before = time.monotonic(), (time.perf_counter(), 0)

    def on_step(done: int, tokens: int) -> None:
        nonlocal before
        now = time.perf_counter()
        if tokens - before[1] == num_rows:
            took.append(now - before[0])
        before = now, tokens

    def is_late() -> bool:
        return not took and time.monotonic() - began > patience.prompt_seconds

    def should_stop() -> bool:
        return is_late() or (len(took) > NUM_WARM and sum(took) > patience.width_seconds)

    player.play(served, castings, lambda group, episodes: None, should_stop=should_stop, on_step=on_step)
    if not took:
        late = f"{num_groups} groups have not read their prompts after {patience.prompt_seconds:.0f} s"
        full = f"{num_groups} groups do not fit this Mac's memory at once"
        # What has no room is late, too: its episodes are played one after another.
        raise UsageError(late if is_late() and player.holds(castings) else full, hint="name fewer with --groups")
    step_seconds = float(np.median(took[NUM_WARM:] or took))
    return num_rows / step_seconds, step_seconds


def bench(
    config: Mapping[str, object],
    raw_dtype: RawType,
    widths: Sequence[int],
    group_size: int,
    *,
    folder: Path,
    allowed: MacHost,
    meter: Meter = watts_here,
    patience: Patience = PATIENCE,
) -> Measured:
    """Measure all widths, narrowest first, in an empty `folder`; then an update of the weights.

    A width that memory does not hold, or that is too slow to measure, ends it: what was measured before counts. Raises
    WeightsError if this MLX computes wrongly, UsageError if not even the narrowest can be measured.
    """
    verdict = selftest.run()
    fingerprint = selftest.require(verdict)
    layout = layout_of(config, raw_dtype)
    live, model_config = random_weights(layout), read_model_config(config)
    served = Served(0, "bench", Model(model_config, live.arrays), live)
    player = Player(
        Chatter(model_config.vocab_size), Rollout(groups=max(widths), group_size=group_size), layout, model_config, Guest(allowed),
        folder=folder, state_folder=folder,
    )  # fmt: skip
    mx.reset_peak_memory()
    rates: dict[int, float] = {}
    steps: dict[int, float] = {}
    draws: dict[int, float | None] = {}
    began = time.monotonic()
    for width in widths:
        if rates and time.monotonic() - began > patience.most_seconds:
            sys.stderr.write(f"{width:3} groups  not measured: it takes too long here\n")
            break
        try:
            with metered(meter) as draw:
                rates[width], steps[width] = measure(player, served, width, group_size, patience)
        except UsageError as fault:
            if not rates:
                raise
            sys.stderr.write(f"{width:3} groups  not measured: {fault.message}\n")
            break
        draws[width] = draw.watts
        sys.stderr.write(f"{width:3} groups  {rates[width]:8.1f} tokens/s  {steps[width] * 1e3:8.1f} ms a step\n")
        player.drop_pool()
    found = knee(rates)
    peak_bytes = mx.get_peak_memory()
    live.settle()
    update = measure_update(live.state)
    sys.stderr.write(
        f"a delta of {update.num_bytes / 1e6:.1f} MB: encoded in {update.encode_seconds:.2f} s, applied in {update.apply_seconds:.2f} s\n"
    )
    return Measured(layout.layout_id, group_size, rates, found, steps[found], peak_bytes, fingerprint, verdict.device, update, draws[found])


def keep(folder: Path, measured: Measured, now: float | None = None) -> Path:
    """Write knee.json for the worker; returns its path."""
    path = folder / KNEE_FILE
    document = {
        "format": KNEE_FORMAT,
        "model": measured.model,
        "knee_groups": measured.knee_groups,
        "tokens_per_second": {str(width): round(rate, 2) for width, rate in measured.tokens_per_second.items()},
        "measured_at": time.time() if now is None else now,
    }
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document, sort_keys=True) + "\n", "ascii")
    part.replace(path)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, keep and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker_mac.bench")
    parser.add_argument("config", type=Path, help="config.json of the model")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--groups", type=int, required=True, help="widest batch to try")
    parser.add_argument("--group-size", type=int, required=True)
    asked = parser.parse_args(arguments)
    try:
        identity = Identity(asked.state)  # no worker beside it: two programs would measure each other
        try:
            config = json.loads(asked.config.read_text("utf-8"))
            widths = [width for width in WIDTHS if width <= asked.groups]
            own = asked.state / "mac.toml"
            allowed = load_mac_host(own if own.is_file() else None)
            if read_battery()[0] is False:
                sys.stderr.write("on battery: the same on mains may be faster, and the knee another\n")
            with tempfile.TemporaryDirectory(dir=asked.state) as folder:
                measured = bench(config, asked.dtype, widths, asked.group_size, folder=Path(folder), allowed=allowed)
            keep(asked.state, measured)
        finally:
            identity.close()
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:  # who started it says that it was stopped; an earlier knee stays
        return 3
    sys.stdout.write(json.dumps(asdict(measured)) + "\n")
    return 0


if __name__ == "__main__":
    telemetry.configure()  # stdout is for the result
    leave(main())
