"""Reads a run: the lineage and chain of HEAD from the bucket, each object once; the fleet and the state from Temporal.

The only maker of a `RunRecord`. It never writes. What is not there yet (before the first version) is left empty.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from cli.macs import held_by, macs_of
from cli.report.look import look_at
from cli.report.noted import with_noted
from cli.report.record import HostShare, RunFacts, RunRecord, StepRow, VersionRow
from cli.report.summary import STEADY_FROM_VERSION
from cli.temporal import CONTROL_SILENT, Control
from stoa.bucket.evals import read_summary
from stoa.bucket.head import Head, read_head
from stoa.bucket.keys import evals_prefix, root
from stoa.bucket.manifest import Manifest, read_manifest
from stoa.bucket.run_document import RunDocument
from stoa.bucket.steps import StepManifest, lineage
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError, ObjectMissingError, RunMissingError, ServiceError
from stoa.contracts.evaluation_messages import EvaluationResult
from stoa.contracts.fleet_messages import SessionStatus
from stoa.contracts.messages import RunResult, RunStatus

log = structlog.get_logger()

_ENDED: Final = ("stopped", "failed")
_NOT_YET: Final = "waiting for the trainer's control process to start"
_BUCKET_ALONE: Final = "what is shown is what the bucket tells: time and limits of the first start, nothing of Macs"


@dataclass(frozen=True, slots=True)
class _Link:
    """A manifest of the chain and the key and sha256 it was read by."""

    key: str
    sha256: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Newest:
    """How many of a run's newest steps, versions and evaluations a glance reads: it shows no more."""

    num_steps: int = 100
    num_versions: int = 8
    num_evaluations: int = 8


class Collector:
    """Follows one run. Each `collect` reads what is new since the last."""

    def __init__(self, document: RunDocument, store: Store, control: Control | None, *, newest: Newest | None = None) -> None:
        """`newest`: begin with so many of the newest, not with all. Each is read after the one that names it, one request each."""
        self._newest = newest
        self._document = document
        self._store = store
        self._control = control
        self._steps: list[tuple[str, StepManifest]] = []
        self._chain: list[_Link] = []
        self._evaluations: dict[str, EvaluationResult] = {}
        self._sessions: dict[str, SessionStatus] = {}
        self._early: tuple[SessionStatus, ...] = ()
        self._heads: dict[tuple[int, str], None] = {}
        self._head: Head | None = None
        self._seen_versions = -1
        self._status: RunStatus | None = None
        self._silence = ""
        self._away = ""
        self._begins = False
        self._result: RunResult | None = None
        self._ended_at = 0.0
        self._was_running = False
        self._waits: Counter[str] = Counter()
        self._garbled: set[str] = set()
        self._gpu_hours = 0.0

    @property
    def head_stopped(self) -> bool:
        """True if the HEAD that was read last tells the workers that the run is over."""
        return self._head is not None and self._head.state == "stopped"

    @property
    def temporal_away(self) -> str:
        """Why Temporal itself gave no answer at the last look; empty while it does, and where only the run's own processes are silent."""
        return self._away

    def collect(self, *, everything: bool = False, interval: int = -1) -> RunRecord:
        """The run up to now; `everything` also counts all objects of the bucket and reads some groups.

        interval: the version whose time as the newest is then looked at; -1 takes one from the middle of the run.
        """
        self._read_bucket(everything)
        self._ask_temporal()
        record = self._record(self._count_objects() if everything else ({}, {}))
        return look_at(self._store, self._document, with_noted(self._store, record), interval) if everything else record

    def _read_bucket(self, everything: bool) -> None:
        run = self._document.run
        try:
            head, _ = read_head(self._store, run, self._document.public_key)
        except ObjectMissingError:
            return
        self._head = head
        if head.version >= 0:
            self._heads[head.version, head.manifest_sha256] = None
        self._follow_steps(head)
        self._follow_chain(head)
        # A summary is written some seconds after its version: look while versions come, and at the end.
        if everything or head.version != self._seen_versions or head.state != "running" or self._status_tells_more():
            self._seen_versions = head.version
            self._read_evaluations()

    def _status_tells_more(self) -> bool:
        status = self._status
        return status is not None and (status.num_evaluations_open > 0 or (status.last_pass_at_1 >= 0 and not self._evaluations))

    def _follow_steps(self, head: Head) -> None:
        known = {key: index for index, (key, _) in enumerate(self._steps)}
        fresh: list[tuple[str, StepManifest]] = []
        key = head.step_manifest_key
        if key in known:
            del self._steps[known[key] + 1 :]
            return
        for manifest in lineage(self._store, head):
            fresh.append((key, manifest))
            key = manifest.parent_key
            if key in known or (self._newest is not None and len(fresh) >= self._newest.num_steps):
                break
        keep = known[key] + 1 if key in known else 0
        self._steps[keep:] = reversed(fresh)

    def _follow_chain(self, head: Head) -> None:
        fresh: list[_Link] = []
        key, sha256 = head.manifest_key, head.manifest_sha256
        known = {link.key: index for index, link in enumerate(self._chain)}
        most = self._newest.num_versions if self._newest is not None else head.version + 1
        while key and key not in known and len(fresh) < most:
            manifest = read_manifest(self._store, head.run, key, sha256, self._document.public_key)
            fresh.append(_Link(key, sha256, manifest))
            parent = manifest.parent
            key, sha256 = (parent.manifest_key, parent.manifest_sha256) if parent else ("", "")
        keep = known[key] + 1 if key in known else 0
        self._chain[keep:] = reversed(fresh)

    def _read_evaluations(self) -> None:
        found = [listed.key for listed in self._store.list(evals_prefix(self._document.run)) if listed.key.endswith("/summary.json")]
        for key in found[-self._newest.num_evaluations :] if self._newest is not None else found:
            if key not in self._evaluations and key not in self._garbled:
                try:
                    self._evaluations[key] = read_summary(self._store, key).result
                except FormatError as problem:
                    # A stranger's bytes under a key that anybody may guess must not cost the report.
                    self._garbled.add(key)
                    log.warning("summary_garbled", key=key, reason=problem.message)

    def _ask_temporal(self) -> None:
        if self._control is None:
            return
        run = self._document.run
        self._away, self._begins = "", False
        try:
            self._status = self._control.status(run)
            # A Mac that left is kept: its session's last answer stands.
            for session in macs_of(self._control, run, self._sessions).sessions:
                self._sessions[session.host] = session
            if self._head is not None and self._head.version >= STEADY_FROM_VERSION and self._head.state == "running":
                self._early = self._early or tuple(self._sessions.values())
                self._waits.update(s.reason for s in self._sessions.values() if s.state == "live" and s.reason)
            self._silence = ""
            self._gpu_hours = self._used(run, self._status)
        except RunMissingError as problem:
            self._silence = f"nothing: {problem.message}; `stoa run CONFIG --resume` goes on with it"
            self._recall()
        except ServiceError as problem:
            # The view must live on while Temporal or the control process starts again; the last answers stand.
            self._away = "" if CONTROL_SILENT in problem.message else problem.message
            self._silence = problem.message
            if self._status is None:
                self._silence = f"{self._away}; {_BUCKET_ALONE}" if self._away else _NOT_YET
            self._recall()

    def _recall(self) -> None:
        """Of a run that HEAD calls ended and whose workers are gone: what its workflows left as results, else what its steps tell."""
        if self._control is None or self._status is not None or self._head is None or self._head.state not in _ENDED:
            return
        try:
            # One that was resumed and has no workers yet: its result would be waited for.
            self._begins = self._control.is_running(self._document.run)
            if self._begins:
                self._result = None
                return
            self._silence = ""
            result = self._control.result(self._document.run)
        except (ServiceError, RunMissingError):
            pass  # Temporal is away, or has forgotten the run
        else:
            self._result, self._gpu_hours = result, result.gpu_hours
            self._sessions |= {said.host: said for said in self._control.ended_sessions(self._document.run)}
        told = sessions_of(manifest for _, manifest in self._steps)
        if self._newest is not None and (not self._sessions or told.keys() - self._sessions.keys()):
            # What a Mac brought in all only all steps tell.
            self._newest, self._steps = None, []
            self._follow_steps(self._head)
            told = sessions_of(manifest for _, manifest in self._steps)
        for host, said in told.items():
            self._sessions.setdefault(host, said)

    def _used(self, run: str, status: RunStatus) -> float:
        """GPU hours: of an ended run those of its result, since the clock of a query runs on."""
        self._result = None
        if self._control is None or status.state not in _ENDED or self._control.is_running(run):
            return status.gpu_hours
        self._result = self._control.result(run)
        return self._result.gpu_hours

    def _count_objects(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        prefix = root(self._document.run)
        for listed in self._store.list(prefix):
            kind = listed.key[len(prefix) :].partition("/")[0]
            sizes[kind] += listed.num_bytes
            counts[kind] += 1
        return dict(sizes), dict(counts)

    def _record(self, objects: tuple[Mapping[str, int], Mapping[str, int]]) -> RunRecord:
        status, head, result = self._status, self._head, self._result
        timed = result if result is not None and result.started_at else None
        told = status or timed
        # A run that was resumed may end at others than it was started with.
        stop = told.stop if told is not None else None
        facts = facts_of(self._document)
        facts = replace(facts, gpu_usd_an_hour=stop.dollars_per_gpu_hour) if stop is not None else facts
        state = status.state if status is not None else (head.state if head is not None and not self._begins else "created")
        steps = tuple(_step_row(key, manifest) for key, manifest in self._steps)
        started_at = (told.started_at if told is not None else 0.0) or facts.created_at
        done_at = {(row.step, row.epoch): row.started_at + row.train_seconds for row in steps}
        latencies = _latencies(steps)
        versions = tuple(_version_row(link, done_at, latencies) for link in self._chain)
        newest = max([started_at, *done_at.values(), *(row.published_at for row in versions)])
        ended_at = time.time() if self._control is not None else newest
        if state in _ENDED:
            # Watched to its end, or found ended: where its workflow does not tell, its last publish is the last that is known.
            self._ended_at = self._ended_at or (ended_at if self._was_running else newest)
            ended_at = timed.ended_at if timed is not None else self._ended_at
        if self._begins:
            started_at = ended_at  # when, and with what limits, only its own process tells
        self._was_running = state not in _ENDED
        return RunRecord(
            facts=facts,
            state=state,
            waiting_for=self._silence or (status.waiting_for if status is not None else ""),
            held=held_by(state, head.state if head is not None else ""),
            end_reason=status.end_reason if status is not None else (result.end_reason if result is not None else ""),
            started_at=started_at,
            ended_at=ended_at,
            seconds_before=told.seconds_before if told is not None else 0.0,
            version=head.version if head is not None else -1,
            max_steps=stop.max_steps if stop is not None else (0 if self._begins else self._document.config.stop.max_steps),
            live_step=status.step if status is not None else 0,
            step=head.step if head is not None else 0,
            steps=steps,
            versions=versions,
            evaluations=tuple(sorted(self._evaluations.values(), key=lambda e: (e.version, e.key))),
            sessions=tuple(sorted(self._sessions.values(), key=lambda s: s.host)),
            sessions_early=self._early,
            bucket_bytes=objects[0],
            bucket_objects=objects[1],
            waits=dict(self._waits),
            heads_seen=tuple(self._heads),
            gpu_hours=self._gpu_hours,
        )


def facts_of(document: RunDocument) -> RunFacts:
    """What was settled before the first step."""
    config = document.config
    return RunFacts(
        run=document.run,
        model=config.model,
        environment=config.environment.name,
        seed=config.seed,
        created_at=document.created_at,
        settings=config.model_dump_json(indent=2),
        groups_per_version=config.groups_per_version,
        groups_per_step=config.learning.groups_per_step,
        equal_rewards_alarm=config.alarms.zero_variance_fraction.threshold,
        head_poll_seconds=config.timeouts.head_poll_seconds,
        prices=config.prices,
        gpu_usd_an_hour=config.stop.dollars_per_gpu_hour,
    )


def with_end(record: RunRecord, *, restarts: Mapping[str, int], end_reason: str = "") -> RunRecord:
    """The record of a run this process has watched: how often workers were started again, and why it ended."""
    return replace(record, restarts=dict(restarts), end_reason=end_reason or record.end_reason)


def sessions_of(steps: Iterable[StepManifest]) -> dict[str, SessionStatus]:
    """What step manifests tell of each Mac, for a run whose sessions nobody remembers: its groups and tokens, no times and no bytes."""
    counted: dict[str, SessionStatus] = {}
    for manifest in steps:
        for host, counts in manifest.hosts.items():
            so_far = counted.get(host, SessionStatus(host, "ended", 0, -1, reason="told by the bucket alone"))
            counted[host] = replace(
                so_far,
                version=max(so_far.version, manifest.version),
                num_groups=so_far.num_groups + counts.accepted,
                num_sampled_tokens=so_far.num_sampled_tokens + counts.num_sampled_tokens,
                pull_latency_seconds_last=counts.pull_latency_seconds or so_far.pull_latency_seconds_last,
            )
    return counted


def _step_row(key: str, manifest: StepManifest) -> StepRow:
    return StepRow(
        step=manifest.step,
        version=manifest.version,
        epoch=manifest.epoch,
        key=key,
        parent_key=manifest.parent_key,
        started_at=manifest.started_at,
        wait_seconds=manifest.wait_seconds,
        train_seconds=manifest.train_seconds,
        consumed=manifest.consumed,
        dropped={drop.key: drop.reason for drop in manifest.dropped},
        refused=tuple((refused.key, refused.host, refused.reason) for refused in manifest.refused),
        hosts={
            host: HostShare(
                accepted=counts.accepted,
                refused=dict(counts.refused),
                quarantined=counts.quarantined,
                sampled_tokens=counts.num_sampled_tokens,
                decode_seconds=counts.decode_seconds,
                pull_latency_seconds=counts.pull_latency_seconds,
                idle_seconds=counts.idle_seconds,
            )
            for host, counts in manifest.hosts.items()
        },
        metrics=manifest.metrics,
        facts=manifest.facts,
        gated=tuple(manifest.gated),
    )


def _latencies(steps: Sequence[StepRow]) -> Mapping[int, float]:
    """Version -> seconds from its last optimizer step to HEAD naming it, as the trainer measured them."""
    told = [row.metrics for row in steps if "publish_latency_version" in row.metrics]
    return {int(metrics["publish_latency_version"]): metrics["publish_latency_seconds"] for metrics in told}


def _version_row(link: _Link, done_at: Mapping[tuple[int, int], float], latencies: Mapping[int, float]) -> VersionRow:
    """`done_at`: by step and epoch. `latencies`: as the trainer measured them, by version; for others the manifest's own time stands in."""
    manifest = link.manifest
    parent = manifest.parent
    # A version that a new lease published at an old step has no last optimizer step of its own: the time between is nobody's latency.
    done = done_at.get((manifest.step, manifest.epoch), 0.0)
    repeated = parent is None or not done or manifest.created_at - done < 0
    return VersionRow(
        version=manifest.version,
        step=manifest.step,
        epoch=manifest.epoch,
        key=link.key,
        sha256=link.sha256,
        parent_version=parent.version if parent is not None else -1,
        parent_sha256=parent.manifest_sha256 if parent is not None else "",
        state_id=manifest.state_id,
        parent_state_id=parent.state_id if parent is not None else "",
        published_at=manifest.created_at,
        delta_bytes=manifest.delta.num_bytes if manifest.delta is not None else 0,
        anchor_bytes=manifest.anchor.num_bytes,
        anchor_version=manifest.anchor.version,
        changed_fraction=manifest.stats.changed_fraction,
        latency_seconds=0.0 if repeated else latencies.get(manifest.version, manifest.created_at - done),
        work_seconds=sum(manifest.stats.seconds.values()),
    )
