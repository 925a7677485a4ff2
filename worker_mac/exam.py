"""Plays an examination of a checkpoint on this Mac: `python -m worker_mac.exam PLAN`, where PLAN is a file of `ExamTask`.

No run, no Temporal: parts are claimed from the bucket until all are answered. What plays is this Mac, or the wired set that
`cluster/sitting.py` makes; a part's answer does not depend on it.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import mlx.core as mx
import structlog

from environments import known
from environments.base import Environment
from stoa.bucket import keys
from stoa.bucket.exams import EXAM_FORMAT, ExamPlan, ExamTask, answered, claim, open_exam, read_task
from stoa.bucket.store import Store
from stoa.config.host import MacHost
from stoa.config.load import bucket_credentials, load_mac_host, state_base
from stoa.config.run import Bucket, Rollout
from stoa.contracts.errors import CheckpointError, ObjectExistsError, StoaError, UsageError
from stoa.rollouts.records import Episode, Fingerprint, Group, Timings
from stoa.rollouts.shard import encode_group
from stoa.telemetry import log as telemetry
from stoa.weights.layout import Layout
from worker_mac import selftest
from worker_mac.checkpoint import bring_in, read_config
from worker_mac.ending import leave
from worker_mac.families import engine_config, engine_layout, refuse_short_window
from worker_mac.guest import Guest
from worker_mac.identity import project_version
from worker_mac.memory import SPARE_BYTES, Play, model_bytes
from worker_mac.model import Model
from worker_mac.player import Player
from worker_mac.sampler import Sampling, seed_of
from worker_mac.sweep import exam_castings
from worker_mac.versions import Served
from worker_mac.weights import LiveWeights

POLL_SECONDS: Final = 1.0
TOLD: Final = "memory: "
"""Begins a line that is for the person who asked."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Means:
    """What an examination is played with. `live` is filled with the checkpoint; then `check()` raises if the whole computes wrongly."""

    live: LiveWeights
    model: Model
    player: Player
    check: Callable[[], None] = lambda: None


Make = Callable[[Layout, Mapping[str, object], Environment, Path], Means]
"""From a layout, its config.json, the task and a folder of its own."""


def alone(layout: Layout, model_config: Mapping[str, object], environment: Environment, scratch: Path) -> Means:
    """This Mac with nothing but itself, within what its owner lets be taken.

    Raises CheckpointError if weights and the least of pages do not fit it, ConfigError for a mac.toml that cannot be used.
    """
    config = engine_config(model_config)
    item = 4 if layout.raw_dtype == "float32" else 2
    whole = model_bytes(config, layout, item_bytes=item, activation_bytes=item)
    allowed, limit = share_allowed(state_base() / "mac"), None
    if mx.metal.is_available():
        limit = int(int(mx.device_info()["max_recommended_working_set_size"]) * allowed.memory_fraction)
    need = whole.weights_bytes + Play(1, environment.limits.max_episode_tokens).least_pages * whole.page_bytes + 3 * whole.slot_bytes
    tell_memory((f"weights take {_size(whole.weights_bytes)}{_of(limit)}",))
    if limit is not None and need + SPARE_BYTES > limit:
        raise CheckpointError(
            f"it takes {_size(need + SPARE_BYTES)} with the least of pages, this Mac may give {_size(limit)}",
            hint="wire this Mac to others: `stoa eval CHECKPOINT --hosts hosts.json`, or raise memory_fraction",
        )
    player = Player(environment, Rollout(), layout, config, Guest(allowed), folder=scratch, state_folder=scratch)
    live = LiveWeights(layout)
    return Means(live, Model(config, live.arrays), player)


def share_allowed(folder: Path) -> MacHost:
    """What the owner lets weights and pages take, as mac.toml in the folder says. A person asked, so it is played at any hour."""
    limits = folder / "mac.toml"
    return MacHost(memory_fraction=load_mac_host(limits).memory_fraction) if limits.is_file() else MacHost()


def tell_memory(lines: Sequence[str]) -> None:
    """Say, before anything is loaded, what it will take."""
    for line in lines:
        sys.stderr.write(f"{TOLD}{line}\n")
    sys.stderr.flush()


def told_of(where: str, held_bytes: int, limit: int | None) -> str:
    """A line for one Mac."""
    return f"{where}: weights of {_size(held_bytes)}{_of(limit)}"


def _of(limit: int | None) -> str:
    return "" if limit is None else f", of {_size(limit)} that may be taken"


def _size(num_bytes: int) -> str:
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


class Seat:
    """One Mac, or one wired set, in an examination."""

    def __init__(self, task: ExamTask, store: Store, scratch: Path, *, make: Make = alone) -> None:
        folder = Path(task.folder)
        config = read_config(folder)
        layout = engine_layout(config, task.dtype)
        self._environment: Environment = known.create(task.environment, task.settings, (folder / "tokenizer.json").read_bytes())
        refuse_short_window(config, self._environment.limits.max_episode_tokens)
        means = make(layout, config, self._environment, scratch)
        self.state_id = bring_in(folder, means.live.state)
        means.check()
        self._task, self._store, self._player = task, store, means.player
        self._served = Served(0, self.state_id, means.model, means.live)
        self._sampling = Sampling(*task.sampling)
        self.plan = ExamPlan(
            EXAM_FORMAT, task.exam, self.state_id, json.dumps([task.environment, task.settings], sort_keys=True), task.question_ids,
            task.num_samples, task.questions_a_part, task.seed, task.sampling,
        )  # fmt: skip

    def sit(self) -> int:
        """Claim and play until every part is answered, here or elsewhere; returns how many were played here."""
        open_exam(self._store, self.plan)
        num_played = 0
        while True:
            part = claim(self._store, self.plan, self._task.host, now=time.time(), expires_seconds=self._task.expires_seconds)
            if part is not None:
                self._play(part)
                num_played += 1
            elif len(answered(self._store, self.plan)) == self.plan.num_parts:
                return num_played
            else:
                time.sleep(POLL_SECONDS)

    def _play(self, part: int) -> None:
        task, began, started_at = self._task, time.monotonic(), time.time()
        # By question and sample alone: the result does not depend on who plays which part.
        seed = seed_of(task.seed, "exam")
        castings = exam_castings(self.plan.part(part), task.num_samples, seed)
        episodes: list[Episode] = []
        self._player.play(
            self._served, castings, lambda _, ended: episodes.extend(ended), should_stop=lambda: False, on_step=lambda done, tokens: None,
            sampling=self._sampling,
        )  # fmt: skip
        # Those of a wired set come in halves: a part is in the order of its questions whoever plays it.
        order = {question: number for number, question in enumerate(self.plan.part(part))}
        episodes.sort(key=lambda episode: order[episode.question_id])
        num_tokens = sum(len(episode.logprobs) for episode in episodes)
        timings = Timings(started_at, time.monotonic() - began, num_sampled_tokens=num_tokens)
        device = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
        group = Group(
            task.exam, task.host, 0, part % 100, "eval", "", 0, self.state_id, self._sampling.temperature, seed, tuple(episodes),
            Fingerprint(f"mlx {metadata.version('mlx')} {device}", project_version()), timings,
        )  # fmt: skip
        try:
            self._store.create(keys.exam_answer(task.exam, part), encode_group(group))
        except ObjectExistsError:
            _log.warning("part_answered_by_another", part=part)
        _log.info("part_played", part=part, num_episodes=len(episodes), seconds=timings.decode_seconds)


def main(arguments: Sequence[str] | None = None, *, make: Make = alone) -> int:
    """Play one task; returns the exit code."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    try:
        task = read_task(Path(path))
        selftest.require(selftest.run())
        bucket = Bucket.model_validate(task.bucket)
        store = Store(bucket, bucket_credentials(bucket), patience_seconds=60.0)
        with tempfile.TemporaryDirectory() as scratch:
            num_played = Seat(task, store, Path(scratch), make=make).sit()
        sys.stdout.write(json.dumps({"host": task.host, "num_parts": num_played}) + "\n")
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    telemetry.configure()  # stdout is for the result
    leave(main())
