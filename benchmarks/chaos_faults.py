"""Which faults strike when, and how one is done: signals to processes, cuts of lines, a bucket that answers with errors.

The plan is drawn from a seed and pure; carrying it out touches real processes. Everything that dies is started again,
everything that is stopped goes on, everything that is cut is mended: a fault is over when `Strike.strike` returns.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from benchmarks.fleet_plant import Plant
from benchmarks.network_link import Line
from benchmarks.proxy import Seen, reply
from cli.processes import Child

SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
PARTS: Final = ("mac", "trainer", "control", "temporal", "s3")
KINDS: Final = (
    *(f"{part}_{act}" for part in PARTS for act in SIGNALS),
    *(f"{part}_cut_{how}" for part in ("mac", "trainer") for how in ("silent", "refused")),
    "s3_500",
    "s3_429",
)
SECONDS: Final = {"kill": (0.5, 5.0), "term": (0.5, 3.0), "stop": (3.0, 20.0), "silent": (3.0, 15.0), "refused": (3.0, 15.0)}
"""How long a fault lasts, by what it is: least and most. A killed part is down for so long before it is started again."""
ERROR_SECONDS: Final = (4.0, 12.0)
ERROR_SHARE: Final = 0.5
"""Share of requests that a failing bucket answers with an error."""
_END_SECONDS: Final = 45.0
_ERRORS: Final = {"s3_500": (500, "InternalError"), "s3_429": (429, "TooManyRequests")}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at` seconds after the first may strike, for about `seconds`. `draw` picks among parts of one kind."""

    at: float
    kind: str
    seconds: float
    draw: float

    @property
    def part(self) -> str:
        """What it strikes."""
        return self.kind.partition("_")[0]


def draw_faults(seed: int, num: int, seconds: float) -> list[Fault]:
    """`num` faults over `seconds`, each at a moment of its own stretch of them: every kind comes once before any comes again."""
    chance = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < num:
        kinds += chance.sample(KINDS, len(KINDS))
    moments = [(number + chance.random()) * seconds / num for number in range(num)]
    faults: list[Fault] = []
    for at, kind in zip(moments, kinds, strict=False):
        low, high = SECONDS.get(kind.rpartition("_")[2], ERROR_SECONDS)
        faults.append(Fault(at, kind, chance.uniform(low, high), chance.random()))
    return faults


class Strike:
    """Carries faults out on a plant. `parts` and `lines` are by name; names begin with what they are."""

    def __init__(self, plant: Plant, parts: dict[str, Child], lines: dict[str, Line], owner_pid: Callable[[], int | None]) -> None:
        """owner_pid: process that holds the run, as HEAD says."""
        self._plant, self._parts, self._lines, self._owner_pid = plant, parts, lines, owner_pid
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def pick(self, fault: Fault) -> str | None:
        """The part that a fault strikes, claimed; None while it is struck by another. For a Mac, one of them."""
        names = [name for name in self._parts if name.startswith(fault.part)] or ["trainer-1" if fault.part == "control" else fault.part]
        name = names[int(fault.draw * len(names))]
        if fault.part == "trainer" and fault.draw < 0.8:  # most of the time, whoever holds the run
            holder = self._owner_pid()
            name = next((one for one in names if self._parts[one].identity.pid == holder), name)
        return name if self.claim(name) else None

    def claim(self, name: str) -> bool:
        """Take a part for oneself; False while another has it."""
        with self._lock:
            if name in self._busy:
                return False
            self._busy.add(name)
            return True

    def release(self, name: str) -> None:
        """A fault of this part is over."""
        with self._lock:
            self._busy.discard(name)

    def strike(self, fault: Fault, name: str) -> None:
        """Do it; returns when it is over."""
        act = fault.kind.rpartition("_")[2]
        if fault.kind in _ERRORS:
            self._answer_errors(fault)
        elif act in ("silent", "refused"):
            self._plant.lines.cut(self._lines[name], "silent" if act == "silent" else "refused")
            time.sleep(fault.seconds)
            self._plant.lines.cut(self._lines[name], "")
        elif fault.part == "control":
            self._strike_control(fault, act)
        else:
            self._signal(fault, name, act)

    def _answer_errors(self, fault: Fault) -> None:
        chance = random.Random(fault.draw)

        def answer(_: Seen) -> bytes | None:
            return reply(*_ERRORS[fault.kind]) if chance.random() < ERROR_SHARE else None

        proxy = self._plant.proxy
        assert proxy is not None
        proxy.answer = answer
        time.sleep(fault.seconds)
        proxy.answer = None

    def _signal(self, fault: Fault, name: str, act: str) -> None:
        child = self._parts[name]
        with suppress(ProcessLookupError):
            os.kill(child.identity.pid, SIGNALS[act])
        if act == "stop":
            time.sleep(fault.seconds)
            with suppress(ProcessLookupError):
                os.kill(child.identity.pid, signal.SIGCONT)
            return
        _await_end(lambda: child.exit_code is not None)
        time.sleep(fault.seconds)
        self._parts[name] = self._plant.again(child)

    def _strike_control(self, fault: Fault, act: str) -> None:
        """The control process is started again by the trainer whose child it is."""
        process = control_of(self._parts["trainer-1"])
        if process is None:
            return
        with suppress(psutil.NoSuchProcess):
            process.send_signal(SIGNALS[act])
            if act == "stop":
                time.sleep(fault.seconds)
                process.send_signal(signal.SIGCONT)
                return
        _await_end(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def control_of(trainer: Child) -> psutil.Process | None:
    """The control process of a trainer; None while it has none."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(trainer.identity.pid).children():
            if "trainer_gpu.control" in process.cmdline():
                return process
    return None


def dead(parts: dict[str, Child]) -> list[str]:
    """Parts that have ended, struck or by themselves."""
    return [name for name, child in tuple(parts.items()) if child.exit_code is not None]


def _await_end(ended: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _END_SECONDS
    with suppress(psutil.NoSuchProcess):
        while not ended() and time.monotonic() < deadline:
            time.sleep(0.05)
