"""What a Mac tells of itself: power, heat, memory, its user, its network. Probes only; what follows is `power.py`'s.

Each probe asks one system tool or one system call and gives None when it cannot tell, so a Mac that hides something is
played on. Off macOS nothing is known. What tools print is parsed by functions that are tested on kept samples.
"""

import ctypes
import ctypes.util
import ipaddress
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import psutil

from worker_mac.power import Pressure, Senses, Thermal

TOOL_SECONDS: Final = 2.0
"""Longest wait for a system tool."""
SLOW_SECONDS: Final = 10.0
"""What changes seldom is asked this often."""
SLEPT_SECONDS: Final = 10.0
"""A gap between two looks that is longer by the wall clock than by the one that stands still in sleep means sleep."""
_HOTSPOT: Final = ipaddress.ip_network("172.20.10.0/28")
"""The only network that an iPhone's hotspot hands out."""
_THERMAL: Final[dict[int, Thermal]] = {0: "nominal", 1: "fair", 2: "serious", 3: "critical"}
_PRESSURE: Final[dict[int, Pressure]] = {1: "normal", 2: "warn", 4: "critical"}
_IDLE = re.compile(r'"HIDIdleTime"\s*=\s*(\d+)')
_LOCKED = re.compile(r'"CGSSessionScreenIsLocked"\s*=\s*(Yes|No)')
_ON_CONSOLE = re.compile(r'"kCGSSessionOnConsoleKey"\s*=\s*Yes')
_GATEWAY = re.compile(r"^\s*gateway:\s*(\S+)", re.MULTILINE)
Tool = Callable[[Sequence[str]], str]


class Probe(Protocol):
    """Reads the Mac's senses; may take tens of milliseconds, so it is not called from the engine's thread."""

    def read(self) -> Senses: ...  # noqa: D102


class Battery(Protocol):
    """What psutil tells of one."""

    @property
    def percent(self) -> float: ...  # noqa: D102

    @property
    def power_plugged(self) -> bool | None: ...  # noqa: D102


class NoProbe:
    """A machine of which nothing is known."""

    def read(self) -> Senses:
        """Only the time."""
        return Senses(time.monotonic())


class MacProbe:
    """The senses of the Mac this process runs on."""

    def __init__(self, tool: Tool | None = None) -> None:
        self._tool = tool or run_tool
        self._slow_at, self._locked, self._hotspot = float("-inf"), None, None
        self._before = time.time(), time.monotonic()
        self._woke_at = float("-inf")

    def read(self) -> Senses:
        """Everything that can be told now."""
        now, wall = time.monotonic(), time.time()
        if slept_between(self._before, (wall, now)):
            self._woke_at = now
        self._before = wall, now
        if now - self._slow_at >= SLOW_SECONDS:
            self._slow_at = now
            self._locked: bool | None = read_locked(self._tool(("ioreg", "-n", "Root", "-d1")))
            self._hotspot: bool | None = read_hotspot(self._tool(("route", "-n", "get", "default")))
        local = datetime.now()
        on_mains, battery_percent = read_battery()
        thermal = _process_info("thermalState")
        return Senses(
            now_seconds=now,
            minute_of_day=local.hour * 60 + local.minute,
            on_mains=on_mains,
            battery_percent=battery_percent,
            low_power_mode=None if (low := _process_info("isLowPowerModeEnabled")) is None else bool(low & 0xFF),
            idle_seconds=read_idle(self._tool(("ioreg", "-c", "IOHIDSystem", "-d4"))),
            screen_locked=self._locked,
            thermal=None if thermal is None else _THERMAL.get(thermal),
            pressure=read_pressure(self._tool(("sysctl", "-n", "kern.memorystatus_vm_pressure_level"))),
            on_hotspot=self._hotspot,
            awake_seconds=now - self._woke_at,
            free_disk_bytes=read_free_disk(Path.home()),
        )


def probe_here(platform: str = sys.platform) -> Probe:
    """The probe for this machine."""
    return MacProbe() if platform == "darwin" else NoProbe()


def slept_between(before: tuple[float, float], now: tuple[float, float]) -> bool:
    """True if the machine slept between two looks, each (wall clock, clock that stands still in sleep), in seconds."""
    return (now[0] - before[0]) - (now[1] - before[1]) > SLEPT_SECONDS


def read_battery(battery: Callable[[], "Battery | None"] = psutil.sensors_battery) -> tuple[bool | None, float | None]:
    """True on mains, and percent of the battery; a Mac without one is on mains."""
    try:
        found = battery()
    except (OSError, RuntimeError, psutil.Error):
        return None, None
    return (True, None) if found is None else (found.power_plugged, float(found.percent))


def read_free_disk(folder: Path) -> int | None:
    """Bytes that are free where this folder is."""
    try:
        return int(psutil.disk_usage(str(folder)).free)
    except OSError:  # a home on a network that is away
        return None


def read_idle(text: str) -> float | None:
    """Seconds since the last key or pointer event, by `ioreg -c IOHIDSystem`: the least of all that are listed."""
    found = _IDLE.findall(text)
    return min(int(nanoseconds) for nanoseconds in found) / 1e9 if found else None


def read_locked(text: str) -> bool | None:
    """True if the screen is locked, by `ioreg -n Root -d1`, which leaves the key out while it is not."""
    found = _LOCKED.search(text)
    if found is not None:
        return found[1] == "Yes"
    return False if _ON_CONSOLE.search(text) else None


def read_pressure(text: str) -> Pressure | None:
    """The system's memory pressure, by `sysctl -n kern.memorystatus_vm_pressure_level`."""
    return _PRESSURE.get(int(text)) if text.strip().isdecimal() else None


def read_hotspot(text: str) -> bool | None:
    """True if the way out is an iPhone's hotspot, by `route -n get default`. Other phones and Low Data Mode do not show here."""
    found = _GATEWAY.search(text)
    try:
        return None if found is None else ipaddress.ip_address(found[1].partition("%")[0]) in _HOTSPOT
    except ValueError:
        return None


def run_tool(command: Sequence[str]) -> str:
    """What a system tool prints; "" if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")


@cache
def _objc() -> ctypes.CDLL | None:
    """The Objective-C runtime with Foundation loaded; None where there is none."""
    name = ctypes.util.find_library("Foundation") if sys.platform == "darwin" else None
    runtime = ctypes.util.find_library("objc")
    if name is None or runtime is None:
        return None
    ctypes.CDLL(name)
    library = ctypes.CDLL(runtime)
    for function in (library.objc_getClass, library.sel_registerName):
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    return library


def _process_info(selector: str) -> int | None:
    """`[[NSProcessInfo processInfo] selector]` as a number; None where there is no such thing."""
    library = _objc()
    if library is None:
        return None
    # objc_msgSend is called as the function it stands for: on arm64 a variadic call would pass arguments elsewhere.
    give = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", library))
    number = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", library))
    info = give(library.objc_getClass(b"NSProcessInfo"), library.sel_registerName(b"processInfo"))
    return number(info, library.sel_registerName(selector.encode()))
