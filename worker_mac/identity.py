"""Who this worker is: one process a state folder, a host id that stays, a nonce drawn at each start; a run's key and last sweep.

Nothing here talks to a server. The folder belongs to one worker; a second one is refused by a lock that the system
drops when the process ends, however it ends.
"""

import fcntl
import os
import secrets
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Final

import structlog

from stoa.contracts.errors import ConfigError, WorkerLockedError
from stoa.contracts.ids import is_name

_log = structlog.get_logger(__name__)

LOCK_FILE: Final = "lock"
_TRIES: Final = 5
_TRY_SECONDS: Final = 0.02


class Identity:
    """Holds the lock on a state folder; `host` names this Mac in keys, queues and workflow ids, `nonce` this process."""

    def __init__(self, folder: Path, host: str = "") -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._lock = (folder / LOCK_FILE).open("a+", encoding="ascii")
        if not _take(self._lock):
            self._lock.close()
            raise locked_error(folder, lock_holder(folder))
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        self.host = self._host(host)
        self.nonce = secrets.token_hex(8)

    def close(self) -> None:
        """Let the folder go."""
        self._lock.close()

    def run_folder(self, run: str) -> Path:
        """Folder of one run, made if it is not there."""
        path = self.folder / "runs" / run
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _host(self, given: str) -> str:
        path = self.folder / "host"
        kept = path.read_text("ascii", "replace").strip() if path.is_file() else ""
        host = given or kept or f"mac-{secrets.token_hex(4)}"
        if not is_name(host):
            raise ConfigError(
                f"host name {host!r} is not lower case letters, digits and dashes (1 to 48)",
                hint="choose another --host" if given else f"remove {path}",
            )
        if host != kept:
            _write_whole(path, host)
        return host


def _take(lock: IO[str]) -> bool:
    """Lock a file for this process; somebody who only looks holds it for a moment."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(_TRY_SECONDS)
        else:
            return True
    return False


def lock_holder(folder: Path) -> int | None:
    """Process id of the worker that uses this state folder, 0 if it did not say; None if there is none."""
    try:
        with (folder / LOCK_FILE).open("r+", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                said = lock.read().strip()
                return int(said) if said.isdecimal() else 0
    except OSError:
        return None
    return None


def locked_error(folder: Path, holder: int | None) -> WorkerLockedError:
    """What to tell somebody who would start a second worker on a folder."""
    who = f"process {holder} is a worker that" if holder else "another worker"
    return WorkerLockedError(
        f"{folder}: {who} uses this state folder",
        hint="it works already; to end it: `stoa leave` if it starts at log-in, else Ctrl-C in its window. A second one needs --state DIR",
    )


def pinned_key(run_folder: Path) -> str | None:
    """The public key this Mac trusts for the run; None before its first visit, and where a loss of power left the file empty."""
    path = run_folder / "public_key"
    return path.read_text("ascii", "replace").strip("\0 \n") or None if path.is_file() else None


def pin_key(run_folder: Path, public_key: str) -> None:
    """Trust this key for the run from now on."""
    if pinned_key(run_folder) != public_key:
        _write_whole(run_folder / "public_key", public_key)


def note_sweep(run_folder: Path, sweep: int) -> int | None:
    """Note that this sweep begins; the last one that was begun before. None if none was, or nobody can tell any more."""
    path = run_folder / "last_sweep"
    try:
        last = int(path.read_text("ascii")) if path.is_file() else None
    except ValueError:  # a loss of power leaves anything
        last = None
    run_folder.mkdir(parents=True, exist_ok=True)
    try:
        _write_whole(path, str(max(sweep, last or 0)))
    except OSError as error:  # a full disk: what may be sent from memory and the spool still is
        _log.warning("sweep_not_noted", sweep=sweep, reason=str(error))
        path.unlink(missing_ok=True)
        return None
    return last


def _write_whole(path: Path, text: str) -> None:
    """All or nothing, however this process ends."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(f"{text}\n", "ascii")
    part.replace(path)


def project_version() -> str:
    """Version of the installed project; "source" where it runs from its folder."""
    try:
        return metadata.version("stoa")
    except metadata.PackageNotFoundError:
        return "source"
