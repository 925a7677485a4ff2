"""A Mac's sweeps: played once however often they are asked for, and ahead while nobody asks."""

import asyncio
import threading
import time

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.edge import EngineThread
from activities.rollout import RolloutActivities
from stoa.contracts.errors import ServiceUnavailableError
from stoa.contracts.fleet_messages import Grant, Notice, SweepRequest, SweepResult
from stoa.contracts.messages import Beat
from stoa.contracts.ports import Progress

LOST = ActivityCancellationDetails(not_found=True)


class Engine:
    """Plays until it is let go, a sweep after another, and keeps books."""

    def __init__(self, *, free: bool = True) -> None:
        self.played: list[int] = []
        self.tickets: list[str] = []
        self.free = threading.Event()
        self.fail: list[Exception] = []
        self.status = "done"
        if free:
            self.free.set()

    def sweep(self, request: SweepRequest, progress: Progress) -> SweepResult:
        self.played.append(request.sweep)
        self.tickets.append(request.tickets)
        progress.report(f"playing {request.sweep}", version=3)
        while not self.free.is_set():
            if progress.cancelled:
                return SweepResult("partial", request.sweep, request.purpose)
            if progress.stopping:
                return SweepResult("draining", request.sweep, request.purpose)
            time.sleep(0.01)
        if self.fail:
            raise self.fail.pop()
        return SweepResult(self.status, request.sweep, request.purpose, version=3)  # type: ignore[arg-type]


def request(sweep: int, *ahead: int) -> SweepRequest:
    grants = tuple(Grant("r", "mac", number, (f"q{number}",), 1, tickets=f"t{number}") for number in ahead)
    return SweepRequest("r", "mac", sweep, "train", (f"q{sweep}",), 8, 1, tickets=f"t{sweep}", ahead=grants)


def part(number: int) -> SweepRequest:
    return SweepRequest("r", "mac", 0, "eval", ("held",), 1, version=4, evaluation="v4-every", part=number)


async def until(wanted: object, seconds: float = 5.0) -> None:
    for _ in range(int(seconds / 0.01)):
        if wanted():  # type: ignore[operator]
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


async def test_sweeps_held_ahead_are_played_when_nobody_asks_and_reported_when_somebody_does() -> None:
    engine = Engine()
    activities = RolloutActivities("r", "mac", engine, patience_seconds=0.05)
    first = await ActivityEnvironment().run(activities.sweep, request(7, 8, 9))
    assert (first.sweep, first.unasked) == (7, False)
    await until(lambda: engine.played == [7, 8, 9])
    assert engine.tickets == ["t7", "t8", "t9"]
    assert activities.is_unasked
    late = [await ActivityEnvironment().run(activities.sweep, request(number)) for number in (8, 9)]
    assert [(one.sweep, one.unasked, one.status) for one in late] == [(8, True, "done"), (9, True, "done")]
    assert engine.played == [7, 8, 9]
    assert not activities.is_unasked
    await activities.close()


async def test_mac_that_is_asked_in_time_plays_nothing_by_itself() -> None:
    engine = Engine()
    activities = RolloutActivities("r", "mac", engine, patience_seconds=0.5)
    for number in range(4):
        result = await ActivityEnvironment().run(activities.sweep, request(number, number + 1))
        assert not result.unasked
    assert engine.played == [0, 1, 2, 3]
    await activities.close()


async def test_lost_connection_leaves_the_sweep_playing_and_the_next_activity_gets_it() -> None:
    engine = Engine(free=False)
    activities = RolloutActivities("r", "mac", engine, patience_seconds=5)
    env = ActivityEnvironment()
    running = asyncio.create_task(env.run(activities.sweep, request(3)))
    await until(lambda: engine.played == [3])
    env.cancel(LOST)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert activities.take_lost()
    assert not activities.take_lost()
    again = asyncio.create_task(ActivityEnvironment().run(activities.sweep, request(3)))
    await asyncio.sleep(0.05)
    engine.free.set()
    assert (await again).status == "done"
    assert engine.played == [3]


async def test_finished_sweep_asked_for_again_is_answered_without_playing() -> None:
    engine = Engine()
    activities = RolloutActivities("r", "mac", engine)
    results = [await ActivityEnvironment().run(activities.sweep, request(3)) for _ in range(2)]
    assert results[0] == results[1]
    assert engine.played == [3]
    other = SweepRequest("r", "mac", 3, "train", ("another question",), 8)
    await ActivityEnvironment().run(activities.sweep, other)
    assert engine.played == [3, 3]


@pytest.mark.parametrize("details", [ActivityCancellationDetails(cancel_requested=True), ActivityCancellationDetails(paused=True)])
async def test_cancel_and_pause_reach_the_sweep_and_end_what_was_held_ahead(details: ActivityCancellationDetails) -> None:
    engine = Engine(free=False)
    activities = RolloutActivities("r", "mac", engine, patience_seconds=0.05)
    env = ActivityEnvironment()
    running = asyncio.create_task(env.run(activities.sweep, request(3, 4)))
    await until(lambda: engine.played == [3])
    env.cancel(details)
    if details.paused:
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        assert (await running).status == "partial"
    await asyncio.sleep(0.2)
    assert engine.played == [3]
    engine.free.set()
    assert (await ActivityEnvironment().run(activities.sweep, request(3))).status == "done"
    assert engine.played == [3, 3]
    await activities.close()


async def test_failed_or_paused_sweep_is_played_again_and_ends_the_playing_ahead() -> None:
    engine = Engine()
    engine.fail = [ServiceUnavailableError("no bucket")]
    activities = RolloutActivities("r", "mac", engine, patience_seconds=0.05)
    with pytest.raises(ApplicationError, match="no bucket"):
        await ActivityEnvironment().run(activities.sweep, request(3))
    await ActivityEnvironment().run(activities.sweep, request(3))
    engine.status = "paused"
    assert (await ActivityEnvironment().run(activities.sweep, request(4, 5))).status == "paused"
    await asyncio.sleep(0.2)
    assert engine.played == [3, 3, 4]


async def test_part_of_an_evaluation_waits_behind_a_sweep_played_ahead_and_shows_it() -> None:
    engine = Engine()
    activities = RolloutActivities("r", "mac", engine, EngineThread("rollout", beat_seconds=0.02), patience_seconds=0.05)
    await ActivityEnvironment().run(activities.sweep, request(3, 4))
    engine.free.clear()
    await until(lambda: engine.played == [3, 4])
    env, beats = ActivityEnvironment(), list[Beat]()
    env.on_heartbeat = lambda *details: beats.append(details[0])
    running = asyncio.create_task(env.run(activities.sweep, part(2)))
    await asyncio.sleep(0.1)
    assert beats[-1].progress == "behind sweep 4: playing 4"
    engine.free.set()
    assert (await running).purpose == "eval"
    await activities.close()


async def test_notice_reaches_the_owner_and_stops_what_was_begun_unasked() -> None:
    engine, told = Engine(), list[Notice]()
    activities = RolloutActivities("r", "mac", engine, on_notice=told.append, patience_seconds=0.05)
    await ActivityEnvironment().run(activities.sweep, request(3, 4, 5))
    engine.free.clear()
    await until(lambda: engine.played == [3, 4])
    notice = Notice("r", "mac", "quarantined", "its rewards were edited")
    await ActivityEnvironment().run(activities.notice, notice)
    await asyncio.sleep(0.2)
    assert (told, engine.played) == ([notice], [3, 4])
    await activities.close()


async def test_closing_ends_a_sweep_that_nobody_asked_for_and_begins_no_other() -> None:
    engine = Engine()
    activities = RolloutActivities("r", "mac", engine, patience_seconds=0.05)
    await ActivityEnvironment().run(activities.sweep, request(3, 4, 5))
    engine.free.clear()
    await until(lambda: engine.played == [3, 4])
    await asyncio.wait_for(activities.close(), 5)
    await asyncio.sleep(0.1)
    assert engine.played == [3, 4]


async def test_sweep_that_ends_while_the_worker_shuts_down_is_the_last() -> None:
    engine = Engine(free=False)
    activities = RolloutActivities("r", "mac", engine, patience_seconds=0.05)
    env = ActivityEnvironment()
    running = asyncio.create_task(env.run(activities.sweep, request(3, 4)))
    await until(lambda: engine.played == [3])
    env.worker_shutdown()
    assert (await running).status == "draining"
    await asyncio.sleep(0.2)
    assert engine.played == [3]


async def test_a_mac_that_is_handed_what_is_its_namesakes_ends_and_plays_none_of_it() -> None:
    engine, told = Engine(), list[Notice]()
    activities = RolloutActivities("a-b", "c", engine, on_notice=told.append, patience_seconds=0.05)
    for handed in (activities.sweep, activities.notice):
        argument = (
            SweepRequest("a", "b-c", 0, "train", ("q0",), 8) if handed == activities.sweep else Notice("a", "b-c", "quarantined", "no")
        )
        with pytest.raises(ApplicationError) as refused:
            await ActivityEnvironment().run(handed, argument)
        assert refused.value.type == "NamesakeError" and not refused.value.non_retryable
        for words in ("Mac b-c of run a ", "Mac c of run a-b", "--host"):
            assert words in str(refused.value)
        assert [(one.run, one.host, one.kind, one.ends) for one in told] == [("a-b", "c", "name_taken", True)]
        told.clear()
    assert engine.played == []
    await activities.close()


async def test_a_mac_passes_on_what_its_namesake_is_told_and_plays_on() -> None:
    engine, told = Engine(), list[Notice]()
    activities = RolloutActivities("a", "b-c", engine, on_notice=told.append, patience_seconds=0.05)
    await ActivityEnvironment().run(activities.sweep, SweepRequest("a", "b-c", 0, "train", ("q0",), 8))
    with pytest.raises(ApplicationError):
        await ActivityEnvironment().run(activities.notice, Notice("a-b", "c", "name_taken", "taken", ends=True))
    assert (engine.played, told) == ([0], [])
    await activities.close()
