"""Queries that waited out an outage bring events along that no workflow task has seen: nothing may be decided at an old time."""

import asyncio
import uuid

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

from activities.connection import connect
from tests.servers import TemporalServer
from tests.workflows.relay import Relay
from workflows.clock import TaskClock

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults, pytest.mark.timeout(200)]
NO_POLLER_SECONDS = 13.0
"""After ten seconds without one the server forgets which worker remembers a workflow, and sends queries with all of its history."""


@workflow.defn
class Diary:
    """Writes down when each signal came; keeps only the time it decided by."""

    def __init__(self) -> None:
        self.clock, self.times = TaskClock(), list[float]()

    @workflow.run
    async def run(self) -> list[float]:
        await workflow.wait_condition(lambda: len(self.times) == 3)
        return self.times

    @workflow.signal
    def note(self) -> None:
        self.times.append(self.clock.now())

    @workflow.query
    def num_notes(self) -> int:
        return len(self.times)


async def test_events_that_come_with_a_query_are_taken_up_at_their_own_time(temporal_server: TemporalServer) -> None:
    queue = f"diary-{uuid.uuid4().hex[:8]}"
    direct = await connect(temporal_server.address, temporal_server.namespace)
    async with Relay(temporal_server.address) as relay:
        through = await connect(relay.address, temporal_server.namespace)
        async with Worker(through, task_queue=queue, workflows=[Diary], workflow_runner=UnsandboxedWorkflowRunner()):
            handle = await direct.start_workflow(Diary.run, id=queue, task_queue=queue)
            await handle.signal(Diary.note)
            assert await handle.query(Diary.num_notes) == 1
            relay.cut()
            await asyncio.sleep(NO_POLLER_SECONDS)
            waiting = [asyncio.create_task(handle.query(Diary.num_notes)) for _ in range(12)]
            await asyncio.sleep(0.7)
            await handle.signal(Diary.note)
            await asyncio.sleep(0.5)
            relay.mend()
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waiting, timeout=2.0)  # those that were taken along; of the rest the server says no word for 30 s
            for query in waiting:
                query.cancel()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert len(answers) > sum(isinstance(answer, asyncio.CancelledError) for answer in answers)
            assert {answer for answer in answers if isinstance(answer, int)} <= {1, 2}
            await handle.signal(Diary.note)
            times = await asyncio.wait_for(handle.result(), 60)
    history = await handle.fetch_history()
    began = EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED
    tasks = {event.event_time.ToNanoseconds() / 1e9 for event in history.events if event.event_type == began}
    assert set(times) <= tasks
    assert len(set(times)) == 3
    await Replayer(workflows=[Diary], workflow_runner=UnsandboxedWorkflowRunner()).replay_workflow(history)
