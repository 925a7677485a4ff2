"""A Mac without a model, for fleets: it plays sweeps by waiting, and ships honest groups that it made up.

Only decoding is pretended. Weights are pulled, verified and updated, groups are encoded, spooled and sent, sweeps are
resumed by the Mac's own code, on numpy in place of MLX. A line about every sweep is written to `sweeps.jsonl` in the run's
folder. `python -m benchmarks.fleet_mac PLAY CONFIG --state DIR --host NAME`
is `worker_mac.worker` with this engine; PLAY is a JSON file of `Play`.
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.fleet_play import Play
from environments.base import Environment
from environments.search.prompts import ANSWER_MARK
from stoa.bucket.head import Head
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.chat.render import ChatRenderer
from stoa.contracts.ports import Progress
from stoa.rollouts.records import Episode, Turn
from stoa.weights.layout import Layout
from stoa.weights.state import WeightState
from stoa.weights.sync import Puller
from worker_mac.engine import MacEngine
from worker_mac.model import Model
from worker_mac.sweep import Casting, OnGroup, Played
from worker_mac.uploader import Gate, Target, Uploader
from worker_mac.versions import Pulled, Served, Versions
from worker_mac.weights import LiveWeights
from worker_mac.worker import main

LOGPROB = -0.1
_BEAT_SECONDS = 0.2


class Scribe:
    """Writes one-turn episodes of the search task: the right answer, or another question's."""

    def __init__(self, environment: Environment, tokenizer_json: bytes) -> None:
        self._environment, self._renderer = environment, ChatRenderer(tokenizer_json)
        answers = {answer for question in environment.question_ids("train") for answer in environment.question(question).answers}
        self._answers = sorted(answers)

    def episode(self, casting: Casting, p_right: float) -> Episode:
        """An episode that is right with this chance, drawn from the casting's own key."""
        question = self._environment.question(casting.question_id)
        draw = random.Random(casting.key)
        wrong = [answer for answer in self._answers if answer not in question.answers]
        answer = question.answers[0] if draw.random() < p_right else draw.choice(wrong)
        turn = [*self._renderer.encode(f"{ANSWER_MARK} {answer}"), self._renderer.special.im_end]
        prompt = list(self._environment.prompt_ids(casting.question_id))
        outcome = self._environment.score(casting.question_id, [turn])
        mask = np.zeros(len(prompt) + len(turn), np.uint8)
        mask[len(prompt) :] = 1
        return Episode(
            casting.question_id,
            np.array([*prompt, *turn], np.int32),
            mask,
            np.full(len(turn), LOGPROB, np.float32),
            (Turn(len(prompt), len(mask), True),),
            outcome.reward,
            outcome.parts,
            "answered",
        )


class _PlainWeights:
    """Weights in numpy, where a Mac has them in MLX."""

    def __init__(self, layout: Layout) -> None:
        self.state = WeightState.empty(layout)
        self.num_bytes = layout.num_bytes

    def settle(self) -> None:
        """Nothing reads them."""


class _NoModel:
    ops = "none"


class PlainVersions(Versions):
    """The Mac's versions, without MLX. With `full_sync` each new one is pulled whole when it is needed, and nothing is kept."""

    def __init__(self, store: Store, document: RunDocument, model_config: Mapping[str, object], folder: Path, *, full_sync: bool) -> None:
        super().__init__(store, document, model_config, folder)
        self._again = partial(Puller, store, document, folder)
        self._weights_folder, self._full_sync = folder, full_sync

    def newest(self, head: Head, oldest: int) -> tuple[Served, Pulled]:
        """See `Versions.newest`."""
        if self._full_sync and head.version != self.version:
            self.distrust()
            shutil.rmtree(self._weights_folder)
            self._puller = self._again()
        return super().newest(head, oldest)

    def stage_ahead(self, poll_seconds: float, on_staged: Callable[[int], None] | None = None) -> None:
        """See `Versions.stage_ahead`."""
        if not self._full_sync:
            super().stage_ahead(poll_seconds, on_staged)

    def _new_memory(self) -> tuple[LiveWeights, Model]:
        return cast(LiveWeights, _PlainWeights(self._puller.layout)), cast(Model, _NoModel())

    def _check(self, model: Model) -> None:
        """There is no model to check."""


class Noted:
    """Passes objects on, and writes down the key of each that the bucket took: evidence for an audit."""

    def __init__(self, target: Target, path: Path) -> None:
        self._target, self._path = target, path

    def create(self, key: str, data: bytes, *, kind: str = "") -> str:
        """As `Store.create`."""
        etag = self._target.create(key, data, kind=kind)
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"{key}\n")
        return etag


class FakeMac(MacEngine):
    """The Mac's engine without decoding."""

    def __init__(
        self, store: Store, document: RunDocument, environment: Environment, *, play: Play, folder: Path, model_folder: Path, **options: Any
    ) -> None:
        super().__init__(store, document, environment, folder=folder, model_folder=model_folder, **options)
        model_config = json.loads((model_folder / "config.json").read_text("utf-8"))
        self._versions.close()
        self._versions = PlainVersions(store, document, model_config, folder / "weights", full_sync=play.full_sync)
        self._uploader.close()
        gate = Gate(store, lambda: self._guest.may_transfer)
        self._uploader = Uploader(Noted(gate, folder / "acknowledged"), self._spool)
        self._play_as = play
        self._scribe = Scribe(environment, (model_folder / "tokenizer.json").read_bytes())
        self.pause: Callable[[float], None] = time.sleep
        """How time is passed; a Mac that is put to sleep does not come back from here."""
        self._diary = folder / "sweeps.jsonl"

    def _play_groups(self, run: Any, groups: Sequence[Sequence[Casting]], on_group: OnGroup, progress: Progress) -> Played:
        play, started = self._play_as, time.monotonic()
        draw = random.Random(groups[0][0].key if groups else 0)
        share = len(groups) / self._config.rollout.usual_groups
        seconds = play.sweep_seconds * draw.lognormvariate(0.0, play.jitter) * min(1.0, share)
        played = Played(True, 0, 0, 0, 0, 0.0, 0, 0.0)
        order = list(range(len(groups)))
        draw.shuffle(order)
        for place, index in enumerate(order):
            due = started + seconds * _when(play.first_group, place, len(order))
            while (left := due - time.monotonic()) > 0:
                run.broken_off = run.broken_off or self._reason_to_stop(run, progress)
                if run.broken_off is not None:
                    return replace(played, ended=False, seconds=time.monotonic() - started)
                progress.report(f"sweep {run.request.sweep} version {run.served.version}: {place} of {len(order)} groups")
                self.pause(min(left, _BEAT_SECONDS))
            episodes = [self._scribe.episode(casting, play.p_right) for casting in groups[index]]
            on_group(groups[index][0].group, episodes)
            played = _both(played, _played(episodes))
        self._write_down(run, len(order), time.monotonic() - started)
        return replace(played, seconds=time.monotonic() - started)

    def _write_down(self, run: Any, num_groups: int, seconds: float) -> None:
        pulled = run.pulled
        line = {
            "ended_at": time.time(),
            "sweep": run.request.sweep,
            "version": run.served.version,
            "groups": num_groups,
            "decode_seconds": seconds,
            "idle_seconds": run.idle_seconds,
            "pull_seconds": pulled.pull_seconds + pulled.apply_seconds,
            "pull_latency_seconds": pulled.latency_seconds,
        }
        with self._diary.open("a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


def _both(one: Played, other: Played) -> Played:
    """What was played, counted together."""
    counts = ("num_episodes", "num_sampled_tokens", "num_prompt_tokens", "reward_sum")
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in counts})


def _when(first: float, place: int, count: int) -> float:
    """Share of a sweep after which its group number `place` of `count` ends."""
    return 1.0 if count == 1 else first + (1.0 - first) * place / (count - 1)


def _played(episodes: Sequence[Episode]) -> Played:
    sampled = sum(len(episode.logprobs) for episode in episodes)
    prompts = sum(len(episode.ids) for episode in episodes) - sampled
    return Played(True, len(episodes), 0, sampled, prompts, sum(episode.reward for episode in episodes), 0, 0.0)


if __name__ == "__main__":
    chosen = Play(**json.loads(Path(sys.argv[1]).read_text("utf-8")))
    sys.exit(main([*sys.argv[2:], "--always"], make_engine=partial(FakeMac, play=chosen)))
