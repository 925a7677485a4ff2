"""Grants in the bucket: create-only objects, one a sweep, that fix which question each group of the sweep plays.

Who is granted what is decided by `stoa.learning.ledger`; here it is written down and looked up. A grant never changes,
so what was read once is kept. No torch here: the control process imports this too.
"""

import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Final

import structlog
from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.keys import GroupKey
from stoa.bucket.manifest import canonical, parse_canonical, validate
from stoa.bucket.store import SMALL_BYTES, Store
from stoa.contracts.errors import BucketError, FormatError, ObjectExistsError, ObjectMissingError
from stoa.learning.ledger import GrantRecord

GRANT_FORMAT: Final = "stoa-grant-1"
MAX_AHEAD: Final = 6
"""Sweeps a Mac may be granted beyond the one it plays."""
SWEEPS_A_HOST: Final = MAX_AHEAD + 2
"""Newest grants that are read: older ones are over."""
_MAX_KEPT: Final = 8192

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GrantDocument:
    """A grant as it stands in the bucket."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: str
    run: str
    grant: GrantRecord


_GRANT = TypeAdapter(GrantDocument)


class GrantBook:
    """The grants of one run. Safe from any thread."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], GrantRecord] = OrderedDict()

    def find(self, host: str, sweep: int) -> GrantRecord | None:
        """The grant of (host, sweep), None if there is none. Raises FormatError if its object is no grant."""
        with self._lock:
            kept = self._kept.get((host, sweep))
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
        sweeps: dict[str, list[int]] = defaultdict(list)
        listed = (found.key for found in self._store.list(keys.grants_prefix(self._run)))
        for _, named in keys.ours(listed, keys.parse_grant):
            sweeps[named.host].append(named.sweep)
        wanted = [(host, sweep) for host, all_ in sorted(sweeps.items()) for sweep in sorted(all_)[-SWEEPS_A_HOST:]]
        return tuple(grant for host, sweep in wanted if (grant := self._find_whole(host, sweep)) is not None)

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
            self._kept[grant.host, grant.sweep] = grant
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return grant
