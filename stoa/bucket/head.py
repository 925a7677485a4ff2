"""HEAD: the one mutable object of a run, changed by compare-and-swap only, and the fence that keeps old trainers out.

Who may write what is decided here; what a version or a checkpoint holds is not. A writer that loses a swap re-reads:
its own nonce means that only the reply was lost; a higher epoch means that another trainer has the run. Content comes
back (ABA), so every write has a higher `seq` and a fresh `nonce`.
"""

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.manifest import Signer, read_signed, write_signed
from stoa.bucket.store import SMALL_BYTES, Store, Stored
from stoa.contracts.errors import FencedError, FormatError, ObjectMissingError, PreconditionError, ServiceUnavailableError, SignatureError
from stoa.contracts.messages import RunState

HEAD_FORMAT: Final = "stoa-head-1"
_MAX_SWAPS: Final = 8
_RESTORE_HINT: Final = "put the newest good HEAD.json back from the bucket's older versions, then `stoa resume RUN`: all else is kept"


@dataclass(frozen=True, slots=True)
class Head:
    """What a run's newest version, step and checkpoint are, and who may say so.

    `version` is -1 and `manifest_key` empty before the first publish. `published_at` is Unix seconds of the version.
    `epoch` is the fencing token of the trainer's lease.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: str
    run: str
    epoch: int
    owner: str
    seq: int
    nonce: str
    state: RunState
    version: int
    manifest_key: str
    manifest_sha256: str
    step: int
    step_manifest_key: str
    checkpoint_key: str
    published_at: float
    sig: str = ""


@dataclass(frozen=True, slots=True)
class Reset:
    """Where a new lease starts: the step of the checkpoint that HEAD names, and its last step manifest."""

    checkpoint_key: str
    step: int
    step_manifest_key: str


_HEAD = TypeAdapter(Head)


def read_head(store: Store, run: str, public_key: str) -> tuple[Head, str]:
    """HEAD and its etag. Raises ObjectMissingError before the first acquire, SignatureError, FormatError."""
    stored = store.get(keys.head(run), max_bytes=SMALL_BYTES)
    return _parse(stored, run, public_key), stored.etag


def poll_head(store: Store, run: str, public_key: str, etag: str) -> tuple[Head, str] | None:
    """HEAD and its etag if it changed since `etag` ("" for never read), else None."""
    stored = store.get_if_changed(keys.head(run), etag, max_bytes=SMALL_BYTES)
    return None if stored is None else (_parse(stored, run, public_key), stored.etag)


class HeadWriter:
    """Writes HEAD for one process; at most one write every `interval_seconds` (R2 allows one a second). One thread at a time."""

    def __init__(self, store: Store, run: str, signer: Signer, *, owner: str, interval_seconds: float) -> None:
        self._store = store
        self._run = run
        self._signer = signer
        self._owner = owner
        self._interval_seconds = interval_seconds
        self._next_write_at = 0.0
        self._version: int | None = None
        self._unanswered: set[str] = set()
        """Manifests of swaps that a call gave up on without an answer: one of them may have arrived."""

    def read(self) -> tuple[Head, str]:
        """HEAD and its etag."""
        return read_head(self._store, self._run, self._signer.public_key)

    def acquire(self, token: int, reset: Reset | None = None) -> Head:
        """Take the run with fencing token `token`; every older writer is fenced from here on.

        `reset` puts step and step manifest back to the checkpoint it names, in the same swap; it must have been worked
        out from the HEAD that is there.

        Raises:
            FencedError: HEAD has this token or a higher one already, by another owner.
            PreconditionError: HEAD names another checkpoint than `reset` by now: read again.
        """
        nonce = secrets.token_hex(16)
        for attempt in range(_MAX_SWAPS):
            try:
                head, etag = self.read()
            except ObjectMissingError:
                head, etag = _first(self._run), None
            if attempt and head.epoch == token and head.owner == self._owner:
                break  # the reply was lost, and somebody may have set the state since
            if head.epoch >= token:
                raise FencedError(f"run {self._run}: lease {token} is too old, {head.owner} holds {head.epoch}")
            if reset is not None and reset.checkpoint_key != head.checkpoint_key:
                raise PreconditionError(f"run {self._run}: HEAD names another checkpoint by now", hint="read HEAD and acquire again")
            step, steps = (head.step, head.step_manifest_key) if reset is None else (reset.step, reset.step_manifest_key)
            new = replace(head, epoch=token, owner=self._owner, step=step, step_manifest_key=steps, seq=head.seq + 1, nonce=nonce)
            if self._try(new, etag):
                head = self._signed(new)
                break
        else:
            raise self._contended()
        self._version = head.version
        return head

    def swap(self, expected_epoch: int, **changes: Any) -> Head:
        """Change fields of HEAD, as the holder of `expected_epoch`; returns HEAD as written.

        `state` is kept as it is in the bucket unless it is among the changes.

        Raises:
            FencedError: another trainer has the run, or the version moved without us.
        """
        nonce = secrets.token_hex(16)
        for attempt in range(_MAX_SWAPS):
            head, etag = self.read()
            if head.epoch != expected_epoch:
                raise FencedError(f"run {self._run}: lease {expected_epoch} ended, {head.owner} holds {head.epoch}")
            if attempt and all(getattr(head, name) == value for name, value in changes.items()):
                self._version = head.version
                return head  # the reply was lost, and somebody may have set the state since
            if head.manifest_key in self._unanswered:
                self._version = head.version
            if self._version is not None and head.version != self._version:
                raise FencedError(f"run {self._run}: version moved from {self._version} to {head.version} by another writer")
            new = replace(head, **changes, seq=head.seq + 1, nonce=nonce)
            if self._try(new, etag):
                self._version = new.version
                self._unanswered.clear()
                return self._signed(new)
        raise self._contended()

    def set_state(self, state: RunState, nonce: str) -> Head:
        """Set HEAD.state; asking again with the same nonce, or for the state HEAD has, changes nothing.

        A publish that comes between read and swap is no conflict: the state is put on the HEAD it made. Raises
        FencedError if the run changed hands meanwhile, ObjectMissingError if no trainer ever took it.
        """
        epoch: int | None = None
        for _ in range(_MAX_SWAPS):
            head, etag = self.read()
            if head.nonce == nonce or head.state == state:
                return head
            if epoch is not None and head.epoch != epoch:
                raise FencedError(f"run {self._run}: changed hands from lease {epoch} to {head.epoch}", hint="ask again")
            epoch = head.epoch
            new = replace(head, state=state, seq=head.seq + 1, nonce=nonce)
            if self._try(new, etag):
                return self._signed(new)
        raise self._contended()

    def _try(self, head: Head, etag: str | None) -> bool:
        """One swap; False if it lost (or its reply did)."""
        wait_seconds = self._next_write_at - time.monotonic()
        if wait_seconds > 0:
            time.sleep(wait_seconds)
        try:
            self._store.swap(keys.head(self._run), write_signed(_HEAD, head, self._signer), etag)
        except PreconditionError:
            return False
        except ServiceUnavailableError:
            self._unanswered.add(head.manifest_key)
            raise
        finally:
            self._next_write_at = time.monotonic() + self._interval_seconds
        return True

    def _signed(self, head: Head) -> Head:
        """HEAD as a reader gets it."""
        return replace(head, sig=self._signer.sign(_HEAD.dump_python(head, mode="json")))

    def _contended(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(f"run {self._run}: HEAD changed under {_MAX_SWAPS} swaps in a row", hint="try again")


def _first(run: str) -> Head:
    """HEAD before anybody wrote it."""
    return Head(HEAD_FORMAT, run, 0, "", 0, "", "running", -1, "", "", 0, "", "", 0.0)


def _parse(stored: Stored, run: str, public_key: str) -> Head:
    try:
        head = read_signed(_HEAD, stored.data, public_key, keys.head(run))
    except (FormatError, SignatureError) as error:
        raise type(error)(f"HEAD of run {run} is not one that a trainer of this run wrote: {error.message}", hint=_RESTORE_HINT) from error
    if head.format != HEAD_FORMAT or head.run != run:
        raise FormatError(f"{keys.head(run)} is a {head.format} of run {head.run}")
    return head
