"""Real worker processes killed, paused and reset in mid-run; the audit reads the books they kept."""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowHandle

from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.fleet_messages import SessionStatus
from stoa.contracts.messages import Ask, RunInput, RunResult, RunStatus, StopConditions
from tests.servers import TemporalServer
from tests.workflows.folder import Folder
from tests.workflows.stub_worker import HEARTBEAT_SECONDS
from workflows.run import RunWorkflow

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults, pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[2]
Handle = WorkflowHandle[RunWorkflow, RunResult]


class Processes:
    """The worker processes of one run."""

    def __init__(self, address: str, run: str, root: Path) -> None:
        self.address, self.run, self.root = address, run, root
        self.alive: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, name: str) -> None:
        command = [sys.executable, "-m", "tests.workflows.stub_worker", role, self.address, self.run, str(self.root), name]
        log = (self.root / f"{name}.log").open("ab")
        self.alive[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        log.close()

    def kill(self, name: str) -> None:
        process = self.alive.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for process in self.alive.values():
            process.terminate()
        for process in self.alive.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def processes(temporal_server: TemporalServer, tmp_path: Path) -> Iterator[Processes]:
    found = Processes(temporal_server.address, f"r{uuid.uuid4().hex[:8]}", tmp_path)
    try:
        yield found
    finally:
        found.end()


async def until(handle: Handle, wanted: Callable[[RunStatus], bool], seconds: float = 40) -> RunStatus:
    status = None
    for _ in range(int(seconds / 0.2)):
        status = await handle.query(names.STATUS_QUERY, result_type=RunStatus)
        if wanted(status):
            return status
        await asyncio.sleep(0.2)
    raise AssertionError(status)


async def reset_to_middle(client: Client, workflow_id: str) -> None:
    """What `temporal workflow reset` does: go back to a workflow task in the middle of the present history."""
    handle = client.get_workflow_handle(workflow_id)
    description = await handle.describe()
    assert description.run_id is not None
    pinned = client.get_workflow_handle(workflow_id, run_id=description.run_id)
    done = [
        event.event_id async for event in pinned.fetch_history_events() if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    ]
    request = ResetWorkflowExecutionRequest(
        namespace=client.namespace,
        workflow_execution=WorkflowExecution(workflow_id=workflow_id, run_id=description.run_id),
        reason="test",
        workflow_task_finish_event_id=done[len(done) // 2],
        request_id=uuid.uuid4().hex,
    )
    await client.workflow_service.reset_workflow_execution(request)


def audit(folder: Folder) -> None:
    """One chain of steps without a hole, no group in it twice, no version twice, versions only by the lease of their time."""
    chain = folder.lineage()[::-1]
    assert [manifest["step"] for manifest in chain] == list(range(1, folder.read_head()["step"] + 1))
    consumed = [group for manifest in chain for group in manifest["consumed"]]
    assert len(consumed) == len(set(consumed))
    epochs = [manifest["epoch"] for manifest in chain]
    assert epochs == sorted(epochs)
    versions = [folder.read(key) for key in folder.keys("versions")]
    assert len(versions) == folder.read_head()["version"] + 1
    assert [one["epoch"] for one in versions] == sorted(one["epoch"] for one in versions)


async def test_run_outlives_its_parts_and_no_group_counts_twice(client: Client, processes: Processes) -> None:
    run, folder = processes.run, Folder(processes.root)
    for role, name in (("control", "control"), ("trainer", "box-1"), ("mac", "mac-1"), ("mac", "mac-2")):
        processes.start(role, name)
    plan = EvaluationPlan(every_versions=5, num_questions=6, num_questions_final=12, questions_a_part=4, part_timeout_seconds=10)
    given = RunInput(run, StopConditions(), plan, steps_per_version=2, heartbeat_seconds=HEARTBEAT_SECONDS, continue_after_events=150)
    handle: Handle = await client.start_workflow(RunWorkflow.run, given, id=names.run_workflow_id(run), task_queue=names.control_queue(run))
    first_run_id = handle.first_execution_run_id
    handle = client.get_workflow_handle_for(RunWorkflow.run, handle.id)
    await until(handle, lambda status: status.step >= 4 and status.num_macs == 2)

    processes.kill("mac-1")  # in the middle of a sweep, almost surely: it does little else
    await until(handle, lambda status: status.num_macs == 1)
    processes.start("mac", "mac-1")
    await until(handle, lambda status: status.num_macs == 2)

    processes.kill("mac-2")  # and back before anybody has noticed: the new worker waits for the old one's silence
    processes.start("mac", "mac-2")
    sessions = client.get_workflow_handle(names.session_workflow_id(run, "mac-2"))
    had = (await sessions.query(names.SESSION_QUERY, result_type=SessionStatus)).num_sweeps
    for _ in range(100):
        now = await sessions.query(names.SESSION_QUERY, result_type=SessionStatus)
        if now.num_sweeps > had + 1:
            break
        await asyncio.sleep(0.2)
    assert now.num_sweeps > had + 1
    assert (now.state, now.num_redone <= 1) == ("live", True)  # 0 if it was waiting for room when it was killed

    before = await until(handle, lambda status: status.token > 0)
    processes.kill("box-1")
    processes.start("trainer", "box-2")
    after = await until(handle, lambda status: status.token > before.token and status.step > before.step)
    assert after.lease > before.lease

    await handle.execute_update(names.PAUSE, Ask("test"), result_type=RunStatus)
    await until(handle, lambda _: folder.read_head()["state"] == "paused")
    await until(handle, lambda status: "paused" in status.waiting_for)
    await asyncio.sleep(1.5)  # the step that was being made is told
    held = (await handle.query(names.STATUS_QUERY, result_type=RunStatus)).step
    await asyncio.sleep(1.5)
    assert (await handle.query(names.STATUS_QUERY, result_type=RunStatus)).step == held
    await handle.execute_update(names.RESUME, Ask(), result_type=RunStatus)
    resumed = await until(handle, lambda status: status.step > held + 2)

    await reset_to_middle(client, handle.id)
    await reset_to_middle(client, names.session_workflow_id(run, "mac-2"))
    await until(handle, lambda status: status.step > resumed.step + 4 and status.lease > after.lease)

    await handle.execute_update(names.STOP, Ask("enough"), result_type=RunStatus)
    result = await handle.result()
    assert result.end_reason == "enough"
    assert folder.read_head()["state"] == "stopped"
    assert (await handle.describe()).run_id != first_run_id
    assert result.step == folder.read_head()["step"] > 10
    audit(folder)
    results = {one.evaluation: one for one in result.evaluations}
    assert (results["v0-first"].num_questions, results[f"v{result.version}-last"].num_questions) == (12, 12)
    assert not any(one.error for one in results.values())
