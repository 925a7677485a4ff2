"""What is uploaded beside the trainer's steps: anchors and roll-ups, each announced by a later manifest once it is whole.

An anchor is the published mirror, bit for bit. The mirror moves on with the next version, so it is first written to disk
(only the next version's change waits for that) and uploaded from there, however long the uplink takes. What is not whole
when the process ends was never announced: it is simply not there. Deltas and manifests are `publisher.py`'s.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from stoa.bucket import keys
from stoa.bucket.manifest import AnchorRef, DeltaRef
from stoa.bucket.store import Store
from stoa.contracts.errors import ServiceUnavailableError, StoaError
from stoa.weights.container import ANCHOR_FORMAT, AnchorIndex, AnchorPart, DeltaHeader, anchor_groups, anchor_part_pieces, encode_index
from stoa.weights.layout import Layout
from stoa.weights.pulse import Counts
from stoa.weights.rollups import RollupBook
from stoa.weights.state import WeightState

_LONGEST_WAIT_SECONDS: Final = 10.0
_PREFIX: Final = "stoa-publish"
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Ready:
    """What is whole in the bucket and no manifest has announced yet."""

    rollups: tuple[DeltaRef, ...] = ()
    anchor: AnchorRef | None = None


@dataclass(slots=True)
class _Job:
    """Work of the thread. `step` does a piece of it and says whether it was the last; a lower `rank` goes first."""

    what: str
    version: int
    rank: int
    step: Callable[[], bool]


@dataclass(slots=True)
class _Anchor:
    """An anchor on its way: parts on disk, then in the bucket."""

    version: int
    state_id: str
    files: list[tuple[Path, AnchorPart]] = field(default_factory=list)
    num_uploaded: int = 0


class Background:
    """Uploads for one publisher, on a thread that starts with the first job."""

    def __init__(self, store: Store, run: str, layout: Layout, *, part_bytes: int) -> None:
        self.store = store
        self._run = run
        self._layout = layout
        self._part_bytes = part_bytes
        self._folder = _own_folder(run)
        self.book = RollupBook(self._folder, run, layout)
        self._book_lock = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._rollups: list[DeltaRef] = []
        self._anchor: AnchorRef | None = None
        self._busy_anchor = False
        self._yielding = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> Ready:
        """What the next manifest announces."""
        with self._changed:
            return Ready(tuple(self._rollups), self._anchor)

    def announced(self, ready: Ready) -> None:
        """HEAD names a manifest that announces these."""
        with self._changed:
            self._rollups = [ref for ref in self._rollups if ref not in ready.rollups]
            if self._anchor == ready.anchor:
                self._anchor = None

    def start_anchor(self, mirror: WeightState, version: int, state_id: str) -> None:
        """Make the mirror, as it is now, an anchor. It must not change before `wait_for_mirror` returns."""
        with self._changed:
            if self._busy_anchor:
                _log.info("anchor_skipped", version=version, reason="the one before is still on its way")
                return
            self._busy_anchor = True
        anchor = _Anchor(version, state_id)
        self._add(_Job("snapshot", version, 0, lambda: self._write_parts(mirror, anchor)))

    def add_delta(self, header: DeltaHeader, counts: Counts, data: bytes, anchor_version: int, *, upload: bool = True) -> None:
        """A version was published: roll-ups to it can be made. `upload` is False for one whose roll-ups are made already."""
        with self._book_lock:
            self.book.keep(header, counts, [data])
            self.book.prune(header.version, anchor_version)
            bases = self.book.wanted(header.version, anchor_version) if upload else []
        for base in bases:
            self._add(_Job("rollup", header.version, 1, lambda base=base: self._upload_rollup(base, header.version)))

    def rollups_now(self, header: DeltaHeader, counts: Counts, data: bytes, anchor_version: int) -> tuple[DeltaRef, ...]:
        """Make and upload the roll-ups to a version before this returns."""
        with self._book_lock:
            self.book.keep(header, counts, [data])
            bases = self.book.wanted(header.version, anchor_version)
        made = [self._make(base, header.version) for base in bases]
        return tuple(ref for ref in made if ref is not None)

    def forget(self, version: int) -> None:
        """The version was not published."""
        with self._book_lock:
            self.book.drop(version)

    def upload_anchor(self, state: WeightState, version: int, state_id: str) -> AnchorRef:
        """Upload an anchor before this returns, straight from memory."""
        parts: list[AnchorPart] = []
        for number, arrays in enumerate(anchor_groups(self._layout, self._part_bytes)):
            data = b"".join(anchor_part_pieces(state, arrays, run=self._run, version=version))
            sha256 = hashlib.sha256(data).hexdigest()
            key = keys.anchor_part(self._run, version, number, sha256)
            self.store.create(key, data)
            parts.append(AnchorPart(key, sha256, len(data), tuple(array.name for array in arrays)))
        return self._upload_index(version, state_id, parts)

    def wait_for_mirror(self) -> None:
        """Until the mirror may change."""
        with self._changed:
            self._changed.wait_for(lambda: not any(job.rank == 0 for job in self._jobs))

    @contextlib.contextmanager
    def yielding(self) -> Iterator[None]:
        """While this lasts, no further part of an anchor begins: something more urgent uses the uplink."""
        with self._changed:
            self._yielding += 1
        try:
            yield
        finally:
            with self._changed:
                self._yielding -= 1
                self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was begun is whole; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_seconds)

    def close(self) -> None:
        """End the thread, after the request in hand if that ends soon, and remove what is on disk."""
        with self._changed:
            self._closing = True
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LONGEST_WAIT_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _add(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="publish-background", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _next(self) -> _Job | None:
        able = [job for job in self._jobs if job.rank < 2 or not self._yielding]
        return min(able, key=lambda job: job.rank, default=None)

    def _work(self) -> None:
        wait_seconds = 1.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._next() is not None)
                job = self._next()
                if self._closing or job is None:
                    return
            try:
                done, wait_seconds = job.step(), 1.0
            except ServiceUnavailableError as error:
                _log.warning("background_upload_waiting", what=job.what, version=job.version, reason=error.message)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, wait_seconds)
                done, wait_seconds = False, min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)
            except (StoaError, OSError) as error:
                _log.warning("background_upload_given_up", what=job.what, version=job.version, reason=str(error))
                done = True
                if job.rank != 1:
                    self._end_anchor()
            if done:
                with self._changed:
                    if job in self._jobs:
                        self._jobs.remove(job)
                    self._changed.notify_all()

    def _write_parts(self, mirror: WeightState, anchor: _Anchor) -> bool:
        """Copy the mirror to disk, as the parts will be."""
        started = time.monotonic()
        for number, arrays in enumerate(anchor_groups(self._layout, self._part_bytes)):
            digest, num_bytes = hashlib.sha256(), 0
            path = self._folder / f"anchor-{number:04d}"
            with path.open("wb") as file:
                for piece in anchor_part_pieces(mirror, arrays, run=self._run, version=anchor.version):
                    digest.update(piece)
                    num_bytes += file.write(piece)
            sha256 = digest.hexdigest()
            key = keys.anchor_part(self._run, anchor.version, number, sha256)
            anchor.files.append((path, AnchorPart(key, sha256, num_bytes, tuple(array.name for array in arrays))))
        _log.info("anchor_snapshot_written", version=anchor.version, seconds=round(time.monotonic() - started, 3))
        self._add(_Job("anchor", anchor.version, 2, lambda: self._upload_part(anchor)))
        return True

    def _upload_part(self, anchor: _Anchor) -> bool:
        """The next part; after the last one, the index."""
        if anchor.num_uploaded < len(anchor.files):
            path, part = anchor.files[anchor.num_uploaded]
            self.store.create(part.key, path.read_bytes())
            path.unlink()
            anchor.num_uploaded += 1
            return False
        ref = self._upload_index(anchor.version, anchor.state_id, [part for _, part in anchor.files])
        with self._changed:
            self._anchor = ref
        self._end_anchor()
        _log.info("anchor_uploaded", version=anchor.version, bytes=ref.num_bytes)
        return True

    def _end_anchor(self) -> None:
        with self._changed:
            self._busy_anchor = False
        for path in self._folder.glob("anchor-*"):
            path.unlink()

    def _upload_index(self, version: int, state_id: str, parts: Sequence[AnchorPart]) -> AnchorRef:
        made = AnchorIndex(ANCHOR_FORMAT, self._run, version, self._layout.layout_id, state_id, tuple(parts))
        index, sha256 = encode_index(made)
        key = keys.anchor_index(self._run, version, sha256)
        self.store.create(key, index)
        return AnchorRef(version, state_id, key, sha256, len(index) + sum(part.num_bytes for part in parts))

    def _upload_rollup(self, base: int, version: int) -> bool:
        ref = self._make(base, version)
        if ref is not None:
            with self._changed:
                self._rollups.append(ref)
        return True

    def _make(self, base: int, version: int) -> DeltaRef | None:
        with self._book_lock:
            made = self.book.make(base, version)
        if made is None:
            return None
        data = made.path.read_bytes()
        ref = delta_ref(made.header, made.counts, data, self._run)
        self.store.create(ref.key, data)
        return ref


def delta_ref(header: DeltaHeader, counts: Counts, data: bytes, run: str) -> DeltaRef:
    """How a manifest names the bytes of a delta or roll-up."""
    sha256 = hashlib.sha256(data).hexdigest()
    return DeltaRef(
        base=header.base,
        base_state_id=header.base_state_id,
        key=keys.delta(run, header.base, header.version, sha256),
        sha256=sha256,
        num_bytes=len(data),
        codec=header.codec,
        num_changed=counts.num_changed,
        num_raw=counts.num_raw,
        num_regrid=counts.num_regrid,
        version=header.version,
        state_id=header.state_id,
    )


def _own_folder(run: str) -> Path:
    """A new folder of this process on the disk for temporary files; those of processes that were killed are removed."""
    root = Path(tempfile.gettempdir())
    for path in root.glob(f"{_PREFIX}-{run}-*-*"):
        pid = path.name.split("-")[-2]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{run}-{os.getpid()}-"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
