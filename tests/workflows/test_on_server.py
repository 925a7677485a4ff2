"""Workflows on Temporal's dev server, with stand-in activities: what the time-skipping server cannot show."""

import asyncio
import uuid
from dataclasses import dataclass

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from activities.connection import make_worker
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationInput, EvaluationResult
from stoa.contracts.fleet_messages import Hello, SessionInput, SweepRequest, SweepResult
from stoa.contracts.messages import StopConditions
from tests.workflows.test_mac_session import given, only, session, stop
from tests.workflows.test_mac_session import until as until_session
from tests.workflows.test_run_workflow import rules, running, until
from tests.workflows.world import World
from workflows.evaluation import EvaluationWorkflow
from workflows.mac_session import MacSessionWorkflow

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Env:
    """What the stand-in harness needs of an environment."""

    client: Client


async def test_wall_clock_ends_a_step_that_waits_for_groups(client: Client) -> None:
    world = World(client, step_gate=asyncio.Event())
    given = rules(stop=StopConditions(max_seconds=3.0))
    async with running(Env(client), given, world) as handle:
        result = await handle.result()
    assert world.cancelled_steps == 1
    assert "wall clock" in result.end_reason
    assert world.head_states[-1] == "stopped"


async def test_cancelled_workflow_ends_in_good_order(client: Client) -> None:
    world = World(client, step_gate=asyncio.Event())
    async with running(Env(client), rules(), world) as handle:
        await until(handle, lambda s: "step 1" in s.waiting_for)
        await handle.cancel()
        result = await handle.result()
    assert result.end_reason == "cancelled in Temporal"
    assert world.head_states[-1] == "stopped"


async def test_memory_of_a_session_survives_continue_as_new(client: Client) -> None:
    world = World(client)
    world.on_grant = only(19)
    start = given(continue_after_events=60)
    async with session(Env(client), start, world) as handle:
        newest = client.get_workflow_handle_for(MacSessionWorkflow.run, handle.id)
        await until_session(newest, lambda status: status.num_sweeps == 20)
        assert (await newest.describe()).run_id != handle.first_execution_run_id
        status = await stop(newest)
    assert [one.sweep for one in world.swept] == list(range(20))
    assert (status.num_groups, status.decode_seconds) == (40, 40.0)
    assert [event.event for event in world.fleet] == ["joined"]


class Fleet:
    """Sessions of some Macs with one world, and an evaluation among them."""

    def __init__(self, client: Client, world: World, hosts: tuple[str, ...]) -> None:
        self.client, self.world, self.hosts = client, world, hosts
        self.run = f"r{uuid.uuid4().hex[:8]}"
        world.hosts = hosts
        world.on_grant = only(-1)

    async def evaluate(self, *, serve: tuple[str, ...] | None = None, **changes: object) -> EvaluationResult:
        control = names.control_queue(self.run)
        workers = [
            make_worker(
                self.client,
                control,
                workflows=[MacSessionWorkflow, EvaluationWorkflow],
                activities=self.world.desk_activities(),
                graceful_seconds=0,
            )
        ]
        for host in self.hosts if serve is None else serve:
            queue = names.mac_queue(self.run, host)
            workers.append(
                make_worker(self.client, queue, activities=self.world.mac_activities(), max_concurrent_activities=1, graceful_seconds=0)
            )
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            for host in self.hosts:
                await self.client.start_workflow(
                    names.MAC_SESSION,
                    SessionInput(self.run, host, heartbeat_seconds=6),
                    id=names.session_workflow_id(self.run, host),
                    task_queue=control,
                    start_signal=names.HELLO,
                    start_signal_args=[Hello(host, "n")],
                )
            start = EvaluationInput(self.run, "v4-every", 4, **changes)  # type: ignore[arg-type]
            workflow_id = names.evaluation_workflow_id(self.run, "v4-every")
            return await self.client.execute_workflow(EvaluationWorkflow.run, start, id=workflow_id, task_queue=control)
        finally:
            await asyncio.gather(*(worker.shutdown() for worker in workers))
            await asyncio.gather(*tasks)


async def test_evaluation_is_split_over_macs_and_every_question_is_asked_once(client: Client) -> None:
    world = World(client)
    result = await Fleet(client, world, ("mac-a", "mac-b")).evaluate(num_questions=512, questions_a_part=40)
    # the task has 150 held-out questions: four parts of 40, 40, 40 and 30
    asked = [question for request in world.swept for question in request.question_ids]
    assert sorted(asked) == sorted(f"held-{i}" for i in range(150))
    assert {request.version for request in world.swept} == {4}
    (summarised,) = world.summarised
    assert [key.rsplit("/", 1)[1].split("-")[0] for key in summarised.keys] == ["0", "1", "2", "3"]
    assert summarised.num_questions == 150
    assert world.reported == [result]


async def test_part_of_a_failing_mac_is_given_to_another_and_counted_once(client: Client) -> None:
    world = World(client)
    failed: list[int] = []

    def fail_on_a(request: SweepRequest) -> SweepResult | None:
        if not request.evaluation.endswith("every") or failed or request.host != "mac-a":
            return None
        failed.append(request.part)
        raise ApplicationError("disk full", type="ServiceUnavailableError", non_retryable=True)

    world.on_sweep = fail_on_a
    await Fleet(client, world, ("mac-a", "mac-b")).evaluate(num_questions=120, questions_a_part=40)
    (summarised,) = world.summarised
    assert len(summarised.keys) == 3
    players = [request.host for request in world.swept if request.part == failed[0]]
    assert players == ["mac-a", "mac-b"]


async def test_part_of_a_silent_mac_is_given_to_another(client: Client) -> None:
    world = World(client)
    fleet = Fleet(client, world, ("mac-a", "mac-b"))
    await fleet.evaluate(serve=("mac-b",), num_questions=80, questions_a_part=40, part_timeout_seconds=3)
    (summarised,) = world.summarised
    assert [key.split("-")[-1] for key in summarised.keys] == ["b", "b"]


async def test_evaluation_without_macs_fails_in_time_and_says_so(client: Client) -> None:
    world = World(client)
    fleet = Fleet(client, world, ())
    with pytest.raises(WorkflowFailureError) as caught:
        await fleet.evaluate(num_questions=80, questions_a_part=40, timeout_seconds=3)
    assert "0 of 2 parts came within 3 s" in str(caught.value.cause)
    (reported,) = world.reported
    assert "0 of 2 parts" in reported.error
