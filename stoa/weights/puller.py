"""How weights leave the bucket: a cold join, the next version staged and applied in place, an older version rebuilt.

The disk cache holds immutable files only (anchor parts, deltas), each checked against its sha256 whenever it is read;
patched weights are never written to disk, so after a kill at any point the same files give the same weights. Weights in
memory are touched by `apply` alone, after everything about an update has been checked.
"""

import json
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from stoa.bucket import keys
from stoa.bucket.download import fetch, file_sha256
from stoa.bucket.head import Head, poll_head
from stoa.bucket.manifest import Manifest
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store, check_sha256
from stoa.contracts.errors import (
    FormatError,
    ObjectMissingError,
    ReplayedError,
    WrongBaseError,
    WrongStateError,
)
from stoa.weights.chain import Plan
from stoa.weights.container import decode_index
from stoa.weights.history import Doubts, by_any_way, changes_of, layout_of_run, manifest_of, rebuild, walk, way_to
from stoa.weights.layout import Layout
from stoa.weights.pulse import Change
from stoa.weights.state import WeightState

KEPT_ANCHORS: Final = 2
_MARK = "high_water.json"
Mark = tuple[int, int, int]
"""Epoch, version and seq of a HEAD; none of them ever goes down."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Staged:
    """An update that is downloaded, checked and decoded; weights are untouched.

    `rebuilt` holds the whole new weights when no chain from the weights at hand was cheaper than an anchor.
    """

    version: int
    state_id: str
    base_version: int
    base_state_id: str
    changes: tuple[Change, ...]
    rebuilt: WeightState | None
    num_bytes: int
    """Downloaded for it."""


class Puller:
    """Brings a run's weights to this machine; `folder` is its own cache. One thread at a time."""

    def __init__(self, store: Store, document: RunDocument, folder: Path) -> None:
        """Raises LayoutError if the run's weights are not of a layout this program makes."""
        self._store = store
        self._document = document
        self._folder = folder
        self.layout: Layout = layout_of_run(store, document)
        self.bytes_downloaded = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._mark_lock = threading.Lock()
        self._mark = self._mark_at_start = self._read_mark()

    def join(self, head: Head) -> WeightState:
        """The weights HEAD names, from the cheapest anchor and deltas, verified. Takes what is on disk already."""
        return self.build(head, head.version)

    def build(self, head: Head, version: int) -> WeightState:
        """The weights of `version`, which may be older than HEAD's. Raises ObjectMissingError if it is gone."""
        target = self.manifest_at(head, version)
        started, before = time.monotonic(), self.bytes_downloaded

        def attempt(doubts: Doubts) -> tuple[Plan, WeightState]:
            way = self._way(target, {}, doubts)
            return way, rebuild(way, self.layout, self._document.run, doubts.noting(self._fetch))

        way, state = by_any_way(attempt)
        if version == head.version:
            self._prune(target)
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

        def attempt(doubts: Doubts) -> tuple[Plan, WeightState | None, list[Change]]:
            way, fetch = self._way(target, {have_version: have_state_id}, doubts), doubts.noting(self._fetch)
            if way.anchor is not None:
                return way, rebuild(way, self.layout, self._document.run, fetch), []
            return way, None, changes_of(way, self.layout, self._document.run, fetch)

        _, rebuilt, changes = by_any_way(attempt)
        self._prune(target)
        return Staged(
            target.version,
            target.state_id,
            have_version,
            have_state_id,
            tuple(changes),
            rebuilt,
            self.bytes_downloaded - before,
        )

    def apply(self, staged: Staged, state: WeightState) -> None:
        """Write a staged update into `state`, in place, and rescan.

        Raises:
            WrongBaseError: `state` is not what the update was staged for; nothing was written.
            WrongStateError: the weights afterwards are not the promised ones; they must be rebuilt before any use.
        """
        if staged.rebuilt is not None:
            state.copy_from(staged.rebuilt)
        else:
            base = state.verified_id or state.state_id()
            if base != staged.base_state_id:
                raise WrongBaseError(
                    f"the update to version {staged.version} is for {staged.base_state_id[:16]}.., the weights here are {base[:16]}..",
                    hint="rebuild the weights from anchor and deltas",
                )
            for done, change in enumerate(staged.changes):
                try:
                    state.apply(change)
                except FormatError as error:
                    if done:
                        raise WrongStateError(f"version {staged.version} was applied in part: {error.message}") from error
                    raise
        state.verify(staged.state_id, f"version {staged.version}")

    def manifest_at(self, head: Head, version: int) -> Manifest:
        """The manifest of `version`, at or before HEAD's.

        Raises ReplayedError if HEAD is older than one an earlier process saw, ObjectMissingError if there is no such version.
        """
        with self._mark_lock:
            self._check(head, self._mark_at_start)
            self._remember(head)
        newest = manifest_of(self._store, self._document, head)
        found = walk(self._store, self._document, newest, version)[-1]
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
        except (TypeError, ValueError) as error:
            raise FormatError(f"{path} is not what this program writes", hint="remove it, or the machine's state folder") from error
        return epoch, version, seq

    def _way(self, target: Manifest, have: dict[int, str], doubts: Doubts) -> Plan:
        root = keys.root(self._document.run)
        on_disk = {f"{root}deltas/{path.name}" for path in (self._folder / "deltas").glob("*")}
        versions: list[int] = []
        for path in (self._folder / "anchors").glob("*/index-*.json"):
            if self._is_complete(path):
                on_disk.add(f"{root}anchors/{path.parent.name}/{path.name}")
                versions.append(int(path.parent.name))
        return way_to(self._store, self._document, target, have=have, on_disk=on_disk, disk_versions=versions, doubts=doubts)

    def _is_complete(self, index: Path) -> bool:
        """True if every part that an anchor's index on disk names is there; their bytes are checked when read."""
        try:
            parts = decode_index(index.read_bytes(), self.layout, index.name).parts
        except FormatError:
            return False
        return all(self._path(part.key).is_file() for part in parts)

    def _fetch(self, key: str, sha256: str, num_bytes: int) -> bytes:
        """Bytes of an object by way of the disk cache."""
        path = self._path(key)
        if not key.endswith(".json"):
            self.bytes_downloaded += fetch(self._store, key, path, num_bytes=num_bytes, sha256=sha256)
            data = path.read_bytes()
        elif path.is_file() and file_sha256(path) == sha256:
            return path.read_bytes()
        else:  # the size of an index is not known beforehand, only bounded
            data = self._store.get(key, max_bytes=num_bytes).data
            self.bytes_downloaded += len(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            part.write_bytes(data)
            part.replace(path)
        check_sha256(data, sha256, key)
        return data

    def _path(self, key: str) -> Path:
        """Where an object of this run is kept: its key below the run's root."""
        return self._folder / key.removeprefix(keys.root(self._document.run))

    def _prune(self, newest: Manifest) -> None:
        """Drop anchors but the last two, and deltas that end before the older of them."""
        anchors = sorted((self._folder / "anchors").glob("*"), reverse=True)
        for folder in anchors[KEPT_ANCHORS:]:
            shutil.rmtree(folder)
        oldest = min([newest.anchor.version, *(int(folder.name) for folder in anchors[:KEPT_ANCHORS])])
        for path in (self._folder / "deltas").glob("*"):
            if int(path.name[9:17]) <= oldest:
                path.unlink()


def _mark_of(head: Head) -> Mark:
    return head.epoch, head.version, head.seq
