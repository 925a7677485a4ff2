"""Reads a corpus as a stream: JSON lines `{"id": ..., "contents": ...}`, plain, gzip or zstd, from any byte on.

Offsets count bytes of the uncompressed text, so an interrupted reader goes on where it was. A line that is no document is
counted, never guessed at.
"""

import gzip
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from stoa.contracts.errors import ConfigError

MOST_LINE_BYTES = 4 * 1024 * 1024
_HEAD_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Document:
    """One abstract of a corpus; `contents` is its title and text."""

    id: str
    contents: str


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a corpus: its document (None if it is none) and the offset just after it."""

    document: Document | None
    end: int


def open_stream(path: Path) -> BinaryIO:
    """The uncompressed bytes of a corpus, by the end of its name. Raises ConfigError if there is no such file."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file", hint="give a .jsonl, .jsonl.gz or .jsonl.zst file")
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    if path.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return cast("BinaryIO", io.BufferedReader(cast("io.RawIOBase", reader), 1 << 20))
    return path.open("rb", buffering=1 << 20)


def read_lines(path: Path, start: int = 0) -> Iterator[Line]:
    """The lines of a corpus from byte `start` of its uncompressed text on, which must begin a line."""
    with open_stream(path) as stream:
        _skip(stream, start)
        end = start
        while line := stream.readline(MOST_LINE_BYTES):
            end += len(line)
            whole = line.endswith(b"\n") or len(line) < MOST_LINE_BYTES
            while not line.endswith(b"\n") and (rest := stream.readline(MOST_LINE_BYTES)):
                end += len(rest)
                line = rest
            if line.strip():
                yield Line(_document(line) if whole else None, end)


def fingerprint(path: Path) -> str:
    """What tells this corpus from another: its size and the sha256 of its first MiB."""
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
    return f"{path.stat().st_size}-{head[:32]}"


def _skip(stream: BinaryIO, start: int) -> None:
    if stream.seekable() and not isinstance(stream, gzip.GzipFile):
        stream.seek(start)
        return
    while start > 0:
        piece = stream.read(min(start, 1 << 20))
        if not piece:
            return
        start -= len(piece)


def _document(line: bytes) -> Document | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    entry = cast("dict[str, object]", fields)
    name, contents = entry.get("id"), entry.get("contents")
    if not isinstance(name, str | int) or not isinstance(contents, str) or not contents.strip():
        return None
    return Document(str(name), contents.encode("utf-8", "replace").decode("utf-8"))
