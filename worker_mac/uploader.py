"""Ships finished objects from a background thread, with a spool on disk so that a killed worker loses none.

It receives bytes only (nothing of MLX may leave the engine's thread) and writes create-only keys, so sending twice is
harmless. What is in an object, and whether a spooled one is still wanted, is the engine's business.

A spooled file is named by its key and holds the object's bytes and their 8-byte xxh3 (little-endian): what a Mac that
lost power left half written is told from what is whole. What the bucket will never take is moved to the folder `refused`
beside its reason. What finds no room on the disk is kept in memory, and `Uploader.trouble` says so: whoever makes more has
to wait then.
"""

import contextlib
import errno
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote, unquote

import structlog
import xxhash

from stoa.contracts.errors import AccessDeniedError, DiskFullError, ObjectExistsError, ServiceUnavailableError, StoaError, TicketError

_log = structlog.get_logger(__name__)

WAIT_SECONDS: Final = (0.2, 10.0)
"""First and longest wait between two tries; there is no last try."""
CLOSE_SECONDS: Final = 2.0
"""For the object in hand when this process ends; it stays in the spool."""
AGAIN_SECONDS: Final = 60.0
"""After the bucket refused our key, and after a failure of the thread at most, until the next try."""
MOST_FAILURES: Final = 3
"""Times that one object may end the thread before it is put aside."""
MAX_REFUSED: Final = 64
"""Objects put aside that are kept."""
_SUM_BYTES: Final = 8
MAX_REMEMBERED: Final = 1024
_PART: Final = ".part"
_WHY: Final = ".why"
REFUSED: Final = "refused"
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

    def put_aside(self, key: str, reason: str) -> None:
        """Take an object out that the bucket will not have, and keep it with the reason; only the last MAX_REFUSED are kept."""
        folder, path = self._folder / REFUSED, self._path(key)
        try:
            folder.mkdir(exist_ok=True)
            path.replace(folder / path.name)
            for old in sorted(folder.glob(f"*{_WHY}"), key=lambda why: why.stat().st_mtime_ns)[: -MAX_REFUSED + 1]:
                _log.warning("refused_object_dropped", key=unquote(old.name.removesuffix(_WHY)))
                old.with_name(old.name.removesuffix(_WHY)).unlink(missing_ok=True)
                old.unlink(missing_ok=True)
            (folder / f"{path.name}{_WHY}").write_text(reason, "utf-8")
        except OSError as error:  # it was never on the disk, or the disk has no room for the reason: the log has both
            _log.warning("object_not_put_aside", key=key, reason=str(error))
            path.unlink(missing_ok=True)

    def refused(self) -> dict[str, str]:
        """What was put aside: keys and reasons."""
        return {unquote(why.name.removesuffix(_WHY)): why.read_text("utf-8") for why in sorted((self._folder / REFUSED).glob(f"*{_WHY}"))}

    def held(self) -> list[str]:
        """Keys of all objects, oldest first."""
        with os.scandir(self._folder) as entries:
            files = [(entry.stat().st_mtime_ns, entry.name) for entry in entries if entry.is_file() and not entry.name.endswith(_PART)]
        return [unquote(name) for _, name in sorted(files)]

    @property
    def num_bytes(self) -> int:
        """Disk that the objects take, while they come and go."""
        total = 0
        for path in self._folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # sent meanwhile
                total += path.stat().st_size if path.name != REFUSED else 0
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

    def __init__(
        self, target: Target, spool: Spool, *, wait_seconds: tuple[float, float] = WAIT_SECONDS, again_seconds: float = AGAIN_SECONDS
    ) -> None:
        """wait_seconds: first and longest wait between two tries. again_seconds: see AGAIN_SECONDS."""
        self._target, self._spool, self._wait_seconds, self._again_seconds = target, spool, wait_seconds, again_seconds
        self._changed = threading.Condition()
        self._queue: deque[str] = deque()
        self._unsent: list[str] = []
        self._sent: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._unspooled: dict[str, bytes] = {}
        """Objects that found no room on the disk."""
        self._blocked: dict[str, str] = {}
        """Keys of objects for which the bucket refused our own key, with what it said; tried again after a while."""
        self._blocked_since = 0.0
        self._failures: dict[str, int] = {}
        self._failure = ""
        self._closing = False
        self._fault: StoaError | None = None
        self.num_sent = 0
        self.num_refused = 0
        """Objects that the bucket will not have and that were put aside: an earlier try of the same sweep got there first, say."""
        self.num_failures = 0
        """Times that something unexpected ended the thread."""
        self.bytes_sent = 0
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why nothing more is to be made for now, in words; "" while objects can be kept and sent. For any thread."""
        with self._changed:
            if self._unspooled:
                return f"the disk is full: {len(self._unspooled)} finished groups wait in memory"
            if self._blocked:
                return f"the bucket takes no groups from this Mac: {next(iter(self._blocked.values()))}"
            return f"finished groups cannot be sent: {self._failure}" if self._failure else ""

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
        """Take over an object: it is on disk when this returns, and in the bucket some time later.

        One that finds no room is kept in memory until it is sent or there is room; see `trouble`.
        """
        if type(data) is not bytes:
            raise TypeError(f"the uploader takes bytes, not {type(data).__name__}")
        try:
            self._spool.add(key, data)
        except (DiskFullError, OSError) as error:
            _log.error("object_not_spooled", key=key, bytes=len(data), reason=str(error))
            with self._changed:
                self._unspooled[key] = data
        self._enqueue(key)

    def pending(self) -> list[str]:
        """Keys that are not in the bucket yet."""
        with self._changed:
            return [*self._unsent, *self._blocked, *self._queue]

    def seen(self) -> list[str]:
        """Keys that are not in the bucket yet, and the last ones that went there: nobody needs to make them again."""
        with self._changed:
            return [*self._sent, *self._unsent, *self._blocked, *self._queue]

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
        return done

    def close(self) -> None:
        """Stop after the object in hand; what is not sent stays in the spool for the next start."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=CLOSE_SECONDS)
        self._spool_again()
        if self._unspooled:
            _log.error("objects_lost", keys=list(self._unspooled), reason="the disk is full, and the bucket did not take them in time")

    def _enqueue(self, key: str) -> None:
        with self._changed:
            if key not in self._queue and key not in self._unsent and key not in self._blocked:
                self._queue.append(key)
            self._changed.notify_all()

    def _run(self) -> None:
        """The thread. Whatever ends it but `close` is counted and told, and another takes its place after a while."""
        try:
            while (key := self._next()) is not None and self._send(key):
                with self._changed:
                    self._queue.popleft()
                    self._changed.notify_all()
        finally:
            error = sys.exc_info()[1]
            if error is not None and not self._closing:
                self._begin_again(error)

    def _next(self) -> str | None:
        """The object to send; None if closing came first."""
        with self._changed:
            while not self._closing and not self._queue:
                self._changed.wait(self._again_seconds if self._blocked or self._unspooled else None)
                self._spool_again()
                if self._blocked and time.monotonic() - self._blocked_since >= self._again_seconds:
                    self._queue.extend(self._blocked)
                    self._blocked.clear()
            return None if self._closing else self._queue[0]

    def _begin_again(self, error: BaseException) -> None:
        """After something unexpected: the object in hand goes to the end, and aside if it was in hand too often."""
        with self._changed:
            key = self._queue.popleft() if self._queue else ""
            self._failure = f"{type(error).__name__}: {error}"
            self.num_failures += 1
            self._failures[key] = self._failures.get(key, 0) + 1
            num = self._failures[key]
            if key and num < MOST_FAILURES:
                self._queue.append(key)
        _log.error("uploader_failed", key=key, failures=num, reason=self._failure)
        if key and num >= MOST_FAILURES:
            self._refuse(key, self._failure)
        first, longest = self._wait_seconds
        wait_seconds = min(first * 2 ** min(self.num_failures, 16), longest)

        def begin() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, wait_seconds)
            self._run()

        self._thread = threading.Thread(target=begin, name="uploader", daemon=True)
        self._thread.start()

    def _refuse(self, key: str, reason: str) -> None:
        """Keep an object that the bucket will not have where it is in nobody's way."""
        self.num_refused += 1
        self._spool_again()
        self._spool.put_aside(key, reason)
        with self._changed:
            self._unspooled.pop(key, None)
            self._failure = ""
            self._changed.notify_all()
        _log.error("object_refused", key=key, reason=reason)

    def _spool_again(self) -> None:
        """Put what is in memory only on the disk, as far as there is room."""
        for key, data in list(self._unspooled.items()):
            try:
                self._spool.add(key, data)
            except (DiskFullError, OSError):
                return
            with self._changed:
                self._unspooled.pop(key, None)

    def _send(self, key: str) -> bool:
        """Send one object, waiting out outages; False if closing came first."""
        wait_seconds, longest_seconds = self._wait_seconds
        data = self._unspooled.get(key) or self._spool.read(key)
        if data is None:
            _log.warning("spooled_object_lost", key=key)
            return True
        said = ""
        while True:
            self._spool_again()
            try:
                self._target.create(key, data)
                self.num_sent += 1
                self.bytes_sent += len(data)
                _log.debug("object_sent", key=key, bytes=len(data))
                break
            except ObjectExistsError:
                self._refuse(key, "the key is taken by other bytes: an earlier try of the same sweep was sent before")
                break
            except TicketError as error:
                _log.warning("object_waits_for_ticket", key=key, reason=error.message)
                with self._changed:
                    self._unsent.append(key)
                return True
            except StoaError as error:
                if not error.retryable:
                    self._undeliverable(key, error)
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
            self._unspooled.pop(key, None)
            self._failures.pop(key, None)
            self._failure = ""
        self._spool.remove(key)
        return True

    def _undeliverable(self, key: str, error: StoaError) -> None:
        """What no waiting helps: told to who waits; kept, to be tried again if it was our key for the bucket, else put aside."""
        if isinstance(error, AccessDeniedError):
            _log.error("object_blocked", key=key, reason=error.message)
        else:
            self._refuse(key, error.message)
        with self._changed:
            if isinstance(error, AccessDeniedError):
                self._blocked[key], self._blocked_since = error.message, time.monotonic()
            self._fault = error
            self._changed.notify_all()
