"""A whole run's data path on this machine, without the control plane: real trainer, real Mac engine, real bucket.

It measures before a long run what must not move: at learning rate 0 versions, digests and the mismatch between the
engines stay where they are. And where a mismatch comes from: the engine, int8, or the age of the weights. Neither wing
knows of the other here; both are imported when they are needed and meet only in the bucket.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from environments import known
from stoa.bucket import keys
from stoa.bucket.head import Head, read_head
from stoa.bucket.manifest import Signer, read_manifest
from stoa.bucket.run_document import claim_run, new_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.load import LOOPBACK_KEY, LOOPBACK_SECRET, Credentials, resolve_model_folder
from stoa.config.run import Bucket, Gate, RunConfig
from stoa.contracts.errors import MissingExtraError, StarvedError
from stoa.contracts.fleet_messages import SweepRequest
from stoa.contracts.messages import AcquireRequest, PublishRequest, StepRequest
from stoa.learning.gate import GateMode, drop_rates
from stoa.learning.ledger import GrantRecord
from stoa.learning.replay import flatness
from stoa.rollouts.records import Group
from stoa.rollouts.shard import MAX_GROUP_BYTES, decode_group

if TYPE_CHECKING:
    from trainer_gpu.engine import TrainerEngine
    from trainer_gpu.metrics import Tokens
    from worker_mac.engine import MacEngine

RUN: Final = "canary"
HOST: Final = "canary-mac"
MAX_SWEEPS: Final = 12
"""Sweeps that are played at most for the groups of one step."""
FLAT_ERRORS: Final = 4.0
"""A version's mean mismatch may lie this many of its standard errors from the mean of all."""

Floats = NDArray[np.float64]


@dataclass
class Quiet:
    """A `Progress` that nobody watches."""

    cancelled: bool = False
    stopping: bool = False

    def report(self, detail: str, *, version: int = -1, key: str = "") -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class VersionSeen:
    """One published version, and the sweeps played with it."""

    version: int
    state_id: str
    changed_fraction: float
    delta_bytes: int
    num_tokens: int
    mismatch_mean: float
    mismatch_error: float
    same_groups_unmoved: bool
    """Whether the trainer gives the first version's groups the same logprobs, bit for bit."""


@dataclass(frozen=True, slots=True)
class Canary:
    """What was seen, and what was wrong with it."""

    versions: tuple[VersionSeen, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arm:
    """|pi - mu| of the same trainer against one sampler, and what the gate's modes would drop of it."""

    name: str
    num_tokens: int
    mean: float
    p50: float
    p99: float
    p999: float
    largest: float
    k3: float
    drop_rate: float
    """Of the run's own gate."""
    would_drop: dict[GateMode, float] = field(default_factory=dict[GateMode, float])


class OneMachine:
    """Trainer and Mac of one run in this process. `one_machine` makes one."""

    def __init__(self, store: Store, config: RunConfig, public_key: str, trainer: "TrainerEngine", mac: "MacEngine") -> None:
        self._store, self.config, self._public_key = store, config, public_key
        self._trainer, self._mac = trainer, mac
        self._quiet = Quiet()
        self._num_sweeps = self._step = 0
        self._acquired = trainer.acquire(AcquireRequest(config.run, 1), 1, self._quiet)
        self._questions = self._mac_questions()

    @property
    def trainer(self) -> "TrainerEngine":
        """The trainer; the policy that `prepare` gives may be looked at between calls."""
        return self._trainer

    def head(self) -> Head:
        """What the bucket names now."""
        return read_head(self._store, self.config.run, self._public_key)[0]

    def state_id(self) -> tuple[str, int]:
        """The digest of the newest version, and the bytes of its delta."""
        head = self.head()
        manifest = read_manifest(self._store, head.run, head.manifest_key, head.manifest_sha256, self._public_key)
        return manifest.state_id, manifest.delta.num_bytes if manifest.delta is not None else 0

    def play(self, num_usable: int) -> list[Group]:
        """Sweeps with the newest version until so many groups have unequal rewards. Raises StarvedError."""
        from trainer_gpu.grant_book import GrantBook

        groups: list[Group] = []
        for _ in range(MAX_SWEEPS):
            sweep, rollout = self._num_sweeps, self.config.rollout
            first = sweep * rollout.usual_groups
            asked = tuple(self._questions[(first + i) % len(self._questions)] for i in range(rollout.usual_groups))
            GrantBook(self._store, self.config.run).write(GrantRecord(HOST, sweep, first, asked, 0.0, 0))
            version = self.head().version
            self._mac.sweep(SweepRequest(self.config.run, HOST, sweep, "train", asked, rollout.group_size, version), self._quiet)
            for listed in self._store.list(keys.groups_of_sweep(self.config.run, version, HOST, sweep)):
                groups.append(decode_group(self._store.get(listed.key, max_bytes=MAX_GROUP_BYTES).data))
            self._num_sweeps += 1
            if sum(not flatness(group) for group in groups) >= num_usable:
                return groups
        raise StarvedError(
            f"{MAX_SWEEPS} sweeps gave fewer than {num_usable} groups with unequal rewards",
            hint="the policy solves all of the task's questions, or none: use another base checkpoint or task",
        )

    def step(self) -> None:
        """One optimizer step on what has been played. Raises StarvedError."""
        self._step += 1
        result = self._trainer.train_step(StepRequest(self.config.run, self._acquired.token, self._step), self._quiet)
        if result.status != "done":
            raise StarvedError(f"step {self._step} was not taken: {result.reason}")

    def publish(self) -> float:
        """The next version, waited for; returns the share of codes that changed."""
        request = PublishRequest(self.config.run, self._acquired.token, self._step, anchor=False, checkpoint=True, announce=True)
        return self._trainer.publish(request, self._quiet).changed_fraction

    def score(self, groups: Sequence[Group]) -> "list[Tokens]":
        """What the trainer now says of the groups' tokens."""
        from trainer_gpu.scoring import score

        return score(self._trainer.prepare(), groups, self.config.learning)

    def close(self) -> None:
        """End both engines' threads."""
        self._mac.close()
        self._trainer.close()

    def _mac_questions(self) -> Sequence[str]:
        tokenizer = (resolve_model_folder(self.config) / "tokenizer.json").read_bytes()
        environment = known.create(self.config.environment.name, self.config.environment.settings, tokenizer)
        return environment.question_ids("train")


@contextmanager
def one_machine(config: RunConfig, folder: Path) -> Iterator[OneMachine]:
    """A fresh bucket and both engines under `folder`; everything is ended with the block.

    Raises MissingExtraError if one of the engines is not installed.
    """
    from cli.processes import Household
    from cli.services import start_bucket
    from stoa.weights.layout import Layout

    _require_engines()
    from cli.launch import check
    from trainer_gpu.engine import TrainerEngine
    from trainer_gpu.run_handle import RunHandle
    from worker_mac.engine import MacEngine

    credentials = Credentials(LOOPBACK_KEY, LOOPBACK_SECRET)
    model_folder = resolve_model_folder(config)
    with Household(folder) as house:
        endpoint = start_bucket(house, folder / "bucket", folder / "logs", credentials)
        config = config.model_copy(update={"bucket": Bucket(endpoint=endpoint, name=RUN, head_interval_seconds=0.0), "run": RUN})
        store = Store(config.bucket, credentials, patience_seconds=30.0)
        store.ensure_bucket()
        layout: Layout = check(config)
        signer = Signer.generate()
        files = upload_model_files(store, RUN, model_folder)
        document = claim_run(store, new_run(config, signer, layout_id=layout.layout_id, model_files=files), signer)
        tokenizer = (model_folder / "tokenizer.json").read_bytes()
        environment = known.create(config.environment.name, config.environment.settings, tokenizer)
        trainer = TrainerEngine(RunHandle(store, document, signer, environment, model_folder, "canary-trainer"))
        mac_store = Store(config.bucket, credentials, patience_seconds=30.0)
        mac = MacEngine(mac_store, document, environment, host=HOST, folder=folder / "mac", model_folder=model_folder)
        machine = OneMachine(store, config, signer.public_key, trainer, mac)
        try:
            yield machine
        finally:
            machine.close()


def fly(config: RunConfig, folder: Path, num_versions: int) -> Iterator[VersionSeen]:
    """Train at learning rate 0, publish and play, version after version; yields each as it is done."""
    still = config.learning.model_copy(update={"learning_rate": 0.0, "starved_seconds": 30.0})
    with one_machine(_quick(config, still), folder) as machine:
        first: list[Group] = []
        said: list[Floats] = []
        changed = 0.0
        for number in range(num_versions):
            groups = machine.play(max(2, machine.config.learning.groups_per_step))  # one has no error of its mean
            first = first or groups
            again = [tokens.log_pi for tokens in machine.score(first)]
            said = said or again
            means = [float(_far(tokens).mean()) for tokens in machine.score(groups)]
            state_id, delta_bytes = machine.state_id()
            yield VersionSeen(
                machine.head().version,
                state_id,
                changed,
                delta_bytes,
                sum(len(episode.logprobs) for group in groups for episode in group.episodes),
                float(np.mean(means)),
                float(np.std(means, ddof=1) / math.sqrt(len(means))),
                all(np.array_equal(a, b) for a, b in zip(said, again, strict=True)),
            )
            if number + 1 < num_versions:
                machine.step()
                changed = machine.publish()


def judge(versions: Sequence[VersionSeen]) -> Canary:
    """What moved that must not."""
    faults: list[str] = []
    first = versions[0]
    overall = float(np.mean([seen.mismatch_mean for seen in versions]))
    for seen in versions:
        if seen.state_id != first.state_id:
            faults.append(f"version {seen.version} has digest {seen.state_id[:12]}, version {first.version} has {first.state_id[:12]}")
        if seen.changed_fraction:
            faults.append(f"version {seen.version} changes {seen.changed_fraction:.2e} of the codes: its delta is not empty")
        if not seen.same_groups_unmoved:
            faults.append(f"at version {seen.version} the trainer's logprobs of the first groups have moved")
        if not abs(seen.mismatch_mean - overall) <= FLAT_ERRORS * seen.mismatch_error:  # NaN is not flat
            faults.append(f"version {seen.version}: mean |pi - mu| is {seen.mismatch_mean:.3g}, that of all versions {overall:.3g}")
    return Canary(tuple(versions), tuple(faults))


def decompose(config: RunConfig, folder: Path, lags: Sequence[int]) -> Iterator[Arm]:
    """The same trainer against three samplers: fp32 of the same version, int8 of the same version, int8 and older ones.

    All groups are played at version 0 and trained on in that order. The first two arms share their tokens; those of
    an older version are scored when the trainer is `lags` (rising) versions ahead, just before it would train on them.
    """
    from trainer_gpu.scoring import write_hub_folder
    from worker_mac.stock import forced_logprobs

    gate = config.learning.gate
    learning = config.learning.model_copy(update={"starved_seconds": 30.0, "max_staleness_hard": max(8, *lags)})
    with one_machine(_quick(config, learning), folder) as machine:
        chunks = [machine.play(config.groups_per_version) for _ in range(max(lags) + 1)]
        tokens = _joined(machine.score(chunks[0]))
        write_hub_folder(machine.trainer.prepare(), folder / "hub")
        stock = forced_logprobs(folder / "hub", [episode for group in chunks[0] for episode in group.episodes])
        yield arm("fp32, same version", replace(tokens, log_mu=np.concatenate(stock).astype(np.float64)), gate)
        yield arm("int8, same version", tokens, gate)
        version = 0
        for lag in lags:
            for _ in range((lag - version) * config.learning.steps_per_version):
                machine.step()
            version = lag
            yield arm(f"int8, {lag} version{'s' if lag > 1 else ''} old", _joined(machine.score(chunks[lag])), gate)


def arm(name: str, tokens: "Tokens", gate: Gate) -> Arm:
    """The numbers of one arm."""
    far = _far(tokens)
    p50, p99, p999 = (float(value) for value in np.quantile(far, (0.5, 0.99, 0.999)))
    log_ratio = tokens.log_pi - tokens.log_mu
    rates = drop_rates(tokens.log_pi, tokens.log_mu, tokens.advantages, gate)
    k3 = float(np.mean(np.expm1(log_ratio) - log_ratio))
    return Arm(name, len(far), float(far.mean()), p50, p99, p999, float(far.max()), k3, rates[gate.mode], rates)


def _far(tokens: "Tokens") -> Floats:
    return np.abs(np.exp(tokens.log_pi) - np.exp(tokens.log_mu))


def _joined(parts: "list[Tokens]") -> "Tokens":
    return type(parts[0]).concatenate(parts)


def _quick(config: RunConfig, learning: object) -> RunConfig:
    """The same run, with nobody to wait for."""
    timeouts = config.timeouts.model_copy(update={"head_poll_seconds": 0.2})
    return config.model_copy(update={"learning": learning, "timeouts": timeouts})


def _require_engines() -> None:
    """Raise MissingExtraError unless both engines are installed here."""
    from importlib.util import find_spec

    for module, extra in (("torch", "gpu"), ("megatron", "gpu"), ("mlx", "mac"), ("mlx_lm", "mac")):
        if find_spec(module) is None:
            raise MissingExtraError(f"the canary needs {module} beside the other engine", hint=f"run `pip install 'stoa[{extra}]'`")
