"""Ships finished objects from a background thread, with a spool on disk so that a killed worker loses none.

It receives bytes only (nothing of MLX may leave the engine's thread) and writes create-only keys, so sending twice is
harmless. What is in an object, and whether a spooled one is still wanted, is the engine's business.

A spooled file is named by its key and holds the object's bytes and their 8-byte xxh3 (little-endian): what a Mac that
lost power left half written is told from what is whole.
"""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote, unquote

import structlog
import xxhash

from stoa.contracts.errors import DiskFullError, ObjectExistsError, ServiceUnavailableError, StoaError, TicketError

_log = structlog.get_logger(__name__)

WAIT_SECONDS: Final = (0.2, 10.0)
"""First and longest wait between two tries; there is no last try."""
CLOSE_SECONDS: Final = 2.0
"""For the object in hand when this process ends; it stays in the spool."""
_SUM_BYTES: Final = 8
MAX_REMEMBERED: Final = 1024
_PART: Final = ".part"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Target(Protocol):
    """Where objects go: the one method of `stoa.bucket.store.Store` that is needed."""

    def create(self, key: str, data: bytes, *, kind: str = "") -> str: ...  # noqa: D102


class Spool:
    """Objects on disk, one file each, named by their key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob(f"*{_PART}"):
            torn.unlink()

    def add(self, key: str, data: bytes) -> None:
        """Keep an object until it is removed. Raises DiskFullError; nothing is kept then."""
        path = self._path(key)
        part = path.with_name(path.name + _PART)
        self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it under a living worker
        try:
            with part.open("wb") as file:
                file.write(data)
                file.write(_sum_of(data))
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            if error.errno not in _FULL:
                raise
            raise DiskFullError(f"{path}: the disk is full", hint="make room: a finished group waits there for the network") from error

    def read(self, key: str) -> bytes | None:
        """The bytes kept under this key; None if somebody removed or damaged them."""
        try:
            found = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        data = found[:-_SUM_BYTES]
        return data if len(found) >= _SUM_BYTES and found[-_SUM_BYTES:] == _sum_of(data) else None

    def remove(self, key: str) -> None:
        """Forget an object."""
        self._path(key).unlink(missing_ok=True)

    def held(self) -> list[str]:
        """Keys of all objects, oldest first."""
        with os.scandir(self._folder) as entries:
            files = [(entry.stat().st_mtime_ns, entry.name) for entry in entries if not entry.name.endswith(_PART)]
        return [unquote(name) for _, name in sorted(files)]

    @property
    def num_bytes(self) -> int:
        """Disk that the objects take, while they come and go."""
        total = 0
        for path in self._folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # sent meanwhile
                total += path.stat().st_size
        return total

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


def _sum_of(data: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(_SUM_BYTES, "little")


class Gate:
    """A target that takes nothing while the network is not ours to use."""

    def __init__(self, target: Target, is_open: Callable[[], bool]) -> None:
        self._target, self._is_open = target, is_open

    def create(self, key: str, data: bytes, *, kind: str = "") -> str:
        """Pass an object on. Raises ServiceUnavailableError while closed."""
        if not self._is_open():
            raise ServiceUnavailableError("this Mac's network is not to be used now", hint="objects are kept and sent later")
        return self._target.create(key, data, kind=kind)


class Uploader:
    """Sends spooled objects one after another; an outage is waited out for as long as this process lives."""

    def __init__(self, target: Target, spool: Spool, *, wait_seconds: tuple[float, float] = WAIT_SECONDS) -> None:
        """wait_seconds: first and longest wait between two tries."""
        self._target, self._spool, self._wait_seconds = target, spool, wait_seconds
        self._changed = threading.Condition()
        self._queue: deque[str] = deque()
        self._unsent: list[str] = []
        self._sent: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._closing = False
        self._fault: StoaError | None = None
        self.num_sent = 0
        self.num_refused = 0
        """Objects whose key was taken by other bytes: an earlier try of the same sweep got there first."""
        self.bytes_sent = 0
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
        self._thread.start()

    def recover(self, wanted: Callable[[str], bool]) -> int:
        """Queue what an earlier process left in the spool; what is damaged or not wanted is dropped. Returns how many."""
        kept = 0
        for key in self._spool.held():
            if wanted(key) and self._spool.read(key) is not None:
                self._enqueue(key)
                kept += 1
            else:
                _log.warning("spooled_object_dropped", key=key)
                self._spool.remove(key)
        return kept

    def put(self, key: str, data: bytes) -> None:
        """Take over an object: it is on disk when this returns, and in the bucket some time later."""
        if type(data) is not bytes:
            raise TypeError(f"the uploader takes bytes, not {type(data).__name__}")
        self._spool.add(key, data)
        self._enqueue(key)

    def pending(self) -> list[str]:
        """Keys that are not in the bucket yet."""
        with self._changed:
            return [*self._unsent, *self._queue]

    def seen(self) -> list[str]:
        """Keys that are not in the bucket yet, and the last ones that went there: nobody needs to make them again."""
        with self._changed:
            return [*self._sent, *self._unsent, *self._queue]

    def unsent(self) -> list[str]:
        """Keys that wait for a ticket, oldest first; nobody else waits for them."""
        with self._changed:
            return list(self._unsent)

    def retry(self, has_ticket: Callable[[str], bool]) -> None:
        """Queue again what waited for a ticket and has one now."""
        with self._changed:
            ready = [key for key in self._unsent if has_ticket(key)]
            self._unsent = [key for key in self._unsent if key not in ready]
            self._queue.extend(ready)
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until nothing is left to send; False if something still is. Raises what made an object undeliverable."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._fault is not None or not self._queue, timeout_seconds)
            fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if not done and not self._thread.is_alive():
            raise ServiceUnavailableError("the upload thread has ended", hint="start the worker again: its spool is kept")
        return done

    def close(self) -> None:
        """Stop after the object in hand; what is not sent stays in the spool for the next start."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=CLOSE_SECONDS)

    def _enqueue(self, key: str) -> None:
        with self._changed:
            if key not in self._queue and key not in self._unsent:
                self._queue.append(key)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._queue))
                if self._closing:
                    return
                key = self._queue[0]
            if not self._send(key):
                return
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _send(self, key: str) -> bool:
        """Send one object, waiting out outages; False if closing came first."""
        data, (wait_seconds, longest_seconds) = self._spool.read(key), self._wait_seconds
        if data is None:
            _log.warning("spooled_object_lost", key=key)
            return True
        said = ""
        while True:
            try:
                self._target.create(key, data)
                self.num_sent += 1
                self.bytes_sent += len(data)
                _log.debug("object_sent", key=key, bytes=len(data))
                break
            except ObjectExistsError:
                self.num_refused += 1
                _log.warning("object_refused", key=key, reason="the key is taken")
                break
            except TicketError as error:
                _log.warning("object_waits_for_ticket", key=key, reason=error.message)
                with self._changed:
                    self._unsent.append(key)
                return True
            except StoaError as error:
                if not error.retryable:
                    # The spool keeps it: the next start tries again, perhaps with a better key for the bucket.
                    _log.error("object_undeliverable", key=key, reason=error.message)
                    with self._changed:
                        self._fault = error
                    return True
                if error.message != said:  # an outage of hours is one line
                    said = error.message
                    _log.warning("upload_waiting", key=key, reason=said)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, wait_seconds):
                    return False
            wait_seconds = min(wait_seconds * 2, longest_seconds)
        with self._changed:
            self._sent.append(key)
        self._spool.remove(key)
        return True
