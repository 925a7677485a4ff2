"""How weights leave the bucket: a cold join, the next version staged and applied in place, an older version rebuilt.

The disk cache holds immutable files only (anchor parts, deltas), each checked against its sha256 whenever it is read;
patched weights are never written to disk, so after a kill at any point the same files give the same weights. Weights in
memory are touched by `apply` alone, after everything about an update has been checked.
"""

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from stoa.bucket.head import Head, poll_head
from stoa.bucket.manifest import Manifest
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.contracts.errors import (
    FormatError,
    ObjectMissingError,
    ReplayedError,
    WrongBaseError,
    WrongStateError,
)
from stoa.telemetry.arriving import Arrival
from stoa.weights.cache import MAX_BYTES, Cache, Memory
from stoa.weights.chain import Hop, Plan
from stoa.weights.history import Doubts, Known, by_any_way, layout_of_run, manifest_of, read_hop, walk, way_to
from stoa.weights.layout import Layout
from stoa.weights.state import WeightState

_MARK = "high_water.json"
Mark = tuple[int, int, int]
"""Epoch, version and seq of a HEAD; none of them ever goes down."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Staged:
    """An update that is downloaded, checked and tried to decode; weights are untouched.

    `deltas` lead on from the weights at hand, in bytes: decoded they would take eight times the memory. `way` is set
    instead when no chain was cheaper than an anchor: its files are on disk, and the weights are built anew in place.
    """

    version: int
    state_id: str
    base_version: int
    base_state_id: str
    deltas: tuple[tuple[Hop, bytes], ...]
    way: Plan | None
    num_bytes: int
    """Downloaded for it."""


class Puller:
    """Brings a run's weights to this machine; `folder` is its own cache. One thread at a time."""

    def __init__(self, store: Store, document: RunDocument, folder: Path, *, cache_bytes: int = MAX_BYTES) -> None:
        """`cache_bytes`: see `Cache`. Raises LayoutError if the run's weights are not of a layout this program makes."""
        self._store = store
        self._document = document
        self._folder = folder
        self.layout: Layout = layout_of_run(store, document)
        self._cache = Cache(store, document.run, folder, self.layout, max_bytes=cache_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        self._known = Known()
        self._mark_lock = threading.Lock()
        self._mark = self._mark_at_start = self._read_mark()

    @property
    def bytes_downloaded(self) -> int:
        """Since this object was made."""
        return self._cache.bytes_downloaded

    @property
    def arrival(self) -> Arrival | None:
        """How far the bytes on their way have come; None while none are. For any thread."""
        return self._cache.arrival

    def join(self, head: Head, *, into: WeightState | Memory | None = None) -> WeightState:
        """The weights HEAD names, from the cheapest anchor and deltas, verified. Takes what is on disk already.

        into: weights to overwrite in place, or what makes room for them once the bytes are on their way (asked again, it
        gives the same); without it, new ones. They are worth nothing if this raises.
        """
        return self.build(head, head.version, into=into)

    def build(self, head: Head, version: int, *, into: WeightState | Memory | None = None) -> WeightState:
        """The weights of `version`, which may be older than HEAD's. Raises ObjectMissingError if it is gone."""
        target = self.manifest_at(head, version)
        started, before = time.monotonic(), self.bytes_downloaded
        if into is None:
            into = WeightState.empty(self.layout)

        def attempt(doubts: Doubts) -> tuple[Plan, WeightState]:
            way = self._way(target, {}, doubts)
            return way, self._cache.rebuild(way, doubts, into)

        way, state = by_any_way(attempt)
        if version == head.version:
            self._cache.trim(target.anchor.version)
        _log.info(
            "weights_built",
            version=version,
            anchor=way.base,
            num_deltas=len(way.hops),
            bytes=self.bytes_downloaded - before,
            seconds=round(time.monotonic() - started, 3),
        )
        return state

    def stage(self, head: Head, have_version: int, have_state_id: str) -> Staged:
        """Download and check all that leads from the weights at hand to HEAD's version. Writes no weights."""
        target = self.manifest_at(head, head.version)
        before = self.bytes_downloaded

        def attempt(doubts: Doubts) -> tuple[Plan, list[tuple[Hop, bytes]]]:
            way, fetch = self._way(target, {have_version: have_state_id}, doubts), doubts.noting(self._cache.read)
            needed = self._cache.needed(way, fetch)
            with self._cache.coming(needed):
                for key, sha256, num_bytes in needed[: len(needed) - len(way.hops)]:
                    fetch(key, sha256, num_bytes)
                deltas = [(hop, fetch(hop.ref.key, hop.ref.sha256, hop.ref.num_bytes)) for hop in way.hops]
            for hop, data in deltas:
                for _ in read_hop(hop, self.layout, self._document.run, data):
                    pass
            return way, deltas

        way, deltas = by_any_way(attempt)
        self._cache.trim(target.anchor.version)
        rebuilds = way.anchor is not None
        return Staged(
            target.version,
            target.state_id,
            have_version,
            have_state_id,
            () if rebuilds else tuple(deltas),
            way if rebuilds else None,
            self.bytes_downloaded - before,
        )

    def apply(self, staged: Staged, state: WeightState) -> None:
        """Write a staged update into `state`, in place. What comes out is known after `verify` only.

        Raises:
            WrongBaseError: `state` is not what the update was staged for; nothing was written.
            FormatError: it does not fit these weights; nothing was written.
            WrongStateError: it was written in part: the weights must be rebuilt before any use.
        """
        if staged.way is not None:
            self._cache.rebuild(staged.way, Doubts(), state)
            return
        base = state.verified_id or state.state_id()
        if base != staged.base_state_id:
            raise WrongBaseError(
                f"the update to version {staged.version} is for {staged.base_state_id[:16]}.., the weights here are {base[:16]}..",
                hint="rebuild the weights from anchor and deltas",
            )
        for number, (hop, data) in enumerate(staged.deltas):
            try:
                state.apply_segments(read_hop(hop, self.layout, self._document.run, data))
            except FormatError as error:
                if number:
                    raise WrongStateError(f"version {staged.version} was applied in part: {error.message}") from error
                raise

    def verify(self, staged: Staged, state: WeightState) -> None:
        """Rescan the weights an update was applied to; nothing made with them may leave this machine before.

        Raises WrongStateError if they are not the promised ones: they must be rebuilt.
        """
        if state.verified_id != staged.state_id:
            state.verify(staged.state_id, f"version {staged.version}")

    def manifest_at(self, head: Head, version: int) -> Manifest:
        """The manifest of `version`, at or before HEAD's.

        Raises ReplayedError if HEAD is older than one an earlier process saw, ObjectMissingError if there is no such version.
        """
        with self._mark_lock:
            self._check(head, self._mark_at_start)
            self._remember(head)
        newest = manifest_of(self._store, self._document, head, self._known)
        found = walk(self._store, self._document, newest, version, self._known)[-1]
        if found.version != version:
            raise ObjectMissingError(f"run {self._document.run} has no version {version}; HEAD is at {head.version}")
        return found

    def poll_head(self, etag: str) -> tuple[Head, str] | None:
        """HEAD and its etag if it changed since `etag` ("" for never read). For any thread.

        Raises ReplayedError if it is older than one read before, by this process or an earlier one with this folder.
        """
        with self._mark_lock:
            found = poll_head(self._store, self._document.run, self._document.public_key, etag)
            if found is not None:
                self._check(found[0], self._mark)
                self._remember(found[0])
        return found

    def _check(self, head: Head, mark: Mark) -> None:
        if any(now < before for now, before in zip(_mark_of(head), mark, strict=True)):
            raise ReplayedError(
                f"HEAD of run {self._document.run} went back from epoch, version, seq {mark} to {_mark_of(head)}",
                hint="somebody put an old HEAD back; if the run was made anew on purpose, remove this machine's state folder",
            )

    def _remember(self, head: Head) -> None:
        """Raise the high-water mark, in memory and on disk."""
        if _mark_of(head) > self._mark:
            self._mark = _mark_of(head)
            part = self._folder / f"{_MARK}.part"
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._mark), encoding="ascii")
            part.replace(self._folder / _MARK)

    def _read_mark(self) -> Mark:
        path = self._folder / _MARK
        try:
            epoch, version, seq = (int(value) for value in json.loads(path.read_text(encoding="ascii")))
        except FileNotFoundError:
            return -1, -1, -1
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FormatError(f"{path} is not what this program writes", hint="remove it, or the machine's state folder") from error
        return epoch, version, seq

    def _way(self, target: Manifest, have: dict[int, str], doubts: Doubts) -> Plan:
        on_disk, versions = self._cache.keys()
        return way_to(
            self._store, self._document, target, have=have, on_disk=on_disk, disk_versions=versions, doubts=doubts, known=self._known
        )


def _mark_of(head: Head) -> Mark:
    return head.epoch, head.version, head.seq
