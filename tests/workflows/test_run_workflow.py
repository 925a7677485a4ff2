"""RunWorkflow on the time-skipping server: lanes, leases, pauses, endings. Trainer and desk are stand-ins."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from temporalio.client import WorkflowFailureError, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from activities.connection import make_worker
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvalAsk, EvaluationInput, EvaluationPlan
from stoa.contracts.fleet_messages import Census, FleetEvent, FleetQuery
from stoa.contracts.messages import Ask, RunInput, RunResult, RunStatus, StepResult, StopConditions
from tests.workflows.world import World, error, scored
from workflows.run import RunWorkflow

pytestmark = pytest.mark.asyncio(loop_scope="module")
NO_EVALUATION = EvaluationPlan(every_versions=0, num_questions_final=0)


def rules(**changes: object) -> RunInput:
    base = RunInput(
        run=f"r{uuid.uuid4().hex[:8]}", stop=StopConditions(max_steps=8), evaluation=NO_EVALUATION, steps_per_version=4, heartbeat_seconds=5
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def running(env: WorkflowEnvironment, given: RunInput, world: World) -> AsyncIterator[WorkflowHandle[RunWorkflow, RunResult]]:
    """The workflow with its desk and a trainer that follows each lease to its queue."""
    desk = make_worker(
        env.client, names.control_queue(given.run), workflows=[RunWorkflow], activities=world.desk_activities(), graceful_seconds=0
    )
    boxes: list[Worker] = []

    async def serve_leases() -> None:
        served = set()
        while True:
            if world.epoch and world.epoch not in served:
                served.add(world.epoch)
                queue = names.lease_queue(given.run, world.epoch)
                box = make_worker(env.client, queue, activities=world.trainer_activities(), max_concurrent_activities=1, graceful_seconds=0)
                boxes.append(box)
                tasks.append(asyncio.create_task(box.run()))
            await asyncio.sleep(0.01)

    acquirer = make_worker(env.client, names.gpu_queue(given.run), activities=[world.acquire], graceful_seconds=0)
    tasks: list[asyncio.Task[None]] = []
    async with desk, acquirer:
        leases = asyncio.create_task(serve_leases())
        try:
            yield await env.client.start_workflow(
                RunWorkflow.run, given, id=names.run_workflow_id(given.run), task_queue=names.control_queue(given.run)
            )
        finally:
            leases.cancel()
            await asyncio.gather(*(box.shutdown() for box in boxes))
            await asyncio.gather(*tasks)


async def until(handle: WorkflowHandle[RunWorkflow, RunResult], wanted: object, seconds: float = 20) -> RunStatus:
    """Poll the status query until `wanted(status)`."""
    for _ in range(int(seconds / 0.05)):
        status = await handle.query(names.STATUS_QUERY, result_type=RunStatus)
        if wanted(status):  # type: ignore[operator]
            return status
        await asyncio.sleep(0.05)
    raise AssertionError(status)


async def test_steps_are_published_by_cadence_and_the_run_ends_stopped(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    given = rules(stop=StopConditions(max_steps=10), anchor_every_versions=2, checkpoint_every_versions=2)
    async with running(skipping, given, world) as handle:
        result = await handle.result()
        await asyncio.sleep(1.0)
        ended = await handle.query(names.STATUS_QUERY, result_type=RunStatus)
        assert ended.gpu_hours == result.gpu_hours, "nothing is used after the end"
    assert [step for _, step in world.trained] == list(range(1, 11))
    # version 0 came with the lease; 2 is the anchor's and the checkpoint's turn; the last one is always saved
    assert world.published == [(1, 4, False, False), (2, 8, True, True), (3, 10, True, True)]
    assert (result.step, result.version, result.end_reason) == (10, 3, "all 10 steps are done")
    assert world.head_states[-1] == "stopped"
    assert world.released == 1


async def test_step_is_told_how_many_groups_the_last_census_found_on_the_way(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, step_seconds=0.1)
    world.on_census = lambda request: Census((), 0, "", num_groups_running=5)
    async with running(skipping, rules(stop=StopConditions(max_steps=10_000), census_seconds=0.2), world) as handle:
        for _ in range(600):
            if world.steps and world.steps[-1].groups_running == 5:
                break
            await asyncio.sleep(0.05)
        await handle.terminate()
    assert (world.steps[0].groups_running, world.steps[-1].groups_running) == (-1, 5)


async def test_first_and_last_version_are_evaluated_in_full_and_others_by_cadence(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_evaluation = lambda start: scored(start.input.run, start.input.evaluation, start.input.version)
    plan = EvaluationPlan(every_versions=2, num_questions=128, num_questions_final=512)
    async with running(skipping, rules(stop=StopConditions(max_steps=20), evaluation=plan), world) as handle:
        result = await handle.result()
    asked = [(start.input.evaluation, start.input.version, start.input.num_questions) for start in world.evaluations]
    assert asked == [("v0-first", 0, 512), ("v2-every", 2, 128), ("v4-every", 4, 128), ("v5-last", 5, 512)]
    assert [one.evaluation for one in result.evaluations] == ["v0-first", "v2-every", "v4-every", "v5-last"]


async def test_run_examines_what_a_person_asks_for_before_it_ends(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, step_seconds=0.2)
    world.on_evaluation = lambda start: scored(start.input.run, start.input.evaluation, start.input.version)
    async with running(skipping, rules(stop=StopConditions(max_steps=1000)), world) as handle:
        await until(handle, lambda status: status.version >= 1)
        given = await handle.execute_update(names.EVALUATE, EvalAsk("mine", 1, 32, 8), result_type=EvaluationInput)
        assert (given.evaluation, given.version, given.num_questions, given.num_samples) == ("mine", 1, 32, 8)
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update(names.EVALUATE, EvalAsk("mine"), result_type=EvaluationInput)
        assert "was asked for before" in str(refused.value.cause)
        await handle.execute_update(names.STOP, Ask("enough"))
        result = await handle.result()
    assert [(one.evaluation, one.version) for one in result.evaluations] == [("mine", 1)]
    assert [(start.input.num_questions, start.input.num_samples) for start in world.evaluations] == [(32, 8)]


async def test_last_evaluation_that_never_answers_is_given_up_and_the_run_ends(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, hosts=("mac-1",))
    plan = EvaluationPlan(every_versions=0, num_questions_final=512, timeout_seconds=600)
    async with running(skipping, rules(evaluation=plan), world) as handle:
        result = await handle.result()
    assert [one.error for one in result.evaluations] == ["it brought no result in time"] * 2
    assert world.head_states[-1] == "stopped"


async def test_target_on_held_out_questions_ends_the_run(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, step_seconds=0.2)
    world.on_evaluation = lambda start: scored(
        start.input.run, start.input.evaluation, start.input.version, pass_at_1=0.2 + 0.1 * start.input.version
    )
    plan = EvaluationPlan(every_versions=1, num_questions=128, num_questions_final=512)
    stop = StopConditions(max_steps=1000, target_pass_at_1=0.6)
    async with running(skipping, rules(stop=stop, evaluation=plan), world) as handle:
        result = await handle.result()
    assert "pass@1 has reached 0.6" in result.end_reason
    assert result.step < 40


async def test_lease_lost_with_a_version_on_its_way_is_taken_from_the_version_before_it(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, waits_for_versions=False)

    def forget_once(request: object) -> StepResult | None:
        if world.step == 6 and len(world.acquisitions) == 1:
            raise error("LostStateError", hopeless=True)
        return None

    world.on_step = forget_once
    async with running(skipping, rules(), world) as handle:
        await handle.result()
    assert [request.min_version for request in world.acquisitions] == [-1, 0]


async def test_lost_memory_takes_the_run_anew_with_a_higher_lease_and_redoes_unsaved_steps(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    failed: list[int] = []

    def forget_once(request: object) -> StepResult | None:
        if world.step == 6 and not failed:
            failed.append(world.step)
            raise error("LostStateError", hopeless=True)
        return None

    world.on_step = forget_once
    async with running(skipping, rules(), world) as handle:
        result = await handle.result()
    tokens = [token for token, _ in world.trained]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 2
    assert [step for _, step in world.trained] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert result.step == 8


async def test_run_that_cannot_begin_fails_with_the_cause(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)

    def refuse(_: object) -> None:
        raise error("CheckpointError", hopeless=True)

    world.on_acquire = refuse
    async with running(skipping, rules(), world) as handle:
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
    assert "CheckpointError on purpose" in str(caught.value.cause)


async def test_fault_of_the_program_pauses_a_run_underway_and_resume_goes_on(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    broken = [True]

    def trip(_: object) -> None:
        if broken[0] and world.step == 4:
            raise error("NonFiniteError", hopeless=True)

    world.on_publish = trip
    async with running(skipping, rules(), world) as handle:
        status = await until(handle, lambda s: s.state == "paused")
        assert "NonFiniteError" in status.waiting_for
        await until(handle, lambda _: world.head_state == "paused")
        broken[0] = False
        await handle.execute_update(names.RESUME, Ask("fixed"), result_type=RunStatus)
        result = await handle.result()
    assert result.step == 8
    told = [state for state, _ in itertools.groupby(world.head_states)]  # a lease taken meanwhile makes the run tell a state again
    assert told == ["paused", "running", "draining", "stopped"]


async def test_pause_holds_steps_and_tells_head_and_refuses_a_second_pause(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, step_gate=asyncio.Event())
    async with running(skipping, rules(), world) as handle:
        await until(handle, lambda s: s.step == 0 and "step 1" in s.waiting_for)
        status = await handle.execute_update(names.PAUSE, Ask("lunch"), result_type=RunStatus)
        assert status.state == "paused"
        await until(handle, lambda _: world.head_state == "paused")  # while the step still runs
        with pytest.raises(Exception, match="failed"):
            await handle.execute_update(names.PAUSE, Ask(), result_type=RunStatus)
        world.step_gate.set()
        await until(handle, lambda s: s.step == 1)
        await asyncio.sleep(0.3)
        assert [step for _, step in world.trained] == [1]
        await handle.execute_update(names.RESUME, Ask(), result_type=RunStatus)
        assert (await handle.result()).step == 8


async def test_stop_publishes_and_saves_what_was_trained(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, step_seconds=0.2)

    def starve(request: object) -> StepResult | None:
        return StepResult("starved", 6, reason="no groups", wait_seconds=5) if world.step == 6 else None

    world.on_step = starve
    async with running(skipping, rules(stop=StopConditions(), checkpoint_every_versions=100), world) as handle:
        await until(handle, lambda s: s.step == 6)
        await handle.execute_update(names.STOP, Ask("enough"), result_type=RunStatus)
        result = await handle.result()
    assert (result.step, result.end_reason) == (6, "enough")
    assert world.published[-1] == (2, 6, True, True)


async def test_alarm_pauses(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)

    def alarm(request: object) -> StepResult | None:
        if world.step == 2:
            world.step = 3
            return StepResult("done", 3, alarm="gate_drop_rate 0.4 > 0.25")
        return None

    world.on_step = alarm
    async with running(skipping, rules(), world) as handle:
        status = await until(handle, lambda s: s.state == "paused")
        assert status.reason == "alarm at step 3: gate_drop_rate 0.4 > 0.25"
        assert "Macs play on" in status.waiting_for
        assert "paused" not in world.head_states, "HEAD tells the Macs nothing: they generate as far as admission lets them"
        await handle.execute_update(names.PAUSE, Ask("to look"), result_type=RunStatus)
        await until(handle, lambda s: world.head_state == "paused")
        await handle.execute_update(names.RESUME, Ask(), result_type=RunStatus)
        await handle.result()
    assert world.head_states.count("paused") == 1


async def test_memory_survives_continue_as_new(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, hosts=("mac-1", "mac-2"))
    given = rules(stop=StopConditions(max_steps=40), continue_after_events=60)
    async with running(skipping, given, world) as handle:
        await handle.signal(names.FLEET_EVENT, FleetEvent(given.run, "mac-3", "s", "joined", 7, place="attic"))
        first = handle.first_execution_run_id
        result = await handle.result()
        last = skipping.client.get_workflow_handle(handle.id)
        status = await last.query(names.STATUS_QUERY, result_type=RunStatus)
        fleet = await last.query(names.FLEET_QUERY, FleetQuery(limit=2), result_type=None)
        description = await last.describe()
    assert description.run_id != first
    assert description.history_length < 120
    assert [step for _, step in world.trained] == list(range(1, 41))
    assert len(world.acquisitions) == 1
    assert (result.step, status.step, status.num_macs) == (40, 40, 3)
    assert [(member["host"], member["session"]) for member in fleet["members"]] == [
        ("mac-1", f"mac-{given.run}-mac-1"),
        ("mac-2", f"mac-{given.run}-mac-2"),
    ]
    assert fleet["next_host"] == "mac-2"
