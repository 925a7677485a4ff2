"""A sweep at full size on this machine's CPU: `python -m benchmarks.rehearsal --json`.

A synthetic LFM2.5-8B-A1B, 9.0 GB with the real shapes, is published through the real S3 server by a process of its own. A
second process joins with the bucket alone, as a Mac of 16 GB would: it loads the anchor in place, takes a delta, plans its
memory by what macOS recommends for such a Mac, and decodes the widest sweep that this allows, with pages for episodes of
full length, for as long as it is told to. Activations are fp32, in which this CPU is fastest; keys and values are bf16.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.pulse_masters import LFM25, full_layout
from benchmarks.servers import CREDENTIALS, bucket_store
from environments.base import Limits, Outcome, Question, Reply
from stoa.bucket.head import read_head
from stoa.bucket.run_document import read_run
from stoa.bucket.store import Store
from stoa.config.host import MacHost
from stoa.config.run import Bucket, Rollout
from stoa.contracts.errors import DiskFullError
from stoa.weights.sync import Puller

if TYPE_CHECKING:
    from worker_mac.player import Player
    from worker_mac.sweep import Casting
    from worker_mac.versions import Served
    from worker_mac.weights import LiveWeights

NEEDED_DISK_BYTES: Final = 22_000_000_000
MEMORY_BYTES: Final = 11_453_000_000
"""What macOS recommends for the GPU of a Mac of 16 GB."""
MOST_BYTES: Final = 11_500_000_000
RUN: Final = "rehearsal"
PROMPT_TOKENS: Final = 24
LONGEST_TOKENS: Final = 4096
GROUP_SIZE: Final = 8
MODEL: Final[dict[str, Any]] = {
    **LFM25, "conv_bias": False, "norm_eps": 1e-5, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
}  # fmt: skip


class Endless:
    """Questions whose episodes go on until their last token: a sweep of them ends when time is up."""

    name = "endless"
    limits = Limits(1, LONGEST_TOKENS, LONGEST_TOKENS)
    stop_ids: frozenset[int] = frozenset()

    def question_ids(self, split: str) -> Sequence[str]:
        """As many as a sweep may have groups."""
        return [str(number) for number in range(64)]

    def question(self, question_id: str) -> Question:
        """Of no words."""
        return Question(question_id, "", (), "train", "")

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """Random ids."""
        return tuple(np.random.default_rng(int(question_id)).integers(0, int(MODEL["vocab_size"]), PROMPT_TOKENS).tolist())

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """One turn is all."""
        return Reply((), True, "answered")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """Nothing is learned here."""
        return Outcome(0.0, {})


def rehearse(folder: Path | None, seconds: float) -> dict[str, Any]:
    """Both processes, in a temporary folder under `folder`. Raises DiskFullError if there is no room."""
    free = shutil.disk_usage(folder or tempfile.gettempdir()).free
    if free < NEEDED_DISK_BYTES:
        raise DiskFullError(
            f"the rehearsal needs {NEEDED_DISK_BYTES} bytes of disk, there are {free}", hint="give another place by --folder"
        )
    with tempfile.TemporaryDirectory(dir=folder) as scratch, bucket_store(Path(scratch)) as store:
        place = [store.settings.endpoint, store.settings.name, scratch]
        published = _process(["benchmarks.pulse_full", "publish", *place, "1"])
        return {**_process(["benchmarks.rehearsal", "--sweep", *place, str(seconds)]), "delta_bytes": published["delta_bytes"]}


def _process(arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


@dataclass(frozen=True, slots=True)
class _Joined:
    """Weights of the second version in MLX's memory, and what bringing them there took."""

    live: "LiveWeights"
    state_id: str
    times: dict[str, float]
    num_changes: int


def _join(store: Store, folder: Path) -> _Joined:
    """Load the anchor in place, then take the delta."""
    from worker_mac.weights import LiveWeights

    document = read_run(store, RUN)
    head, _ = read_head(store, RUN, document.public_key)
    puller = Puller(store, document, folder)
    clock = [time.monotonic()]
    live = LiveWeights(puller.layout)
    state = puller.build(head, 0, into=live.state)
    clock.append(time.monotonic())
    staged = puller.stage(head, 0, str(state.verified_id))
    clock.append(time.monotonic())
    live.settle()
    puller.apply(staged, live.state)
    clock.append(time.monotonic())
    puller.verify(staged, live.state)
    clock.append(time.monotonic())
    names = ("load_seconds", "stage_seconds", "apply_pause_seconds", "rescan_seconds")
    times = {name: after - before for name, (before, after) in zip(names, pairwise(clock), strict=True)}
    return _Joined(live, staged.state_id, times, sum(hop.ref.num_changed for hop, _ in staged.deltas))


def _small_mac(folder: Path) -> "Player":
    """A player on a Mac of 16 GB, as its owner allows by default."""
    from worker_mac.guest import Guest
    from worker_mac.model_config import read_model_config
    from worker_mac.player import Player

    class SmallMac(Player):
        def _memory_bytes(self) -> int | None:
            return int(MEMORY_BYTES * MacHost().memory_fraction)

    folder.mkdir()
    rollout, guest = Rollout(group_size=GROUP_SIZE), Guest(MacHost())
    return SmallMac(Endless(), rollout, full_layout(), read_model_config(MODEL), guest, folder=folder, state_folder=folder)


def _decode(player: "Player", served: "Served", castings: Sequence["Casting"], seconds: float) -> list[tuple[float, int]]:
    """Play until time is up and something was sampled; (when, tokens sampled so far) after each step."""
    steps: list[tuple[float, int]] = []
    until = time.monotonic() + seconds

    def on_step(done: int, tokens: int) -> None:
        steps.append((time.monotonic(), tokens))
        print(f"{tokens} tokens after {len(steps)} steps, peak {_peak_bytes() / 1e9:.2f} GB", file=sys.stderr, flush=True)

    def should_stop() -> bool:
        return time.monotonic() > until and len(steps) > 1 and steps[-2][1] > 0

    # There is no watchdog here, and every step is slow: all rows go into each.
    player._pace.tokens = len(castings) + 64
    player._pace.saw = lambda num_tokens, seconds: None
    player.play(served, castings, lambda group, ended: None, should_stop=should_stop, on_step=on_step)
    return steps


def _sweep(store: Store, scratch: Path, seconds: float) -> dict[str, Any]:
    import mlx.core as mx

    from worker_mac.memory import CACHE_BYTES
    from worker_mac.model import Model
    from worker_mac.model_config import read_model_config
    from worker_mac.sampler import seed_of
    from worker_mac.sweep import Casting
    from worker_mac.versions import Served

    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(CACHE_BYTES)
    idle_bytes = _resident_bytes()
    joined = _join(store, scratch / "mac")
    model = Model(read_model_config(MODEL), joined.live.arrays, dtype=mx.float32)
    player = _small_mac(scratch / "state")
    groups = player.groups
    castings = [Casting(group, str(group), seed_of(group, one)) for group in range(groups) for one in range(GROUP_SIZE)]
    plan = player._plan(castings)
    steps = _decode(player, Served(1, joined.state_id, model, joined.live), castings, seconds)
    peak = _peak_bytes()
    return {
        "peak_resident_bytes": peak,
        "fits": peak <= MOST_BYTES,
        "planned_bytes": plan.total_bytes,
        "measured_bytes": peak - idle_bytes,
        "measured_over_planned": (peak - idle_bytes) / plan.total_bytes,
        "mlx_peak_bytes": mx.get_peak_memory(),
        "idle_bytes": idle_bytes,
        "groups": groups,
        "episodes": len(castings),
        "pages": plan.num_pages,
        "longest_tokens": LONGEST_TOKENS,
        "sampled_tokens": steps[-1][1],
        "steps": len(steps),
        "weights_bytes": plan.weights_bytes,
        "pool_bytes": plan.pool_bytes,
        "step_bytes": plan.step_bytes,
        "changes": joined.num_changes,
        "tokens_per_second": _rate(steps),
        **joined.times,
        "conditions": {"memory_bytes": MEMORY_BYTES, "memory_fraction": MacHost().memory_fraction, "activations": "fp32", "pages": "bf16"},
    }


def _rate(steps: list[tuple[float, int]]) -> float:
    first = next((step for step in steps if step[1]), None)
    return (steps[-1][1] - first[1]) / (steps[-1][0] - first[0]) if first is not None and steps[-1][1] > first[1] else 0.0


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal", description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to decode")
    parser.add_argument("--folder", type=Path, help="where 22 GB fit")
    parser.add_argument("--sweep", nargs=4, metavar=("ENDPOINT", "BUCKET", "FOLDER", "SECONDS"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.sweep:
        endpoint, name, scratch, seconds = asked.sweep
        store = Store(Bucket(endpoint=endpoint, name=name, head_interval_seconds=0.0), CREDENTIALS, patience_seconds=600.0)
        found = _sweep(store, Path(scratch), float(seconds))
    else:
        found = rehearse(asked.folder, asked.seconds)
    if not asked.json and not asked.sweep:
        for key, value in found.items():
            print(f"{key:28} {value}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
