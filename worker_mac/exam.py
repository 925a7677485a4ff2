"""Plays an examination of a checkpoint on this Mac: `python -m worker_mac.exam PLAN`, where PLAN is a file of `ExamTask`.

No run, no Temporal: parts are claimed from the bucket until all are answered. Weights are the checkpoint's on the int8 grid
of a run's first version, or an MLX export's own codes.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import structlog
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from environments import registry
from environments.base import Environment
from stoa.bucket import keys
from stoa.bucket.exams import EXAM_FORMAT, ExamPlan, ExamTask, answered, claim, open_exam, read_task
from stoa.bucket.store import Store
from stoa.config.load import bucket_credentials
from stoa.config.run import Bucket, Rollout
from stoa.contracts.errors import CheckpointError, ObjectExistsError, StoaError, UsageError
from stoa.rollouts.records import Episode, Fingerprint, Group, Timings
from stoa.rollouts.shard import encode_group
from stoa.telemetry import log as telemetry
from stoa.weights import grid
from stoa.weights.layout import Layout, layout_of
from stoa.weights.state import WeightState
from worker_mac import selftest
from worker_mac.ending import leave
from worker_mac.guest import Guest
from worker_mac.identity import project_version
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.player import Player
from worker_mac.sampler import Sampling, seed_of
from worker_mac.sweep import exam_castings
from worker_mac.versions import Served
from worker_mac.weights import LiveWeights

POLL_SECONDS: Final = 1.0
_log = structlog.get_logger(__name__)


def state_of(folder: Path, layout: Layout) -> WeightState:
    """A checkpoint's weights as a run would publish them first. Raises CheckpointError if it has others than the layout.

    folder: a hub checkpoint that mlx_lm opens, or an export of ours at 8 bits and groups of 64.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    quantised = config.get("quantization")
    if quantised is not None and (quantised.get("bits"), quantised.get("group_size")) != (8, 64):
        raise CheckpointError(
            f"{folder} is quantised to {quantised.get('bits')} bits in groups of {quantised.get('group_size')}, not 8 in 64"
        )
    model, _ = load_model(folder, lazy=True)
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    state = WeightState.empty(layout)
    for spec in layout.tensors:
        missing = spec.name not in arrays
        if missing:
            raise CheckpointError(f"{folder} has no tensor {spec.name}")
        if spec.kind != "int8":
            values = np.array(arrays[spec.name].astype(mx.float32)).reshape(-1)
            bits = state.bits(spec)
            bits[...] = values.view(np.uint32) if bits.dtype == np.uint32 else grid.bf16_bits(values)
        elif quantised is not None:
            _copy_codes(state, spec.name, arrays, layout)
        else:
            found = grid.quantise(np.array(arrays[spec.name].astype(mx.float32)))
            for array, made in zip(state.quantised(spec), found, strict=True):
                array[...] = made.reshape(array.shape)
    return state


def _copy_codes(state: WeightState, name: str, arrays: Mapping[str, mx.array], layout: Layout) -> None:
    spec = layout.by_name[name]
    codes, scales, biases = state.quantised(spec)
    codes[...] = np.array(arrays[name]).view(np.uint8).reshape(codes.shape)
    for array, part in ((scales, spec.scales), (biases, spec.biases)):
        array[...] = np.array(arrays[part].astype(mx.bfloat16).view(mx.uint16)).reshape(array.shape)


class Seat:
    """One Mac in an examination."""

    def __init__(self, task: ExamTask, store: Store, scratch: Path) -> None:
        folder = Path(task.folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        layout = layout_of(config, task.dtype)
        state = state_of(folder, layout)
        self.state_id = state.state_id()
        self._task, self._store = task, store
        live, model_config = LiveWeights.of(state), read_model_config(config)
        self._served = Served(0, self.state_id, Model(model_config, live.arrays), live)
        self._environment: Environment = registry.create(task.environment, task.settings, (folder / "tokenizer.json").read_bytes())
        self._player = Player(self._environment, Rollout(), layout, model_config, Guest(), folder=scratch, state_folder=scratch)
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


def main(arguments: list[str] | None = None) -> int:
    """Play one task; returns the exit code."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    try:
        task = read_task(Path(path))
        selftest.require(selftest.run())
        bucket = Bucket.model_validate(task.bucket)
        store = Store(bucket, bucket_credentials(bucket), patience_seconds=60.0)
        with tempfile.TemporaryDirectory() as scratch:
            num_played = Seat(task, store, Path(scratch)).sit()
        sys.stdout.write(json.dumps({"host": task.host, "num_parts": num_played}) + "\n")
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    telemetry.configure()  # stdout is for the result
    leave(main())
