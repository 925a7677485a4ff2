"""The activities of a Mac: one sweep, played by a `RolloutEngine` on its own thread, and a notice for its owner.

A sweep and the activity that asks for it live apart. A sweep asked for again while it is played, or after it was played,
is not played twice: the activity is given the one there is. And with grants held ahead the next sweep begins by itself
when nobody asks for it in time, so that an outage of the control plane costs no decoding; its result is reported when it
is asked for at last. A person's cancel, pause or reset reaches the sweep; a lost connection does not.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from temporalio import activity

from activities.edge import EngineProgress, EngineThread, application_error, attended, first_beat, must_run_again
from stoa.contracts import names
from stoa.contracts.errors import NamesakeError, StoaError
from stoa.contracts.fleet_messages import Grant, Notice, SweepRequest, SweepResult
from stoa.contracts.messages import Beat
from stoa.contracts.namesakes import HINT, clash
from stoa.contracts.ports import RolloutEngine

_log = structlog.get_logger(__name__)

PATIENCE_SECONDS: Final = 1.0
"""How long a Mac that holds grants waits to be asked before it goes on by itself."""
MAX_KEPT: Final = 16
"""Results that are kept in case they are asked for again."""

_Key = tuple[str, int, str, int]


@dataclass(eq=False, slots=True)
class _Play:
    """One sweep on the engine's thread, waiting for it, or played."""

    request: SweepRequest
    progress: EngineProgress
    result: "asyncio.Future[SweepResult]"
    unasked: bool
    """It began by itself."""
    asked: bool = False
    """Somebody has asked for it since."""

    @property
    def is_wasted(self) -> bool:
        """True if it ended without being of use to whoever asks again."""
        if not self.result.done():
            return False
        if self.progress.cancelled or self.result.cancelled() or self.result.exception() is not None:
            return True
        return self.result.result().status not in ("done", "partial")


class RolloutActivities:
    """Serve `names.mac_queue(run, host)` with at most one activity at a time. For one event loop."""

    def __init__(
        self,
        run: str,
        host: str,
        engine: RolloutEngine,
        thread: EngineThread | None = None,
        *,
        on_notice: Callable[[Notice], None] = lambda notice: None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`on_notice` is told what the run has to say to this Mac's owner, also that it may not take part under this name."""
        self._me = (run, host)
        self._engine = engine
        self._thread = thread or EngineThread("rollout")
        self._on_notice = on_notice
        self._patience_seconds = patience_seconds
        self._plays: OrderedDict[_Key, _Play] = OrderedDict()
        self._ahead: dict[int, SweepRequest] = {}
        self._going_on: asyncio.Task[None] | None = None
        self._closed = False
        self._was_lost = False
        self._is_unasked = False

    def served(self) -> list[Callable[..., Any]]:
        """All of them, for the worker."""
        return [self.sweep, self.notice]

    @property
    def is_unasked(self) -> bool:
        """True from when this Mac began to play by itself until somebody asks for a sweep: perhaps it was lost sight of."""
        return self._is_unasked

    def silent_seconds(self) -> float:
        """Seconds since the engine last moved; 0 while it has nothing to do."""
        return min((play.progress.last()[1] for play in self._unfinished()), default=0.0)

    def take_lost(self) -> bool:
        """True once after a sweep whose activity the server had given up: it takes this Mac for gone."""
        lost, self._was_lost = self._was_lost, False
        return lost

    @activity.defn(name=names.SWEEP, no_thread_cancel_exception=True)
    async def sweep(self, request: SweepRequest) -> SweepResult:
        """Play one sweep and ship its groups."""
        if (request.run, request.host) != self._me:
            raise self._not_mine(request.run, request.host)
        self._stop_going_on()
        self._is_unasked = False
        self._hold(request)
        play = self._play_of(request)
        try:
            return await self._attend(play)
        finally:
            self._go_on()

    @activity.defn(name=names.NOTICE, no_thread_cancel_exception=True)
    async def notice(self, notice: Notice) -> None:
        """Tell this Mac's owner something."""
        activity.heartbeat(first_beat(notice))
        if (notice.run, notice.host) != self._me:
            raise self._not_mine(notice.run, notice.host, ends=notice.kind != "name_taken")
        if notice.kind != "free":
            self._forget_ahead()
        self._on_notice(notice)

    def _not_mine(self, run: str, host: str, *, ends: bool = True) -> Exception:
        """What came is another Mac's: the one on whose queue we are. Only a word to a namesake leaves us who is there."""
        text = clash(run, host, self._me)
        if ends:
            self._forget_ahead()
            self._on_notice(Notice(*self._me, "name_taken", text, ends=True))
        return application_error(NamesakeError(text, hint=HINT))

    async def close(self) -> None:
        """Begin nothing more by itself, and wait until what is being played has ended. The engine is asked to be quick."""
        self._closed = True
        self._stop_going_on()
        self._ahead.clear()
        left = [play for play in self._plays.values() if not play.result.done()]
        for play in left:
            play.progress.stop()
        await asyncio.gather(*(play.result for play in left), return_exceptions=True)

    def _hold(self, request: SweepRequest) -> None:
        """Keep the grants that came with a request; older ones are replaced, since a newer request knows better."""
        if request.purpose == "train":
            self._ahead = {grant.sweep: _request_of(grant, request) for grant in request.ahead}

    def _play_of(self, request: SweepRequest) -> _Play:
        """The sweep that is played, or was, for this request; a new one otherwise."""
        key = _key_of(request)
        found = self._plays.get(key)
        if found is not None and not found.is_wasted and found.request.question_ids == request.question_ids:
            found.asked = True
            return found
        return self._begin(request, unasked=False)

    def _begin(self, request: SweepRequest, *, unasked: bool) -> _Play:
        progress = EngineProgress(first_beat(request, self._last_beat()))
        result = asyncio.get_running_loop().run_in_executor(self._thread.executor, self._engine.sweep, request, progress)
        result.add_done_callback(_look_at)
        play = _Play(request, progress, result, unasked, asked=not unasked)
        key = _key_of(request)
        self._plays[key] = play
        self._plays.move_to_end(key)
        for old in [old for old, one in self._plays.items() if one.result.done()][: max(0, len(self._plays) - MAX_KEPT)]:
            del self._plays[old]
        return play

    async def _attend(self, play: _Play) -> SweepResult:
        """Heartbeats for a sweep until it ends; a cancel is passed on unless it only says that the server lost sight of us."""
        beating = _Behind(play, self._unfinished)
        with attended(beating, self._thread.beat_seconds, self._thread.stall_seconds):
            while True:
                try:
                    result = await asyncio.shield(play.result)
                    break
                except asyncio.CancelledError:
                    if play.result.cancelled():
                        raise
                    if _is_lost():
                        self._was_lost = True
                        raise
                    self._forget_ahead()
                    play.progress.cancel()
                except StoaError as error:
                    if play.progress.cancelled:
                        raise asyncio.CancelledError(f"{type(error).__name__}: {error}") from error
                    raise application_error(error) from error
        if play.progress.cancelled and must_run_again():
            raise asyncio.CancelledError("paused or reset: runs again")
        if play.progress.stopping or result.status in ("paused", "stopped", "draining"):
            self._ahead.clear()
        return replace(result, unasked=play.unasked)

    def _go_on(self) -> None:
        """Play what is held ahead once nobody has asked for anything for a while."""
        if self._ahead and not self._closed and self._going_on is None:
            self._going_on = asyncio.create_task(self._play_ahead())

    def _stop_going_on(self) -> None:
        if self._going_on is not None:
            self._going_on.cancel()
            self._going_on = None

    async def _play_ahead(self) -> None:
        for play in self._unfinished():
            await asyncio.wait((play.result,))
        await asyncio.sleep(self._patience_seconds)
        while self._ahead and not self._closed:
            request = self._ahead.pop(min(self._ahead))
            if _key_of(request) in self._plays:
                continue
            self._is_unasked = True
            _log.info("sweep_unasked", sweep=request.sweep)
            play = self._begin(request, unasked=True)
            await asyncio.wait((play.result,))
            if play.is_wasted:
                self._ahead.clear()
        self._going_on = None

    def _forget_ahead(self) -> None:
        """Somebody decided that this Mac does something else: what it plays unasked ends."""
        self._stop_going_on()
        self._ahead.clear()
        for play in self._unfinished():
            if not play.asked:
                play.progress.cancel()

    def _unfinished(self) -> list[_Play]:
        return [play for play in self._plays.values() if not play.result.done()]

    def _last_beat(self) -> Beat:
        newest = next(reversed(self._plays.values()), None)
        return newest.progress.last()[0] if newest is not None else first_beat(None)


class _Behind(EngineProgress):
    """Progress of a sweep; while another one holds the engine, that one's."""

    def __init__(self, play: _Play, unfinished: Callable[[], list[_Play]]) -> None:
        super().__init__()
        self._play, self._unfinished = play, unfinished

    def last(self) -> tuple[Beat, float]:
        """See `EngineProgress.last`."""
        first = next(iter(self._unfinished()), self._play)
        if first is self._play:
            return self._play.progress.last()
        beat, seconds = first.progress.last()
        return replace(beat, progress=f"behind sweep {first.request.sweep}: {beat.progress}"[:120]), seconds

    def stop(self) -> None:
        """The worker shuts down."""
        for play in self._unfinished():
            play.progress.stop()


def _key_of(request: SweepRequest) -> _Key:
    return request.purpose, request.sweep, request.evaluation, request.part


def _request_of(grant: Grant, like: SweepRequest) -> SweepRequest:
    """What the session will ask for with this grant."""
    return replace(
        like,
        sweep=grant.sweep,
        question_ids=grant.question_ids,
        min_version=grant.min_version,
        tickets=grant.tickets,
        shipped=grant.shipped,
        ahead=(),
    )


def _is_lost() -> bool:
    """True if this activity was not cancelled by anybody: the server has given it up, as after an outage."""
    details = activity.cancellation_details()
    return details is not None and (details.not_found or details.timed_out) and not details.cancel_requested


def _look_at(done: "asyncio.Future[SweepResult]") -> None:
    if not done.cancelled():
        done.exception()
