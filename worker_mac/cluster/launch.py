"""Keeps a wired set going from its first Mac: looks addresses up, starts `mlx.launch`, starts all again when one is lost.

What is finished is on the first Mac's disk before it is sent, so a set that ends at any moment loses no group. Each start
is one of the whole: a collective cannot go on without one of its members.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import psutil
import structlog

from stoa.contracts.errors import RankLostError, WiredError
from worker_mac.cluster.ended import ANEW, read
from worker_mac.cluster.hosts import FOLDER, PORT, PYTHON, Launch, WiredHost, choose_backend, hostfile
from worker_mac.cluster.probe import Probe, addresses_of
from worker_mac.cluster.split import Split
from worker_mac.window import line_of

_log = structlog.get_logger(__name__)
LEAVE_SECONDS: Final = 20.0
"""For the first Mac's worker to take its leave, and `mlx.launch` to end the others."""
LONG_SECONDS: Final = 120.0
"""A set that lived so long had started well: counting its failures begins anew."""
MAX_STARTS: Final = 6
"""Starts in a row that fail soon, before the whole gives up."""
UNREACHED_SECONDS: Final = 15.0
"""From one look at Macs that cannot be reached to the next."""
PORT_STEP: Final = 100
_NICEST: Final = 19
_BIND: Final = re.compile(r"(Couldn't bind socket|cannot listen at \S+) \(error: \d+\)")
"""As MLX's ring and `rank.py` say it: 48 and 98 are ports in use; macOS says 49 of a port, too."""
_GONE: Final = re.compile(r"Node with rank \d+ (exited with code [1-9]|was killed)")
"""As `mlx.launch` says it, which then ends the other ranks, and waits for ever for one that is frozen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one start ended. `code`: of the worker, None if it did not say; `port_taken`: it could not listen."""

    code: int | None
    lost: str
    port_taken: bool
    seconds: float


class Supervisor:
    """One set. `worker`: arguments of the first Mac's worker; `folder`: of its state."""

    def __init__(
        self,
        hosts: Sequence[WiredHost],
        probe: Probe,
        worker: Sequence[str],
        folder: Path,
        *,
        available: Sequence[str],
        say: Callable[[str], None],
        home: Path | None = None,
        program: str = "",
        port: int = PORT,
        python: str = PYTHON,
        cwd: str = FOLDER,
        split: Split = "pipeline",
        patient: bool = False,
        memory_fraction: float | None = None,
        quiet: bool = False,
        exam: bool = False,
    ) -> None:
        """available: backends of this MLX. say: tells a person. program: of `mlx.launch`, that beside this Python unless given.

        patient: Macs that cannot be reached at the first start are waited for, as they are at every other.
        memory_fraction, quiet: for every Mac, as in `Launch`. exam: `worker` is the task of an examination, which ends with its set.
        """
        self._hosts, self._probe, self._worker, self._folder = tuple(hosts), probe, tuple(worker), folder
        self._backend, self._say = choose_backend(hosts, available), say
        self._home, self._port = home or Path.home(), port
        self._program = program or str(Path(sys.executable).with_name("mlx.launch"))
        self._python, self._cwd = python, cwd
        self._split: Split = split
        self._patient = patient
        self._memory_fraction, self._quiet, self._exam = memory_fraction, quiet, exam
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = threading.Event()
        self._said = ""

    def run(self) -> int:
        """Keep the set going until its run has stopped or we are asked to end; returns the worker's exit code.

        A Mac that cannot be reached is waited for, except at the first start. Raises WiredError then, and after several starts
        in a row that failed soon; RankLostError if the set of an examination is lost.
        """
        failures = 0
        while True:
            launch = self._await_plan()
            if launch is None:
                return 0
            self._patient = True
            outcome = self._once(launch)
            if self._asked.is_set():
                return 0
            if outcome.code is not None and not outcome.lost:
                return outcome.code
            if self._exam and not outcome.port_taken:
                raise RankLostError(f"the wired set is lost: {outcome.lost}", hint="see `stoa doctor --hosts`")
            if outcome.code == ANEW:
                _log.info("set_begins_anew")
                failures = 0
                continue
            _log.warning("set_ended", lost=outcome.lost, seconds=round(outcome.seconds, 1), port_taken=outcome.port_taken)
            failures = 1 if outcome.seconds > LONG_SECONDS else failures + 1
            if failures >= MAX_STARTS:
                raise WiredError(f"{failures} starts in a row failed soon: {outcome.lost}", hint="see `stoa doctor --hosts`")
            if outcome.port_taken:
                self._port += PORT_STEP
            if self._asked.wait(min(30.0, 0.5 * 2**failures)):
                return 0

    def end(self) -> None:
        """Ask the set to take its leave. For any thread."""
        self._asked.set()
        process = self._process
        if process is not None and process.stdin is not None:
            try:
                process.stdin.write(b"end\n")
                process.stdin.flush()
            except (OSError, ValueError):
                return

    def plan(self) -> Launch:
        """What `mlx.launch` would be told now. Looks every address up, and writes the hostfile."""
        addresses = addresses_of(self._probe, self._hosts)
        place = self._folder / "wired"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = place / "hosts.json"
        path.write_text(hostfile(self._hosts, addresses), "utf-8")
        return Launch(
            program=self._program,
            hostfile=path,
            hosts=self._hosts,
            control_address=addresses[0],
            ended=place / "ended.json",
            worker=self._worker,
            backend=self._backend,
            port=self._port,
            folder=self._cwd,
            python=self._python,
            starter=os.getpid(),
            starter_host=socket.gethostname(),
            split=self._split,
            memory_fraction=self._memory_fraction,
            quiet=self._quiet,
            exam=self._exam,
        )

    def _await_plan(self) -> Launch | None:
        """What to start; None once asked to end."""
        said = ""
        while not self._asked.is_set():
            try:
                return self.plan()
            except WiredError as error:
                if not self._patient:
                    raise
                if error.message != said:
                    said = error.message
                    _log.warning("set_waiting", reason=error.message, hint=error.hint)
            self._asked.wait(UNREACHED_SECONDS)
        return None

    def _once(self, launch: Launch) -> Outcome:
        began = time.monotonic()
        launch.ended.unlink(missing_ok=True)
        if launch.text() != self._said:
            self._said = launch.text()
            self._say(self._said)
        # A pipe that stays open: at the end of its own input `mlx.launch` would spin, and the ranks would end.
        try:
            process = subprocess.Popen(launch.line(), cwd=self._home, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise WiredError(f"{launch.program} cannot be started: {error.strerror}", hint="install the extra `mac` again") from error
        self._process = process
        seen: list[str] = []
        pump = threading.Thread(target=_pump, args=(process.stderr, seen), name="ranks", daemon=True)
        pump.start()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: what it said is told below
                process.stdin.write(secrets.token_hex(16).encode() + b"\n")
                process.stdin.flush()
        if self._asked.is_set():
            self.end()
        threading.Thread(target=calm, args=(process.pid, len(self._hosts)), name="calm", daemon=True).start()
        self._await(process, launch.ended, seen)
        pump.join(5.0)
        ended = read(launch.ended)
        code, lost = ended.code, ended.lost
        port_taken = any(_BIND.search(line) for line in seen)
        if code is None and not lost:
            lost = (
                "it could not listen on its port" if port_taken else f"it ended without a word: {seen[-1] if seen else 'nothing was said'}"
            )
        return Outcome(code, lost, port_taken, time.monotonic() - began)

    def _await(self, process: "subprocess.Popen[bytes]", ended: Path, seen: Sequence[str]) -> None:
        """Until `mlx.launch` has ended; what hangs once a Mac has ended, or once asked to end, is ended by force."""
        deadline: float | None = None
        while process.poll() is None:
            time.sleep(0.1)
            if deadline is None and (ended.is_file() or self._asked.is_set() or any(_GONE.search(line) for line in list(seen))):
                deadline = time.monotonic() + LEAVE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                break
        with contextlib.suppress(ProcessLookupError):  # ranks on this machine that outlived it, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def calm(pid: int, num_ranks: int) -> None:
    """Let `mlx.launch` have what processor time nobody else wants, once it has started its ranks: it never sleeps."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        while len(process.children()) < num_ranks:
            time.sleep(0.2)
        process.nice(_NICEST)


def _pump(source: IO[bytes] | None, seen: list[str]) -> None:
    """Pass on what the ranks say, and keep the last of it. On a terminal their events are lines for a person, as one Mac's are."""
    for line in source or ():
        text = line.decode("utf-8", "replace").strip()
        shown = shown_of(text) if sys.stderr.isatty() else text
        if shown:
            with contextlib.suppress(OSError):  # where nobody reads on, ranks must not stand still over what they say
                sys.stderr.write(f"{shown}\n")
                sys.stderr.flush()
        if text:
            seen.append(text)
            del seen[:-50]


def shown_of(text: str) -> str:
    """What a person reads of a line of a rank: the words for an event, "" for one that needs none; other lines as they are."""
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return line_of(event) if isinstance(event, dict) and "event" in event else text
