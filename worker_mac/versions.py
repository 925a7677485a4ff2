"""Which weights this Mac serves: follows HEAD, brings the newest version in between sweeps, rebuilds older ones.

During a sweep a background thread reads HEAD and stages the newest version (downloaded and verified, nothing written);
between sweeps it is applied in place. On any doubt about the weights in memory they are built anew from disk and
bucket. What is in a delta is `stoa.weights`'s business, what is played on the weights the engine's.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from stoa.bucket.head import Head
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.contracts.errors import DigestError, FormatError, ObjectMissingError, StoaError, WeightsError
from stoa.weights.state import WeightState
from stoa.weights.sync import Puller, Staged
from worker_mac.decoder import check_batching
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


@dataclass(frozen=True, slots=True)
class Pulled:
    """What bringing weights in took. `latency_seconds`: from HEAD's publication of the version to its being served."""

    pull_seconds: float = 0.0
    apply_seconds: float = 0.0
    latency_seconds: float = 0.0


class Versions:
    """Weights of one run on this Mac. All but `run_state` is for the engine's thread only."""

    def __init__(self, store: Store, document: RunDocument, model_config: Mapping[str, object], folder: Path) -> None:
        self._config = read_model_config(model_config)
        self._puller = Puller(store, document, folder)
        self._served: Served | None = None
        self._pinned: Served | None = None
        self._lock = threading.Lock()
        self._head: Head | None = None
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
                self._head, self._etag = found
            return self._head

    @property
    def run_state(self) -> str:
        """HEAD.state as last read, by whichever thread; "" before HEAD was there."""
        head = self._head
        return "" if head is None else head.state

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
        if self._served is None:
            return self._join(head, started)
        if self._served.version == head.version:
            return self._served, Pulled()
        try:
            return self._advance(self._served, head, started)
        except (ObjectMissingError, DigestError) as fault:
            if self._served.version < oldest:
                raise
            _log.warning("update_unreachable", version=head.version, playing=self._served.version, reason=fault.message)
            return self._served, Pulled()
        except (WeightsError, FormatError) as fault:
            _log.warning("weights_rebuilt", version=head.version, reason=fault.message)
            self._served = None
            return self._join(head, started)

    def pinned(self, head: Head, version: int) -> tuple[Served, Pulled]:
        """The weights of a version at or before HEAD's, built beside the live ones if those are others."""
        for served in (self._served, self._pinned):
            if served is not None and served.version == version:
                return served, Pulled()
        self._pinned = None  # two sets of older weights are never held at once
        started = time.monotonic()
        self._stop_stager()
        self._pinned = self._serve(version, self._puller.build(head, version))
        _log.info("version_rebuilt", version=version, seconds=time.monotonic() - started)
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

    def close(self) -> None:
        """End the background thread."""
        self._stop_stager()

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

    def _join(self, head: Head, started: float) -> tuple[Served, Pulled]:
        self._staged = None
        state = self._puller.join(head)
        pulled_at = time.monotonic()
        self._served = self._serve(head.version, state)
        check_batching(self._served.model)
        done = time.monotonic()
        _log.info("run_joined", version=head.version, bytes=self._served.live.num_bytes, seconds=done - started)
        return self._served, Pulled(pulled_at - started, done - pulled_at, _since(head))

    def _advance(self, served: Served, head: Head, started: float) -> tuple[Served, Pulled]:
        staged, self._staged = self._staged, None
        if staged is None or staged.version != head.version:
            staged = self._puller.stage(head, served.version, served.state_id)
        pulled_at = time.monotonic()
        served.live.settle()
        self._puller.apply(staged, served.live.state)
        self._served = Served(head.version, staged.state_id, served.model, served.live)
        done = time.monotonic()
        pulled = Pulled(pulled_at - started, done - pulled_at, _since(head))
        _log.info("delta_applied", version=head.version, pull_seconds=pulled.pull_seconds, apply_seconds=pulled.apply_seconds)
        return self._served, pulled

    def _serve(self, version: int, state: WeightState) -> Served:
        """Put built weights into MLX's memory; their id is scanned there, not taken over."""
        live = LiveWeights(state)
        live.state.verify(state.verified_id or state.state_id(), f"version {version} in MLX's memory")
        return Served(version, str(live.state.verified_id), Model(self._config, live.arrays), live)


def _since(head: Head) -> float:
    """Seconds since HEAD's publication; two machines' clocks may disagree, so never below 0."""
    return max(0.0, time.time() - head.published_at)
