"""A trainer without a model, for fleets: masters that move a little each step, which then takes as long as it is told.

Everything around it is the trainer's own: the lease, intake and admission, step manifests, checkpoints, the publisher.
`python -m benchmarks.fleet_policy PACE CONFIG --state DIR [--no-control]` is `trainer_gpu.worker` with this in place of the
policy; PACE is a file that holds the seconds of a step, and is read at each.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import torch

from stoa.bucket.store import Store
from stoa.learning.advantages import group_advantages
from stoa.rollouts.records import Group
from stoa.weights.layout import Layout, layout_of
from trainer_gpu import rng as chance
from trainer_gpu.checkpoint import Part, read_tensors, save_parts
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.metrics import Tokens, group_metrics, token_metrics
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle
from trainer_gpu.step import StepOutcome
from trainer_gpu.worker import main

MOVED_A_STEP: Final = 0.00125
"""Share of the masters that a step moves by more than one code: 0.5 % in a version of 4 steps."""
_MOVE: Final = 0.001
_BEAT_SECONDS: Final = 0.1


class FakePolicy:
    """Stands where `trainer_gpu.policy.Policy` does; a step changes numbers by chance and measures no model."""

    def __init__(self, handle: RunHandle, pace: Path) -> None:
        source = (handle.model_folder / "config.json").read_text("utf-8")
        config: dict[str, Any] = json.loads(source)
        self.layout: Layout = layout_of(config, handle.config.learning.dtype)
        self.config = SimpleNamespace(vocab_size=config["vocab_size"])
        self.architecture = hashlib.sha256(source.encode()).hexdigest()
        self.routing = None
        learning = handle.config.learning
        self._gate, self._max_staleness, self._pace = learning.gate, learning.max_staleness, pace
        self._masters: dict[str, torch.Tensor] = {}
        self.load_base()

    def load_base(self) -> None:
        """The masters a run begins with."""
        draw = torch.Generator().manual_seed(0)
        self._masters = {spec.name: torch.randn(spec.shape, generator=draw) * 0.02 for spec in self.layout.tensors}

    def restore_parts(self, store: Store, parts: Sequence[Part], rng: str, *, on_part: Callable[[str], None] = lambda name: None) -> None:
        """Take a saved state."""
        self._masters = dict(read_tensors(store, tuple(parts), on_part=on_part))
        chance.restore(rng, 0)

    def capture_rng(self) -> str:
        """States of the generators."""
        return chance.as_text([chance.capture()])

    def save_parts(
        self, store: Store, run: str, epoch: int, step: int, *, part_bytes: int, on_part: Callable[[str], None] = lambda name: None
    ) -> tuple[Part, ...]:
        """Write the state."""
        return save_parts(store, run, epoch, step, self._masters, part_bytes=part_bytes, on_part=on_part)

    def wire_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The masters under their names on the wire."""
        yield from self._masters.items()

    def train(
        self, groups: Sequence[Group], *, version: int, step: int, planned_sequences: int, on_row: Callable[[str], None]
    ) -> StepOutcome:
        """Move some masters, and pass the time of a step."""
        ends_at = time.monotonic() + self._seconds()
        self._move(step)
        outcome = self._measure(groups, version)
        while (left := ends_at - time.monotonic()) > 0:
            on_row(f"{left:.1f} s to go")
            time.sleep(min(left, _BEAT_SECONDS))
        return outcome

    def _seconds(self) -> float:
        with suppress(OSError, ValueError):
            return float(self._pace.read_text("ascii"))
        return 1.0

    def _move(self, step: int) -> None:
        chance = np.random.default_rng(step)
        for spec in self.layout.quantised:
            flat = self._masters[spec.name].reshape(-1)
            places = torch.from_numpy(chance.integers(0, spec.num_elements, max(1, int(spec.num_elements * MOVED_A_STEP))))
            flat[places] += torch.from_numpy(chance.choice((-_MOVE, _MOVE), len(places)).astype(np.float32))

    def _measure(self, groups: Sequence[Group], version: int) -> StepOutcome:
        per_host: dict[str, list[Tokens]] = {}
        for group in groups:
            advantages = group_advantages(group.rewards)
            for episode, advantage in zip(group.episodes, advantages, strict=True):
                log_p = episode.logprobs.astype(np.float64)
                per_host.setdefault(group.host, []).append(Tokens(log_p, log_p, np.full(len(log_p), advantage), -log_p))
        hosts = {host: Tokens.concatenate(parts) for host, parts in per_host.items()}
        metrics = {
            **group_metrics(groups, version, self._max_staleness),
            **token_metrics(Tokens.concatenate(list(hosts.values())), self._gate),
        }
        return StepOutcome({**metrics, "grad_norm": 1.0}, sum(group.num_tokens for group in groups), hosts)


class FakeTrainer(TrainerEngine):
    """The trainer's engine over a `FakePolicy`."""

    def __init__(self, handle: RunHandle, *, pace: Path, **options: Any) -> None:
        super().__init__(handle, **options)
        self._pace = pace

    def _new_policy(self) -> Policy:
        return cast(Policy, FakePolicy(self._handle, self._pace))


if __name__ == "__main__":
    torch.set_num_threads(1)
    code = main(sys.argv[2:], make_engine=partial(FakeTrainer, pace=Path(sys.argv[1])))
    sys.stderr.flush()
    os._exit(code)  # as the trainer's own main does
