"""Records the histories that `tests/workflows/test_histories.py` replays: `python -m tests.histories.record`.

Run it when a workflow gains a path worth keeping: give it a name of its own; what is there already is never written over.
A history that no longer replays means that running workflows would break, and the change needs `workflow.patched`.
`run_first`, `run_last`, `session`, `session_examined` and the evaluations were recorded before leases were numbered by
what HEAD says and before grants were held ahead.
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
from stoa.contracts.fleet_messages import Admitted, Census, Hello, MacFacts, SessionStatus, Standing, SweepRequest, SweepResult
from stoa.contracts.messages import AnchorCadence, Ask, MacAsk, RunStatus, StepRequest, StepResult, StopConditions
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
    if (HERE / f"{name}.json").exists():
        return
    history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
    tree = {"workflow_id": workflow_id, "history": scrub(json.loads(history.to_json()))}
    (HERE / f"{name}.json").write_text(json.dumps(tree, indent=0, sort_keys=True) + "\n")


async def record_run(client: Client) -> None:
    """A lost lease, evaluations, a pause, a quarantine, a fence, censuses, a continue-as-new and a stop."""
    world = World(client, hosts=("mac-1",), step_seconds=0.05)
    world.on_evaluation = lambda start: scored(start.input.run, start.input.evaluation, start.input.version)
    failed: list[int] = []

    def lose_once(request: StepRequest) -> StepResult | None:
        if request.step == 6 and not failed:
            failed.append(6)
            raise error("LostStateError", hopeless=True)
        if request.token != world.epoch:
            raise error("FencedError", hopeless=True)
        return StepResult("starved", 11, reason="no groups", wait_seconds=5, num_missing=3) if request.step == 12 else None

    world.on_step = lose_once
    plan = EvaluationPlan(every_versions=1, num_questions=128, num_questions_final=512)
    world.on_census = lambda request: Census((MacFacts("mac-1", sweep=3, version=1, tokens_per_second=50.0),), 1)
    given = rules(
        stop=StopConditions(max_steps=100, max_seconds=600, max_gpu_hours=9),
        evaluation=plan,
        continue_after_events=160,
        groups_per_step=8,
        census_seconds=1.0,
    )
    async with running(Env(client), given, world) as handle:  # type: ignore[arg-type]
        await until(handle, lambda status: status.step >= 5)
        await handle.execute_update(names.QUARANTINE, MacAsk("mac-9", "a look", unseen=True), result_type=RunStatus)
        await handle.execute_update(names.SET_ANCHOR_CADENCE, AnchorCadence(3, by_join_cost=True), result_type=RunStatus)
        await handle.execute_update(names.PAUSE, Ask("a look"), result_type=RunStatus)
        await until(handle, lambda _: world.head_state == "paused")
        await handle.execute_update(names.RESUME, Ask(), result_type=RunStatus)
        newest = client.get_workflow_handle(handle.id)
        await until(newest, lambda status: status.step == 11)  # type: ignore[arg-type]
        world.epoch = 9001  # somebody else took the run: the next lease is asked for too low, and then found in HEAD
        await until(newest, lambda status: status.token > 9001)  # type: ignore[arg-type]
        await newest.execute_update(names.STOP, Ask("enough"), result_type=RunStatus)
        await newest.result()
    await keep(client, handle.id, "run_fleet_first", handle.first_execution_run_id)
    await keep(client, handle.id, "run_fleet_last")


async def record_drain(client: Client) -> None:
    """A run that drains: steps with too few groups, a census, an end."""
    world = World(client)
    world.on_step = lambda request: StepResult("starved", 3, wait_seconds=2, num_missing=5) if request.step == 3 else None
    world.on_census = lambda request: Census((), 0, "", num_groups_running=0, num_groups_waiting=3)
    async with running(Env(client), rules(stop=StopConditions(), groups_per_step=8), world) as handle:  # type: ignore[arg-type]
        await until(handle, lambda status: status.step == 2)
        await handle.execute_update(names.DRAIN, Ask("enough"), result_type=RunStatus)
        await handle.result()
    await keep(client, handle.id, "run_drained")


async def record_bounded_drain(client: Client) -> None:
    """A drain that ends by its bound: a Mac is said to play on for ever."""
    world = World(client)
    world.on_step = lambda request: StepResult("starved", 3, wait_seconds=2, num_missing=5) if request.step == 3 else None
    world.on_census = lambda request: Census((), 1, "", num_groups_running=5, num_groups_waiting=0)
    plan = EvaluationPlan(every_versions=0, num_questions_final=0, part_timeout_seconds=2.0)
    given = rules(stop=StopConditions(), groups_per_step=8, evaluation=plan, starved_seconds=1.0)
    async with running(Env(client), given, world) as handle:  # type: ignore[arg-type]
        await until(handle, lambda status: status.step == 2)
        await handle.execute_update(names.DRAIN, Ask("enough"), result_type=RunStatus)
        result = await handle.result()
    assert result.end_reason in ("drained: 5 groups were left", "drained as far as its time allowed: 5 groups were left")
    await keep(client, handle.id, "run_drain_bound")


async def record_session(client: Client) -> None:
    """A failed sweep, a Mac that ends and comes back, a quarantine and a release, a run that stops."""
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
        world.sweep_gate = asyncio.Event()
        world.on_grant = only(5)
        await until_session(handle, lambda _: world.swept[-1].sweep >= 4)
        await handle.signal(names.STANDING, Standing(handle.id, "mac-1", "quarantined", "a look"))
        await until_session(handle, lambda status: status.state == "quarantined")
        world.sweep_gate.set()
        await until_session(handle, lambda _: bool(world.notices))
        await handle.signal(names.STANDING, Standing(handle.id, "mac-1", "free"))
        await until_session(handle, lambda status: status.num_sweeps == 6)
        status: SessionStatus = await stop(handle)
        assert status.num_redone == 1
    await keep(client, handle.id, "session_ahead")


async def record_refused(client: Client) -> None:
    """A Mac whose build is too old."""
    world = World(client)
    world.on_admit = lambda request: Admitted(ok=False, reason="build 0.0.9 is too old")
    async with session(Env(client), given(), world, build="0.0.9") as handle:  # type: ignore[arg-type]
        await handle.result()
    await keep(client, handle.id, "session_refused")


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
    await keep(client, names.session_workflow_id(fleet.run, "mac-b"), "session_examined_ahead")
    starved = Fleet(client, World(client), ())
    try:
        await starved.evaluate(num_questions=60, questions_a_part=30, timeout_seconds=2)
    except WorkflowFailureError:
        await keep(client, names.evaluation_workflow_id(starved.run, "v4-every"), "evaluation_starved")


async def main(address: str) -> None:
    client = await connect(address, "default")
    await record_run(client)
    await record_drain(client)
    await record_bounded_drain(client)
    await record_session(client)
    await record_refused(client)
    await record_evaluation(client)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, temporal_server(Path(folder)) as server:
        asyncio.run(main(server.address))
