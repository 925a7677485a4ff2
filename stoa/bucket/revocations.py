"""Who may no longer take part: create-only notices in the bucket, signed by the run's key, one a host or invite.

The proxy and the control process look every few seconds. A host name that was revoked is burnt for the run: no later
invite makes it good again, so nobody has to ask which came first.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.manifest import Signer, read_signed, write_signed
from stoa.bucket.store import SMALL_BYTES, Store
from stoa.contracts.errors import BucketError, FormatError, InviteError, ObjectExistsError, ServiceError
from stoa.contracts.ids import is_name
from stoa.contracts.sealed import host_of, is_invite

REVOCATION_FORMAT: Final = "stoa-revocation-1"
LOOK_SECONDS: Final = 5.0
MAX_REASON_CHARACTERS: Final = 200

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Revocation:
    """One notice. `what`: a host, or the id of one invite. `at`: Unix seconds."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: str
    run: str
    what: str
    at: float
    reason: str
    sig: str = ""


_REVOCATION = TypeAdapter(Revocation)


def revoke(store: Store, signer: Signer, run: str, what: str, reason: str = "") -> bool:
    """Revoke a host or an invite; False if it was revoked before. Raises InviteError if `what` is neither."""
    if not (is_name(what) or is_invite(what)):
        raise InviteError(f"{what!r} is neither a host name nor the id of an invitation", hint="an id looks like mac-1.0123abcd")
    notice = Revocation(REVOCATION_FORMAT, run, what, time.time(), reason[:MAX_REASON_CHARACTERS])
    try:
        store.create(keys.revocation(run, what), write_signed(_REVOCATION, notice, signer))
    except ObjectExistsError:
        return False
    return True


class Revoked:
    """The notices of one run as last seen. Any thread; looks again when what it knows is `look_seconds` old."""

    def __init__(
        self, store: Store, run: str, public_key: str, *, look_seconds: float = LOOK_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._run, self._public_key = store, run, public_key
        self._look_seconds, self._clock = look_seconds, clock
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}
        self._read: set[str] = set()
        self._fresh_until: float | None = None

    def look(self) -> None:
        """Read what is new. Raises what the bucket raises; a notice that is not signed by the run counts for nothing."""
        prefix = keys.revoked_prefix(self._run)
        for listed in self._store.list(prefix):
            if listed.key in self._read:
                continue
            try:
                notice = read_signed(_REVOCATION, self._store.get(listed.key, max_bytes=SMALL_BYTES).data, self._public_key, listed.key)
                if (notice.format, notice.run, keys.revocation(self._run, notice.what)) != (REVOCATION_FORMAT, self._run, listed.key):
                    raise FormatError(f"{listed.key} is a notice of something else")
                self._reasons[notice.what] = notice.reason
            except BucketError as error:
                _log.warning("revocation_unreadable", key=listed.key, error=error.message)
            self._read.add(listed.key)
        self._fresh_until = self._clock() + self._look_seconds

    def reason(self, host: str, invite: str) -> str | None:
        """Why `host`, or its `invite` (may be ""), was revoked; None if neither was.

        An outage of the bucket is ridden out on what is known, once something is: the first look must succeed.
        """
        with self._lock:
            if self._fresh_until is None:
                self.look()
            elif self._clock() >= self._fresh_until:
                try:
                    self.look()
                except ServiceError as error:
                    _log.warning("revocations_unknown", error=error.message)
                    self._fresh_until = self._clock() + self._look_seconds
        return self.known(host, invite)

    def sentences(self) -> dict[str, str]:
        """What was revoked, hosts and ids of invitations -> the same sentence, as seen at the last look."""
        return {what: self.known(what, "") or "" for what in self._reasons}

    def known(self, host: str, invite: str) -> str | None:
        """As `reason`, by what was seen at the last look: for who must not wait for the bucket."""
        for what in (host, invite, host_of(invite)):
            if what in self._reasons:
                return f"{what} was revoked" + (f": {self._reasons[what]}" if self._reasons[what] else "")
        return None
