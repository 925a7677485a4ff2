"""Hidden states from one Mac to the next, and sums over all of them, by MLX's own collectives.

Before each, both sides say what they are about to exchange: arrays of unlike shapes or types would else wait for each
other for ever, without a word. A watchdog ends a process whose collective makes no progress, since nothing can break
into one. Who runs which backend is the launcher's business.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import mlx.core as mx
import numpy as np
import structlog

from stoa.contracts.errors import GpuInterruptedError, LinkMismatchError, RankLostError

MAGIC: Final = 0x53544F41
STUCK_SECONDS: Final = 90.0
"""A neighbour computes one stretch of prompts at most before it sends: seconds even on a slow Mac."""
TICK_SECONDS: Final = 0.5
_HEADER: Final = 8
_ABORTED: Final = -1
_TYPES: Final = (mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint32, mx.uint8)
_log = structlog.get_logger(__name__)


class Watchdog:
    """Calls `act` with what was waited for, once something has lasted `limit_seconds`."""

    def __init__(self, act: Callable[[str], None], limit_seconds: float = STUCK_SECONDS) -> None:
        self._act, self._limit = act, limit_seconds
        self._what, self._since = "", 0.0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch the block."""
        outer = self._what
        self._since, self._what = time.monotonic(), what
        try:
            yield
        finally:
            # Progress was made: what lies around begins to count anew.
            self._since, self._what = time.monotonic(), outer

    def _watch(self) -> None:
        tick = min(TICK_SECONDS, self._limit / 4)
        while True:
            time.sleep(tick)
            what = self._what
            if what and time.monotonic() - self._since > self._limit:
                self._act(f"{what} has not ended in {self._limit:g} s")
                return


class RingLink:
    """This Mac's place in the set; implements `stage.Neighbours`. For one thread."""

    def __init__(self, group: mx.distributed.Group, watchdog: Watchdog) -> None:
        self._group, self._watchdog = group, watchdog
        self.rank, self.size = group.rank(), group.size()
        self.bytes_sent = 0

    def send(self, x: mx.array) -> None:
        """Hand an array to the next Mac. Raises RankLostError."""
        self._send(_header(x.shape, x.dtype), "a header for the next Mac")
        self._send(x, "hidden states for the next Mac")

    def abort(self) -> None:
        """Tell the next Mac that what it waits for does not come."""
        self._send(mx.array([MAGIC, _ABORTED] + [0] * (_HEADER - 2), mx.int32), "a header for the next Mac")

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """What the Mac before this one sends.

        Raises LinkMismatchError if it is of another shape or type, GpuInterruptedError if it was given up, RankLostError.
        """
        header = self._received((_HEADER,), mx.int32, "a header from the Mac before")
        found = np.array(header).tolist()
        if found[0] == MAGIC and found[1] == _ABORTED:
            if self.rank + 1 < self.size:
                self.abort()
            raise GpuInterruptedError(f"Mac {self.rank - 1} of the set was interrupted")
        expected = np.array(_header(shape, dtype)).tolist()
        if found != expected:
            raise _mismatch(self.rank - 1, found, self.rank, expected)
        return self._received(shape, dtype, "hidden states from the Mac before")

    def agree(self, shape: tuple[int, ...], dtype: mx.Dtype, num_sums: int) -> None:
        """Make sure that all Macs are about to sum up as many arrays of this shape and type. Raises LinkMismatchError."""
        own = _header(shape, dtype, num_sums)
        with self._within("headers of all Macs"):
            every = mx.distributed.all_gather(own, group=self._group).reshape(self.size, _HEADER)
            mx.eval(every)
        rows = np.array(every).tolist()
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise _mismatch(rank, row, 0, rows[0])
        self.bytes_sent += own.nbytes

    def total(self, x: mx.array) -> mx.array:
        """The sum of an array over all Macs, the same bits on each. Lazy: `watched` is to stand around what evaluates it."""
        self.bytes_sent += x.nbytes
        return mx.distributed.all_sum(x, group=self._group)

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """For what evaluates sums."""
        with self._within(what):
            yield

    def _send(self, x: mx.array, what: str) -> None:
        with self._within(what):
            mx.eval(mx.distributed.send(x, (self.rank + 1) % self.size, group=self._group))
        self.bytes_sent += x.nbytes

    def _received(self, shape: tuple[int, ...], dtype: mx.Dtype, what: str) -> mx.array:
        with self._within(what):
            found = mx.distributed.recv(shape, dtype, (self.rank - 1) % self.size, group=self._group)
            mx.eval(found)
        return found

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        with self._watchdog.over(what):
            try:
                yield
            except RuntimeError as error:
                if "[ring]" in str(error) or "[jaccl]" in str(error):
                    raise RankLostError(f"a neighbour of Mac {self.rank} is gone: {error}") from error
                raise


def backends() -> tuple[str, ...]:
    """Those of this MLX that wired Macs may use, the quicker first. jaccl needs RDMA over Thunderbolt 5; it was never run here."""
    return tuple(name for name in ("jaccl", "ring") if mx.distributed.is_available(name))


def _header(shape: tuple[int, ...], dtype: mx.Dtype, num_sums: int = 0) -> mx.array:
    padded = [*shape, *[0] * (4 - len(shape))]
    return mx.array([MAGIC, _TYPES.index(dtype), len(shape), *padded, num_sums], mx.int32)


def _mismatch(there: int, theirs: list[int], here: int, ours: list[int]) -> LinkMismatchError:
    return LinkMismatchError(
        f"Mac {there} would send {_said(theirs)}, Mac {here} expects {_said(ours)}", hint="the same program must run on every Mac"
    )


def _said(row: list[int]) -> str:
    if row[0] != MAGIC or not 0 <= row[1] < len(_TYPES):
        return "something that is no array of ours"
    return f"{_TYPES[row[1]]} {tuple(row[3 : 3 + row[2]])}" + (f" {row[7]} times" if row[7] else "")
