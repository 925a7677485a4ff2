"""The disk of a machine that pulls: anchors' parts and deltas of one run, each checked against its sha256 when it comes.

Files are immutable and stand under their key below the run's root. Those that were here are checked again when `read`;
an anchor's parts, 9 GB of them, go by `file`, and the digests of the weights tell. What is downloaded next is the caller's plan; here
it comes with all ranges at once while the first of it is read already. Within `max_bytes` the newest anchors stay, with
the deltas after them, so that a re-join downloads little; the oldest go first. A `Cache` is for one thread at a time.
"""

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from stoa.bucket import keys
from stoa.bucket.download import Downloads, fetch, file_sha256
from stoa.bucket.store import Store, check_sha256
from stoa.bucket.transfer import Wanted
from stoa.contracts.errors import DiskFullError, FormatError, WrongStateError
from stoa.telemetry.arriving import Arrival
from stoa.weights.chain import Plan
from stoa.weights.container import MAX_INDEX_BYTES, decode_index
from stoa.weights.history import Doubts, Fetch, rebuild
from stoa.weights.layout import Layout
from stoa.weights.state import WeightState

KEPT_ANCHORS: Final = 2
MAX_BYTES: Final = 24_000_000_000
"""Two anchors of 8.5e9 codes and the deltas after them."""
_ANCHORS: Final = "[0-9]" * 8
_DELTAS: Final = f"{_ANCHORS}-{_ANCHORS}-*"
"""What this program puts into its folders; a Finder leaves files of its own there."""
Needed = tuple[str, str, int]
"""Key, sha256 and size of an object."""
Memory = Callable[[], WeightState]
"""Makes room for weights; asked again, it gives the same."""
_log = structlog.get_logger()


class Cache:
    """The files of one run in `folder`."""

    def __init__(self, store: Store, run: str, folder: Path, layout: Layout, *, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._run = run
        self._folder = folder
        self._layout = layout
        self._max_bytes = max_bytes
        self._coming: Downloads | None = None
        self._coming_keys: frozenset[str] = frozenset()
        self.bytes_downloaded = 0

    @property
    def arrival(self) -> Arrival | None:
        """How far what is on its way has come, with what of it was here before; None while nothing is. For any thread."""
        coming = self._coming
        return None if coming is None else coming.arrival

    def path(self, key: str) -> Path:
        """Where an object of this run is kept: its key below the run's root."""
        return self._folder / key.removeprefix(keys.root(self._run))

    def read(self, key: str, sha256: str, num_bytes: int) -> bytes:
        """The checked bytes of an object, downloaded if they are not here. Raises what `Downloads.wait` raises."""
        if key.endswith(".json"):
            return self._read_small(key, sha256, num_bytes)
        path = self.path(key)
        if self._await(key):  # checked on arrival
            return path.read_bytes()
        if path.is_file() and path.stat().st_size == num_bytes:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
            path.unlink()
        self.bytes_downloaded += fetch(self._store, key, path, num_bytes=num_bytes, sha256=sha256)
        return path.read_bytes()

    def file(self, key: str, sha256: str, num_bytes: int) -> Path:
        """The file of an object, downloaded if it is not here. One that was here has its size; its bytes were checked when
        they came and are not read again: whoever reads them must be able to tell. Raises as `read`.
        """
        path = self.path(key)
        if not self._await(key) and not self._has(key, num_bytes):
            self.bytes_downloaded += fetch(self._store, key, path, num_bytes=num_bytes, sha256=sha256)
        return path

    def drop_damaged(self, needed: Sequence[Needed]) -> int:
        """Remove the files of these objects that have not their sha256; returns how many there were."""
        damaged = [path for path, sha256 in ((self.path(key), sha256) for key, sha256, _ in needed) if _is_damaged(path, sha256)]
        for path in damaged:
            _log.warning("cached_file_damaged", name=path.name)
            path.unlink()
        return len(damaged)

    def rebuild(self, way: Plan, doubts: Doubts, into: WeightState | Memory) -> WeightState:
        """The weights at the end of a way that starts from an anchor, from what is here and what comes.

        into: weights to overwrite, or what makes room for them once the bytes are on their way. Files that proved damaged
        are brought anew, once. Raises what `rebuild` of history.py and `Downloads.wait` raise.
        """
        fetch, place = doubts.noting(self.read), doubts.noting(self.file)
        needed = self.needed(way, fetch)

        def once() -> WeightState:
            with self.coming(needed):
                room = into if isinstance(into, WeightState) else into()
                return rebuild(way, self._layout, self._run, fetch, place=place, into=room)

        try:
            return once()
        except (FormatError, WrongStateError):
            if not self.drop_damaged(needed):
                raise
            return once()

    def needed(self, way: Plan, fetch: Fetch) -> list[Needed]:
        """The objects of a way, in the order they are read. An anchor's index is fetched to know its parts."""
        parts: list[Needed] = []
        if way.anchor is not None:
            index = fetch(way.anchor.index_key, way.anchor.index_sha256, MAX_INDEX_BYTES)
            parts = [(part.key, part.sha256, part.num_bytes) for part in decode_index(index, self._layout, way.anchor.index_key).parts]
        return [*parts, *((hop.ref.key, hop.ref.sha256, hop.ref.num_bytes) for hop in way.hops)]

    def _await(self, key: str) -> bool:
        """Until an object that is on its way is here; False if it is not on its way."""
        if self._coming is None or key not in self._coming_keys:
            return False
        self._coming.wait(key)
        return True

    def _read_small(self, key: str, sha256: str, max_bytes: int) -> bytes:
        """An index: its size is not known beforehand, only bounded."""
        path = self.path(key)
        if path.is_file():
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
        data = self._store.get(key, max_bytes=max_bytes).data
        self.bytes_downloaded += len(data)
        check_sha256(data, sha256, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(data)
        part.replace(path)
        return data

    @contextmanager
    def coming(self, needed: Sequence[Needed]) -> Iterator[None]:
        """Within the block, everything of `needed` that is not here is on its way, in this order, and `read` waits for it.

        Raises DiskFullError if there is no room, also after all that is not needed was removed.
        """
        missing = [Wanted(key, self.path(key), size, sha256) for key, sha256, size in needed if not self._has(key, size)]
        held_bytes = sum(size for _, _, size in needed) - sum(one.num_bytes for one in missing)
        try:
            downloads = Downloads(self._store, missing, held_bytes=held_bytes)
        except DiskFullError:
            self._keep_only({key for key, _, _ in needed})
            downloads = Downloads(self._store, missing, held_bytes=held_bytes)
        try:
            with downloads:
                self._coming, self._coming_keys = downloads, frozenset(one.key for one in missing)
                yield
        finally:
            self._coming, self._coming_keys = None, frozenset()
            self.bytes_downloaded += downloads.num_bytes

    def keys(self) -> tuple[set[str], set[int]]:
        """Keys of the deltas and of the indexes of whole anchors that are here, and the versions of these anchors."""
        root = keys.root(self._run)
        found = {f"{root}deltas/{path.name}" for path in (self._folder / "deltas").glob(f"{_DELTAS}.safetensors")}
        versions: set[int] = set()
        for index in (self._folder / "anchors").glob(f"{_ANCHORS}/index-*.json"):
            if self._is_whole(index):
                found.add(f"{root}anchors/{index.parent.name}/{index.name}")
                versions.add(int(index.parent.name))
        return found, versions

    def trim(self, newest_anchor: int) -> None:
        """Remove what is too old to keep, and the oldest of the rest until it fits. `newest_anchor`: version of the bucket's."""
        _, whole = self.keys()
        anchors = {version: _size(self._folder / "anchors" / f"{version:08d}") for version in whole}
        deltas = [(_leads_to(path), path.stat().st_size) for path in (self._folder / "deltas").glob(_DELTAS)]
        floor = floor_of(anchors, deltas, newest_anchor, self._max_bytes)
        for folder in (self._folder / "anchors").glob(_ANCHORS):
            if int(folder.name) < floor:
                shutil.rmtree(folder)
        for path in (self._folder / "deltas").glob(_DELTAS):
            if _leads_to(path) <= floor:
                path.unlink()

    def _has(self, key: str, num_bytes: int) -> bool:
        path = self.path(key)
        return path.is_file() and path.stat().st_size == num_bytes

    def _is_whole(self, index: Path) -> bool:
        """True if every part that an anchor's index on disk names is there; their bytes are checked when read."""
        try:
            parts = decode_index(index.read_bytes(), self._layout, index.name).parts
        except FormatError:
            return False
        return all(self._has(part.key, part.num_bytes) for part in parts)

    def _keep_only(self, needed: Collection[str]) -> None:
        """Remove all files but those of these objects and the parts of them."""
        kept = {self.path(key).name for key in needed}
        num_bytes = 0
        for path in [*(self._folder / "anchors").glob(f"{_ANCHORS}/*"), *(self._folder / "deltas").glob(_DELTAS)]:
            if path.name.split(".part")[0] not in kept and not path.name.startswith("index-"):
                num_bytes += path.stat().st_size
                path.unlink()
        _log.warning("cache_emptied", bytes=num_bytes)


def floor_of(anchors: Mapping[int, int], deltas: Sequence[tuple[int, int]], newest_anchor: int, max_bytes: int) -> int:
    """The version that everything kept leads on from. Pure.

    Args:
        anchors: version -> bytes of the whole anchors that are here. deltas: (version it leads to, bytes).
        newest_anchor: version of the newest anchor there is, here or not.
        max_bytes: what is kept may take; the newest anchor here and the deltas after it stay in any case.
    """
    newest_first = sorted(anchors, reverse=True)[:KEPT_ANCHORS]
    for count in range(len(newest_first), 1, -1):
        floor = newest_first[count - 1]
        if sum(anchors[v] for v in newest_first[:count]) + sum(size for to, size in deltas if to > floor) <= max_bytes:
            return min(floor, newest_anchor)
    return min([newest_anchor, *newest_first[:1]])


def _is_damaged(path: Path, sha256: str) -> bool:
    return path.is_file() and file_sha256(path) != sha256


def _leads_to(path: Path) -> int:
    """The version a delta's file leads to: also of its part and journal."""
    return int(path.name[9:17])


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*"))
