"""Which groups have arrived in the bucket: one listing a look, each key told once.

Nothing is downloaded or judged here. Keys under the prefix that are no group's are told apart, for whoever counts
them; a key says by itself which version and host it is of.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoa.bucket import keys
from stoa.bucket.keys import GroupKey
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError

_NOTHING: Final = (-1, 0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One object that has arrived. `modified_at` is the bucket's clock, Unix seconds."""

    key: str
    named: GroupKey
    num_bytes: int
    modified_at: float


class Inbox:
    """The groups of one run. One thread at a time."""

    def __init__(self, store: Store, run: str, known: Iterable[str] = ()) -> None:
        """`known`: keys that are settled, such as those of the steps before a restart, and never told again."""
        self._store = store
        self._run = run
        self._seen = set(known)
        self._barred: dict[str, tuple[int, float]] = {}
        """Key -> size and time of what is there."""
        self._num_junk = 0

    @property
    def num_junk(self) -> int:
        """Objects seen under the prefix of groups whose key is no group's."""
        return self._num_junk

    def look(self, oldest_version: int = 0) -> tuple[Arrival, ...]:
        """Arrivals not told before, of versions from `oldest_version` on, first in first out by (version, modified_at).

        Start a process with version 0, so that groups that arrived too late are seen once and dropped with a reason.
        """
        found: list[Arrival] = []
        gone = set(self._barred)
        # Keys sort by version, so one listing that starts late stands for one a version.
        start_after = keys.groups_of_version(self._run, oldest_version) if oldest_version else ""
        for listed in self._store.list(keys.groups_prefix(self._run), start_after):
            gone.discard(listed.key)
            there = (listed.num_bytes, listed.modified_at)
            if listed.key in self._seen and self._barred.get(listed.key, there) == there:
                continue
            self._seen.add(listed.key)
            if listed.key in self._barred:
                self._barred[listed.key] = there
            try:
                named = keys.parse_group(listed.key)
            except FormatError:
                self._num_junk += 1
                continue
            found.append(Arrival(listed.key, named, listed.num_bytes, listed.modified_at))
        self._barred |= dict.fromkeys(gone, _NOTHING)
        return tuple(sorted(found, key=lambda arrival: (arrival.named.version, arrival.modified_at, arrival.key)))

    def bar(self, arrival: Arrival) -> None:
        """Nothing under this key is ever to be read. What comes there after this one was deleted is told, so that it can be counted."""
        self._barred[arrival.key] = (arrival.num_bytes, arrival.modified_at)

    def is_barred(self, key: str) -> bool:
        """True if nothing under `key` is to be read."""
        return key in self._barred

    def put_back(self, key: str) -> None:
        """Tell this key again at the next look: it could not be read just now."""
        self._seen.discard(key)
