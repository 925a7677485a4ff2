"""Brings objects of the bucket into files: ranges in parallel over all of them, resumed at the byte where they broke.

A file under its final name is complete and had its sha256 when it was renamed. Beside a `.part` stands a journal of the
bytes it holds, so that a process that was killed goes on where it was (`transfer.py`). What is downloaded, and when it
may go, is the caller's business. Ranges get smaller towards the end, and a thread with nothing left to do takes over a
range that has gone silent, so that one bad connection does not hold up the whole.
"""

import contextlib
import hashlib
import os
import random
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from stoa.bucket.store import Store
from stoa.bucket.transfer import Piece, Transfer, Wanted, disk_errors, part_of, put
from stoa.contracts.errors import BucketError, DigestError, DiskFullError, PreconditionError, ServiceUnavailableError, StoaError
from stoa.telemetry.arriving import Arrival

RANGE_BYTES: Final = 8 << 20
LEAST_RANGE_BYTES: Final = 1 << 20
NUM_RANGES: Final = 8
"""Ranges in flight at a time, over all objects."""
STALL_SECONDS: Final = 5.0
"""Silence after which a connection is given up."""
TAKE_OVER_SECONDS: Final = 1.0
"""Silence after which an idle thread takes over the rest of a range; doubles with each time the same range is taken."""
MIN_TRIES: Final = 3
"""Tries in a row without progress before the store's patience counts; and whole downloads of a wrong object."""
_TELL_SECONDS: Final = 2.0
_PROGRESS_BYTES: Final = 64 << 10
_LONGEST_WAIT_SECONDS: Final = 5.0
_HASH_BYTES: Final = 4 << 20


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(_HASH_BYTES), b""):
            digest.update(piece)
    return digest.hexdigest()


def fetch(store: Store, key: str, path: Path, *, num_bytes: int, sha256: str) -> int:
    """Make `path` the object under `key`; returns the bytes downloaded, 0 if a right file was there already.

    A file that is there with other bytes is replaced. Raises what `Downloads.wait` raises; no file is left under `path` then.
    """
    if path.is_file():
        if path.stat().st_size == num_bytes and file_sha256(path) == sha256:
            return 0
        path.unlink()
    with Downloads(store, [Wanted(key, path, num_bytes, sha256)]) as downloads:
        downloads.wait(key)
        return downloads.num_bytes


class Downloads:
    """Objects on their way into files, begun when entered, in the order given. For use by one thread.

    On leaving, whatever is not whole stays as parts, for the next one to go on with.
    """

    def __init__(self, store: Store, wanted: Sequence[Wanted], *, held_bytes: int = 0, stall_seconds: float = STALL_SECONDS) -> None:
        """held_bytes: of files that belong to it and are here already.

        Raises DiskFullError if the disk has no room for what is missing; nothing was begun then.
        """
        self._store = store
        self._held_bytes = held_bytes
        self._stall_seconds = stall_seconds
        self._transfers = [Transfer.resume(one) for one in wanted]
        self._tries = dict.fromkeys((one.key for one in wanted), 1)
        self._changed = threading.Condition()
        self._busy: set[Transfer] = set()
        """Transfers that one thread hashes, checks or renames, outside the lock."""
        self._num_threads = 0
        self._most_threads = 0
        self._heard_at: dict[int, float] = {}
        """Thread -> when it last did something (monotonic); one that waits for a silent server does nothing."""
        self._failed: dict[str, BucketError] = {}
        """Objects that cannot be had, and why; the others go on."""
        self._error: Exception | None = None
        """What ended everything: the server, the disk."""
        self._over = threading.Event()
        self._retry_reason = ""
        self.num_bytes = 0
        """Downloaded so far."""
        _check_room(self._transfers)

    def __enter__(self) -> Self:
        left = sum(transfer.num_missing for transfer in self._transfers)
        self._most_threads = min(NUM_RANGES, max(1, -(-left // LEAST_RANGE_BYTES)))
        with self._changed:
            for _ in range(self._most_threads):
                self._start_thread()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._changed:
            self._changed.notify_all()
            for transfer in self._transfers:
                with contextlib.suppress(DiskFullError):
                    self._close(transfer)
                transfer.close()

    @property
    def arrival(self) -> Arrival:
        """How far all of it has come, bytes of earlier processes included. For any thread."""
        with self._changed:
            kept = sum(transfer.kept_bytes for transfer in self._transfers)
            total = sum(transfer.wanted.num_bytes for transfer in self._transfers)
        return Arrival(self._held_bytes + kept, self._held_bytes + total)

    def wait(self, key: str) -> None:
        """Until the object under `key` is a whole file, checked and on disk.

        Raises:
            ObjectMissingError, AccessDeniedError: the bucket says so.
            ServiceUnavailableError: no progress for the store's patience.
            DigestError: the bucket has other bytes, also after three tries.
            DiskFullError: there is no room; what came stays.
        """
        told, told_at = 0, time.monotonic()
        while True:
            with self._changed:
                if (failure := self._failed.get(key) or self._error) is not None:
                    raise failure
                if any(transfer.wanted.key == key and transfer.done for transfer in self._transfers):
                    return
                if not self._num_threads:
                    raise BucketError(f"{self._store.name}/{key}: its download has ended", hint="begin it anew")
                self._changed.wait(0.25)
                if self._num_threads < 2 * NUM_RANGES and self._num_live() < self._most_threads:
                    self._start_thread()
                reason, self._retry_reason = self._retry_reason, ""
                if not reason and self.num_bytes > told and time.monotonic() - told_at >= _TELL_SECONDS:
                    told, told_at = self.num_bytes, time.monotonic()
                    reason = f"downloading {key}: {self.arrival}"
            if reason and self._store.on_retry is not None:
                self._store.on_retry(reason)

    def _start_thread(self) -> None:
        # Daemons: one that waits for a silent server must hold up neither this download nor the process.
        self._num_threads += 1
        threading.Thread(target=self._work, name="download", daemon=True).start()

    def _num_live(self) -> int:
        """Threads that do not wait for a silent server."""
        now = time.monotonic()
        return self._num_threads - sum(now - at > TAKE_OVER_SECONDS for at in self._heard_at.values())

    def _hear(self, after_seconds: float = 0.0) -> None:
        """This thread does something, or will after a wait that it means to make."""
        self._heard_at[threading.get_ident()] = time.monotonic() + after_seconds

    def _work(self) -> None:
        """One thread: takes pieces until nothing is left to do. A server or a disk that fails it ends all of them."""
        try:
            while not self._over.is_set():
                with self._changed:
                    self._hear()
                    if self._num_live() > self._most_threads:
                        return  # those it stood in for are back
                    task = self._next()
                    if task is None:
                        if all(transfer.done or transfer.dead for transfer in self._transfers):
                            return
                        self._changed.wait(0.1)
                        continue
                try:
                    if isinstance(task, Piece):
                        self._fly(task)
                    else:
                        self._finish(task)
                except BucketError as error:
                    self._give_up(task.transfer if isinstance(task, Piece) else task, error)
        except (StoaError, OSError) as error:
            self._error = self._error or error
            self._over.set()
        finally:
            with self._changed:
                self._num_threads -= 1
                self._heard_at.pop(threading.get_ident(), None)
                self._changed.notify_all()

    def _next(self) -> Piece | Transfer | None:
        """What an idle thread does next: a missing range, a file to check, a silent range to take over; None: wait."""
        now = time.monotonic()
        left = sum(transfer.num_missing for transfer in self._transfers)
        for transfer in self._transfers:
            if transfer.is_whole and transfer not in self._busy:
                transfer.open()
                transfer.finishing = True
                self._busy.add(transfer)
                return transfer
            if transfer.missing:
                transfer.open()
                return transfer.take(min(RANGE_BYTES, max(LEAST_RANGE_BYTES, left // (2 * NUM_RANGES))), now)
        for piece in (piece for transfer in self._transfers for piece in transfer.pieces):
            if now - piece.heard_at > TAKE_OVER_SECONDS * 2**piece.num_taken:
                return piece.transfer.take_over(piece, now)
        return None

    def _fly(self, piece: Piece) -> None:
        """Fetch one piece, resuming where it breaks, until it is here or taken away."""
        while not self._over.is_set() and piece.at < piece.end:
            began_at = piece.at
            try:
                self._read(piece)
            except ServiceUnavailableError as error:
                self._over.wait(self._wait_seconds(piece, began_at, error))
            except PreconditionError as error:
                self._begin_anew(piece.transfer, error)
        with self._changed:
            piece.transfer.leave(piece)
            self._changed.notify_all()
        self._hash_on(piece.transfer)

    def _wait_seconds(self, piece: Piece, began_at: int, error: ServiceUnavailableError) -> float:
        """How long to wait before the next try of a piece. Raises `error` if there were enough."""
        with self._changed:
            if piece.at >= piece.end:
                return 0.0  # taken over meanwhile: not this thread's trouble any more
            now = time.monotonic()
            piece.num_tries += 1
            if piece.at - began_at >= _PROGRESS_BYTES:
                piece.num_tries, piece.fruitful_at = 0, now
            elif piece.num_tries >= MIN_TRIES and now - piece.fruitful_at >= self._store.patience_seconds:
                raise error
            wait_seconds = min(0.1 * 2**piece.num_tries, _LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0) if piece.num_tries else 0.0
            piece.heard_at = now + wait_seconds  # it waits by intention: nobody need take it over
            self._hear(wait_seconds)
            self._retry_reason = f"downloading {piece.transfer.wanted.key} again: {type(error.__cause__).__name__}"
        return wait_seconds

    def _read(self, piece: Piece) -> None:
        """One request for the rest of a piece."""
        transfer = piece.transfer
        with self._changed:
            at, end, etag = piece.at, piece.end, transfer.etag
            if transfer.dead or at >= end:
                return
        reply = self._store.open_range(transfer.wanted.key, at, end - at, etag=etag, stall_seconds=self._stall_seconds)
        handle = -1
        try:
            if reply.object_bytes not in (-1, transfer.wanted.num_bytes):
                where, promised = f"{self._store.name}/{transfer.wanted.key}", transfer.wanted.num_bytes
                raise DigestError(f"{where} has {reply.object_bytes} bytes, {promised} were promised", hint="somebody changed the object")
            with self._changed:
                if transfer.dead:
                    return
                if not transfer.agree(reply.etag):
                    raise PreconditionError(f"{self._store.name}/{transfer.wanted.key} is another object by now")
                piece.heard_at = time.monotonic()
                handle = transfer.handle()
            with disk_errors(transfer.wanted.path):
                for chunk in reply.chunks:
                    if not self._keep(piece, handle, chunk):
                        return
        finally:
            reply.chunks.close()
            if handle >= 0:
                os.close(handle)

    def _keep(self, piece: Piece, handle: int, chunk: bytes) -> bool:
        """Write what came for a piece; False once nothing more of it is wanted."""
        wanted = memoryview(chunk)[: max(0, piece.end - piece.at)]
        if not wanted or self._over.is_set():
            return False
        put(handle, wanted, piece.at)
        with self._changed:
            self._hear()
            if not piece.transfer.advance(piece, len(wanted), time.monotonic()):
                return False
            self.num_bytes += len(wanted)
            return piece.at < piece.end

    def _begin_anew(self, old: Transfer, cause: Exception) -> None:
        """The object has other bytes than were promised, or than before: forget what came, unless it was tried often."""
        key = old.wanted.key
        with self._changed:
            if not self._close(old):
                return
            self._tries[key] += 1
            if self._tries[key] > MIN_TRIES:
                raise cause if isinstance(cause, DigestError) else DigestError(f"{cause}: it keeps changing") from cause
            old.forget()  # a thread may still hold its file
            fresh = Transfer(old.wanted, [(0, old.wanted.num_bytes)] if old.wanted.num_bytes else [])
            self._transfers[self._transfers.index(old)] = fresh
            self._changed.notify_all()

    def _give_up(self, transfer: Transfer, error: BucketError) -> None:
        """An object cannot be had."""
        with self._changed:
            if transfer in self._transfers:
                self._failed.setdefault(transfer.wanted.key, error)
                self._close(transfer)
                transfer.missing.clear()
                transfer.forget()
            self._changed.notify_all()

    def _close(self, transfer: Transfer) -> bool:
        """Take everything away from the threads that work on a file, and close it; False if that was done before."""
        while transfer in self._busy:
            self._changed.wait()
        if transfer.dead:
            return False
        for piece in transfer.pieces:
            transfer.note(piece)
            piece.end = piece.at
        transfer.close()
        return True

    def _hash_on(self, transfer: Transfer) -> None:
        """Hash what is here from the start on, if no other thread does, so that little is left to hash at the end."""
        with self._changed:
            if transfer in self._busy or transfer.dead or transfer.finishing or self._over.is_set():
                return
            self._busy.add(transfer)
            prefix = transfer.whole_prefix
        try:
            transfer.hash_on(prefix)
        finally:
            self._release(transfer)

    def _finish(self, transfer: Transfer) -> None:
        try:
            right = transfer.finish()
        finally:
            self._release(transfer)
        if not right:
            wanted = transfer.wanted
            message = f"{self._store.name}/{wanted.key} does not have its sha256 {wanted.sha256[:16]}.."
            self._begin_anew(transfer, DigestError(message, hint="the object is damaged in the bucket, or a proxy changes it"))
            return
        with self._changed:
            transfer.done = True
            transfer.close()
            self._changed.notify_all()

    def _release(self, transfer: Transfer) -> None:
        with self._changed:
            self._busy.discard(transfer)
            self._changed.notify_all()


def _check_room(transfers: Sequence[Transfer]) -> None:
    """Raises DiskFullError if what is still to come does not fit on the disk."""
    num_bytes = sum(transfer.num_missing for transfer in transfers)
    if num_bytes:
        folder = transfers[0].wanted.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free + sum(_reserved(transfer) for transfer in transfers)
        if free < num_bytes:
            raise DiskFullError(f"{folder}: {num_bytes} bytes are to come, {free} are free", hint="make room: what was downloaded is kept")


def _reserved(transfer: Transfer) -> int:
    """Bytes of the disk that a part holds already for what is missing of it."""
    part = part_of(transfer.wanted.path)
    blocks = 512 * part.stat().st_blocks if part.is_file() else 0
    return max(0, blocks - (transfer.wanted.num_bytes - transfer.num_missing))
