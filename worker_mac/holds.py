"""What a Mac is asked for while groups are played, and given back after: that it stays awake, and wired memory.

Staying awake is asked for on mains only; both are dropped however a sweep ends. Nothing here decides when to play.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import structlog

_log = structlog.get_logger(__name__)

END_SECONDS: Final = 2.0


class Awake:
    """Keeps the system, not its display, from sleeping for want of a user, while it is held and this process lives.

    Does nothing off macOS, unless told the `command` to hold on with.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        given = ("caffeinate", "-i", "-w", str(os.getpid())) if sys.platform == "darwin" else ()
        self._command = given if command is None else command
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def held(self) -> bool:
        """True while the system is kept awake."""
        return self._holder is not None and self._holder.poll() is None

    def hold(self) -> None:
        """Keep the system awake until `release`; again does nothing."""
        if self._command and not self.held:
            self._holder = _start(self._command)

    def release(self) -> None:
        """Let the system sleep; again does nothing."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        holder.terminate()
        try:
            holder.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes] | None":
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        _log.warning("sleep_not_prevented", reason=str(error))
        return None


def wired_bytes(planned_bytes: int, memory_bytes: int | None) -> int:
    """What to wire: what a sweep is planned to take, never more than `memory_bytes`; 0, for nothing, where that is not known."""
    return 0 if memory_bytes is None else min(planned_bytes, memory_bytes)


@contextmanager
def wired(num_bytes: int, set_limit: Callable[[int], int]) -> Iterator[None]:
    """Wire up to `num_bytes` while the block runs. `set_limit` sets a limit and gives the one before; 0 bytes: leave it."""
    if not num_bytes:
        yield
        return
    before = set_limit(num_bytes)
    try:
        yield
    finally:
        set_limit(before)
