"""Starts the processes of a warm start, alone, on this machine or over wired Macs, and tells how they get on.

What is taught and how is `worker_mac.warmstart`'s. The processes speak in JSON lines; the words a person reads are made here.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cli import say
from cli.say import Exit
from stoa.config.load import child_environment
from stoa.contracts.errors import UsageError
from worker_mac.cluster.hosts import FOLDER, PORT, PYTHON, hostfile, read_hosts
from worker_mac.cluster.install import install_everywhere
from worker_mac.cluster.launch import PORT_STEP
from worker_mac.cluster.probe import SshProbe, addresses_of

TRIES: Final = 3
"""Starts with other ports before giving up."""
GRACE_SECONDS: Final = 60.0
"""For the present step and its saved state, after a stop was asked for."""
_LOST_SECONDS: Final = 5.0
_MODULE: Final = ("-m", "worker_mac.warmstart")

Event = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Hosts:
    """Wired Macs: MLX's hostfile, how many there are, and the Python and folder that each has in its home."""

    file: Path
    num_ranks: int
    python: str = PYTHON
    folder: str = FOLDER

    @classmethod
    def find(cls, hosts_file: Path, place: Path) -> "Hosts":
        """Install this program on every Mac of hosts.json, look up the addresses on the wire and write the hostfile into `place`.

        Raises WiredError for a file that is no such list, or a Mac that cannot be reached.
        """
        hosts, probe = read_hosts(hosts_file), SshProbe()
        install_everywhere(probe, hosts, say.talk)
        file = place / "ring.json"
        file.write_text(hostfile(hosts, addresses_of(probe, hosts)), encoding="utf-8")
        return cls(file, len(hosts))

    def command(self, arguments: Sequence[str], port: int) -> list[str]:
        """The exact line that starts every rank, from the home folder."""
        launcher = str(Path(sys.executable).with_name("mlx.launch"))
        line = [launcher, "--hostfile", str(self.file), "--backend", "ring", "--starting-port", str(port)]
        return [*line, "--cwd", self.folder, "--python", self.python, "--", *arguments]


@dataclass(slots=True)
class Outcome:
    """What the events said in the end."""

    fault: Event | None = None
    memory: Event = field(default_factory=dict)
    last_step: Event = field(default_factory=dict)
    exported: Event | None = None
    codes: tuple[int, ...] = ()

    @property
    def unmet(self) -> bool:
        """Whether the processes never came together, which other ports may mend."""
        return self.fault is not None and bool(self.fault.get("unmet"))

    @property
    def exit(self) -> Exit:
        """What the command ends with. mlx.launch itself ends with 0 whatever became of the ranks."""
        if self.exported is not None:
            return Exit.DONE
        if self.fault is not None:
            return Exit.WRONG_USE if self.fault.get("usage") else Exit.FAILED
        return Exit.STOPPED if Exit.STOPPED in self.codes else Exit.FAILED


class Processes:
    """The ranks of one start, and their lines as they come. Ends all of them when the block is left."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], cwd: Path | None = None) -> None:
        self._commands, self._environments, self._cwd = commands, environments, cwd
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for command, environment in zip(self._commands, self._environments, strict=True):
            # mlx.launch reads its standard input in a loop, so it gets a pipe that says nothing, never a closed one.
            process = subprocess.Popen(
                command,
                cwd=self._cwd,
                env=child_environment(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._processes.append(process)
            threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop(GRACE_SECONDS)

    def events(self) -> Iterator[Event]:
        """What the ranks say, until all are gone; the others are ended soon after one has failed."""
        open_pipes, failed_at = len(self._processes), float("inf")
        while open_pipes:
            if any(process.poll() not in (None, 0) for process in self._processes):
                failed_at = min(failed_at, time.monotonic())
            if time.monotonic() - failed_at > _LOST_SECONDS:
                self.stop(_LOST_SECONDS)
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.5)
                if line is None:
                    open_pipes -= 1
                elif (event := _event(line)) is not None:
                    yield event

    def stop(self, grace_seconds: float) -> None:
        """Ask every rank to end after its step, and end those that do not."""
        going = [process for process in self._processes if process.poll() is None]
        for process in going:
            with contextlib.suppress(ProcessLookupError):  # mlx.launch's ranks on this machine are of its group
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        for process in going:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @property
    def codes(self) -> tuple[int, ...]:
        """How the ranks that are gone have ended."""
        return tuple(code for process in self._processes if (code := process.poll()) is not None)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank, or the launcher's alone."""
        return tuple(process.pid for process in self._processes)

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put(line)
        self._lines.put(None)


def run(settings_json: str, num_ranks: int, hosts: Hosts | None, *, resume: bool, port: int = PORT) -> Outcome:
    """Start the ranks and follow them; other ports are tried where the ranks could not meet."""
    arguments = [*_MODULE, settings_json, *(["--resume"] if resume else [])]
    outcome = Outcome()
    for attempt in range(TRIES):
        outcome = Outcome()
        with contextlib.ExitStack() as stack:
            if hosts is not None:
                line = hosts.command(arguments, port + attempt * PORT_STEP)
                say.talk("starting: " + subprocess.list2cmdline([*line[: len(line) - len(arguments)], *_MODULE, "SETTINGS"]))
                commands, environments = [line], [dict[str, str]()]
            else:
                environments = stack.enter_context(ring(num_ranks))
                commands = [[sys.executable, *arguments]] * num_ranks
            processes = stack.enter_context(Processes(commands, environments, Path.home() if hosts is not None else None))
            view = stack.enter_context(View())
            try:
                for event in processes.events():
                    _take(outcome, event)
                    view.show(event)
            except KeyboardInterrupt:
                view.say("stopping after this step")
                processes.stop(GRACE_SECONDS)
                for event in processes.events():
                    _take(outcome, event)
            outcome.codes = processes.codes
        if not outcome.unmet:
            break
    return outcome


class View:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console) if self._console.is_terminal else None
        self._task: TaskID | None = None
        self._num_steps = 0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """One line that stays."""
        self._console.print(line, markup=False, soft_wrap=True)

    def show(self, event: Event) -> None:
        """Tell one event."""
        kind = event["event"]
        if kind == "memory":
            self.say(memory_line(event))
        elif kind == "started":
            self._start(event)
        elif kind == "step":
            self._step(event)
        elif kind == "exported":
            far = event["max_logit_difference"]
            compared = "" if far is None else f", reloaded: logits differ by at most {far:.2g}"
            self.say(f"{event['folder']}: a hub checkpoint of {say.bytes_text(_number(event, 'num_bytes'))}{compared}")

    def _start(self, event: Event) -> None:
        first, self._num_steps = int(_number(event, "first_step")), int(_number(event, "num_steps"))
        shares = cast(Sequence[float], event["shares"])
        if len(shares) > 1:
            self.say("rows by speed: " + ", ".join(f"rank {rank} {share / sum(shares):.0%}" for rank, share in enumerate(shares)))
        if first:
            self.say(f"going on after step {first}")
        if self._bar is not None:
            self._task = self._bar.add_task("warm start", total=self._num_steps, completed=first, facts="")

    def _step(self, event: Event) -> None:
        done = int(_number(event, "step")) + 1
        facts = f"loss {_number(event, 'loss'):.4f}  {_number(event, 'num_tokens') / _number(event, 'seconds'):,.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, facts=facts)
        elif done % max(1, self._num_steps // 20) == 0 or done == self._num_steps:
            self.say(f"step {done}/{self._num_steps}  {facts}")


def memory_line(event: Event) -> str:
    """What it takes, in a sentence."""

    def size(name: str) -> str:
        return say.bytes_text(_number(event, name))

    twice = ", layers computed twice" if event["grad_checkpoint"] else ""
    return (
        f"memory: {size('planned_bytes')} of {size('limit_bytes')} (weights {size('weights_bytes')}, "
        f"{_number(event, 'num_trained'):,.0f} trained {size('trained_bytes')}), "
        f"{event['rows_at_once']} rows of up to {event['longest_tokens']} tokens at once{twice}"
    )


def parse_shares(text: str) -> tuple[float, ...]:
    """`2,1` to numbers. Raises UsageError."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"--shares {text}: not numbers", hint="one for each process, as in --shares 2,1") from None


@contextlib.contextmanager
def ring(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """What each rank on this machine is told of the ring: nothing where there is but one."""
    if num_ranks == 1:
        yield [{}]
        return
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(num_ranks)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ring = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ring.json"
        file.write_text(json.dumps(ring), encoding="utf-8")
        yield [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)} for rank in range(num_ranks)]


def _take(outcome: Outcome, event: Event) -> None:
    kind = event["event"]
    if kind == "fault":
        # A rank that lost another says so too; the first to speak is the one it began with, unless a cause follows.
        if outcome.fault is None or (event.get("usage") and not outcome.fault.get("usage")):
            outcome.fault = event
    elif kind == "memory":
        outcome.memory = event
    elif kind == "step":
        outcome.last_step = event
    elif kind == "exported":
        outcome.exported = event


def _event(line: str) -> Event | None:
    """A line of a rank as an event; what else a launcher or a library prints goes on to standard error."""
    try:
        found = json.loads(line)
        if isinstance(found, dict) and "event" in found:
            return cast(Event, found)
    except ValueError:
        pass
    if line.strip():
        print(line.rstrip(), file=sys.stderr)
    return None


def _number(event: Event, name: str) -> float:
    return float(str(event[name]))
