"""Which groups of a run are in the bucket, a few pages of the listing at a time: a large fleet's take seconds to list.

The window of versions that can be trained on is looked through from its oldest version to its newest, over and over; a
small one is seen whole at every look. No torch here: part of the control process.
"""

from itertools import islice
from typing import Final

from stoa.bucket import keys
from stoa.bucket.keys import GroupKey
from stoa.bucket.store import Store

KEYS_A_LOOK: Final = 5000
"""Five pages of a listing."""


class Arrivals:
    """What has arrived, each group told once. One thread at a time."""

    def __init__(self, store: Store, run: str, *, keys_a_look: int = KEYS_A_LOOK) -> None:
        self._store, self._run, self._keys_a_look = store, run, keys_a_look
        self._seen: set[str] = set()
        self._start = ""
        self._cursor = ""

    @property
    def has_seen_all(self) -> bool:
        """True if the next look begins at the oldest version again: all that was there when the last one did so is told."""
        return not self._cursor

    def look(self, oldest: int) -> list[tuple[GroupKey, int]]:
        """The next groups of versions from `oldest` on that were not told before, with their sizes in bytes."""
        start = keys.groups_of_version(self._run, oldest)
        if start != self._start:
            self._start = start
            self._seen = {key for key in self._seen if key >= start}
        listed = list(islice(self._store.list(keys.groups_prefix(self._run), max(self._cursor, start)), self._keys_a_look))
        self._cursor = listed[-1].key if len(listed) == self._keys_a_look else ""
        sizes = {found.key: found.num_bytes for found in listed if found.key not in self._seen}
        self._seen |= sizes.keys()
        return [(named, sizes[key]) for key, named in keys.ours(sizes, keys.parse_group)]
