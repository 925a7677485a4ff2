"""The worker as a LaunchAgent of the user who is logged in: install, remove, status; parked after quick failures.

launchd starts it at log-in and again after a crash only, never after a clean end. What the worker does is `worker.py`'s.
`Attempts` is the worker's own record of its starts: three that ended soon after park it, with the reason, until a person
looks.
"""

import json
import os
import plistlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import structlog

from stoa.config.load import PROJECT_ROOT
from stoa.contracts.errors import StoaError, UsageError
from worker_mac.identity import lock_holder, locked_error
from worker_mac.panics import PanicLog

_log = structlog.get_logger(__name__)

LABEL: Final = "run.stoa.worker"
THROTTLE_SECONDS: Final = 30
"""launchd waits at least this long between two starts."""
EXIT_SECONDS: Final = 40
"""From SIGTERM to SIGKILL: a worker ships what is finished first."""
QUICK_SECONDS: Final = 120.0
"""A start that fails within this time is a quick failure."""
MAX_QUICK: Final = 3
KILLED: Final = "it was killed, or crashed without a word: its log and macOS's crash reports may say more"
LAUNCHCTL_SECONDS: Final = 30.0
_PID = re.compile(r"^\s*pid = (\d+)$", re.MULTILINE)
_LAST_EXIT = re.compile(r"^\s*last exit code = (\S.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Said:
    """What launchctl answered."""

    code: int
    text: str


Launchctl = Callable[[Sequence[str]], Said]


@dataclass(frozen=True, slots=True)
class Status:
    """Of the agent. `pid`: 0 while it does not run. `last_exit`: as launchd says it."""

    installed: bool
    loaded: bool
    pid: int
    last_exit: str
    parked: str
    """Why it has parked itself; "" if it has not."""


def plist(command: Sequence[str], log: Path) -> bytes:
    """The agent's property list: `command` is run at log-in, and again after a crash."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(PROJECT_ROOT),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_SECONDS,
            "ExitTimeOut": EXIT_SECONDS,
            # Background would be slowed by the system beyond what the owner asked for: the worker is polite by itself.
            "ProcessType": "Standard",
            "StandardErrorPath": str(log),
            "StandardOutPath": str(log),
        }
    )


def worker_command(config: Path | None, state: Path, *, at_login: bool = False) -> tuple[str, ...]:
    """What starts the worker, with this Python; no key and no secret stands in it."""
    given = () if config is None else (str(config.resolve()),)
    flags = ("--parks", "--kept") if at_login else ()
    return (sys.executable, "-m", "worker_mac.worker", *given, "--state", str(state.resolve()), *flags)


class Service:
    """The agent of one user. `agents` is ~/Library/LaunchAgents, `state` the worker's state folder."""

    def __init__(self, agents: Path, state: Path, launchctl: Launchctl | None = None, *, user_id: int | None = None) -> None:
        self._path, self._state = agents / f"{LABEL}.plist", state
        self._launchctl = launchctl or run_launchctl
        self._domain = f"gui/{os.getuid() if user_id is None else user_id}"

    def install(self, config: Path | None = None, *, command: Sequence[str] = ()) -> None:
        """Write the agent, load it and start it; one that is there is replaced, one that was parked is free again.

        command: what is started in place of this Mac's own worker: that of a wired set.
        Raises WorkerLockedError if a worker that is not the agent's uses the state folder, StoaError if launchd refuses.
        """
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Before the agent is ended: one that is to be refused leaves everything as it is.
        pid, holder = self.status().pid, lock_holder(self._state)
        if holder is not None and (not pid or not _is_of(holder, pid)):
            raise locked_error(self._state, holder)
        self._launchctl(("bootout", f"{self._domain}/{LABEL}"))
        self._wait_for_the_folder()
        self._forget_failures()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        command = command or worker_command(config, self._state, at_login=True)
        self._path.write_bytes(plist(command, self._state / "worker.log"))
        said = self._launchctl(("bootstrap", self._domain, str(self._path)))
        if said.code:
            self._path.unlink()
            raise StoaError(f"launchd did not take the agent: {said.text.strip()}", hint="log in at the Mac's own screen and try again")

    def remove(self) -> bool:
        """Stop the agent and forget it; False if there was none."""
        said = self._launchctl(("bootout", f"{self._domain}/{LABEL}"))
        there = self._path.is_file()
        self._path.unlink(missing_ok=True)
        self._forget_failures()
        return there or said.code == 0

    def _wait_for_the_folder(self) -> None:
        """Until the agent's worker, which was just told to end, has let the folder go."""
        deadline = time.monotonic() + EXIT_SECONDS
        while (holder := lock_holder(self._state)) is not None:
            if time.monotonic() > deadline or not self._path.is_file():
                raise locked_error(self._state, holder)
            time.sleep(0.2)

    def _forget_failures(self) -> None:
        """A person has looked."""
        Attempts(self._state).forget()
        PanicLog(self._state).forget()

    def status(self) -> Status:
        """What launchd and the worker's own record say."""
        said = self._launchctl(("print", f"{self._domain}/{LABEL}"))
        pid, last = _PID.search(said.text), _LAST_EXIT.search(said.text)
        return Status(
            installed=self._path.is_file(),
            loaded=said.code == 0,
            pid=int(pid[1]) if pid else 0,
            last_exit=last[1] if last else "",
            parked=PanicLog(self._state).look().stays_off or Attempts(self._state).parked(),
        )


class Attempts:
    """Failures in a row soon after a start, in one small file of the state folder; a second one is there while a start is young."""

    def __init__(self, state: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._mark, self._clock = state / "attempts.json", state / "starting", clock
        self._began = clock()

    def begin(self) -> str:
        """Note a start, and the one before if it was killed before it was told to `forget`; returns why this one is not to go on, or ""."""
        if self._mark.exists():
            self._note([*self._read(), KILLED])
        if not (parked := self.parked()):
            self._write(self._mark, "")
        return parked

    def parked(self) -> str:
        """Why no further start is tried; "" while one may be."""
        failures = self._read()
        return f"{len(failures)} starts in a row failed soon: {failures[-1]}" if len(failures) >= MAX_QUICK else ""

    def failed(self, reason: str) -> str:
        """Note that this start failed; returns why the worker parks, or ""."""
        quick = self._clock() - self._began < QUICK_SECONDS
        self._note([*self._read(), reason] if quick else [])
        return self.parked()

    def forget(self) -> None:
        """Start counting anew."""
        self._mark.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _note(self, failures: Sequence[str]) -> None:
        self._mark.unlink(missing_ok=True)
        self._write(self._path, json.dumps(list(failures)[-MAX_QUICK:]))

    def _write(self, path: Path, text: str) -> None:
        part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_text(text, "utf-8")
            part.replace(path)
        except OSError as error:  # a full disk is told by the worker itself
            _log.warning("attempt_not_noted", path=str(path), reason=str(error))

    def _read(self) -> list[str]:
        try:
            found = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return []
        return [str(reason) for reason in found] if isinstance(found, list) else []


def _is_of(holder: int, pid: int) -> bool:
    """True if a folder's holder is the agent's process, or one that it started, as a wired set's; also where it is not known."""
    if holder in (0, pid):
        return True
    try:
        return any(one.pid == pid for one in psutil.Process(holder).parents())
    except psutil.Error:
        return True


def run_launchctl(arguments: Sequence[str]) -> Said:
    """Ask launchd. Raises UsageError where there is none."""
    try:
        done = subprocess.run(("launchctl", *arguments), capture_output=True, timeout=LAUNCHCTL_SECONDS, check=False)
    except FileNotFoundError:
        raise UsageError("there is no launchd here: starting at log-in is for macOS", hint="start the worker by hand") from None
    except subprocess.TimeoutExpired:
        raise StoaError(f"launchctl {arguments[0]} did not answer in {LAUNCHCTL_SECONDS:g} s", hint="try again") from None
    return Said(done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace"))
