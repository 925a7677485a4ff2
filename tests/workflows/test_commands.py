"""The commands of docs/guides/temporal-ui.md, run one after another on a live run, with what they promise."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client

from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.fleet_messages import SessionStatus
from stoa.contracts.messages import RunInput, RunResult, RunStatus, StopConditions
from tests.workflows.folder import Folder
from tests.workflows.stub_worker import HEARTBEAT_SECONDS
from tests.workflows.test_faults import Processes, audit, processes, until  # noqa: F401 - a fixture
from workflows.run import RunWorkflow

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults, pytest.mark.timeout(200)]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "temporal-ui.md"
TEMPORAL = str(Path(sys.executable).parent / "temporal")


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


class Shell:
    """Runs the guide's commands for one run."""

    def __init__(self, address: str, run: str) -> None:
        self.address, self.run = address, run
        self.left = commands()

    async def next(self, start: str, **words: str) -> str:
        """The next command, which must begin with `start`. Fails if it does."""
        line = self.left.pop(0)
        assert line.startswith(start), line
        line = re.sub(r"\bdemo\b", self.run, line)
        for word, value in words.items():
            line = line.replace(word, value)
        command = [TEMPORAL, *shlex.split(line)[1:], "--address", self.address]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, f"{line}\n{output}"
        return output


async def pending(client: Client, workflow_id: str, kind: str, *, other_than: str = "", seconds: float = 30) -> PendingActivityInfo:
    """The activity of a kind that a workflow waits for, once its first heartbeat has come."""
    for _ in range(int(seconds / 0.05)):
        description = await client.get_workflow_handle(workflow_id).describe()
        for one in description.raw_description.pending_activities:
            if one.activity_type.name == kind and one.activity_id != other_than and one.heartbeat_details.payloads:
                return one
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {kind} is pending")


async def slow_sweep(client: Client, root: Path, workflow_id: str) -> str:
    """Id of a sweep that lasts long enough to be dealt with by hand: one that began after sweeps became slow."""
    before = await pending(client, workflow_id, names.SWEEP)
    (root / "slow").touch()
    return (await pending(client, workflow_id, names.SWEEP, other_than=before.activity_id)).activity_id


def beat_of(found: PendingActivityInfo) -> dict[str, object]:
    return json.loads(found.heartbeat_details.payloads[0].data)


async def session_status(client: Client, workflow_id: str) -> SessionStatus:
    return await client.get_workflow_handle(workflow_id).query(names.SESSION_QUERY, result_type=SessionStatus)


async def until_more_sweeps(client: Client, workflow_id: str, num_sweeps: int, seconds: float = 30) -> None:
    for _ in range(int(seconds / 0.2)):
        if (await session_status(client, workflow_id)).num_sweeps > num_sweeps:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(await session_status(client, workflow_id))


async def until_idle(client: Client, folder: Folder, workflow_id: str, seconds: float = 30) -> None:
    """Until a paused sweep's Mac has heard of it and stopped."""
    for _ in range(int(seconds / 0.2)):
        description = await client.get_workflow_handle(workflow_id).describe()
        if all(
            one.paused and one.state != PendingActivityState.PENDING_ACTIVITY_STATE_PAUSE_REQUESTED
            for one in description.raw_description.pending_activities
            if one.activity_type.name == names.SWEEP
        ):
            return
        await asyncio.sleep(0.2)
    raise AssertionError("the sweep still runs")


async def test_commands_of_the_guide_do_what_it_says(client: Client, processes: Processes) -> None:  # noqa: F811
    run, folder = processes.run, Folder(processes.root)
    for role, name in (("control", "control"), ("trainer", "box-1"), ("mac", "mac-1"), ("mac", "mac-2")):
        processes.start(role, name)
    plan = EvaluationPlan(every_versions=0, num_questions_final=8, questions_a_part=4, part_timeout_seconds=10)
    given = RunInput(run, StopConditions(), plan, steps_per_version=2, heartbeat_seconds=HEARTBEAT_SECONDS)
    await client.start_workflow(RunWorkflow.run, given, id=names.run_workflow_id(run), task_queue=names.control_queue(run))
    handle = client.get_workflow_handle_for(RunWorkflow.run, names.run_workflow_id(run))
    mac = names.session_workflow_id(run, "mac-1")
    await until(handle, lambda status: status.step >= 3 and status.num_macs == 2)
    shell = Shell(processes.address, run)

    assert f"run-{run}" in await shell.next("temporal workflow list")
    listed = await shell.next("temporal workflow list")
    assert mac in listed
    assert f"run-{run}" not in listed
    assert "waiting_for" in await shell.next("temporal workflow query")
    assert mac in await shell.next("temporal workflow query")
    assert "published_at" in await shell.next("temporal workflow query")
    assert "num_sweeps" in await shell.next("temporal workflow query")
    await shell.next("temporal workflow describe")
    await shell.next("temporal workflow describe")
    step = beat_of(await pending(client, handle.id, names.TRAIN_STEP))
    sweep = beat_of(await pending(client, mac, names.SWEEP))
    assert step.keys() == sweep.keys() == {"version", "step", "sweep", "last_key", "progress"}
    assert int(str(step["step"])) > 3 and int(str(step["version"])) >= 1 and step["progress"] and str(step["last_key"]).startswith("steps/")
    assert int(str(sweep["sweep"])) >= 1 and sweep["progress"] and str(sweep["last_key"]).startswith("groups/")

    assert "paused" in await shell.next("temporal workflow update execute")
    await until(handle, lambda _: folder.read_head()["state"] == "paused")
    await shell.next("temporal workflow update execute")
    await until(handle, lambda _: folder.read_head()["state"] == "running")

    other = names.session_workflow_id(run, "mac-2")
    assert "num_quarantined:1" in await shell.next("temporal workflow update execute")
    while (await session_status(client, other)).state != "quarantined":
        await asyncio.sleep(0.1)
    await shell.next("temporal workflow update execute")
    await until_more_sweeps(client, other, (await session_status(client, other)).num_sweeps)

    held = await slow_sweep(client, processes.root, mac)
    await shell.next("temporal activity pause", ACTIVITY_ID=held)
    await until_idle(client, folder, mac)
    (processes.root / "slow").unlink()
    before_pause = (await session_status(client, mac)).num_sweeps
    shipped = [key for key in folder.keys("groups") if "mac-1" in key]
    await asyncio.sleep(3)
    assert (await session_status(client, mac)).num_sweeps == before_pause
    assert [key for key in folder.keys("groups") if "mac-1" in key] == shipped
    await shell.next("temporal activity unpause", ACTIVITY_ID=held)
    await until_more_sweeps(client, mac, before_pause)
    held = await slow_sweep(client, processes.root, mac)
    now = (await session_status(client, mac)).num_sweeps
    await shell.next("temporal activity reset", ACTIVITY_ID=held)
    (processes.root / "slow").unlink()
    await until_more_sweeps(client, mac, now)

    before = await handle.query(names.STATUS_QUERY, result_type=RunStatus)
    assert "Resetting workflow" in await shell.next("temporal workflow reset")
    assert "Resetting workflow" in await shell.next("temporal workflow reset")
    await until(handle, lambda status: status.step > before.step + 2)
    await until_more_sweeps(client, mac, 1)

    await shell.next("temporal workflow cancel")
    await until(handle, lambda status: status.num_macs == 1)
    await shell.next("temporal workflow cancel")
    result: RunResult = await handle.result()
    assert result.end_reason == "cancelled in Temporal"
    assert not shell.left
    audit(folder)
    assert folder.read_head()["state"] == "stopped"
