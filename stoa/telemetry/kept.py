"""The newest events of a process in a file of bounded size, beside what it says on stderr: for whoever helps, by `stoa bundle`.

One JSON object a line. A file that has grown to its half of the bound becomes `NAME.before.log`, in place of the one before it.
Events that cannot be written (the disk is full, the folder is gone) are let go: a log must never stop what it tells of.
"""

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MOST_BYTES: Final = 8 << 20
"""Of both files together."""


class KeptEvents:
    """An open file of events. Any thread."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._half = path, most_bytes // 2
        self._lock = threading.Lock()
        self._number = -1
        self._size = 0
        with contextlib.suppress(OSError):
            self._open()

    def write(self, event: Mapping[str, object]) -> None:
        """Add an event."""
        line = (json.dumps(event, default=repr) + "\n").encode()
        with self._lock, contextlib.suppress(OSError):
            if self._number >= 0 and self._size + len(line) > self._half:
                self._shut()
                self._path.replace(self._path.with_suffix(".before.log"))
            if self._number < 0:
                self._open()
            self._size += os.write(self._number, line)

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            self._shut()

    def _open(self) -> None:
        self._number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._number).st_size

    def _shut(self) -> None:
        if self._number >= 0:
            os.close(self._number)
        self._number = -1
