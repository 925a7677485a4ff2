"""One object on its way into a `.part` file: which bytes are here, which are on their way, and the journal that says so.

No request is made and no thread started here: `download.py` does both, and holds its lock around every method but
`hash_on` and `finish`. Bytes are `put` into the file outside that lock: a piece that was taken over meanwhile gets the same
bytes twice. A kill at any moment loses what came after the last line of the journal; a power cut may leave
lines for bytes that never reached the disk, which the sha256 finds.

The journal, beside the part, is text: a JSON line of key, size, sha256 and etag, then a line `start end` for every run
of bytes that was written. A line that is cut off, or holds nonsense, claims nothing.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stoa.contracts.errors import DiskFullError

NOTE_BYTES: Final = 1 << 20
"""A kill loses at most this much of a range."""
_HASH_BYTES: Final = 4 << 20
_LONGEST_LINE: Final = 64
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object and the file it shall be."""

    key: str
    path: Path
    num_bytes: int
    sha256: str


@dataclass(slots=True, eq=False)
class Piece:
    """Bytes [at, end) that one thread is fetching. Whoever takes the rest away from it sets `end` to `at`."""

    transfer: "Transfer"
    at: int
    end: int
    noted: int
    """Up to here the journal knows."""
    heard_at: float
    """When its last byte came, or it was begun or taken over (monotonic)."""
    fruitful_at: float
    """When a try last brought something, whichever thread made it."""
    num_tries: int = 0
    """Since then."""
    num_taken: int = 0
    """Times it was taken over."""


@dataclass(slots=True, eq=False)
class Transfer:
    """The state of one file."""

    wanted: Wanted
    missing: list[tuple[int, int]]
    """Byte ranges nobody fetches yet, in order."""
    etag: str = ""
    pieces: list[Piece] = field(default_factory=list)
    finishing: bool = False
    done: bool = False
    dead: bool = False
    """Begun anew, or given up: nothing may be written any more."""
    _file: int = -1
    _journal: int = -1
    _hash: Any = field(default_factory=hashlib.sha256)
    _hashed: int = 0

    @classmethod
    def resume(cls, wanted: Wanted) -> "Transfer":
        """What an earlier process left, or nothing."""
        transfer = cls(wanted, [(0, wanted.num_bytes)] if wanted.num_bytes else [])
        if part_of(wanted.path).is_file():
            transfer.etag, held = _read_journal(wanted)
            for start, end in held:
                transfer.missing = list(_without(transfer.missing, start, end))
        return transfer

    @property
    def num_missing(self) -> int:
        """Bytes nobody fetches yet."""
        return sum(end - start for start, end in self.missing)

    @property
    def kept_bytes(self) -> int:
        """Bytes on disk as a next process would find them: what the journal does not know yet does not count."""
        if self.done or self.dead:
            return self.wanted.num_bytes if self.done else 0
        return self.wanted.num_bytes - self.num_missing - sum(piece.end - piece.noted for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """True if every byte was written, and nobody checks them yet."""
        return not (self.missing or self.pieces or self.finishing or self.done or self.dead)

    def open(self) -> None:
        """Make room for the whole file. Raises DiskFullError; what was there stays."""
        if self._file >= 0:
            return
        part = part_of(self.wanted.path)
        part.parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(part):
            self._file = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
            if hasattr(os, "posix_fallocate") and self.wanted.num_bytes:
                os.posix_fallocate(self._file, 0, self.wanted.num_bytes)
            os.ftruncate(self._file, self.wanted.num_bytes)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if self.etag else os.O_TRUNC)
            self._journal = os.open(journal_of(self.wanted.path), flags, 0o644)
            if self.etag:
                os.write(self._journal, b"\n")  # an earlier process may have died inside a line

    def agree(self, etag: str) -> bool:
        """False if the object that answers is not the one the bytes here are of. The first answer fixes which it is."""
        if not self.etag:
            self.etag = etag
            os.write(self._journal, (json.dumps([*_names(self.wanted), etag]) + "\n").encode("ascii"))
        return self.etag == etag

    def take(self, num_bytes: int, now: float) -> Piece:
        """The next bytes nobody fetches, at most `num_bytes`."""
        start, end = self.missing[0]
        cut = min(end, start + num_bytes)
        self.missing[0:1] = [(cut, end)] if cut < end else []
        piece = Piece(self, start, cut, start, now, now)
        self.pieces.append(piece)
        return piece

    def take_over(self, piece: Piece, now: float) -> Piece:
        """The rest of a piece whose thread hears nothing."""
        rest = Piece(self, piece.at, piece.end, piece.at, now, piece.fruitful_at, piece.num_tries, piece.num_taken + 1)
        piece.end = piece.at
        self.leave(piece)
        self.pieces.append(rest)
        return rest

    def handle(self) -> int:
        """A handle of the file for one thread, which closes it; it outlives `close`."""
        return os.dup(self._file)

    def advance(self, piece: Piece, num_bytes: int, now: float) -> bool:
        """So many bytes of a piece were `put`. False if it was taken away meanwhile: they do not count."""
        if self.dead or piece.at >= piece.end:
            return False
        piece.at += num_bytes
        piece.heard_at = now
        if piece.at - piece.noted >= NOTE_BYTES:
            self.note(piece)
        return True

    def note(self, piece: Piece) -> None:
        """Tell the journal how far a piece has come."""
        if not self.dead and piece.noted < piece.at:
            with disk_errors(journal_of(self.wanted.path)):
                os.write(self._journal, f"{piece.noted} {piece.at}\n".encode("ascii"))
            piece.noted = piece.at

    def leave(self, piece: Piece) -> None:
        """A piece has ended, wherever it has come to; what is left of it is missing again."""
        if piece in self.pieces:
            self.pieces.remove(piece)
            self.note(piece)
            if piece.at < piece.end:
                self.missing = sorted([*self.missing, (piece.at, piece.end)])

    @property
    def whole_prefix(self) -> int:
        """Bytes from the start on that are all here."""
        return min([self.wanted.num_bytes, *(start for start, _ in self.missing), *(piece.at for piece in self.pieces)])

    def hash_on(self, up_to: int) -> None:
        """Hash bytes of the file up to here. One thread at a time."""
        while self._hashed < up_to:
            data = os.pread(self._file, min(_HASH_BYTES, up_to - self._hashed), self._hashed)
            self._hash.update(data)
            self._hashed += len(data)

    def finish(self) -> bool:
        """Check the whole file and give it its name; False, and nothing is left, if it has not its sha256."""
        self.hash_on(self.wanted.num_bytes)
        right = self._hash.hexdigest() == self.wanted.sha256
        part = part_of(self.wanted.path)
        if right:
            with disk_errors(part):
                os.fsync(self._file)
                part.replace(self.wanted.path)
                _sync_folder(part.parent)
        self.forget()
        return right

    def close(self) -> None:
        """Let go of the files; what is in them stays, if anything is."""
        self.dead = True
        for file in (self._file, self._journal):
            if file >= 0:
                os.close(file)
        self._file = self._journal = -1
        if not self.etag:
            self.forget()

    def forget(self) -> None:
        """Remove the part and its journal."""
        part_of(self.wanted.path).unlink(missing_ok=True)
        journal_of(self.wanted.path).unlink(missing_ok=True)


def put(handle: int, data: bytes | memoryview, at: int) -> None:
    """Write bytes of an object to where they belong in its file. Raises OSError."""
    left = memoryview(data)
    while left:
        written = os.pwrite(handle, left, at)
        at += written
        left = left[written:]


def part_of(path: Path) -> Path:
    """The file that becomes `path`."""
    return path.with_name(path.name + ".part")


def journal_of(path: Path) -> Path:
    """The journal of the part of `path`."""
    return path.with_name(path.name + ".part.journal")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns the error of a full disk into ours."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError(f"{path}: the disk is full", hint="make room: what was downloaded is kept") from error


def _names(wanted: Wanted) -> list[object]:
    return [wanted.key, wanted.num_bytes, wanted.sha256]


def _read_journal(wanted: Wanted) -> tuple[str, list[tuple[int, int]]]:
    """Etag and byte ranges that are in the part; "" and none if it is of another object, or there is none."""
    try:
        head, *lines = journal_of(wanted.path).read_text(encoding="ascii").splitlines()
        *names, etag = json.loads(head)
    except (OSError, ValueError, TypeError, RecursionError):
        return "", []
    if names != _names(wanted) or not isinstance(etag, str) or not etag:
        return "", []
    held: list[tuple[int, int]] = []
    for line in lines:
        start, _, end = line.partition(" ")
        if len(line) < _LONGEST_LINE and start.isdecimal() and end.isdecimal() and int(start) < int(end) <= wanted.num_bytes:
            held.append((int(start), int(end)))
    return etag, held


def _without(ranges: list[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges less [start, end)."""
    for low, high in ranges:
        for one in ((low, min(high, start)), (max(low, end), high)):
            if one[0] < one[1]:
                yield one


def _sync_folder(folder: Path) -> None:
    """Put a rename on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
