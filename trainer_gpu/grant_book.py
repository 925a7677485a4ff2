"""Grants in the bucket: create-only objects, one a sweep, that fix which question each group of the sweep plays.

Who is granted what is decided by `stoa.learning.ledger`; here it is written down and looked up. A grant never changes,
so what was read once is kept. No torch here: the control process imports this too.
"""

import threading
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import structlog
from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.keys import GrantKey, GroupKey
from stoa.bucket.manifest import canonical, parse_canonical, validate
from stoa.bucket.store import SMALL_BYTES, Store
from stoa.contracts.errors import BucketError, FormatError, ObjectExistsError, ObjectMissingError
from stoa.learning.ledger import GrantRecord

GRANT_FORMAT: Final = "stoa-grant-1"
MAX_AHEAD: Final = 6
"""Sweeps a Mac may be granted beyond the one it plays."""
SWEEPS_A_HOST: Final = MAX_AHEAD + 2
"""Newest grants that are read: older ones are over."""
NEWEST_SECONDS: Final = 5.0
"""By the bucket's clock: of the grants written so shortly before the last one, one has the highest position."""
_AT_ONCE: Final = 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GrantDocument:
    """A grant as it stands in the bucket."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: str
    run: str
    grant: GrantRecord


@dataclass(frozen=True, slots=True)
class _Listed:
    """A grant as it is listed."""

    named: GrantKey
    modified_at: float


_GRANT = TypeAdapter(GrantDocument)


class GrantBook:
    """The grants of one run. Safe from any thread."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._lock = threading.Lock()
        self._kept: defaultdict[str, OrderedDict[int, GrantRecord]] = defaultdict(OrderedDict)
        """Host -> the grants last read or written, a few more than those that can be open."""

    def find(self, host: str, sweep: int) -> GrantRecord | None:
        """The grant of (host, sweep), None if there is none. Raises FormatError if its object is no grant."""
        with self._lock:
            kept = self._kept[host].get(sweep) if host in self._kept else None
        if kept is not None:
            return kept
        key = keys.grant(self._run, host, sweep)
        try:
            data = self._store.get(key, max_bytes=SMALL_BYTES).data
        except ObjectMissingError:
            return None
        parse_canonical(data, key)
        document = validate(_GRANT, data, key)
        grant = document.grant
        if document.format != GRANT_FORMAT or (document.run, grant.host, grant.sweep) != (self._run, host, sweep):
            raise FormatError(f"{key} is a {document.format} of run {document.run}, {grant.host}, sweep {grant.sweep}")
        return self._keep(grant)

    def write(self, grant: GrantRecord) -> GrantRecord:
        """Write a new grant; the one that is there already wins and is returned."""
        key = keys.grant(self._run, grant.host, grant.sweep)
        tree: dict[str, object] = _GRANT.dump_python(GrantDocument(GRANT_FORMAT, self._run, grant), mode="json")
        try:
            self._store.create(key, canonical(tree))
        except ObjectExistsError:
            found = self.find(grant.host, grant.sweep)
            if found is None:
                raise
            return found
        return self._keep(grant)

    def newest(self) -> tuple[GrantRecord, ...]:
        """The newest grants of every host: all that can still be open, and the one that was given last."""
        wanted = sorted((listed.named.host, listed.named.sweep) for listed in self._list_newest())
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="grants") as pool:
            found = pool.map(lambda named: self._find_whole(*named), wanted)
            return tuple(grant for grant in found if grant is not None)

    def outline(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Place after the last question granted, and (host, sweep) of all grants that can be open: a listing, and few reads.

        Grants are written in the order of their positions, so the last one is among those written last.
        """
        newest = self._list_newest()
        last = max((listed.modified_at for listed in newest), default=0.0)
        late = [listed.named for listed in newest if listed.modified_at > last - NEWEST_SECONDS]
        grants = [grant for named in late if (grant := self._find_whole(named.host, named.sweep)) is not None]
        with self._lock:
            grants += [grant for kept in self._kept.values() for grant in kept.values()]
        position = max((grant.position + len(grant.question_ids) for grant in grants), default=0)
        return position, tuple(sorted((listed.named.host, listed.named.sweep) for listed in newest))

    def _list_newest(self) -> list[_Listed]:
        by_host: defaultdict[str, list[_Listed]] = defaultdict(list)
        modified_at = {found.key: found.modified_at for found in self._store.list(keys.grants_prefix(self._run))}
        for key, named in keys.ours(modified_at, keys.parse_grant):
            by_host[named.host].append(_Listed(named, modified_at[key]))
        return [one for all_ in by_host.values() for one in sorted(all_, key=lambda listed: listed.named.sweep)[-SWEEPS_A_HOST:]]

    def _find_whole(self, host: str, sweep: int) -> GrantRecord | None:
        """The grant, None also if its object is damaged: that is the trouble of one host, not of all."""
        try:
            return self.find(host, sweep)
        except BucketError as error:
            log.warning("grant_unreadable", host=host, sweep=sweep, error=error.message)
            return None

    def question_of(self, slot: GroupKey) -> str | None:
        """The question granted to a group's slot, None if the slot was not granted."""
        grant = self.find(slot.host, slot.sweep)
        if grant is None or slot.group >= len(grant.question_ids):
            return None
        return grant.question_ids[slot.group]

    def _keep(self, grant: GrantRecord) -> GrantRecord:
        with self._lock:
            kept = self._kept[grant.host]
            kept[grant.sweep] = grant
            if len(kept) > 2 * SWEEPS_A_HOST:
                kept.popitem(last=False)
        return grant
