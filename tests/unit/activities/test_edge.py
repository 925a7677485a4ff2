"""The edge between Temporal and an engine: heartbeats, progress, cancellation, shutdown, errors."""

import asyncio
import threading
import time

import pytest
from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.connection import DATA_CONVERTER
from activities.edge import EngineProgress, EngineThread, application_error, first_beat
from stoa.contracts.errors import FencedError, ServiceUnavailableError, StoaError
from stoa.contracts.fleet_messages import SweepRequest
from stoa.contracts.messages import Beat, PublishRequest, StepRequest
from stoa.contracts.ports import Progress


def environment() -> tuple[ActivityEnvironment, list[Beat]]:
    env = ActivityEnvironment()
    beats: list[Beat] = []
    env.on_heartbeat = lambda *details: beats.append(details[0])
    return env, beats


async def run(env: ActivityEnvironment, thread: EngineThread, work: object, request: object = "request") -> object:
    return await env.run(thread.call, work, request)


async def test_heartbeat_carries_the_newest_detail_cut_to_120_bytes() -> None:
    env, beats = environment()

    def work(request: str, progress: Progress) -> str:
        progress.report("first")
        time.sleep(0.1)
        progress.report("x" * 500)
        time.sleep(0.1)
        return request

    assert await run(env, EngineThread("t", beat_seconds=0.02), work) == "request"
    assert "first" in [beat.progress for beat in beats]
    assert beats[-1].progress == "x" * 120


async def test_activity_shorter_than_a_heartbeat_shows_what_it_was_asked_and_what_came_before() -> None:
    env, beats = environment()
    thread = EngineThread("t", beat_seconds=60)

    def publish(request: PublishRequest, progress: Progress) -> None:
        progress.report("published", version=4, key="runs/demo/manifests/00000004.e1001-aa.json")

    def train(request: StepRequest, progress: Progress) -> None:
        return

    await run(env, thread, publish, PublishRequest("demo", 1001, 12, False, False, version=4))
    await run(env, thread, train, StepRequest("demo", 1001, 13, version=4))
    assert beats == [
        Beat(version=4, step=12, progress="starting"),
        Beat(version=4, step=13, last_key="manifests/00000004.e1001-aa.json", progress="starting"),
    ]
    assert first_beat(SweepRequest("demo", "mac-1", 7, "train", ("q",), 8, min_version=2)) == Beat(version=2, sweep=7, progress="starting")


def test_beat_of_the_longest_key_and_text_stays_small() -> None:
    progress = EngineProgress(Beat(version=99_999_999, step=99_999_999, sweep=99_999_999))
    progress.report("x" * 500, key=f"runs/demo/{'k' * 500}")
    (payload,) = DATA_CONVERTER.payload_converter.to_payloads([progress.last()[0]])
    assert len(payload.data) < 400


async def test_heartbeat_stops_when_progress_stops() -> None:
    env, beats = environment()

    def work(request: str, progress: Progress) -> None:
        progress.report("moving")
        time.sleep(0.6)

    await run(env, EngineThread("t", beat_seconds=0.02, stall_seconds=0.2), work)
    assert 3 < len(beats) < 16  # 0.2 s of beats, not 0.6


async def test_detail_is_never_cut_inside_a_character() -> None:
    progress = EngineProgress()
    progress.report("\u00e4" * 150)
    assert progress.last()[0].progress == "\u00e4" * 60


async def test_all_calls_share_one_thread() -> None:
    env, _ = environment()
    thread = EngineThread("t")

    def work(request: str, progress: Progress) -> int:
        return threading.get_ident()

    assert len({await run(env, thread, work) for _ in range(3)}) == 1


async def test_cancelled_engine_is_told_and_what_it_still_returns_counts() -> None:
    env, _ = environment()

    def work(request: str, progress: Progress) -> str:
        while not progress.cancelled:
            time.sleep(0.01)
        return "finished what was in hand"

    task = asyncio.create_task(run(env, EngineThread("t"), work))
    await asyncio.sleep(0.1)
    env.cancel()
    assert await task == "finished what was in hand"


async def test_paused_activity_runs_again_whatever_its_engine_returned() -> None:
    env, _ = environment()

    def work(request: str, progress: Progress) -> str:
        while not progress.cancelled:
            time.sleep(0.01)
        return "half"

    task = asyncio.create_task(run(env, EngineThread("t"), work))
    await asyncio.sleep(0.1)
    env.cancel(activity.ActivityCancellationDetails(paused=True))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_error_of_a_cancelled_engine_is_its_giving_up() -> None:
    env, _ = environment()

    def work(request: str, progress: Progress) -> None:
        while not progress.cancelled:
            time.sleep(0.01)
        raise ServiceUnavailableError("asked to end")

    task = asyncio.create_task(run(env, EngineThread("t"), work))
    await asyncio.sleep(0.1)
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_shutdown_of_the_worker_reaches_the_engine_without_cancelling_it() -> None:
    env, _ = environment()

    def work(request: str, progress: Progress) -> tuple[bool, bool]:
        while not progress.stopping:
            time.sleep(0.01)
        return progress.stopping, progress.cancelled

    task = asyncio.create_task(run(env, EngineThread("t"), work))
    await asyncio.sleep(0.1)
    env.worker_shutdown()
    assert await task == (True, False)


@pytest.mark.parametrize(("error", "final"), [(FencedError("HEAD is held by 4001"), True), (ServiceUnavailableError("no bucket"), False)])
async def test_error_crosses_with_its_class_and_says_whether_trying_again_helps(error: StoaError, final: bool) -> None:
    env, _ = environment()

    def work(request: str, progress: Progress) -> None:
        raise error

    with pytest.raises(ApplicationError) as caught:
        await run(env, EngineThread("t"), work)
    assert (caught.value.type, caught.value.non_retryable) == (type(error).__name__, final)
    assert error.message in caught.value.message


def test_message_keeps_the_hint_and_is_bounded() -> None:
    error = application_error(ServiceUnavailableError("no bucket " * 1000, hint="start it"))
    assert len(error.message) <= 1500
    assert application_error(ServiceUnavailableError("no bucket", hint="start it")).message == "no bucket (hint: start it)"


async def test_fault_of_the_program_is_not_disguised() -> None:
    env, _ = environment()

    def work(request: str, progress: Progress) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await run(env, EngineThread("t"), work)


async def test_engine_that_does_not_move_is_seen_and_one_without_a_call_is_not() -> None:
    env, _ = environment()
    thread, go = EngineThread("t"), threading.Event()

    def work(request: str, progress: Progress) -> None:
        go.wait(5)

    task = asyncio.create_task(run(env, thread, work))
    await asyncio.sleep(0.3)
    assert thread.silent_seconds() >= 0.2
    go.set()
    await task
    assert thread.silent_seconds() == 0.0
