"""Records the histories that `tests/workflows/test_histories.py` replays: `python -m tests.histories.record`.

Run it when a workflow gains a path worth keeping, never to make a failing replay pass: a history that no longer replays
means that running workflows would break, and the change needs `workflow.patched`.
"""

import asyncio
import json
import re
import tempfile
from pathlib import Path

from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from activities.connection import connect
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.fleet_messages import Hello, SessionStatus, SweepRequest, SweepResult
from stoa.contracts.messages import Ask, RunStatus, StepRequest, StepResult, StopConditions
from tests.servers import temporal_server
from tests.workflows.test_mac_session import given, only, session, stop
from tests.workflows.test_mac_session import until as until_session
from tests.workflows.test_on_server import Env, Fleet
from tests.workflows.test_run_workflow import rules, running, until
from tests.workflows.world import World, error, scored

HERE = Path(__file__).parent
MACHINE = re.compile(r"\d+@[\w.-]+")


def scrub(value: object) -> object:
    """`value` without names of machines, processes and folders."""
    if isinstance(value, dict):
        return {key: "" if key == "stackTrace" else scrub(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [scrub(inner) for inner in value]
    return MACHINE.sub("worker", value) if isinstance(value, str) else value


async def keep(client: Client, workflow_id: str, name: str, run_id: str | None = None) -> None:
    history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
    tree = {"workflow_id": workflow_id, "history": scrub(json.loads(history.to_json()))}
    (HERE / f"{name}.json").write_text(json.dumps(tree, indent=0, sort_keys=True) + "\n")


async def record_run(client: Client) -> None:
    """A lost lease, evaluations, a pause, a continue-as-new and a stop."""
    world = World(client, hosts=("mac-1",), step_seconds=0.05)
    world.on_evaluation = lambda start: scored(start.input.run, start.input.evaluation, start.input.version)
    failed: list[int] = []

    def lose_once(request: StepRequest) -> StepResult | None:
        if request.step == 6 and not failed:
            failed.append(6)
            raise error("LostStateError", hopeless=True)
        return StepResult("starved", 11, reason="no groups", wait_seconds=5) if request.step == 12 else None

    world.on_step = lose_once
    plan = EvaluationPlan(every_versions=1, num_questions=128, num_questions_final=512)
    given = rules(stop=StopConditions(max_steps=100, max_seconds=600), evaluation=plan, continue_after_events=140)
    async with running(Env(client), given, world) as handle:  # type: ignore[arg-type]
        await until(handle, lambda status: status.step >= 5)
        await handle.execute_update(names.PAUSE, Ask("a look"), result_type=RunStatus)
        await until(handle, lambda _: world.head_state == "paused")
        await handle.execute_update(names.RESUME, Ask(), result_type=RunStatus)
        newest = client.get_workflow_handle(handle.id)
        await until(newest, lambda status: status.step == 11)  # type: ignore[arg-type]
        await newest.execute_update(names.STOP, Ask("enough"), result_type=RunStatus)
        await newest.result()
    await keep(client, handle.id, "run_first", handle.first_execution_run_id)
    await keep(client, handle.id, "run_last")


async def record_session(client: Client) -> None:
    """A failed sweep, an eval part elsewhere, a Mac that drains and comes back, a run that stops."""
    world = World(client)
    world.on_grant = only(3)
    script = ["fail", "", "draining", "", ""]

    def play(request: SweepRequest) -> SweepResult | None:
        match script.pop(0) if script else "":
            case "fail":
                raise ApplicationError("disk full", type="ServiceUnavailableError")
            case "draining":
                return SweepResult("draining", request.sweep, num_groups=1)
            case _:
                return None

    world.on_sweep = play
    async with session(Env(client), given(), world) as handle:  # type: ignore[arg-type]
        await until_session(handle, lambda status: status.state == "away")
        await handle.signal(names.HELLO, Hello("mac-1", "nonce-2"))
        await until_session(handle, lambda status: status.num_sweeps == 4)
        status: SessionStatus = await stop(handle)
        assert status.num_redone == 1
    await keep(client, handle.id, "session")


async def record_evaluation(client: Client) -> None:
    """Two Macs, one of which fails a part; and a session that played parts."""
    world = World(client)
    failed: list[int] = []

    def fail_once(request: SweepRequest) -> SweepResult | None:
        if request.host == "mac-a" and not failed:
            failed.append(request.part)
            raise ApplicationError("disk full", type="ServiceUnavailableError")
        return None

    world.on_sweep = fail_once
    fleet = Fleet(client, world, ("mac-a", "mac-b"))
    await fleet.evaluate(num_questions=120, questions_a_part=30)
    await keep(client, names.evaluation_workflow_id(fleet.run, "v4-every"), "evaluation")
    await keep(client, names.session_workflow_id(fleet.run, "mac-b"), "session_examined")
    starved = Fleet(client, World(client), ())
    try:
        await starved.evaluate(num_questions=60, questions_a_part=30, timeout_seconds=2)
    except WorkflowFailureError:
        await keep(client, names.evaluation_workflow_id(starved.run, "v4-every"), "evaluation_starved")


async def main(address: str) -> None:
    client = await connect(address, "default")
    await record_run(client)
    await record_session(client)
    await record_evaluation(client)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, temporal_server(Path(folder)) as server:
        asyncio.run(main(server.address))
