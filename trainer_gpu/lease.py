"""The lease of a run: its fencing token, what its holder keeps in memory, and how one is taken.

Only the swap of HEAD decides who holds the run; everything else here follows from what HEAD names. What a holder does
with its lease is `engine.py`'s.
"""

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from stoa.bucket.head import Head, HeadWriter, Reset
from stoa.bucket.steps import Canary, Dropped, lineage, write_drop_note
from stoa.bucket.store import Store
from stoa.contracts.errors import CheckpointError, FencedError, ObjectMissingError, ReplayedError, ServiceUnavailableError, UsageError
from stoa.contracts.messages import AcquireRequest, Published, StepResult
from stoa.contracts.ports import Progress
from stoa.learning.fleet import FleetBook
from stoa.learning.trials import Trials
from stoa.rollouts.admit import DAMNING
from trainer_gpu.alarms import AlarmBook
from trainer_gpu.checkpoint import Document, Facts, Identity, older_checkpoints, read_document
from trainer_gpu.eval_watch import EvalWatch
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.intake import Intake
from trainer_gpu.policy import Policy
from trainer_gpu.publish import VersionPublisher
from trainer_gpu.referee import Referee, rules_of
from trainer_gpu.run_handle import RunHandle
from trainer_gpu.versions import KnownVersions

MAX_ATTEMPTS = 999

log = structlog.get_logger()


@dataclass(slots=True)
class Lease:
    """What this process knows of the run while it holds it."""

    token: int
    writer: HeadWriter
    publisher: VersionPublisher
    intake: Intake
    versions: KnownVersions
    alarms: AlarmBook
    eval_watch: EvalWatch
    fleet: FleetBook
    trials: Trials
    version: int
    step: int
    step_manifest_key: str
    settled: set[str]
    unusable: tuple[str, ...] = ()
    """Manifests of checkpoints that could not be loaded when the lease was taken."""
    checkpoint_in_flight: str = ""
    """Key of the checkpoint that HEAD will name with the version in flight."""
    last_step: StepResult | None = None
    last_published: Published | None = None
    fresh_changed_fraction: float | None = None
    """Share of codes that the newest version changed, if steps came before it and none has come after it."""
    stepped_at: float = 0.0
    """When the last optimizer step ended that no version was made of yet (by `time.monotonic`); 0.0 for none."""
    fresh_latency: tuple[float, float] | None = None
    """A version that HEAD came to name since the last step, and the seconds from its last optimizer step to that."""
    arrived_version: int = -1
    """Newest version that HEAD names of those this lease published, and the size of its delta."""
    arrived_delta_bytes: int = 0
    canaries: list[Canary] = field(default_factory=list)
    """Groups of Macs on trial that were compared, of which no step manifest tells yet."""
    trials_recalled: bool = False

    def distance_of(self, version: int) -> int:
        """Optimizer steps between the weights of a version and the present ones; all of the run's if it is not known any more.

        After a takeover that lost steps a version may be ahead of the weights.
        """
        return abs(self.step - (self.versions.step_of(version) or 0))

    def hold_trials(self, hosts: Sequence[str], store: Store) -> None:
        """These Macs are on trial from here on; a new lease first takes up what earlier ones saw of them."""
        # What a new lease reads again of them came while they were on trial, and was told of by no step.
        self.trials.hold(hosts, self.intake.refused if self.trials_recalled else ())
        if hosts and not self.trials_recalled:
            self.trials.recall(lineage(store, self.writer.read()[0]))
        self.trials_recalled = True


def identity_of(handle: RunHandle, policy: Policy) -> Identity:
    """What a checkpoint of this run must say of itself."""
    return Identity(handle.run, handle.document.layout_id, policy.architecture)


def next_token(lease_number: int, attempt: int, head_epoch: int, *, strict: bool = False) -> int:
    """The fencing token of a new lease: above every one before it.

    lease_number: the workflow's; attempt: of the activity, from 1; head_epoch: token in HEAD, 0 before the first.
    strict: the workflow has looked at HEAD before it chose the number, so that a lower token than HEAD's is that of a
    task from before, played late by a process that was frozen. Without it the number is raised above HEAD's.

    Raises:
        FencedError: the task is from before the present lease.
        UsageError: the attempts of one lease are used up; their tokens would run into the next lease's.
    """
    if not 1 <= attempt <= MAX_ATTEMPTS:
        raise UsageError(f"attempt {attempt} to take the run: at most {MAX_ATTEMPTS} fit one lease", hint="reset the run's workflow")
    if not strict:
        return max(lease_number, head_epoch // 1000 + 1) * 1000 + attempt
    token = lease_number * 1000 + attempt
    if token <= head_epoch:
        raise FencedError(f"lease {token} is from before the present one, {head_epoch}")
    return token


def take_lease(
    handle: RunHandle, policy: Policy, grants: GrantBook, request: AcquireRequest, attempt: int, progress: Progress
) -> tuple[Lease, Head]:
    """Swap HEAD to a new token, then load what HEAD names. Raises as `TrainerEngine.acquire`.

    Where that checkpoint is damaged the newest before it that can be loaded takes its place, and HEAD names it: the steps
    after it are lost as in a crash, and their groups come back.
    """
    config, store = handle.config, handle.store
    writer = HeadWriter(store, handle.run, handle.signer, owner=handle.owner, interval_seconds=config.bucket.head_interval_seconds)
    before = _present_head(writer, request)
    key = before.checkpoint_key if before else ""
    loaded, document = _readable(handle, policy, key) if key else ("", None)
    facts = document.facts if document else Facts(0, 0, -1, "", ())
    _await_word(progress, handle.word_seconds)
    token = next_token(request.lease_number, attempt, before.epoch if before else 0, strict=request.strict)
    head = writer.acquire(token, Reset(key, facts.step, facts.step_manifest_key) if loaded == key else None)
    progress.report(f"took lease {token}; loading step {facts.step}")
    if document is None:
        policy.load_base()
    else:
        loaded, facts = _restore(handle, policy, loaded, document, progress)
    unusable: tuple[str, ...] = ()
    if loaded != key:
        passed_over = [key, *older_checkpoints(store, key)]
        unusable = tuple(passed_over[: passed_over.index(loaded)])
        log.error("checkpoints_unusable", keys=unusable, went_back_to=loaded, step=facts.step)
        head = writer.swap(token, step=facts.step, step_manifest_key=facts.step_manifest_key, checkpoint_key=loaded)
    versions = KnownVersions(store, handle.run, handle.signer.public_key, window=config.learning.max_staleness_hard)
    versions.follow(head, head.version - config.learning.max_staleness_hard)
    publisher = VersionPublisher(handle)
    progress.report(f"loading version {head.version} as published")
    publisher.load_published(head)
    intake = _intake(handle, policy, grants, versions, facts, token)
    alarms = AlarmBook.of_run(config.alarms, store, head)
    fleet = FleetBook.of_run(store, head, DAMNING)
    trials = Trials(max(1, config.rollout.canary_sweeps), DAMNING)
    watch, step_key, settled = EvalWatch(store, handle.run), facts.step_manifest_key, set(facts.settled)
    return Lease(
        token, writer, publisher, intake, versions, alarms, watch, fleet, trials, head.version, facts.step, step_key, settled, unusable
    ), head


def _readable(handle: RunHandle, policy: Policy, named: str) -> tuple[str, Document]:
    """A checkpoint's key and manifest, or those of the newest before it that can be read.

    Raises CheckpointError for `named` if none can.
    """
    identity, public_key = identity_of(handle, policy), handle.signer.public_key
    try:
        return named, read_document(handle.store, named, identity, public_key)
    except CheckpointError:
        for key in older_checkpoints(handle.store, named):
            with contextlib.suppress(CheckpointError):
                return key, read_document(handle.store, key, identity, public_key)
        raise


def _restore(handle: RunHandle, policy: Policy, key: str, document: Document, progress: Progress) -> tuple[str, Facts]:
    """Load a checkpoint, or the newest before it that can be loaded. Raises CheckpointError for the first if none can."""

    def restore(document: Document) -> Facts:
        policy.restore_parts(handle.store, document.parts, document.facts.rng, on_part=lambda name: progress.report(f"loading {name}"))
        return document.facts

    try:
        return key, restore(document)
    except CheckpointError as error:
        log.warning("checkpoint_damaged", key=key, error=error.message)
        for older in older_checkpoints(handle.store, key):
            progress.report(f"{key} is damaged; trying {older}")
            with contextlib.suppress(CheckpointError):
                found = read_document(handle.store, older, identity_of(handle, policy), handle.signer.public_key)
                return older, restore(found)
        raise


def _present_head(writer: HeadWriter, request: AcquireRequest) -> Head | None:
    """HEAD as it stands, None before the first. Raises ReplayedError if it is older than what the run published."""
    try:
        head, _ = writer.read()
    except ObjectMissingError:
        head = None
    version = head.version if head else -1
    if version < request.min_version:
        raise ReplayedError(
            f"HEAD of run {request.run} is at version {version}, the run published version {request.min_version}",
            hint=f"somebody put an old HEAD back: put the newest one back, then `stoa resume {request.run}`",
        )
    return head


def _await_word(progress: Progress, seconds: float) -> None:
    """A task handed to a frozen process may long be another's: the answer to its first heartbeat tells."""
    deadline = time.monotonic() + seconds
    while not progress.cancelled and time.monotonic() < deadline:
        time.sleep(0.05)
    if progress.cancelled:
        raise ServiceUnavailableError("asked to give up before the run was taken")


def _intake(handle: RunHandle, policy: Policy, grants: GrantBook, versions: KnownVersions, facts: Facts, token: int) -> Intake:
    config = handle.config
    routing = policy.routing if config.rollout.record_routing else None
    rules = rules_of(config, handle.environment, policy.config.vocab_size, versions.state_of, grants.question_of, routing)
    numbers = itertools.count()

    def note(dropped: Sequence[Dropped]) -> None:
        write_drop_note(handle.store, handle.run, token, next(numbers), dropped)

    return Intake(handle.store, rules, Referee(handle.environment), versions, config.learning, settled=facts.settled, note=note)
