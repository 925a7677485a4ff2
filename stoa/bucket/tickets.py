"""Tickets: what an invited Mac holds instead of a key that writes. One ticket creates one object, under one fixed key.

The control process mints them with its own key and puts them into a grant; the Mac puts URLs together from them. Since
a group's key names the version it was played at, which nobody knows beforehand, a grant holds tickets for a few versions.

A minting is one text:

    put1:<id of the invite>:<base64url of body>
    body    header, a line feed, then 32 bytes a signature (see `presign.py`) in the order of `puts`
    header  canonical JSON: access (access key id), region, at (Unix seconds), seconds (how long they are good), puts
    puts    a list of: [sweep, first version, number of versions, number of groups], version by version; or a whole key

A text in clear crosses Temporal sealed (`activities/codec.py`): its beginning is what the codec looks for.
"""

import base64
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys, presign
from stoa.bucket.manifest import canonical
from stoa.config.load import Credentials
from stoa.contracts.errors import FormatError, TicketError
from stoa.contracts.sealed import SEALED, TICKET, parts_of

_log = structlog.get_logger(__name__)

MAX_SIGNATURES: Final = 128
"""In one minting: 5.5 kB of text, so that a grant of 64 groups still fits a message."""
MAX_KEYS: Final = 16
"""Whole keys in one minting, and hence objects a Mac may ask tickets for at a time."""
KEPT: Final = 64
"""Newest mintings a Mac keeps."""
MARGIN_SECONDS: Final = 60
"""A ticket this near its end is not used: the bucket's clock may be ahead."""
_SIGNATURE_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Slots:
    """The groups of one sweep at `num_versions` versions from `version` on."""

    sweep: int
    version: int
    num_versions: int
    num_groups: int

    def keys(self, run: str, host: str) -> list[str]:
        """Their keys in the order of their signatures."""
        last = self.version + self.num_versions
        return [keys.group(run, v, host, self.sweep, g) for v in range(self.version, last) for g in range(self.num_groups)]


@dataclass(frozen=True, slots=True)
class _Header:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    access: str
    region: str
    at: int
    seconds: int
    puts: tuple[tuple[int, int, int, int] | str, ...]


_HEADER = TypeAdapter(_Header)


@dataclass(frozen=True, slots=True)
class Minting:
    """What one text says: `signatures` by key, all of one scope."""

    invite: str
    scope: presign.Scope
    signatures: dict[str, bytes]


class Mint:
    """Makes tickets for the Macs of a run, as they see the bucket: `endpoint` stands in what is signed."""

    def __init__(self, run: str, credentials: Credentials, endpoint: str, bucket: str, region: str) -> None:
        self._run, self._credentials, self._region = run, credentials, region
        self._endpoint, self._bucket = endpoint, bucket

    def make(self, invite: str, host: str, slots: Sequence[Slots] = (), whole: Sequence[str] = (), *, now: float | None = None) -> str:
        """Tickets of `host` for `slots` and for the keys `whole`; which of them it may have is the caller's to know.

        Raises FormatError for more than `MAX_SIGNATURES`.
        """
        at = int(time.time() if now is None else now)
        scope = presign.Scope(self._credentials.key, self._region, at, presign.MAX_SECONDS)
        wanted = [*(key for one in slots for key in one.keys(self._run, host)), *whole]
        if len(wanted) > MAX_SIGNATURES:
            raise FormatError(f"{len(wanted)} tickets in one message are more than {MAX_SIGNATURES}")
        puts = [*(list(_numbers(one)) for one in slots), *whole]
        header = canonical({"access": scope.access_key, "region": scope.region, "at": at, "seconds": scope.seconds, "puts": puts})
        key = presign.signing_key(self._credentials.secret, scope)
        signatures = b"".join(presign.sign(key, scope, self._endpoint, f"/{self._bucket}/{name}") for name in wanted)
        body = base64.urlsafe_b64encode(b"\n".join((header, signatures)))
        return f"{TICKET}{invite}:{body.decode('ascii')}"


def read_tickets(text: str, run: str, host: str) -> Minting:
    """What `text` says for `host` of `run`. Raises FormatError if it is no minting."""
    try:
        found = parts_of(text, TICKET)
        if found is None:
            raise ValueError("not tickets")
        invite, encoded = found
        head, _, signatures = base64.urlsafe_b64decode(encoded).partition(b"\n")
        header = _HEADER.validate_json(head)
        slots = [Slots(*put) for put in header.puts if not isinstance(put, str)]
        num_slots = sum(max(one.num_versions, one.num_versions * one.num_groups) for one in slots)
        if num_slots > MAX_SIGNATURES or any(not 0 <= n < 10**8 for one in slots for n in _numbers(one)):
            raise ValueError(f"{num_slots} slots")
        named = [*(key for one in slots for key in one.keys(run, host)), *(put for put in header.puts if isinstance(put, str))]
        if len(named) * _SIGNATURE_BYTES != len(signatures):
            raise ValueError(f"{len(signatures)} bytes of signatures for {len(named)} keys")
    except ValueError as error:
        raise FormatError(f"tickets cannot be read: {type(error).__name__}") from None
    scope = presign.Scope(header.access, header.region, header.at, header.seconds)
    chunks = (signatures[at : at + _SIGNATURE_BYTES] for at in range(0, len(signatures), _SIGNATURE_BYTES))
    return Minting(invite, scope, dict(zip(named, chunks, strict=True)))


class TicketBook:
    """The tickets one Mac holds, in memory and in a file only its owner can read. One thread accepts, any may look."""

    def __init__(self, run: str, host: str, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._run, self._host, self._path, self._clock = run, host, path, clock
        self._texts: list[str] = []
        self._mintings: list[Minting] = []
        self._take(path.read_text("ascii").split() if path.is_file() else ())

    def accept(self, text: str) -> None:
        """Keep new tickets; expired ones are forgotten. Raises FormatError if `text` is no minting."""
        read_tickets(text, self._run, self._host)
        self._take((*self._texts, text))
        part = self._path.with_name(self._path.name + ".part")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.writelines(f"{one}\n" for one in self._texts)
        part.replace(self._path)

    def take(self, text: str) -> None:
        """Keep the tickets that came with a request, if any; what cannot be read, or opened, is said and passed over."""
        if text:
            try:
                self.accept(text)
            except FormatError as error:
                _log.warning("tickets_unreadable", sealed=text.startswith(SEALED), error=error.message)

    def has(self, key: str) -> bool:
        """True if there is a ticket for `key` that is good now."""
        return self._find(key) is not None

    def url(self, key: str, endpoint: str, bucket: str) -> str:
        """Where to PUT the object of `key`. Raises TicketError without a good ticket."""
        found = self._find(key)
        if found is None:
            raise TicketError(f"{key}: no ticket to create it, or an expired one", hint="another comes with the next grant")
        return presign.url(found.scope, endpoint, f"/{bucket}/{key}", found.signatures[key])

    def _find(self, key: str) -> Minting | None:
        until = self._clock() + MARGIN_SECONDS
        return next((one for one in reversed(self._mintings) if key in one.signatures and one.scope.expires_at > until), None)

    def _take(self, texts: Iterable[str]) -> None:
        kept: dict[str, Minting] = {}
        for text in texts:
            try:
                minting = read_tickets(text, self._run, self._host)
            except FormatError:  # a file that was torn: new tickets come
                continue
            if minting.scope.expires_at > self._clock():
                kept[text] = minting
        newest = list(kept)[-KEPT:]
        self._texts, self._mintings = newest, [kept[text] for text in newest]


def _numbers(slots: Slots) -> tuple[int, int, int, int]:
    return slots.sweep, slots.version, slots.num_versions, slots.num_groups
