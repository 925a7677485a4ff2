"""Six honest Macs and four that cheat, on the trainer itself: how many sweeps until each cheat is suspected, and only they.

Sweeps are played by MLX on the published weights, put into a real bucket under real grants, admitted and trained on by
`TrainerEngine`; whom it suspects is on trial from the next step on, as the run's workflow would decide, and sends canaries
until a verdict. There is no Temporal, and no time between two machines.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.hostile import copied, inflated, invented_results, key_of
from benchmarks.sweeps import POLICY, Player, demo_environment, demo_layout, first_state, move_state
from cli.canary import Quiet
from stoa.bucket.head import read_head
from stoa.bucket.manifest import Signer, read_manifest
from stoa.bucket.run_document import claim_run, new_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.load import LOOPBACK_KEY, LOOPBACK_SECRET, Credentials, load_run
from stoa.config.run import Bucket, RunConfig
from stoa.contracts.messages import AcquireRequest, PublishRequest, StepRequest
from stoa.learning.ledger import GrantRecord
from stoa.rollouts.records import Episode, Group
from stoa.rollouts.shard import encode_group
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.publish import host_tensors
from trainer_gpu.run_handle import RunHandle

RUN: Final = "distrust"
NUM_HONEST: Final = 6
MOST_SWEEPS: Final = 3
EDITED_SHARE: Final = 0.1
EDITED_NATS: Final = 0.3
WAIT_SECONDS: Final = 2.0
DEMO: Final = Path(__file__).parents[1] / "configs" / "demo.toml"

Cheat = Callable[[Group, Sequence[Group], np.random.Generator], Group]


@dataclass(frozen=True, slots=True)
class Caught:
    """When each cheat was suspected, in sweeps that it had sent, and for what."""

    sweeps: dict[str, int]
    reasons: dict[str, str]
    honest_suspected: tuple[str, ...]
    num_groups_sent: int
    num_steps: int
    trusted_again: dict[str, int]
    """Who was trusted again, after so many sweeps in all."""
    failed: dict[str, str]
    """Who was shut out for good, and why."""

    @property
    def sweeps_before_quarantine(self) -> int:
        """Of the cheat that lasted longest; one more than were played if one was never suspected."""
        return max(self.sweeps.get(name, MOST_SWEEPS + 1) for name in CHEATS)


def edited_logprobs(group: Group, chance: np.random.Generator) -> Group:
    """A tenth of each episode's tokens, at least one, called 0.3 nat more or less likely than they were; none above 0."""

    def change(episode: Episode) -> Episode:
        logprobs = episode.logprobs.copy()
        num = max(1, int(np.ceil(EDITED_SHARE * len(logprobs))))
        places = chance.choice(len(logprobs), size=num, replace=False)
        moved = logprobs[places] + EDITED_NATS * chance.choice([-1.0, 1.0], size=num)
        logprobs[places] = np.where(moved > 0.0, logprobs[places] - EDITED_NATS, moved)
        return replace(episode, logprobs=logprobs)

    return replace(group, episodes=tuple(change(episode) for episode in group.episodes))


CHEATS: Final[dict[str, Cheat]] = {
    "inflates": lambda group, others, chance: inflated(group, chance),
    "edits": lambda group, others, chance: edited_logprobs(group, chance),
    "copies": lambda group, others, chance: copied(group, others[int(chance.integers(len(others)))], chance),
    "invents": lambda group, others, chance: invented_results(group, chance),
}
"""Name of the Mac -> what it sends in place of the group that it should have, given what others sent."""


@dataclass(frozen=True, slots=True)
class _Asked:
    seed: int
    groups_a_sweep: int
    framed: str
    cheats: tuple[str, ...]
    wait_seconds: float
    takeover: bool


def catch(
    store: Store | None = None,
    *,
    seed: int = 0,
    groups_a_sweep: int = 8,
    framed: str = "",
    cheats: Sequence[str] = (),
    wait_seconds: float = WAIT_SECONDS,
    takeover: bool = False,
) -> Caught:
    """Play and train until every cheat is suspected, at most MOST_SWEEPS sweeps; on `store`, or a bucket of its own.

    cheats: those that play, of CHEATS; none: all. framed: a Mac that is on trial from the first step on, whatever it does;
    then play on until every trial has its verdict. wait_seconds: how long a step waits for groups. takeover: a new lease of
    the trainer begins after the first sweep.
    """
    asked = _Asked(seed, groups_a_sweep, framed, tuple(cheats) or tuple(CHEATS), wait_seconds, takeover)
    if store is not None:
        return _catch(store, asked)
    with _own_bucket() as own:
        return _catch(own, asked)


def _catch(store: Store, asked: _Asked) -> Caught:
    config = load_run(DEMO, ())
    learning = config.learning.model_copy(update={"starved_seconds": 10.0, "intake_poll_seconds": 0.05})
    config = config.model_copy(update={"run": RUN, "model": str(POLICY), "bucket": store.settings, "learning": learning})
    signer = Signer.generate()
    files = upload_model_files(store, RUN, POLICY)
    document = claim_run(store, new_run(config, signer, layout_id=demo_layout().layout_id, model_files=files), signer)
    trainer = TrainerEngine(RunHandle(store, document, signer, demo_environment(), POLICY, "distrust"))
    try:
        return _Fleet(store, config, trainer, signer.public_key, asked).play()
    finally:
        trainer.close()


class _Fleet:
    """Ten Macs in one process, and their trainer."""

    def __init__(self, store: Store, config: RunConfig, trainer: TrainerEngine, public_key: str, asked: _Asked) -> None:
        self._store, self._config, self._trainer, self._public_key = store, config, trainer, public_key
        self._quiet = Quiet()
        self._token = trainer.acquire(AcquireRequest(RUN, 1), 1, self._quiet).token
        self._tensors = partial(host_tensors, trainer.prepare())
        self._state = first_state(trainer.prepare().layout, self._tensors())
        self._past = [self._state.copy()]
        self._player = Player(self._state)
        self._questions = self._player.environment.question_ids("train")
        self._chance = np.random.default_rng(asked.seed)
        self._seed, self._groups = asked.seed, asked.groups_a_sweep
        self._book = GrantBook(store, RUN)
        self._num_asked = self._num_sent = self._step = 0
        self._sweeps: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        self._framed, self._cheats, self._wait, self._takeover = asked.framed, asked.cheats, asked.wait_seconds, asked.takeover
        self._on_trial = {asked.framed} if asked.framed else set[str]()
        self._failed: dict[str, str] = {}
        self._trusted: dict[str, int] = {}

    def play(self) -> Caught:
        """Sweep after sweep of every Mac that is not shut out, then steps while there are groups, then a version."""
        hosts = [*(f"honest-{number}" for number in range(1, NUM_HONEST + 1)), *self._cheats]
        most = MOST_SWEEPS + (self._config.rollout.canary_sweeps if self._framed else 0)
        for sweep in range(most):
            sent: list[Group] = []
            told: list[Group] = []
            for place, host in enumerate(host for host in hosts if host not in self._failed):
                honest = self._play(host, sweep, max(0, len(self._past) - 1 - (place + sweep) % 2))
                told += [CHEATS[host](group, sent, self._chance) for group in honest] if host in CHEATS else honest
                sent += honest
            # As they come from a fleet: all Macs' first groups, then all second ones; a copy after what it is one of.
            for group in sorted(told, key=lambda group: (group.host == "copies", group.group)):
                self._store.create(key_of(group), encode_group(group))
            self._num_sent += len(told)
            self._train(sweep + 1)
            if set(self._cheats) <= set(self._reasons) and not (self._framed and self._on_trial):
                break
            self._publish(checkpoint=self._takeover)
            if self._takeover and not sweep:
                acquired = self._trainer.acquire(AcquireRequest(RUN, 2), 1, self._quiet)
                self._token = acquired.token
                if acquired.version == len(self._past):  # the same weights, as a version of the new lease
                    self._past.append(self._state.copy())
        honest = tuple(sorted(set(self._reasons) - set(CHEATS)))
        return Caught(self._sweeps, self._reasons, honest, self._num_sent, self._step, self._trusted, self._failed)

    def _play(self, host: str, sweep: int, version: int) -> list[Group]:
        asked = tuple(self._questions[(self._num_asked + i) % len(self._questions)] for i in range(self._groups))
        self._book.write(GrantRecord(host, sweep, self._num_asked, asked, 0.0, 0))
        self._num_asked += self._groups
        size = self._config.rollout.group_size
        played = self._player.play(self._past[version], asked, group_size=size, version=version, sweep=self._num_asked, seed=self._seed)
        return [replace(group, run=RUN, host=host, sweep=sweep) for group in played]

    def _train(self, num_sweeps: int) -> None:
        """Steps until nothing more is admitted, refused or used: two waits in a row end alike."""
        before = -1
        while True:
            tried, shut_out = tuple(sorted(self._on_trial)), (*self._failed, *sorted(self._on_trial))
            request = StepRequest(RUN, self._token, self._step + 1, self._wait, shut_out, on_trial=tried)
            result = self._trainer.train_step(request, self._quiet)
            for suspect in result.suspects:
                self._reasons[suspect.host] = suspect.reason
                self._sweeps[suspect.host] = num_sweeps
                self._on_trial.add(suspect.host)
            for news in result.canaries:
                if news.verdict:
                    self._on_trial.discard(news.host)
                if news.verdict == "failed":
                    self._failed[news.host] = news.reason
                elif news.verdict == "clean":
                    self._trusted[news.host] = num_sweeps
            if result.status == "done":
                self._step, before = result.step, -1
            elif result.num_missing == before:
                return
            else:
                before = result.num_missing

    def _publish(self, *, checkpoint: bool) -> None:
        self._trainer.publish(PublishRequest(RUN, self._token, self._step, anchor=False, checkpoint=checkpoint, announce=True), self._quiet)
        move_state(self._state, self._tensors(), self._config.publish.hysteresis)
        self._past.append(self._state.copy())
        head = read_head(self._store, RUN, self._public_key)[0]
        published = read_manifest(self._store, RUN, head.manifest_key, head.manifest_sha256, self._public_key).state_id
        assert self._state.state_id() == published, "sweeps must be played on the weights that were published"


@contextmanager
def _own_bucket() -> Iterator[Store]:
    from cli.processes import Household
    from cli.services import start_bucket

    credentials = Credentials(LOOPBACK_KEY, LOOPBACK_SECRET)
    with tempfile.TemporaryDirectory() as name, Household(Path(name)) as house:
        folder = Path(name)
        endpoint = start_bucket(house, folder / "bucket", folder / "logs", credentials)
        store = Store(Bucket(endpoint=endpoint, name=RUN, head_interval_seconds=0.0), credentials, patience_seconds=30.0)
        store.ensure_bucket()
        yield store
