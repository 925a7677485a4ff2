"""One episode of a sweep is held open: the other groups are shipped, admitted and trained on before the sweep ends."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from environments.base import Environment, Limits, Outcome, Reply
from stoa.bucket import keys
from stoa.bucket.steps import read_step
from stoa.bucket.store import Store
from stoa.contracts.fleet_messages import SweepRequest, SweepResult
from stoa.contracts.messages import AcquireRequest, StepRequest
from stoa.learning.ledger import GrantRecord
from tests.unit.trainer_gpu.player import POLICY
from tests.unit.trainer_gpu.runs import Reports, config_of, start_run
from trainer_gpu import host
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.grant_book import GrantBook
from worker_mac.engine import MacEngine


class Held:
    """The search task, but one episode of one question goes on, turn after turn, until it is let go."""

    def __init__(self, real: Environment, question_id: str) -> None:
        self.real, self.question_id = real, question_id
        self.released = threading.Event()
        self.first: tuple[int, ...] = ()
        self.name, self.stop_ids = real.name, real.stop_ids
        self.limits = Limits(2_000, real.limits.max_turn_tokens, 12_000)  # what a Mac keeps memory for, times 64 episodes

    def question_ids(self, split: str) -> Sequence[str]:
        return self.real.question_ids(split)  # type: ignore[arg-type]

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        return self.real.prompt_ids(question_id)

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        self.first = self.first or (tuple(turns[0]) if question_id == self.question_id else ())
        if question_id != self.question_id or tuple(turns[0]) != self.first or self.released.is_set():
            return Reply((), True, "answered") if question_id == self.question_id else self.real.reply(question_id, turns)
        time.sleep(0.2)  # few turns while it is held: an episode has room for so many
        return Reply((turns[0][0],), False, "")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        return self.real.score(question_id, turns[:1] if question_id == self.question_id else turns)


@pytest.mark.loop
@pytest.mark.timeout(120)
def test_other_groups_are_trained_on_while_one_episode_is_held_open(store: Store, tmp_path: Path) -> None:
    host.setup_process(num_threads=1, seed=0)
    handle = start_run(store, config_of(store, groups_per_step=3, starved_seconds=40.0))
    trainer = TrainerEngine(handle)
    acquired = trainer.acquire(AcquireRequest("test", 1), 1, Reports())
    questions = tuple(handle.environment.question_ids("train")[:8])
    GrantBook(store, "test").write(GrantRecord("mac-1", 0, 0, questions, 0.0, 0))
    held = Held(handle.environment, questions[0])
    mac = MacEngine(store, handle.document, held, host="mac-1", folder=tmp_path, model_folder=POLICY)  # type: ignore[arg-type]
    results: list[SweepResult] = []
    request = SweepRequest("test", "mac-1", 0, "train", questions, 8)
    sweep = threading.Thread(target=lambda: results.append(mac.sweep(request, Reports())))
    sweep.start()
    try:
        done = trainer.train_step(StepRequest("test", acquired.token, 1), Reports())
        playing_still = sweep.is_alive() and not results
    finally:
        held.released.set()
        sweep.join(60)
        trainer.close()
        mac.close()
    assert playing_still
    assert (done.status, done.num_groups) == ("done", 3)
    manifest = read_step(store, "test", done.manifest_key)
    trained = {keys.parse_group(key).group for key in manifest.consumed}
    assert len(trained) == 3 and trained <= {1, 2, 3, 4, 5, 6, 7}
    assert manifest.refused == ()
    assert (results[0].status, results[0].num_groups) == ("done", 8)
