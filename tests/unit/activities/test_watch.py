"""A worker that has nothing to do and does not poll is noticed and made anew; one that works or polls is left alone."""

import asyncio
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
import structlog
from temporalio import activity
from temporalio.runtime import BufferedMetricUpdate
from temporalio.worker import Worker

from activities import connection
from activities.connection import connect, make_runtime, make_worker, supervise
from activities.watch import PollWatch, end_if_hung
from tests.servers import TemporalServer


@dataclass
class Metric:
    name: str


@dataclass
class Update:
    metric: Metric
    value: float
    attributes: dict[str, object]


@dataclass
class Updates:
    """Metric updates as a test says them."""

    pending: list[Update] = field(default_factory=list)

    def say(self, name: str, value: float = 1, queue: str = "q", kind: str = "ActivityWorker") -> None:
        self.pending.append(Update(Metric(name), value, {"task_queue": queue, "worker_type": kind}))

    def retrieve_updates(self) -> list[BufferedMetricUpdate]:
        found, self.pending = self.pending, []
        return cast(list[BufferedMetricUpdate], found)


class Clock:
    """Time as a test says it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_silence_counts_from_the_last_poll_of_that_queue() -> None:
    clock, updates = Clock(), Updates()
    polls = PollWatch(updates, clock)
    polls.begin("q")
    clock.now += 50
    updates.say("temporal_long_request", queue="another")
    assert polls.silent_seconds("q") == 50
    updates.say("temporal_long_request")
    assert polls.silent_seconds("q") == 0
    clock.now += 200
    updates.say("temporal_request_latency")
    assert polls.silent_seconds("q") == 200


def test_worker_with_a_task_in_hand_need_not_poll() -> None:
    clock, updates = Clock(), Updates()
    polls = PollWatch(updates, clock)
    polls.begin("q")
    updates.say("temporal_worker_task_slots_used", 1)
    updates.say("temporal_worker_task_slots_used", 0, kind="WorkflowWorker")
    assert polls.silent_seconds("q") == 0
    clock.now += 3600
    assert polls.silent_seconds("q") == 0
    updates.say("temporal_worker_task_slots_used", 0)
    clock.now += 10
    assert polls.silent_seconds("q") == 10


def test_another_worker_of_the_queue_begins_anew() -> None:
    clock, updates = Clock(), Updates()
    polls = PollWatch(updates, clock)
    polls.begin("q")
    updates.say("temporal_worker_task_slots_used", 1)
    polls.silent_seconds("q")
    polls.begin("q")  # what the last one held is not this one's
    clock.now += 30
    assert polls.silent_seconds("q") == 30


def test_process_whose_engine_hangs_is_ended_and_one_that_is_slow_is_not() -> None:
    codes: list[int] = []
    end_if_hung(599.0, codes.append)
    assert codes == []
    end_if_hung(601.0, codes.append)
    assert codes == [1]


@activity.defn(name="nothing")
async def nothing() -> None:
    """An activity nobody calls."""


async def test_polls_of_a_real_worker_are_seen_and_a_silent_one_is_made_anew(temporal_server: TemporalServer) -> None:
    runtime, made = make_runtime(), list[Worker]()
    stop, twice = asyncio.Event(), asyncio.Event()

    class Deaf(PollWatch):
        """Hears the first worker's polls no more."""

        def silent_seconds(self, queue: str) -> float:
            heard = super().silent_seconds(queue)
            return 1e6 if len(made) == 1 and heard < 60 else heard

    async def make() -> Worker:
        client = await connect(temporal_server.address, temporal_server.namespace, runtime=runtime)
        made.append(make_worker(client, "watched-queue", activities=[nothing], max_concurrent_activities=1, graceful_seconds=0))
        if len(made) == 2:
            twice.set()
        return made[-1]

    real = runtime.watch
    runtime.watch = Deaf(real._updates)
    supervised = asyncio.create_task(supervise(make, stop))
    await asyncio.wait_for(twice.wait(), 30)
    await asyncio.sleep(0.5)
    for _ in range(100):
        if runtime.watch._queues["watched-queue"].slots_used:
            break
        await asyncio.sleep(0.1)
    stop.set()
    await asyncio.wait_for(supervised, 20)
    assert len(made) == 2
    assert made[0] is not made[1]


async def test_loop_that_is_held_is_told_and_one_that_runs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(connection, "LAG_SECONDS", 0.5)
    config = SimpleNamespace(config=SimpleNamespace(runtime=None))
    worker = cast(Worker, SimpleNamespace(task_queue="q", client=SimpleNamespace(service_client=config)))
    with structlog.testing.capture_logs() as told:
        watching = asyncio.create_task(connection._watch(worker, lambda: 0.0))
        await asyncio.sleep(0.1)
        assert told == []
        time.sleep(0.8)
        await asyncio.sleep(0.1)
        watching.cancel()
    assert [(line["event"], line["queue"]) for line in told] == [("loop_lagging", "q")]
    assert 0.5 < told[0]["seconds"] < 5
