"""The processes a command starts: each in its own group with its own log, all ended when the command ends.

A guard process ends them if the command is killed (see `guard.py`); a file in the command's folder names them, by
process id and start time, for the next start. What the processes are is `services.py`'s and the demo's to know.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import psutil
import structlog

from cli import guard
from stoa.contracts.errors import FormatError, ServiceUnavailableError, UsageError

_log = structlog.get_logger(__name__)

FILE_NAME: Final = "processes.json"
GRACE_SECONDS: Final = 6.0
_SAME_START_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, told from a later one with the same number by when it began."""

    name: str
    pid: int
    started_at: float

    @property
    def alive(self) -> bool:
        """True while this very process runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at) <= _SAME_START_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True, slots=True)
class Child:
    """One process that was started here."""

    identity: Identity
    process: subprocess.Popen[bytes]
    log: Path
    command: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: Path | None

    @property
    def name(self) -> str:
        """What people call it: `temporal`, `trainer`, `mac-1`."""
        return self.identity.name

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self.process.poll()

    def last_lines(self, count: int = 12) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log.read_text("utf-8", errors="replace").splitlines()[-count:])
        except FileNotFoundError:
            return ""


class Household:
    """Starts processes and ends every one of them, in reverse order, when the block is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._guard = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, start_new_session=True)
        self._write_file()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with ignored_signals():
            self.stop(reversed(self._children))
            (self._folder / FILE_NAME).unlink(missing_ok=True)
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()
                self._guard.wait(guard.GRACE_SECONDS * 2 + 1)

    @property
    def children(self) -> tuple[Child, ...]:
        """All processes that were started and not stopped."""
        return tuple(self._children)

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None) -> Child:
        """Start a process whose output is appended to `log`. Raises ServiceUnavailableError if it cannot be started."""
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
        except OSError as error:
            raise ServiceUnavailableError(f"{name}: `{command[0]}` cannot be started ({error})") from None
        self._tell_guard(f"+{process.pid}")
        child = Child(Identity(name, process.pid, _started_at(process.pid)), process, log, tuple(command), dict(env), cwd)
        self._children.append(child)
        self._write_file()
        return child

    def again(self, child: Child) -> Child:
        """End what is left of a process and start it once more, with the same command, environment and log."""
        self.stop([child])
        return self.start(child.name, child.command, env=child.env, log=child.log, cwd=child.cwd)

    def stop(self, children: Iterable[Child], grace_seconds: float = GRACE_SECONDS) -> None:
        """SIGTERM to the groups of `children` together, SIGKILL to what is left after the grace; wait for all."""
        going = [child for child in children if child in self._children]
        for child in going:
            _signal_group(child.identity.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        for child in going:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        while any(guard.alive(child.identity.pid) for child in going) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in going:
            if guard.alive(child.identity.pid):
                _log.info("process_killed", name=child.name, grace_seconds=grace_seconds)
            _signal_group(child.identity.pid, signal.SIGKILL)
            child.process.wait()
            self._children.remove(child)
            self._tell_guard(f"-{child.identity.pid}")
        with contextlib.suppress(OSError):  # a full disk must not keep anything running
            self._write_file()

    def _tell_guard(self, line: str) -> None:
        pipe: IO[bytes] | None = self._guard.stdin if self._guard is not None else None
        if pipe is None:
            raise RuntimeError("a household starts processes inside its `with` block only")
        with contextlib.suppress(BrokenPipeError):
            pipe.write(f"{line}\n".encode())
            pipe.flush()

    def _write_file(self) -> None:
        own = Identity("owner", os.getpid(), _started_at(os.getpid()))
        text = json.dumps([asdict(own), *(asdict(child.identity) for child in self._children)], indent=1)
        new = self._folder / f"{FILE_NAME}.new"
        new.write_text(text, "utf-8")
        new.replace(self._folder / FILE_NAME)


def listed_in(path: Path) -> tuple[Identity, list[Identity]]:
    """The command that wrote the file, and what it started. Raises FormatError."""
    try:
        owner, *children = [Identity(**entry) for entry in json.loads(path.read_text("utf-8"))]
    except (ValueError, TypeError) as error:
        raise FormatError(f"{path}: not a list of processes ({error})", hint="end them by hand and remove the file") from None
    return owner, children


def end_leftovers(folder: Path) -> tuple[str, ...]:
    """End what a command that died left running in `folder`; returns their names.

    Raises UsageError if the command that owns the folder still runs.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return ()
    owner, children = listed_in(path)
    if owner.alive:
        raise UsageError(f"{folder}: in use by process {owner.pid}", hint="stop it, or choose another folder")
    left = [child for child in children if child.alive]
    guard.end({child.pid for child in left}, GRACE_SECONDS)
    path.unlink()
    return tuple(child.name for child in left)


@contextlib.contextmanager
def ignored_signals() -> Iterator[None]:
    """Within the block a second Ctrl-C or SIGTERM does not interrupt the clean-up."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _started_at(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return time.time()
