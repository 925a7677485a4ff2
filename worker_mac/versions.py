"""Which weights this Mac serves: follows HEAD, brings the newest version in between sweeps, rebuilds older ones.

During a sweep a background thread reads HEAD and stages the newest version (downloaded and verified, nothing written);
between sweeps it is applied in place, and decoding goes on while the weights are rescanned: nothing made with them may
leave this machine before `Served.await_verdict`. On any doubt about the weights in memory they are built anew, in the
same memory, from disk and bucket. What is in a delta is `stoa.weights`'s business, what is played on the weights the engine's.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from stoa.bucket.head import Head
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.contracts.errors import DigestError, FormatError, ObjectMissingError, StoaError, WeightsError
from stoa.telemetry.arriving import Arrival
from stoa.weights.cache import MAX_BYTES
from stoa.weights.layout import Layout
from stoa.weights.sync import Puller, Staged
from worker_mac.forced import check_batching
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.weights import LiveWeights

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """Weights ready to be sampled from."""

    version: int
    state_id: str
    model: Model
    live: LiveWeights
    verdict: Future[None] | None = None
    """The rescan after an update; None where the weights were verified before they were served."""

    def await_verdict(self) -> None:
        """Wait until these weights are known to be the version's. Raises WrongStateError if they are not."""
        if self.verdict is not None:
            self.verdict.result()


@dataclass(frozen=True, slots=True)
class Pulled:
    """What bringing weights in took.

    latency_seconds: from HEAD's publication of the version to its being served; of a version that was there before this Mac was,
    from the Mac's first look at HEAD.
    """

    pull_seconds: float = 0.0
    apply_seconds: float = 0.0
    latency_seconds: float = 0.0


class Versions:
    """Weights of one run on this Mac. All but `run_state` is for the engine's thread only."""

    def __init__(
        self,
        store: Store,
        document: RunDocument,
        model_config: Mapping[str, object],
        folder: Path,
        *,
        cache_bytes: int = MAX_BYTES,
        plain_ops: Collection[str] = (),
        holds_two: Callable[[], bool] = lambda: True,
    ) -> None:
        """plain_ops: parts of the model that no Metal kernel is to compute. holds_two: there is memory for two sets of weights."""
        self._plain_ops, self._holds_two = plain_ops, holds_two
        self._config = read_model_config(model_config)
        self._puller = Puller(store, document, folder, cache_bytes=cache_bytes)
        self._served: Served | None = None
        self._memory: tuple[LiveWeights, Model] | None = None
        """The one place for live weights; what is in it is worth something while `_served` says so."""
        self._rescans = ThreadPoolExecutor(1, thread_name_prefix="rescan")
        self._pinned: Served | None = None
        self._lock = threading.Lock()
        self._head: Head | None = None
        self._first_look_at = 0.0
        """Unix seconds at which this Mac found HEAD first."""
        self._etag = ""
        self._staged: Staged | None = None
        self._stager: threading.Thread | None = None
        self._stager_stop = threading.Event()

    def head(self) -> Head | None:
        """HEAD as it is now; None before a trainer has taken the run."""
        with self._lock:
            try:
                found = self._puller.poll_head(self._etag)
            except ObjectMissingError:
                return None
            if found is not None:
                self._first_look_at = self._first_look_at or time.time()
                self._head, self._etag = found
            return self._head

    @property
    def run_state(self) -> str:
        """HEAD.state as last read, by whichever thread; "" before HEAD was there."""
        head = self._head
        return "" if head is None else head.state

    @property
    def head_version(self) -> int:
        """HEAD.version as last read, by whichever thread; -1 before HEAD was there."""
        head = self._head
        return -1 if head is None else head.version

    @property
    def layout(self) -> Layout:
        """Of the run's weights."""
        return self._puller.layout

    @property
    def arrival(self) -> Arrival | None:
        """How far the weights on their way to this Mac have come; None while none are. For any thread."""
        return self._puller.arrival

    @property
    def version(self) -> int:
        """The version in memory; -1 before the first."""
        return -1 if self._served is None else self._served.version

    def newest(self, head: Head, oldest: int) -> tuple[Served, Pulled]:
        """The weights `head` names, brought in if they are not here yet.

        While no way leads to them, because objects are missing or damaged, the live ones are played on with if they are
        of version `oldest` or later: the next anchor is a way again. Raises what the bucket raises, and WeightsError.
        """
        started = time.monotonic()
        self._stop_stager()
        served = self._trusted()
        if served is None:
            return self._join(head, started)
        if served.version == head.version:
            return served, Pulled()
        try:
            return self._advance(served, head, started)
        except (WeightsError, FormatError, ObjectMissingError, DigestError) as fault:
            untouched = self._served is not None
            if untouched and isinstance(fault, ObjectMissingError | DigestError):
                if served.version < oldest:
                    raise
                _log.warning("update_unreachable", version=head.version, playing=served.version, reason=fault.message)
                return served, Pulled()
            _log.warning("weights_rebuilt", version=head.version, reason=fault.message)
            return self._join(head, started)

    def distrust(self) -> None:
        """The live weights proved wrong: the next `newest` builds them anew."""
        self._served = None

    def _trusted(self) -> Served | None:
        """The live weights once their verdict is there; None if there are none or they are wrong."""
        if self._served is not None:
            try:
                self._served.await_verdict()
            except WeightsError as fault:
                _log.warning("weights_wrong", version=self._served.version, reason=fault.message)
                self._served = None
        return self._served

    def pinned(self, head: Head, version: int) -> tuple[Served, Pulled]:
        """The weights of a version at or before HEAD's, built beside the live ones if those are others."""
        for served in (self._served, self._pinned):
            if served is not None and served.version == version:
                return served, Pulled()
        self._pinned = None  # two sets of older weights are never held at once
        started = time.monotonic()
        self._stop_stager()
        if not self._holds_two():
            return self._pinned_in_place(head, version, started)
        live, model = self._new_memory()
        state = self._puller.build(head, version, into=live.state)
        self._pinned = Served(version, str(state.verified_id), model, live)
        _log.info("version_rebuilt", version=version, seconds=time.monotonic() - started)
        return self._pinned, Pulled(pull_seconds=time.monotonic() - started)

    def _pinned_in_place(self, head: Head, version: int, started: float) -> tuple[Served, Pulled]:
        """As `pinned`, in the memory of the live weights, which are built anew when they are next asked for."""
        self._trusted()  # its rescan reads what is overwritten here
        self._staged = self._served = None
        if self._memory is None:
            self._memory = self._new_memory()
        live, model = self._memory
        live.settle()
        state = self._puller.build(head, version, into=live.state)
        self._pinned = Served(version, str(state.verified_id), model, live)
        _log.info("version_rebuilt", version=version, in_place=True, seconds=time.monotonic() - started)
        return self._pinned, Pulled(pull_seconds=time.monotonic() - started)

    def drop_pinned(self) -> None:
        """Let go of weights that were built for an evaluation."""
        self._pinned = None

    def stage_ahead(self, poll_seconds: float, on_staged: Callable[[int], None] | None = None) -> None:
        """Until the next call here: read HEAD now and every `poll_seconds`, and stage what is newer than the live weights."""
        self._stop_stager()
        served = self._served
        if served is None:
            return
        self._stager_stop = threading.Event()
        arguments = (served.version, served.state_id, poll_seconds, self._stager_stop, on_staged)
        self._stager = threading.Thread(target=self._stage_ahead, args=arguments, name="stager", daemon=True)
        self._stager.start()

    def end_staging(self) -> None:
        """Look for no further version until the next call here; what is being staged is staged to its end."""
        self._stager_stop.set()

    def close(self) -> None:
        """End the background threads."""
        self._stop_stager()
        self._rescans.shutdown()

    def _stage_ahead(
        self, version: int, state_id: str, poll_seconds: float, stop: threading.Event, on_staged: Callable[[int], None] | None
    ) -> None:
        while not stop.is_set():
            try:
                head = self.head()
                if head is not None and head.version > max(version, -1 if self._staged is None else self._staged.version):
                    self._staged = self._puller.stage(head, version, state_id)
                    if on_staged is not None:
                        on_staged(head.version)
            except StoaError as fault:  # the engine's thread meets the same fault at the next sweep and acts on it
                _log.info("staging_failed", reason=fault.message)
            stop.wait(poll_seconds)

    def _stop_stager(self) -> None:
        self._stager_stop.set()
        if self._stager is not None:
            self._stager.join()
            self._stager = None

    def _new_memory(self) -> tuple[LiveWeights, Model]:
        """Memory for one set of weights, and the model that reads it."""
        live = LiveWeights(self._puller.layout)
        return live, Model(self._config, live.arrays, without_kernels=self._plain_ops)

    def _check(self, model: Model) -> None:
        check_batching(model)

    def _join(self, head: Head, started: float) -> tuple[Served, Pulled]:
        """Build the weights HEAD names, in the memory that is there already."""
        self._staged = self._served = None
        if self._pinned is not None and self._memory is not None and self._pinned.live is self._memory[0]:
            self._pinned = None
        state = self._puller.join(head, into=lambda: self._room()[0].state)
        live, model = self._room()
        pulled_at = time.monotonic()
        self._check(model)
        self._served = Served(head.version, str(state.verified_id), model, live)
        done = time.monotonic()
        _log.info("run_joined", version=head.version, bytes=live.num_bytes, seconds=done - started)
        return self._served, Pulled(pulled_at - started, done - pulled_at, self._since(head))

    def _room(self) -> tuple[LiveWeights, Model]:
        """The one place for live weights, made at the first call: a Mac downloads while it makes room for 9 GB."""
        if self._memory is None:
            self._memory = self._new_memory()
        self._memory[0].settle()
        return self._memory

    def _advance(self, served: Served, head: Head, started: float) -> tuple[Served, Pulled]:
        """Apply the next version. While it is written, and if that fails, nothing is served."""
        staged, self._staged = self._staged, None
        if staged is None or staged.version != head.version:
            staged = self._puller.stage(head, served.version, served.state_id)
        pulled_at = time.monotonic()
        served.live.settle()
        self._served = None
        self._puller.apply(staged, served.live.state)
        verdict = self._rescans.submit(self._puller.verify, staged, served.live.state)
        self._served = Served(head.version, staged.state_id, served.model, served.live, verdict)
        done = time.monotonic()
        pulled = Pulled(pulled_at - started, done - pulled_at, self._since(head))
        _log.info("delta_applied", version=head.version, pull_seconds=pulled.pull_seconds, apply_seconds=pulled.apply_seconds)
        return self._served, pulled

    def _since(self, head: Head) -> float:
        """Seconds since HEAD's publication, as far as this Mac was there; two machines' clocks may disagree, so never below 0."""
        return max(0.0, time.time() - max(head.published_at, self._first_look_at))
