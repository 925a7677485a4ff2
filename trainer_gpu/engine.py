"""The GPU box's side of a run: takes the lease, trains, publishes, saves. Implements `ports.PolicyTrainer`.

Each method is one activity and does nothing on its own between calls. What it did is in the bucket before it returns,
so a lost reply or a new process loses at most the steps since the last swap of HEAD, whose groups come back. Steps are
`step.py`'s, groups `intake.py`'s, what is held between calls `lease.py`'s. All methods run on one thread.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import structlog

from stoa.bucket import keys
from stoa.bucket.head import Head
from stoa.bucket.steps import Canary, GroupMismatch, Refused, write_step
from stoa.contracts import names
from stoa.contracts.errors import (
    FaultyGroupsError,
    FencedError,
    LostStateError,
    NonFiniteError,
    ServiceUnavailableError,
    StoaError,
    UsageError,
)
from stoa.contracts.messages import (
    Acquired,
    AcquireRequest,
    CanaryNews,
    Checkpointed,
    CheckpointRequest,
    Published,
    PublishRequest,
    StepRequest,
    StepResult,
    Suspect,
)
from stoa.contracts.ports import Progress
from stoa.learning.advantages import is_constant
from stoa.learning.fleet import sample_of
from stoa.rollouts.admit import Reason
from stoa.weights.publisher import Prepared
from trainer_gpu import host
from trainer_gpu.crew import Build, Lead, alone
from trainer_gpu.grant_book import GrantBook
from trainer_gpu.intake import LATE_VERSIONS, Starved, Taken
from trainer_gpu.lease import Lease, take_lease
from trainer_gpu.metrics import drop_metrics
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle
from trainer_gpu.savepoint import Savepoint
from trainer_gpu.step_record import manifest_of

CLOSE_SECONDS = 60.0
"""How long the version in flight is waited for when the process ends."""

MAX_NEWS = 32
"""Trials that one step tells of: a message is small. The others are told of by the next."""

log = structlog.get_logger()


class TrainerEngine:
    """One candidate for a run's lease. `on_lease` is told of each lease taken, and of None when it is lost."""

    def __init__(self, handle: RunHandle, *, on_lease: Callable[[Acquired | None], None] = lambda lease: None, lead: Lead = alone) -> None:
        self._handle = handle
        self._lead = lead
        self._on_lease = on_lease
        self._policy: Policy | None = None
        self._lease: Lease | None = None
        self._progress: Progress | None = None
        self._thread_id = 0
        self._grants = GrantBook(handle.store, handle.run)
        self._savepoint = Savepoint(handle, self._grants)
        handle.store.on_retry = self._on_retry

    def prepare(self) -> Policy:
        """Build the policy ahead of the first acquire: it takes seconds. From any thread, before the first call; returns it."""
        self._policy = self._policy or self._new_policy()
        return self._policy

    def acquire(self, request: AcquireRequest, attempt: int, progress: Progress) -> Acquired:
        """See `ports.PolicyTrainer`. The weights are those of the checkpoint in HEAD, or the base checkpoint's.

        Raises:
            FencedError: a later lease holds the run. CheckpointError: neither HEAD's checkpoint nor one before it can be loaded.
            ReplayedError: HEAD is older than what the run published.
            UsageError: the attempts of this lease are used up.
        """
        with self._working(request.run, progress):
            self._drop_lease()
            policy = self._built(progress)
            lease, head = take_lease(self._handle, policy, self._grants, request, attempt, progress)
            self._lease = lease
            self._publish_taken(lease, head, policy, progress)
            lease.intake.start()
            queue = names.lease_queue(request.run, lease.token)
            acquired = Acquired(
                lease.token, self._handle.owner, queue, lease.step, lease.version, head.state,
                num_gpus=host.num_ranks(), anchor_version=lease.publisher.anchor_version,
            )  # fmt: skip
            log.info("run_acquired", token=lease.token, step=lease.step, version=lease.version)
        self._on_lease(acquired)
        return acquired

    def _publish_taken(self, lease: Lease, head: Head, policy: Policy, progress: Progress) -> None:
        """Make the weights of a new lease the newest version: the one that HEAD names already where it has them to the bit."""
        # A trainer that is killed often must not leave the newest anchor ever further behind.
        late = head.version + 1 - lease.publisher.anchor_version >= self._handle.config.publish.anchor_every_versions
        if not late and head.checkpoint_key and lease.versions.step_of(head.version) == lease.step:
            progress.report(f"comparing the weights with version {head.version}")
            if lease.publisher.is_published(policy, step=lease.step, token=lease.token, version=head.version):
                lease.arrived_version = head.version
                is_anchor = lease.publisher.anchor_version == head.version
                anchor_bytes = lease.publisher.weights_bytes if is_anchor else 0
                lease.last_published = Published(head.version, lease.step, head.manifest_key, anchor_bytes=anchor_bytes)
                return
        progress.report("publishing the present weights")
        key = None if head.checkpoint_key else self._savepoint.prove(lease, policy, progress)
        self._publish(lease, policy, anchor=late or head.version < 0, announce=False, checkpoint_key=key, progress=progress)
        self._arrive(lease, progress)

    def train_step(self, request: StepRequest, progress: Progress) -> StepResult:
        """See `ports.PolicyTrainer`. The step that was done last is answered again without being done again.

        Raises:
            LostStateError: this process does not hold the lease, or is at another step.
            NonFiniteError: the gradient is not finite, and no group of the step is at fault; nothing has changed.
        """
        with self._working(request.run, progress):
            lease = self._held(request.token)
            if lease.last_step is not None and lease.last_step.step == request.step:
                return lease.last_step
            self._check_step(lease, request.step - 1)
            self._check_flight(lease, progress)
            lease.intake.quarantine(request.quarantined, request.on_trial)
            lease.hold_trials(request.on_trial, self._handle.store)
            progress.report("waiting for groups", version=lease.version, key=lease.step_manifest_key)
            waited_seconds = 0.0
            while True:
                found = lease.intake.take(lease.version, progress, request.wait_seconds)
                taken = replace(found, wait_seconds=waited_seconds + found.wait_seconds)
                if isinstance(taken, Starved):
                    return self._starved(lease, request, taken, progress)
                try:
                    return self._train(lease, request, taken, progress)
                except FaultyGroupsError as error:
                    faulty = [taken.keys[place] for place in error.places]
                    log.warning("groups_not_finite", step=request.step, keys=faulty)
                    lease.intake.expel(faulty)
                    waited_seconds = taken.wait_seconds
                except NonFiniteError as error:
                    raise NonFiniteError(f"{error.message}; {self._way_back(lease)}") from error

    def _starved(self, lease: Lease, request: StepRequest, starved: Starved, progress: Progress) -> StepResult:
        """The answer where no step can be made now."""
        wanted = self._handle.config.learning.groups_per_step
        return StepResult(
            "stopped" if starved.stopping else "starved", request.step, wait_seconds=starved.wait_seconds, reason=starved.reason,
            num_missing=starved.num_missing, oldest_version=starved.oldest_version, equal_rewards=dict(starved.equal_rewards),
            alarm=lease.alarms.ring_unstepped(sum(starved.equal_rewards.values()), wanted),
            suspects=_suspects(lease, request.quarantined, lease.intake.refused),
            canaries=self._judge(lease, lease.intake.refused, progress),
        )  # fmt: skip

    def _way_back(self, lease: Lease) -> str:
        """What a person is told to do where the policy itself is at fault: the next lease begins with HEAD's checkpoint."""
        key = lease.writer.read()[0].checkpoint_key
        return f"`stoa resume {self._handle.run}` goes back to checkpoint {key}"

    def publish(self, request: PublishRequest, progress: Progress) -> Published:
        """See `ports.PolicyTrainer`. One swap of HEAD names version, step and checkpoint together.

        Raises:
            LostStateError: as `train_step`. FencedError: another trainer has the run.
        """
        with self._working(request.run, progress):
            lease = self._held(request.token)
            self._check_step(lease, request.step)
            self._check_flight(lease, progress)
            last = lease.last_published
            # An anchor may be wanted of a step that was published without one: that is another version of the same weights.
            if last is not None and last.step == request.step and bool(last.anchor_bytes) >= request.anchor:
                return last
            policy = self._built(progress)
            saved = self._savepoint.save(lease, policy, progress) if request.checkpoint else None
            key = saved.key if saved else None
            return self._publish(lease, policy, anchor=request.anchor, announce=request.announce, checkpoint_key=key, progress=progress)

    def checkpoint(self, request: CheckpointRequest, progress: Progress) -> Checkpointed:
        """See `ports.PolicyTrainer`. Raises as `publish`."""
        with self._working(request.run, progress):
            lease = self._held(request.token)
            self._check_step(lease, request.step)
            self._arrive(lease, progress)
            saved = self._savepoint.save(lease, self._built(progress), progress)
            lease.writer.swap(lease.token, step=lease.step, step_manifest_key=lease.step_manifest_key, checkpoint_key=saved.key)
            self._savepoint.prune(lease, saved.key)
            return Checkpointed(lease.step, saved.key, saved.num_bytes)

    def close(self) -> None:
        """Stop what runs beside the engine's thread."""
        if self._lease is not None:
            self._lease.intake.close()
            self._lease.publisher.close(CLOSE_SECONDS)

    def _train(self, lease: Lease, request: StepRequest, taken: Taken, progress: Progress) -> StepResult:
        """One optimizer step and its manifest. If the manifest cannot be written, memory is ahead of the bucket: lost."""
        step = request.step
        config, policy = self._handle.config, self._built(progress)
        canaries = self._judge(lease, taken.refused, progress)
        started_at, began = time.time(), time.monotonic()
        try:
            outcome = policy.train(
                taken.groups,
                version=lease.version,
                step=step,
                planned_sequences=config.learning.groups_per_step * config.rollout.group_size,
                on_row=lambda row: progress.report(f"step {step}: {row}"),
            )
        except StoaError:
            lease.intake.put_back()
            raise
        lease.stepped_at = time.monotonic()
        train_seconds = lease.stepped_at - began
        metrics = {**outcome.metrics, **drop_metrics(taken.dropped, len(taken.groups)), **taken.metrics}
        if lease.fresh_changed_fraction is not None:
            metrics["changed_fraction"] = lease.fresh_changed_fraction
            lease.fresh_changed_fraction = None
        if request.groups_running >= 0:
            metrics["groups_running"] = float(request.groups_running)
        metrics["trainer_wait_share"] = taken.wait_seconds / max(taken.wait_seconds + train_seconds, 1e-9)
        named, lease.fresh_latency = lease.fresh_latency, None
        if named is not None:
            metrics["publish_latency_version"], metrics["publish_latency_seconds"] = named
        metrics |= lease.eval_watch.news(lease.alarms.eval_seen)
        alarms = lease.alarms.ring(metrics)
        outcome = replace(outcome, metrics={**metrics, **alarms.metrics})
        manifest = manifest_of(
            lease, self._handle.run, step, taken, outcome, config.learning, started=started_at, train_seconds=train_seconds
        )
        try:
            lease.step_manifest_key = write_step(self._handle.store, manifest)
        except StoaError:
            self._drop_lease()
            raise
        lease.intake.settle()
        lease.canaries.clear()
        lease.fleet.note(manifest)
        lease.step = step
        lease.settled |= {*taken.keys, *(d.key for d in taken.dropped), *(r.key for r in taken.refused)}
        lease.last_step = StepResult(
            "done",
            step,
            manifest_key=lease.step_manifest_key,
            num_groups=len(taken.groups),
            reward_mean=outcome.metrics["reward_mean"],
            gate_drop_rate=outcome.metrics["gate_drop_rate"],
            wait_seconds=taken.wait_seconds,
            train_seconds=train_seconds,
            alarm=alarms.pause,
            suspects=_suspects(lease, request.quarantined),
            canaries=canaries,
        )
        log.info("step_done", step=step, version=lease.version, wait_seconds=taken.wait_seconds, train_seconds=train_seconds)
        return lease.last_step

    def _judge(self, lease: Lease, refused: Sequence[Refused], progress: Progress) -> tuple[CanaryNews, ...]:
        """Take what Macs on trial have sent into account, compared with the policy as it is; returns trials that have moved.

        Groups with equal rewards are not compared, for none of the fleet's that are trained on has them.
        """
        lease.trials.charge(refused)
        came = lease.intake.canaries()
        told_apart = [(key, group) for key, group in came if not is_constant(group.rewards)]
        if told_apart:
            progress.report(f"comparing {len(told_apart)} canary groups", version=lease.version)
            compare = self._built(progress).compare
            for (key, group), found in zip(told_apart, compare([group for _, group in told_apart]), strict=True):
                mismatch = found if _is_finite(found) else compare([group])[0]  # another of its row may be at fault
                if not _is_finite(mismatch):
                    lease.trials.charge([Refused(key, group.host, Reason.NON_FINITE)])
                    continue
                seen = Canary(key, lease.version, lease.distance_of(group.version), mismatch)
                lease.canaries.append(seen)
                lease.trials.saw(key, sample_of(*seen))
        for key, _ in came:
            lease.trials.saw(key, None)
        news = lease.trials.news(lease.fleet.newest, MAX_NEWS)
        for one in news:
            log.warning("canaries_judged", host=one.host, num_clean=one.num_clean, verdict=one.verdict, reason=one.reason)
        return tuple(CanaryNews(one.host, one.num_clean, one.verdict, one.reason) for one in news)

    def _publish(
        self, lease: Lease, policy: Policy, *, anchor: bool, announce: bool, checkpoint_key: str | None, progress: Progress
    ) -> Published:
        """The next version, with a checkpoint in the same swap if there is one.

        The trainer is held for the scan only, and for the version before if that has not arrived. A version whose anchor is
        announced at once is waited for.
        """
        self._arrive(lease, progress)
        started = time.monotonic()
        step, step_manifest_key = lease.step, lease.step_manifest_key
        progress.report(f"publishing version {lease.version + 1} of step {step}")
        named = {} if checkpoint_key is None else {"checkpoint_key": checkpoint_key}
        stepped_at, lease.stepped_at = lease.stepped_at, 0.0

        def swap(prepared: Prepared) -> None:
            # Known before HEAD names it: a fast Mac's first groups must not come too early.
            lease.versions.add(prepared.version, prepared.state_id, step)
            lease.writer.swap(
                lease.token,
                version=prepared.version,
                manifest_key=prepared.manifest_key,
                manifest_sha256=prepared.manifest_sha256,
                step=step,
                step_manifest_key=step_manifest_key,
                published_at=time.time(),
                **named,
            )
            if stepped_at:
                lease.fresh_latency = prepared.version, time.monotonic() - stepped_at

        version = lease.version + 1
        changed_fraction = lease.publisher.publish(
            policy, step=step, token=lease.token, version=version, anchor=anchor, inline=announce, swap=swap
        )
        lease.version = version
        log.info("version_scanned", version=version, step=step, changed_fraction=changed_fraction, seconds=time.monotonic() - started)
        lease.checkpoint_in_flight = checkpoint_key or ""
        prepared = self._arrive(lease, progress) if announce else None
        # One version more than a successor, which may publish at once, will look at.
        oldest = lease.version - self._handle.config.learning.max_staleness_hard - LATE_VERSIONS - 1
        lease.settled = {key for key in lease.settled if keys.parse_group(key).version >= oldest}
        if lease.last_published is not None and step > lease.last_published.step:
            lease.fresh_changed_fraction = changed_fraction
        lease.last_published = Published(
            version=version,
            step=step,
            manifest_key=prepared.manifest_key if prepared else "",
            delta_bytes=prepared.delta_bytes if prepared else 0,
            anchor_bytes=lease.publisher.weights_bytes if anchor else 0,
            changed_fraction=changed_fraction,
            seconds=time.monotonic() - started,
            arrived_version=lease.arrived_version,
            arrived_delta_bytes=lease.arrived_delta_bytes,
        )
        return lease.last_published

    def _arrive(self, lease: Lease, progress: Progress) -> Prepared | None:
        """Wait until HEAD names the version in flight, if there is one. Its loss is the lease's: memory is ahead of the bucket."""
        try:
            prepared = lease.publisher.finish(lambda: progress.report(f"version {lease.version} is on its way"))
        except StoaError as error:
            if not isinstance(error, ServiceUnavailableError):
                self._drop_lease()
            raise
        if prepared is not None:
            lease.arrived_version, lease.arrived_delta_bytes = prepared.version, prepared.delta_bytes
            if lease.checkpoint_in_flight:
                with contextlib.suppress(ServiceUnavailableError):  # what is left goes with the next one
                    self._savepoint.prune(lease, lease.checkpoint_in_flight)
                lease.checkpoint_in_flight = ""
            progress.report(f"version {prepared.version} is published", version=prepared.version, key=prepared.manifest_key)
            log.info(
                "version_published",
                version=prepared.version,
                delta_bytes=prepared.delta_bytes,
                anchor_bytes=prepared.anchor_bytes,
                changed_fraction=prepared.changed_fraction,
                encode_seconds=prepared.encode_seconds,
                upload_seconds=prepared.upload_seconds,
            )
        return prepared

    def _check_flight(self, lease: Lease, progress: Progress) -> None:
        """Meet the loss of the version in flight before more is built on it; an outage of the bucket may still pass."""
        if lease.publisher.failed():
            with contextlib.suppress(ServiceUnavailableError):
                self._arrive(lease, progress)

    def _built(self, progress: Progress) -> Policy:
        """The policy, built at first use: that takes seconds and must not hold up the process's start."""
        if self._policy is None:
            progress.report("building the model")
            self._policy = self._new_policy()
        return self._policy

    def _new_policy(self) -> Policy:
        handle, config = self._handle, self._handle.config
        with self._lead(Build(handle.document, handle.store.settings)):
            return Policy(handle.model_folder, config.learning, seed=config.seed, layout_id=handle.document.layout_id, lead=self._lead)

    def _held(self, token: int) -> Lease:
        if self._lease is None or self._lease.token != token:
            holds = f"lease {self._lease.token}" if self._lease else "no lease"
            raise LostStateError(f"this trainer holds {holds}, not {token}", hint="acquire the run again")
        return self._lease

    def _check_step(self, lease: Lease, step: int) -> None:
        if lease.step != step:
            raise LostStateError(f"this trainer is at step {lease.step}, not at {step}", hint="acquire the run again")

    def _drop_lease(self) -> None:
        if self._lease is not None:
            self._lease.intake.close()
            self._lease.publisher.close(0.0)
            self._lease = None
            self._on_lease(None)

    @contextmanager
    def _working(self, run: str, progress: Progress) -> Iterator[None]:
        """One call: where retries of the bucket report to, and what a lost lease means."""
        if run != self._handle.run:
            raise UsageError(f"this trainer serves run {self._handle.run}, not {run}")
        self._progress, self._thread_id = progress, threading.get_ident()
        try:
            yield
        except FencedError:
            self._drop_lease()
            raise
        finally:
            self._progress = None

    def _on_retry(self, reason: str) -> None:
        """The bucket is away: keep the heartbeat going, unless the call was cancelled."""
        progress = self._progress
        if progress is None or threading.get_ident() != self._thread_id:
            return
        progress.report(reason)
        if progress.cancelled or progress.stopping:
            raise ServiceUnavailableError(f"asked to end while {reason}")


def _is_finite(mismatch: GroupMismatch) -> bool:
    return all(map(math.isfinite, mismatch))


def _suspects(lease: Lease, shut_out: Sequence[str], pending: Sequence[Refused] = ()) -> tuple[Suspect, ...]:
    """Macs that the run should shut out beside those that are; `pending`: groups refused since the last step."""
    found = lease.fleet.suspects(shut_out=shut_out, pending=pending)
    for suspicion in found:
        log.warning("mac_suspected", host=suspicion.host, reason=suspicion.reason)
    return tuple(Suspect(suspicion.host, suspicion.reason) for suspicion in found)
