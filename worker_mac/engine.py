"""A Mac's engine: one sweep from a request to groups in the bucket. Implements `stoa.contracts.ports.RolloutEngine`.

It puts the parts in order: HEAD, weights, what is missing, the batch, shipping. How a batch is played, weights are
brought in and bytes are sent is the business of `sweep.py`, `versions.py` and `uploader.py`. All methods run on one
thread, the only one that touches MLX.
"""

import json
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Final

import mlx.core as mx
import structlog

from environments.base import Environment
from stoa.bucket import keys
from stoa.bucket.head import Head
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.bucket.tickets import MAX_KEYS, TicketBook
from stoa.bucket.uploads import TicketTarget
from stoa.contracts.errors import InfrastructureFaultError, ServiceUnavailableError, StarvedError, StoaError, TicketError, WrongStateError
from stoa.contracts.fleet_messages import SweepRequest, SweepResult, SweepStatus
from stoa.contracts.ports import Progress
from stoa.rollouts.records import Episode, Fingerprint, Group, Timings
from stoa.rollouts.shard import encode_group
from worker_mac.arriving import reported
from worker_mac.guest import Guest
from worker_mac.identity import note_sweep, project_version
from worker_mac.memory import CACHE_BYTES
from worker_mac.model_config import read_model_config
from worker_mac.player import Player
from worker_mac.sampler import NEUTRAL, Sampling, seed_of
from worker_mac.sweep import NOTHING_PLAYED, Casting, OnGroup, Played, exam_castings
from worker_mac.uploader import Gate, Spool, Uploader
from worker_mac.versions import Pulled, Served, Versions

_log = structlog.get_logger(__name__)

_REPORT_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Waits:
    """How long, in seconds, the engine waits for others at most."""

    pause: float = 30.0
    """A sweep of a paused run is answered after this long, so that its session stays in charge."""
    version: float = 30.0
    """For a version that the request needs."""
    flush: float = 600.0
    """For the bucket at the end of a sweep; what is not sent by then stays in the spool."""
    grace: float = 15.0
    """How long a sweep goes on after this process was asked to end."""


class _BrokenOffError(Exception):
    """The sweep ends early, with this status."""

    def __init__(self, status: SweepStatus, reason: str) -> None:
        super().__init__(reason)
        self.status: SweepStatus = status
        self.reason = reason


@dataclass(slots=True)
class _Run:
    """One sweep in progress."""

    request: SweepRequest
    served: Served
    pulled: Pulled
    idle_seconds: float
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    num_shipped: int = 0
    last_key: str = ""
    keys: tuple[str, ...] = ()
    broken_off: tuple[SweepStatus, str] | None = None
    stopping_since: float | None = None
    reported_at: float = 0.0


class MacEngine:
    """Plays sweeps of one run on one Mac."""

    def __init__(
        self,
        store: Store,
        document: RunDocument,
        environment: Environment,
        *,
        host: str,
        folder: Path,
        model_folder: Path,
        waits: Waits = Waits(),
        guest: Guest | None = None,
        fingerprint: str = "",
        tickets: TicketBook | None = None,
        state_folder: Path | None = None,
        make_versions: Callable[..., Versions] = Versions,
        make_player: Callable[..., Player] = Player,
    ) -> None:
        """`folder` keeps this run's weights and spool; `model_folder` holds the run's config.json; `guest`: when to play.

        fingerprint: numeric one of this machine, which its groups carry. tickets: of an invited Mac, whose key does not
        write. state_folder: keeps what was measured of this Mac for every run. make_*: of a wired set.
        """
        self._store, self._config, self._environment = store, document.config, environment
        self._run, self._host, self._folder, self._waits = document.run, host, folder, waits
        model_config = json.loads((model_folder / "config.json").read_text("utf-8"))
        self._guest = guest or Guest()
        allowed = self._guest.allowed
        self._versions = make_versions(
            store, document, model_config, folder / "weights", cache_bytes=allowed.cache_bytes, plain_ops=allowed.plain_ops,
            holds_two=lambda: self._player.holds_two,
        )  # fmt: skip
        self._player = make_player(
            environment, self._config.rollout, self._versions.layout, read_model_config(model_config), self._guest,
            folder=folder, state_folder=state_folder or folder,
        )  # fmt: skip
        asked = self._config.evaluation
        self._eval_sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        self._spool = Spool(folder / "spool")
        self._tickets = tickets
        target = store if tickets is None else TicketTarget(store, tickets)
        self._uploader = Uploader(Gate(target, lambda: self._guest.may_transfer), self._spool)
        self._guest.shipping, self._guest.num_refused = lambda: self._uploader.trouble, lambda: self._uploader.num_refused
        self._recovered = False
        self._ended_at = time.monotonic()
        self._busy = False
        self._stopped = False
        mx.set_cache_limit(CACHE_BYTES)
        device = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
        self._engine, self._build = f"mlx {metadata.version('mlx')} {device} {platform.machine()}", project_version()
        self._fingerprint = fingerprint

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last sweep ended; 0 while one is played. For any thread."""
        return 0.0 if self._busy else time.monotonic() - self._ended_at

    @property
    def run_stopped(self) -> bool:
        """True once a sweep found that the run has stopped. For any thread."""
        return self._stopped

    @property
    def groups(self) -> int:
        """Groups to ask for at a time. For any thread."""
        return self._player.groups

    @property
    def holds_weights(self) -> bool:
        """True once weights are in memory. For any thread."""
        return self._versions.version >= 0

    def close(self) -> None:
        """End the background threads; what was not sent stays in the spool."""
        self._versions.close()
        self._uploader.close()

    def sweep(self, request: SweepRequest, progress: Progress) -> SweepResult:
        """Bring weights up to date, play what is missing of the request in one batch, ship each group as it ends.

        Raises:
            StarvedError: the version the request needs does not come.
            ServiceUnavailableError: the bucket is away for longer than the store rides out.
            WeightsError: weights cannot be had, or this MLX computes wrongly.
        """
        idle_seconds, self._busy = time.monotonic() - self._ended_at, True
        self._store.on_retry = progress.report
        down_before = self._store.meters.total().bytes_down
        up_before = self._uploader.bytes_sent
        try:
            if self._tickets is not None:
                self._tickets.take(request.tickets)
                self._uploader.retry(self._tickets.has)
            head = self._await_head(request, progress)
            self._recover(head)
            with self._guest.playing():
                try:
                    result = self._play_request(request, head, idle_seconds, progress)
                except WrongStateError as fault:  # found by the rescan: nothing made with these weights was shipped
                    _log.warning("sweep_begun_anew", sweep=request.sweep, reason=fault.message)
                    self._versions.distrust()
                    result = self._play_request(request, head, idle_seconds, progress)
            return replace(
                result,
                resting=result.status == "paused" and not self._guest.decision.starts,
                bytes_up=self._uploader.bytes_sent - up_before,
                bytes_down=self._store.meters.total().bytes_down - down_before,
                unsent=tuple(self._uploader.unsent()[:MAX_KEYS]),
            )
        except _BrokenOffError as end:
            self._stopped = self._stopped or end.status == "stopped"
            return SweepResult(
                end.status, request.sweep, request.purpose, self._versions.version, idle_seconds=idle_seconds, reason=end.reason,
                resting=end.status == "paused" and not self._guest.decision.starts,
            )  # fmt: skip
        finally:
            self._ended_at, self._busy = time.monotonic(), False
            mx.clear_cache()

    def _await_head(self, request: SweepRequest, progress: Progress) -> Head:
        """HEAD, once this Mac may play, the run goes on and has a version that will do. Raises _BrokenOffError, StarvedError."""
        self._await_guest(progress)
        started = time.monotonic()
        while True:
            head = self._versions.head()
            waited = time.monotonic() - started
            if head is not None and head.state == "stopped":
                raise _BrokenOffError("stopped", "the run has stopped")
            if head is not None and head.state == "draining" and request.purpose == "train":
                raise _BrokenOffError("paused", "the run is ending: only evaluations are played")
            if progress.stopping or progress.cancelled:
                raise _BrokenOffError("draining", "this worker ends")
            paused = head is not None and head.state == "paused" and request.purpose == "train"
            needed = max(0, request.min_version, request.version)
            if head is not None and not paused and head.version >= needed:
                return head
            if paused and waited >= self._waits.pause:
                raise _BrokenOffError("paused", "the run is paused")
            if not paused and waited >= self._waits.version:
                have = "no version" if head is None or head.version < 0 else f"version {head.version}"
                raise StarvedError(f"run {self._run} has {have}, this sweep needs version {needed}", hint="is the trainer running?")
            progress.report("paused" if paused else f"waiting for version {needed}")
            time.sleep(min(self._config.timeouts.head_poll_seconds, 1.0))

    def _await_guest(self, progress: Progress) -> None:
        """Wait until the Mac's owner lets groups be started. Raises _BrokenOffError after a while."""
        started = time.monotonic()
        self._guest.spool_bytes = self._spool.num_bytes
        while not self._guest.decision.starts:
            self._versions.end_staging()
            self._player.drop_pool()
            if progress.stopping or progress.cancelled:
                raise _BrokenOffError("draining", "this worker ends")
            reason = f"paused: {self._guest.decision.reason}"
            if time.monotonic() - started >= self._waits.pause:
                raise _BrokenOffError("paused", reason)
            progress.report(reason)
            time.sleep(0.2)
            self._guest.spool_bytes = self._spool.num_bytes

    def _play_request(self, request: SweepRequest, head: Head, idle_seconds: float, progress: Progress) -> SweepResult:
        if request.purpose == "eval":
            return self._evaluate(request, head, idle_seconds, progress)
        self._versions.drop_pinned()
        with self._arriving(progress):
            oldest = max(request.min_version, head.version - self._config.learning.max_staleness_hard)
            served, pulled = self._versions.newest(head, oldest)
        run = _Run(request, served, pulled, idle_seconds)
        shipped = self._shipped(request, head)
        missing = [index for index in range(len(request.question_ids)) if index not in shipped]
        groups = [self._cast_group(run, index) for index in missing]
        self._versions.stage_ahead(self._config.timeouts.head_poll_seconds)
        played = self._play_groups(run, groups, lambda group, episodes: self._ship_group(run, group, episodes), progress)
        if played.ended and len(missing) == len(request.question_ids):
            lag = self._versions.head_version - served.version
            self._player.learn(played, len(missing), lag=lag, most_lag=self._config.learning.max_staleness)
        self._flush(run, progress)
        return self._result(run, played, len(missing))

    def _arriving(self, progress: Progress) -> AbstractContextManager[None]:
        """While weights are brought in."""
        return reported(lambda: self._versions.arrival, lambda: self._store.meters.total().bytes_down, progress)

    def _cast_group(self, run: _Run, index: int) -> list[Casting]:
        seed = self._group_seed(run, index)
        question = run.request.question_ids[index]
        return [Casting(index, question, seed_of(seed, episode)) for episode in range(run.request.group_size)]

    def _group_seed(self, run: _Run, index: int) -> int:
        return seed_of(self._config.seed, self._run, self._host, run.served.version, run.request.sweep, index)

    def _evaluate(self, request: SweepRequest, head: Head, idle_seconds: float, progress: Progress) -> SweepResult:
        """One part of an evaluation: `group_size` episodes a question on the pinned version; one object."""
        with self._arriving(progress):
            if self._versions.version < head.version == request.version:
                served, pulled = self._versions.newest(head, request.version)
            else:
                served, pulled = self._versions.pinned(head, request.version)
        run = _Run(request, served, pulled, idle_seconds)
        # Keyed by question and not by place, so that the result does not depend on how questions were dealt out.
        seed = seed_of(self._config.seed, self._run, "eval", request.evaluation, request.version)
        castings = exam_castings(request.question_ids, request.group_size, seed)
        episodes: list[Episode] = []
        self._versions.stage_ahead(self._config.timeouts.head_poll_seconds)
        total = self._play_groups(run, [castings], lambda _, ended: episodes.extend(ended), progress)
        if not total.ended:
            return self._result(run, total, 1)
        if not episodes:
            raise InfrastructureFaultError(f"evaluation {request.evaluation}, part {request.part}: every episode was lost")
        served.await_verdict()
        group = self._record(run, request.part % 100, "", seed, episodes)
        key = keys.eval_part(self._run, request.version, request.evaluation, request.part, self._host)
        self._uploader.put(key, encode_group(group))
        run.num_shipped, run.keys = 1, (key,)
        self._flush(run, progress)
        return self._result(run, total, 1)

    def _play_groups(self, run: _Run, groups: Sequence[Sequence[Casting]], on_group: OnGroup, progress: Progress) -> Played:
        """Play groups; ends early when the run stops, this process or the sweep is to end, or the Mac's owner wants it back."""
        castings = [casting for group in groups for casting in group]
        if not castings:
            return NOTHING_PLAYED

        def should_stop() -> bool:
            run.broken_off = run.broken_off or self._reason_to_stop(run, progress)
            return run.broken_off is not None

        stepped_at = time.monotonic()

        def on_step(num_done: int, num_tokens: int) -> None:
            nonlocal stepped_at
            now = time.monotonic()
            self._guest.rest(now - stepped_at)
            stepped_at = time.monotonic()
            if now - run.reported_at >= _REPORT_SECONDS:
                run.reported_at = now
                progress.report(
                    f"sweep {run.request.sweep} version {run.served.version}: {num_done} of {len(castings)} episodes, "
                    f"{num_tokens} tokens, {run.num_shipped} groups"
                )

        trains = run.request.purpose == "train"
        played = self._player.play(
            run.served, castings, on_group, should_stop=should_stop, on_step=on_step,
            record_routing=trains and self._config.rollout.record_routing, sampling=NEUTRAL if trains else self._eval_sampling,
        )  # fmt: skip
        if not played.ended:  # nothing more may begin
            run.broken_off = run.broken_off or ("paused", f"paused: {self._guest.decision.reason}")
        return played

    def _reason_to_stop(self, run: _Run, progress: Progress) -> tuple[SweepStatus, str] | None:
        if progress.cancelled:
            return "partial", "cancelled"
        if self._versions.run_state == "stopped":
            return "stopped", "the run has stopped"
        if reason := self._guest.must_leave:
            return "paused", f"paused: {reason}"
        if progress.stopping:
            run.stopping_since = run.stopping_since or time.monotonic()
            if time.monotonic() - run.stopping_since > self._waits.grace:
                return "draining", "this worker ends"
        return None

    def _ship_group(self, run: _Run, index: int, episodes: list[Episode]) -> None:
        """Hand a group to the uploader, if enough of its episodes were scored."""
        if len(episodes) < self._config.rollout.min_group_size:
            _log.warning("group_lost", sweep=run.request.sweep, group=index, scored=len(episodes))
            return
        run.served.await_verdict()
        group = self._record(run, index, run.request.question_ids[index], self._group_seed(run, index), episodes)
        key = keys.group(self._run, run.served.version, self._host, run.request.sweep, index)
        self._uploader.put(key, encode_group(group))
        self._guest.spool_bytes = self._spool.num_bytes
        run.num_shipped, run.last_key = run.num_shipped + 1, key

    def _record(self, run: _Run, index: int, question_id: str, seed: int, episodes: list[Episode]) -> Group:
        load = self._player.load
        timings = Timings(
            sweep_started_at=run.started_at,
            decode_seconds=time.monotonic() - run.began,
            pull_latency_seconds=run.pulled.latency_seconds,
            idle_seconds=run.idle_seconds,
            num_sampled_tokens=sum(len(episode.logprobs) for episode in episodes),
            batch_occupancy=min(1.0, load.batch_occupancy),
            prefix_hit_share=load.prefix_hit_share,
            peak_memory_bytes=load.peak_memory_bytes,
        )
        return Group(
            run=self._run,
            host=self._host,
            sweep=run.request.sweep,
            group=index,
            purpose=run.request.purpose,
            question_id=question_id,
            version=run.served.version,
            state_id=run.served.state_id,
            temperature=1.0 if run.request.purpose == "train" else self._eval_sampling.temperature,
            seed=seed,
            episodes=tuple(episodes),
            fingerprint=Fingerprint(f"{self._engine} {run.served.model.ops} {self._fingerprint}".strip(), self._build),
            timings=timings,
        )

    def _result(self, run: _Run, played: Played, num_wanted: int) -> SweepResult:
        status: SweepStatus = "done" if run.num_shipped == num_wanted else "partial"
        reason = "" if status == "done" else f"{num_wanted - run.num_shipped} groups were lost"
        if run.broken_off is not None:
            status, reason = run.broken_off
            self._stopped = self._stopped or status == "stopped"
        _log.info(
            "sweep_played", sweep=run.request.sweep, purpose=run.request.purpose, version=run.served.version, status=status,
            groups=run.num_shipped, episodes=played.num_episodes, tokens=played.num_sampled_tokens,
            seconds=time.monotonic() - run.began, heat=self._guest.heat,
        )  # fmt: skip
        return SweepResult(
            status=status,
            sweep=run.request.sweep,
            purpose=run.request.purpose,
            version=run.served.version,
            num_groups=run.num_shipped,
            num_episodes=played.num_episodes - played.num_lost,
            num_sampled_tokens=played.num_sampled_tokens,
            num_prompt_tokens=played.num_prompt_tokens,
            reward_mean=played.reward_sum / max(1, played.num_episodes - played.num_lost),
            decode_seconds=played.seconds,
            pull_seconds=run.pulled.pull_seconds,
            pull_latency_seconds=run.pulled.latency_seconds,
            apply_seconds=run.pulled.apply_seconds,
            idle_seconds=run.idle_seconds,
            keys=run.keys,
            reason=reason,
            groups=self.groups,
            heat=self._guest.heat,
        )

    def _flush(self, run: _Run, progress: Progress) -> None:
        """Wait until everything is in the bucket. Raises ServiceUnavailableError; nothing is lost: the spool has it."""
        started = time.monotonic()
        while not self._uploader.wait(0.5):
            if not self._guest.may_transfer:
                run.broken_off = run.broken_off or ("paused", f"paused: {self._guest.decision.reason}")
                return
            most = self._waits.grace if progress.stopping or progress.cancelled else self._waits.flush
            if time.monotonic() - started > most:
                raise ServiceUnavailableError(
                    f"{self._store.name} did not take all groups of this sweep", hint="they are kept and sent at the next start"
                )
            progress.report("waiting for the bucket to take groups")
        if set(run.keys) & set(self._uploader.unsent()):
            raise TicketError(f"part {run.request.part} of evaluation {run.request.evaluation} waits for a ticket")

    def _recover(self, head: Head) -> None:
        """Once a process: send what an earlier one left in the spool, and wait for it before looking for what is missing."""
        if self._recovered:
            return
        oldest = head.version - self._config.learning.max_staleness_hard

        def wanted(key: str) -> bool:
            try:
                parts = keys.parse_group(key)
            except StoaError:
                return key.startswith(keys.evals_prefix(self._run))
            return parts.run == self._run and parts.host == self._host and parts.version >= oldest

        num_sent = self._uploader.recover(wanted)
        if num_sent:
            _log.info("spool_recovered", objects=num_sent)
            self._uploader.wait(self._waits.version)
        self._recovered = True

    def _shipped(self, request: SweepRequest, head: Head) -> set[int]:
        """Groups of this sweep that are in the bucket already, at any version that still counts.

        A sweep that this state folder has not begun before has none: only a repeated one is looked up.
        """
        last = note_sweep(self._folder, request.sweep)
        if last is not None and request.sweep > last:
            return set(request.shipped)
        oldest = max(0, head.version - self._config.learning.max_staleness_hard)
        names = self._uploader.pending() if self._tickets is None else self._uploader.seen()
        for version in range(oldest, head.version + 1) if self._tickets is None else ():  # an invited Mac may not list
            prefix = keys.groups_of_sweep(self._run, version, self._host, request.sweep)
            names += [listed.key for listed in self._store.list(prefix)]
        found = {parts.group for _, parts in keys.ours(names, keys.parse_group) if parts.sweep == request.sweep} | set(request.shipped)
        if found:
            _log.info("sweep_resumed", sweep=request.sweep, groups_found=len(found))
        return found
