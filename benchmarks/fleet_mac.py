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
from stoa.config.run import Rollout
from stoa.contracts.fleet_messages import SweepResult
from stoa.rollouts.records import Episode, Turn
from stoa.weights.layout import Layout
from stoa.weights.state import WeightState
from stoa.weights.sync import Puller
from worker_mac.engine import MacEngine
from worker_mac.model import Model
from worker_mac.player import Load, Player
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


class Pretender:
    """Stands where `worker_mac.player.Player` does: passes the time of a sweep and hands over groups as they would end."""

    def __init__(self, environment: Environment, tokenizer_json: bytes, play: Play, rollout: Rollout) -> None:
        self._scribe, self._play_as, self._rollout = Scribe(environment, tokenizer_json), play, rollout
        self.pause: Callable[[float], None] = time.sleep
        """How time is passed; a Mac that is put to sleep does not come back from here."""

    @property
    def groups(self) -> int:
        """As the run says."""
        return self._rollout.usual_groups

    @property
    def load(self) -> Load:
        """Nothing is used."""
        return Load()

    def drop_pool(self) -> None:
        """There is none."""

    def learn(self, played: Played, groups: int, *, lag: int, most_lag: int) -> None:
        """Nothing is learned."""

    def play(
        self,
        served: Served,
        castings: Sequence[Casting],
        on_group: OnGroup,
        *,
        should_stop: Callable[[], bool],
        on_step: Callable[[int, int], None],
        **others: object,
    ) -> Played:
        """See `Player.play`."""
        play, started = self._play_as, time.monotonic()
        groups: dict[int, list[Casting]] = {}
        for casting in castings:
            groups.setdefault(casting.group, []).append(casting)
        draw = random.Random(castings[0].key)
        share = min(1.0, len(castings) / (self.groups * self._rollout.group_size))
        seconds = play.sweep_seconds * draw.lognormvariate(0.0, play.jitter) * share
        ended: list[Episode] = []
        order = draw.sample(sorted(groups), len(groups))
        for place, index in enumerate(order):
            due = started + seconds * _when(play.first_group, place, len(order))
            while (left := due - time.monotonic()) > 0:
                if should_stop():
                    return replace(_played(ended), ended=False, seconds=time.monotonic() - started)
                on_step(len(ended), 0)
                self.pause(min(left, _BEAT_SECONDS))
            episodes = [self._scribe.episode(casting, play.p_right) for casting in groups[index]]
            on_group(index, episodes)
            ended += episodes
        return replace(_played(ended), seconds=time.monotonic() - started)


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
        tokenizer = (model_folder / "tokenizer.json").read_bytes()
        self.pretender = Pretender(environment, tokenizer, play, document.config.rollout)
        self._player = cast(Player, self.pretender)
        self._diary = folder / "sweeps.jsonl"

    def _result(self, run: Any, played: Played, num_wanted: int) -> SweepResult:
        if run.request.purpose == "train":
            self._write_down(run, num_wanted, played.seconds)
        return super()._result(run, played, num_wanted)

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
