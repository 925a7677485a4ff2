"""The edge between Temporal and the engines: threads, heartbeats, cancellation, shutdown, error mapping.

Every activity of an engine passes through `EngineThread.call`; what an engine does is not known here. Assumes that
engines report progress while they work and stop soon after `progress.cancelled` turns true.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from stoa.contracts.errors import StoaError
from stoa.contracts.messages import Beat
from stoa.contracts.ports import Progress

Request = TypeVar("Request")
Result = TypeVar("Result")

BEAT_SECONDS: Final = 1.0
"""How often a beat is offered; workers send at most one in 2 s (`connection.HEARTBEAT_THROTTLE`)."""
STALL_SECONDS: Final = 120.0
"""Without a report for this long the heartbeat stops: a hung native call must not look alive."""
MAX_DETAIL_BYTES: Final = 120
MAX_HINT_CHARACTERS: Final = 200
MAX_MESSAGE_CHARACTERS: Final = 1500
NO_BEAT: Final = Beat()


def first_beat(request: object, before: Beat = NO_BEAT) -> Beat:
    """What a request says of itself: an activity shorter than a heartbeat shows nothing else.

    `before`: the newest beat of the activity before on the same engine, whose version and key still hold.
    """

    def number(name: str) -> int:
        value = getattr(request, name, -1)
        return value if isinstance(value, int) else -1

    version = max(number("version"), number("min_version"))
    return Beat(
        version=version if version >= 0 else before.version,
        step=number("step"),
        sweep=number("sweep"),
        last_key=before.last_key,
        progress="starting",
    )


class EngineProgress:
    """The `Progress` an engine gets: reports come from the engine's thread, flags from the activity's."""

    def __init__(self, first: Beat = NO_BEAT) -> None:
        self._lock = threading.Lock()
        self._beat = first
        self._moved_at = time.monotonic()
        self._cancelled = threading.Event()
        self._stopping = threading.Event()

    def report(self, detail: str, *, version: int = -1, key: str = "") -> None:
        """Note that the engine moved; `detail` and `key` are cut to 120 bytes each."""
        with self._lock:
            self._beat = replace(
                self._beat,
                progress=_cut(detail),
                version=version if version >= 0 else self._beat.version,
                last_key=_cut(_without_run(key)) if key else self._beat.last_key,
            )
            self._moved_at = time.monotonic()

    @property
    def cancelled(self) -> bool:
        """True once the activity was cancelled."""
        return self._cancelled.is_set()

    @property
    def stopping(self) -> bool:
        """True once the worker shuts down."""
        return self._stopping.is_set()

    def cancel(self) -> None:
        """Ask the engine to give up at its next safe point."""
        self._cancelled.set()

    def stop(self) -> None:
        """Ask the engine to finish what is in hand."""
        self._stopping.set()

    def last(self) -> tuple[Beat, float]:
        """Newest beat and the seconds since the engine moved."""
        with self._lock:
            return self._beat, time.monotonic() - self._moved_at


def _cut(text: str) -> str:
    return text.encode()[:MAX_DETAIL_BYTES].decode(errors="ignore")


def _without_run(key: str) -> str:
    parts = key.split("/", 2)
    return parts[2] if len(parts) == 3 and parts[0] == "runs" else key


class EngineThread:
    """One thread on which an engine does all its work, so that it needs no locks and keeps thread-bound state."""

    def __init__(self, name: str, *, beat_seconds: float = BEAT_SECONDS, stall_seconds: float = STALL_SECONDS) -> None:
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.beat_seconds = beat_seconds
        self.stall_seconds = stall_seconds
        self._before = Beat()
        self._calls: set[EngineProgress] = set()

    def silent_seconds(self) -> float:
        """Seconds since the engine last moved; 0 while it has nothing to do."""
        return min((progress.last()[1] for progress in self._calls), default=0.0)

    async def call(self, work: Callable[[Request, Progress], Result], request: Request) -> Result:
        """Run `work(request, progress)` on the thread, with heartbeats, from inside an activity.

        Cancellation is passed on as `progress.cancelled` and the engine is waited for: a result it still returns
        counts, except when the activity was paused or reset, which must run again. Raises ApplicationError for
        every error of ours, CancelledError when a cancelled engine gave up.
        """
        progress = EngineProgress(first_beat(request, self._before))
        self._calls.add(progress)
        try:
            return await _run(self.executor, work, request, progress, self.beat_seconds, self.stall_seconds)
        finally:
            self._before, _ = progress.last()
            self._calls.discard(progress)

    def close(self) -> None:
        """Let the thread end without waiting for it."""
        self.executor.shutdown(wait=False, cancel_futures=True)


async def run_engine(
    executor: ThreadPoolExecutor,
    work: Callable[[Request, Progress], Result],
    request: Request,
    *,
    beat_seconds: float = BEAT_SECONDS,
    stall_seconds: float = STALL_SECONDS,
) -> Result:
    """`work` on a thread of `executor`; see `EngineThread.call`."""
    return await _run(executor, work, request, EngineProgress(first_beat(request)), beat_seconds, stall_seconds)


async def _run(
    executor: ThreadPoolExecutor,
    work: Callable[[Request, Progress], Result],
    request: Request,
    progress: EngineProgress,
    beat_seconds: float,
    stall_seconds: float,
) -> Result:
    with attended(progress, beat_seconds, stall_seconds):
        future = asyncio.get_running_loop().run_in_executor(executor, work, request, progress)
        try:
            result = await _outlast_cancellation(future, progress)
        except StoaError as error:
            if progress.cancelled:
                raise asyncio.CancelledError(f"{type(error).__name__}: {error}") from error
            raise application_error(error) from error
    if progress.cancelled and must_run_again():
        raise asyncio.CancelledError("paused or reset: runs again")
    return result


@contextlib.contextmanager
def attended(progress: EngineProgress, beat_seconds: float, stall_seconds: float) -> Iterator[None]:
    """Inside an activity: send `progress` as heartbeats, now and then, and tell it when the worker shuts down."""
    activity.heartbeat(progress.last()[0])
    attendants = (
        asyncio.create_task(_beat(progress, beat_seconds, stall_seconds)),
        asyncio.create_task(_watch_shutdown(progress)),
    )
    try:
        yield
    finally:
        for task in attendants:
            task.cancel()


def must_run_again() -> bool:
    """True if this activity was cancelled because a person paused or reset it."""
    details = activity.cancellation_details()
    return details is not None and (details.paused or details.reset)


async def _outlast_cancellation(future: Awaitable[Result], progress: EngineProgress) -> Result:
    while True:
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Either we were cancelled, and the engine must be told and waited for, or it never began.
            if isinstance(future, asyncio.Future) and future.cancelled():
                raise
            progress.cancel()


async def _beat(progress: EngineProgress, beat_seconds: float, stall_seconds: float) -> None:
    while True:
        await asyncio.sleep(beat_seconds)
        beat, silent_seconds = progress.last()
        if silent_seconds < stall_seconds:
            activity.heartbeat(beat)


async def _watch_shutdown(progress: EngineProgress) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await activity.wait_for_worker_shutdown()
        progress.stop()


def application_error(error: StoaError) -> ApplicationError:
    """`error` as Temporal carries it: type is the class name, `retryable` decides about retries, the hint is kept."""
    text = f"{error.message} (hint: {error.hint})" if error.hint else error.message
    return ApplicationError(
        text[:MAX_MESSAGE_CHARACTERS], error.hint[:MAX_HINT_CHARACTERS], type=type(error).__name__, non_retryable=not error.retryable
    )
