"""Parts that go silent without dying: the control plane away, a trainer frozen, a path that a router forgot."""

import asyncio
import os
import signal
import time
import uuid
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client

from activities.connection import connect, make_runtime, make_worker, supervise
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.fleet_messages import SessionStatus
from stoa.contracts.messages import Ask, RunInput, RunStatus, StopConditions
from tests.servers import TemporalServer
from tests.workflows.folder import Folder
from tests.workflows.relay import Relay
from tests.workflows.stub_worker import HEARTBEAT_SECONDS
from tests.workflows.test_faults import Handle, Processes, audit, processes, until  # noqa: F401 - a fixture
from workflows.run import RunWorkflow

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults, pytest.mark.timeout(200)]
NO_EVALUATION = EvaluationPlan(every_versions=0, num_questions_final=0)


async def start(client: Client, run: str) -> Handle:
    given = RunInput(run, StopConditions(), NO_EVALUATION, steps_per_version=2, heartbeat_seconds=HEARTBEAT_SECONDS)
    await client.start_workflow(RunWorkflow.run, given, id=names.run_workflow_id(run), task_queue=names.control_queue(run))
    return client.get_workflow_handle_for(RunWorkflow.run, names.run_workflow_id(run))


async def stop(handle: Handle, folder: Folder) -> None:
    await handle.execute_update(names.STOP, Ask("enough"), result_type=RunStatus)
    await handle.result()
    audit(folder)


def sweeps(folder: Folder, host: str) -> int:
    """Sweeps of which a group is there."""
    return len({key.rsplit("-", 1)[0] for key in folder.keys("groups") if key.startswith(f"groups/{host}-")})


async def test_mac_plays_on_while_the_control_plane_is_away_and_reports_later(client: Client, processes: Processes) -> None:  # noqa: F811
    """Grants for five sweeps of a second each are held: an outage as long as they last costs no decoding."""
    run, folder = processes.run, Folder(processes.root)
    for role, name in (("control", "control"), ("trainer", "box-1"), ("mac", "mac-1")):
        processes.start(role, name)
    handle = await start(client, run)
    session = client.get_workflow_handle(names.session_workflow_id(run, "mac-1"))
    await until(handle, lambda status: status.step >= 4)
    for _ in range(200):
        if (await session.query(names.SESSION_QUERY, result_type=SessionStatus)).num_sweeps >= 4:
            break
        await asyncio.sleep(0.1)
    before = await session.query(names.SESSION_QUERY, result_type=SessionStatus)
    processes.kill("control")
    had, killed_at = sweeps(folder, "mac-1"), time.monotonic()
    while sweeps(folder, "mac-1") < had + 4 and time.monotonic() < killed_at + 25:
        await asyncio.sleep(0.1)
    assert sweeps(folder, "mac-1") >= had + 4  # the one that was asked for is one of them
    processes.start("control", "control")
    status = before
    for _ in range(300):
        status = await session.query(names.SESSION_QUERY, result_type=SessionStatus)
        if status.num_unasked > before.num_unasked and status.num_sweeps >= before.num_sweeps + 5:
            break
        await asyncio.sleep(0.1)
    assert status.num_unasked > before.num_unasked
    assert status.num_sweeps >= before.num_sweeps + 5
    assert status.num_redone == before.num_redone
    await stop(handle, folder)


async def test_trainer_that_was_frozen_comes_back_to_a_run_that_is_another_ones(client: Client, processes: Processes) -> None:  # noqa: F811
    run, folder = processes.run, Folder(processes.root)
    for role, name in (("control", "control"), ("trainer", "box-1"), ("mac", "mac-1")):
        processes.start(role, name)
    handle = await start(client, run)
    before = await until(handle, lambda status: status.step >= 3)
    os.kill(processes.alive["box-1"].pid, signal.SIGSTOP)
    processes.start("trainer", "box-2")
    taken = await until(handle, lambda status: status.token > before.token and status.step > before.step, 60)
    os.kill(processes.alive["box-1"].pid, signal.SIGCONT)
    # Whatever the revived one does with the tasks it was handed, the other keeps its lease.
    later = await until(handle, lambda status: status.step >= taken.step + 12)
    assert (later.token, later.lease) == (taken.token, taken.lease)
    assert folder.read_head()["epoch"] == taken.token
    await stop(handle, folder)


async def pollers(client: Client, queue: str) -> int:
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    )
    return len((await client.workflow_service.describe_task_queue(request)).pollers)


async def test_half_open_connection_is_noticed_within_a_minute(temporal_server: TemporalServer, client: Client) -> None:
    """The path is silent, neither end is told: polls must begin anew elsewhere without anybody's help."""
    queue = f"q{uuid.uuid4().hex[:8]}"
    done: list[float] = []

    @activity.defn(name="ping")
    async def ping() -> None:
        done.append(time.monotonic())

    async with Relay(temporal_server.address) as relay:
        connected = await connect(relay.address, temporal_server.namespace, runtime=make_runtime())
        ends = asyncio.Event()

        async def make() -> object:
            return make_worker(connected, queue, activities=[ping], max_concurrent_activities=1, graceful_seconds=0)

        supervised = asyncio.create_task(supervise(make, ends))  # type: ignore[arg-type]
        while not await pollers(client, queue):
            await asyncio.sleep(0.1)
        relay.forget_connections()
        began = time.monotonic()
        handle = await client.start_activity("ping", id=queue, task_queue=queue, start_to_close_timeout=timedelta(seconds=5))
        await asyncio.wait_for(handle.result(), 60)
        print(f"noticed after {done[0] - began:.1f} s")
        assert done[0] - began < 60
        ends.set()
        await supervised
