"""One trainer a state folder: a lock that the operating system lets go of however the process ends."""

import fcntl
from pathlib import Path
from types import TracebackType
from typing import IO

from stoa.contracts.errors import WorkerLockedError


class StateLock:
    """Held while inside `with`. Raises WorkerLockedError if another process holds it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "StateLock":
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise WorkerLockedError(
                f"{self._path.parent}: another trainer uses this state folder", hint="end it, or give this one another --state"
            ) from error
        self._file = file
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
