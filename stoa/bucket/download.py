"""Brings one object of the bucket into a file: ranges in parallel, resumed where they broke, checked before it has its name.

A file under its final name is complete and had its sha256 when it was renamed; a `.part` file is worth nothing and is
begun anew by the next process. What is downloaded, and when it may go, is the caller's business.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from stoa.bucket.store import Store
from stoa.contracts.errors import DigestError

RANGE_BYTES: Final = 8 << 20
NUM_RANGES: Final = 8
"""Ranges in flight at a time."""
_HASH_BYTES: Final = 4 << 20
_MAX_TRIES: Final = 3


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(_HASH_BYTES), b""):
            digest.update(piece)
    return digest.hexdigest()


def fetch(store: Store, key: str, path: Path, *, num_bytes: int, sha256: str) -> int:
    """Make `path` the object under `key`; returns the bytes downloaded, 0 if a right file was there already.

    A file that is there with other bytes is replaced. Raises ObjectMissingError, ServiceUnavailableError, and
    DigestError if the bucket still has other bytes after three tries; no file is left under `path` then.
    """
    if path.is_file():
        if path.stat().st_size == num_bytes and file_sha256(path) == sha256:
            return 0
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    for tried in range(1, _MAX_TRIES + 1):
        _download(store, key, part, num_bytes)
        if file_sha256(part) == sha256:
            part.replace(path)
            return num_bytes * tried
        part.unlink()
    raise DigestError(
        f"{store.name}/{key} does not have its sha256 {sha256[:16]}..", hint="the object is damaged in the bucket, or a proxy changes it"
    )


def _download(store: Store, key: str, part: Path, num_bytes: int) -> None:
    """All bytes of `key` into `part`, on disk before this returns."""

    def one(start: int) -> None:
        data = store.get_range(key, start, min(RANGE_BYTES, num_bytes - start))
        os.pwrite(file.fileno(), data, start)

    starts = range(0, num_bytes, RANGE_BYTES)
    with part.open("wb") as file:
        file.truncate(num_bytes)
        if len(starts) == 1:
            one(0)
        else:
            with ThreadPoolExecutor(NUM_RANGES) as pool:
                list(pool.map(one, starts))
        os.fsync(file.fileno())
