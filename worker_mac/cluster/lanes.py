"""Two halves of a sweep in flight at once: while one Mac computes the first half's step, another computes the second's.

Each half is a sweep of its own, with its own schedule and its own part of the pool, on a thread of its own; the engine's
thread, the only one that touches MLX, computes what they ask for. Only one half thinks at a time (the baton), so
environments and what is done with a group are never entered by two threads. What a sweep gives does not depend on it:
a row has the same bits whatever else is in its step.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import GpuInterruptedError, RankLostError, StoaError
from worker_mac.decoder import Drawn
from worker_mac.plan import Ints, Pairs, Work

NUM_LANES: Final = 2
POLL_SECONDS: Final = 0.05
ANSWER_SECONDS: Final = 180.0
_Answer = TypeVar("_Answer")


class InFlight(Protocol):
    """A step that is being computed."""

    def result(self) -> Drawn: ...  # noqa: D102


class Computing(Protocol):
    """See `lead.SetDecoder`."""

    def submit(self, work: Work, uniform: NDArray[np.float32]) -> InFlight: ...  # noqa: D102

    def reset(self) -> None: ...  # noqa: D102


@dataclass(slots=True)
class _Request:
    """Something for the engine's thread: a step, or with no work new caches."""

    work: Work | None = None
    uniform: NDArray[np.float32] | None = None
    served: threading.Event = field(default_factory=threading.Event)
    flight: InFlight | None = None
    fault: StoaError | None = None


class Lane:
    """One half's rows; implements `sweep.Rows`. Its pages and slots follow those of the lanes before it."""

    def __init__(self, lanes: "Lanes", first_page: int, first_slot: int) -> None:
        self._lanes, self._first_page, self._first_slot = lanes, first_page, first_slot
        self._generation = lanes.generation
        """Of the caches that hold what this lane has fed."""

    def step(self, work: Work, uniform: NDArray[np.float32]) -> Drawn:
        """As `Decoder.step`. Raises GpuInterruptedError also where another half's step was interrupted: caches are one."""
        self._check()
        try:
            drawn = self._lanes.compute(self._moved(work), uniform)
        except GpuInterruptedError:
            if self._generation == self._lanes.generation:
                self._lanes.renew()
            self._generation = self._lanes.generation
            raise
        self._check()
        return drawn

    def reset(self) -> None:
        """Done already, for all lanes at once."""

    def apart(self) -> AbstractContextManager[None]:
        """Other lanes think while this one only waits."""
        return self._lanes.resting()

    def _check(self) -> None:
        if self._generation != self._lanes.generation:
            self._generation = self._lanes.generation
            raise GpuInterruptedError("a step of another half of the sweep was interrupted: this half's caches went with it")

    def _moved(self, work: Work) -> Work:
        """The work with this lane's pages and slots as the caches know them; scrap page and slot of zeros are everybody's."""

        def moved(numbers: Ints, first: int) -> Ints:
            return np.where(numbers > 0, numbers + first, 0).astype(np.int32)

        def pairs(found: Pairs, first: int) -> Pairs:
            return [(source + first if source else 0, target + first) for source, target in found]

        return replace(
            work,
            tables=moved(work.tables, self._first_page),
            slots=moved(work.slots, self._first_slot),
            page_copies=pairs(work.page_copies, self._first_page),
            slot_copies=pairs(work.slot_copies, self._first_slot),
        )


def places_of(sizes: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Where in one pool each lane's pages and slots begin, and how many of both the pool has.

    sizes: pages and slots of each lane as it counts them, with the scrap ones of number zero, which are everybody's.
    """
    firsts, pages, slots = [], 0, 0
    for num_pages, num_slots in sizes:
        firsts.append((pages, slots))
        pages, slots = pages + num_pages - 1, slots + num_slots - 1
    return firsts, (pages + 1, slots + 1)


class Lanes:
    """Halves of one sweep. `run` is for the engine's thread, the rest for lanes."""

    def __init__(self, decoder: Computing) -> None:
        self._decoder = decoder
        self._asked: queue.Queue[_Request] = queue.Queue()
        self._baton = threading.Lock()
        self._closed = threading.Event()
        self.generation = 0
        """Times the caches were thrown away."""

    def run(self, halves: Sequence[Callable[[], _Answer]]) -> list[_Answer]:
        """What each half gives, each on a thread of its own; a half computes by its `Lane`. Raises the first fault."""

        def play(half: Callable[[], _Answer]) -> _Answer:
            with self._baton:
                return half()

        with ThreadPoolExecutor(len(halves), thread_name_prefix="lane") as pool:
            playing = [pool.submit(play, half) for half in halves]
            try:
                while not all(one.done() for one in playing):
                    try:
                        self._serve(self._asked.get(timeout=POLL_SECONDS))
                    except queue.Empty:
                        continue
            finally:
                # Whoever still waits for this thread is told.
                self._closed.set()
        return [one.result() for one in playing]

    def compute(self, work: Work, uniform: NDArray[np.float32]) -> Drawn:
        """A step; other lanes think while it lasts."""
        request = _Request(work, uniform)
        self._asked.put(request)
        with self.resting():
            self._await(request)
            if request.flight is None:
                raise RankLostError("a step was not computed")
            return request.flight.result()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """The lane that thinks lets others do so."""
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()

    def renew(self) -> None:
        """New caches; whatever was in flight before has come to its end by then."""
        request = _Request()
        self._asked.put(request)
        self._await(request)
        self.generation += 1

    def _await(self, request: _Request) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not request.served.wait(POLL_SECONDS):
            if self._closed.is_set() or time.monotonic() > deadline:
                raise RankLostError("the engine computes no more steps of this sweep")
        if request.fault is not None:
            raise request.fault

    def _serve(self, request: _Request) -> None:
        try:
            if request.work is None or request.uniform is None:
                self._decoder.reset()
            else:
                request.flight = self._decoder.submit(request.work, request.uniform)
        except StoaError as error:  # raised again on the lane's thread
            request.fault = error
        finally:
            request.served.set()
