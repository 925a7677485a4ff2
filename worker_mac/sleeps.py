"""Told by macOS before it sleeps and after it woke: the system waits, within limits, until we say that it may sleep.

A GPU driver that is put to sleep with memory wired by us has crashed Macs, so the worker must be still by then. Off
macOS nothing is told. What is done about it is the worker's; the C interface is `IOKit/pwr_mgt/IOPMLib.h`.
"""

import ctypes
import ctypes.util
import sys
import threading
from collections.abc import Callable
from typing import Final, Protocol

import structlog

_log = structlog.get_logger(__name__)

CAN_SLEEP: Final = 0xE0000270
"""kIOMessageCanSystemSleep: may it sleep for want of a user? An answer is waited for."""
WILL_SLEEP: Final = 0xE0000280
"""kIOMessageSystemWillSleep: it will; an answer is waited for, for at most 30 s."""
HAS_POWERED_ON: Final = 0xE0000300
"""kIOMessageSystemHasPoweredOn: it is awake."""
Told = Callable[[], None]
_CALLBACK: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)


class Sleeps(Protocol):
    """Calls back from a thread of its own."""

    def start(self, before_sleep: Told, after_wake: Told) -> None:
        """Begin to listen. The system sleeps once `before_sleep` has returned."""
        ...

    def close(self) -> None:
        """Listen no more."""
        ...


class NoSleeps:
    """A machine that does not say."""

    def start(self, before_sleep: Told, after_wake: Told) -> None:
        """Nothing will come."""

    def close(self) -> None:
        """Nothing was begun."""


class MacSleeps:
    """The system's own notices. `kit` and `core`: the libraries that give them, IOKit and CoreFoundation."""

    def __init__(self, kit: ctypes.CDLL, core: ctypes.CDLL) -> None:
        self._kit, self._core = declare(kit, core)
        self._before_sleep: Told = lambda: None
        self._after_wake: Told = lambda: None
        self._port = ctypes.c_void_p()
        self._notifier = ctypes.c_uint32()
        self._root = 0
        self._loop: int | None = None
        self._callback = _CALLBACK(self._on_message)  # kept: C holds only its address
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, before_sleep: Told, after_wake: Told) -> None:
        """Listen on a thread; says so and goes on if the system does not let us."""
        self._before_sleep, self._after_wake = before_sleep, after_wake
        self._thread = threading.Thread(target=self._listen, name="sleeps", daemon=True)
        self._thread.start()
        self._ready.wait(5.0)

    def close(self) -> None:
        """End the thread."""
        if self._loop is not None:
            self._core.CFRunLoopStop(self._loop)
        if self._thread is not None:
            self._thread.join(2.0)

    def _listen(self) -> None:
        self._root = self._kit.IORegisterForSystemPower(None, ctypes.byref(self._port), self._callback, ctypes.byref(self._notifier))
        if not self._root:
            _log.warning("sleep_not_told", reason="the system refused to register us")
            self._ready.set()
            return
        self._loop = self._core.CFRunLoopGetCurrent()
        source = self._kit.IONotificationPortGetRunLoopSource(self._port)
        mode = ctypes.c_void_p.in_dll(self._core, "kCFRunLoopDefaultMode")
        self._core.CFRunLoopAddSource(self._loop, source, mode)
        self._ready.set()
        self._core.CFRunLoopRun()
        self._kit.IODeregisterForSystemPower(ctypes.byref(self._notifier))

    def _on_message(self, _context: int | None, _service: int, message: int, argument: int | None) -> None:
        try:
            if message == WILL_SLEEP:
                self._before_sleep()
            elif message == HAS_POWERED_ON:
                self._after_wake()
        finally:
            if message in (CAN_SLEEP, WILL_SLEEP):
                self._kit.IOAllowPowerChange(self._root, argument or 0)


def declare(kit: ctypes.CDLL, core: ctypes.CDLL) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The libraries, with the types of the functions used: ports are 32 bits wide, pointers and arguments 64."""
    pointer, port = ctypes.c_void_p, ctypes.c_uint32
    kit.IORegisterForSystemPower.restype = port
    kit.IORegisterForSystemPower.argtypes = [pointer, ctypes.POINTER(pointer), _CALLBACK, ctypes.POINTER(port)]
    kit.IODeregisterForSystemPower.argtypes = [ctypes.POINTER(port)]
    kit.IOAllowPowerChange.argtypes = [port, ctypes.c_ssize_t]
    kit.IONotificationPortGetRunLoopSource.restype = pointer
    kit.IONotificationPortGetRunLoopSource.argtypes = [pointer]
    core.CFRunLoopGetCurrent.restype, core.CFRunLoopGetCurrent.argtypes = pointer, []
    core.CFRunLoopAddSource.argtypes = [pointer, pointer, pointer]
    core.CFRunLoopStop.argtypes = [pointer]
    core.CFRunLoopRun.argtypes = []
    return kit, core


def sleeps_here(platform: str = sys.platform) -> Sleeps:
    """What tells of sleep on this machine."""
    names = [ctypes.util.find_library(name) for name in ("IOKit", "CoreFoundation")] if platform == "darwin" else []
    kit, core = names or (None, None)
    if kit is None or core is None:
        return NoSleeps()
    return MacSleeps(ctypes.CDLL(kit), ctypes.CDLL(core))
