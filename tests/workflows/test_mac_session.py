"""MacSessionWorkflow on the time-skipping server: hellos, redone sweeps, prefetched grants, evaluation parts, endings."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment

from activities.connection import make_worker
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvalPart, EvalPartDone
from stoa.contracts.fleet_messages import (
    Goodbye,
    Grant,
    GrantRequest,
    Hello,
    ReleaseRequest,
    SessionInput,
    SessionStatus,
    SweepRequest,
    SweepResult,
)
from tests.workflows.world import World
from workflows.mac_session import MacSessionWorkflow

pytestmark = pytest.mark.asyncio(loop_scope="module")
Session = WorkflowHandle[MacSessionWorkflow, SessionStatus]


@workflow.defn(name=names.EVALUATION, sandboxed=False)
class Answers:
    """Stands where an evaluation would and keeps the answers of sessions."""

    def __init__(self) -> None:
        self.answers: list[EvalPartDone] = []

    @workflow.run
    async def run(self) -> list[EvalPartDone]:
        await workflow.wait_condition(lambda: bool(self.answers))
        return self.answers

    @workflow.signal(name=names.EVAL_PART)
    def part(self, answer: EvalPartDone) -> None:
        self.answers.append(answer)


def given(**changes: object) -> SessionInput:
    base = SessionInput(run=f"r{uuid.uuid4().hex[:8]}", host="mac-1", groups=2, heartbeat_seconds=6, away_expiry_seconds=600, place="attic")
    return replace(base, **changes)  # type: ignore[arg-type]


def only(last: int) -> Callable[[GrantRequest], Grant | None]:
    """Grants up to sweep `last`, then none."""

    def grant(request: GrantRequest) -> Grant | None:
        return None if request.sweep <= last else Grant(request.run, request.host, request.sweep, (), reason="no room")

    return grant


@asynccontextmanager
async def session(env: WorkflowEnvironment, start: SessionInput, world: World, *, serve_mac: bool = True) -> AsyncIterator[Session]:
    async with AsyncExitStack() as stack:
        control = names.control_queue(start.run)
        workflows: list[Any] = [MacSessionWorkflow, Answers]
        await stack.enter_async_context(
            make_worker(env.client, control, workflows=workflows, activities=world.desk_activities(), graceful_seconds=0)
        )
        if serve_mac:
            queue = names.mac_queue(start.run, start.host)
            await stack.enter_async_context(
                make_worker(env.client, queue, activities=world.mac_activities(), max_concurrent_activities=1, graceful_seconds=0)
            )
        handle = await env.client.start_workflow(
            MacSessionWorkflow.run,
            start,
            id=names.session_workflow_id(start.run, start.host),
            task_queue=control,
            start_signal=names.HELLO,
            start_signal_args=[Hello(start.host, "nonce-1")],
        )
        yield handle


async def until(handle: Session, wanted: Callable[[SessionStatus], bool], seconds: float = 20) -> SessionStatus:
    for _ in range(int(seconds / 0.05)):
        status = await handle.query(names.SESSION_QUERY, result_type=SessionStatus)
        if wanted(status):
            return status
        await asyncio.sleep(0.05)
    raise AssertionError(status)


async def stop(handle: Session) -> SessionStatus:
    await handle.signal(names.RUN_STOPPED, ReleaseRequest("r", "all steps are done"))
    return await handle.result()


async def test_sweeps_follow_each_other_and_totals_add_up(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(4)
    start = given()
    async with session(skipping, start, world) as handle:
        await until(handle, lambda status: status.num_sweeps == 5)
        status = await stop(handle)
    assert [(one.sweep, one.question_ids) for one in world.swept] == [(n, (f"q{n}-0", f"q{n}-1")) for n in range(5)]
    assert (status.state, status.num_groups, status.decode_seconds, status.version, status.place) == ("ended", 10, 10.0, 3, "attic")
    assert status.join_seconds == 0.5  # pull and apply of the first sweep only
    joined = world.fleet[0]
    assert (joined.event, joined.host, joined.session, joined.place) == ("joined", "mac-1", handle.id, "attic")


async def test_next_grant_is_fetched_while_a_sweep_decodes(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, sweep_gate=asyncio.Event())
    world.on_grant = only(1)
    async with session(skipping, given(), world) as handle:
        await until(handle, lambda _: world.grants[1] == 1)
        assert [one.sweep for one in world.swept] == [0]
        world.sweep_gate.set()
        await until(handle, lambda status: status.num_sweeps == 2)
        assert world.grants[1] == 1
        await stop(handle)


async def test_failed_sweep_is_redone_under_its_number_after_a_growing_wait(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(0)
    failures = ["FormatError", "ServiceUnavailableError", "TypeError"]

    def fail(request: SweepRequest) -> SweepResult | None:
        if failures:
            raise ApplicationError("no", type=failures.pop(0), non_retryable=True)
        return None

    world.on_sweep = fail
    async with session(skipping, given(), world) as handle:
        status = await until(handle, lambda status: bool(status.reason), seconds=5)
        assert status.state == "live"
        await skipping.sleep(10)  # 1 + 2 + 4 s
        status = await until(handle, lambda status: status.num_sweeps == 1)
        await stop(handle)
    assert [one.sweep for one in world.swept] == [0, 0, 0, 0]
    assert status.num_redone == 3


async def test_mac_that_nobody_serves_is_away_until_its_next_hello_and_redoes_the_sweep(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(0)
    start = given()
    async with session(skipping, start, world, serve_mac=False) as handle:
        await skipping.sleep(8)  # longer than the 6 s a sweep may wait for its Mac
        status = await until(handle, lambda status: status.state == "away")
        assert "schedule_to_start" in status.reason
        await until(handle, lambda _: [event.event for event in world.fleet] == ["joined", "left"])
        queue = names.mac_queue(start.run, start.host)
        async with make_worker(skipping.client, queue, activities=world.mac_activities(), max_concurrent_activities=1, graceful_seconds=0):
            await handle.signal(names.HELLO, Hello("mac-1", "nonce-2"))
            await until(handle, lambda status: status.num_sweeps == 1)
            await until(handle, lambda _: [event.event for event in world.fleet] == ["joined", "left", "joined"])
            await stop(handle)
    assert [one.sweep for one in world.swept] == [0]


async def test_away_for_too_long_ends_the_session(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    async with session(skipping, given(away_expiry_seconds=60), world, serve_mac=False) as handle:
        status = await handle.result()
    assert (status.state, status.reason) == ("ended", "away for 60 s")
    assert [event.event for event in world.fleet] == ["joined", "left"]


async def test_goodbye_of_another_worker_changes_nothing_and_ones_own_ends_the_sweep(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, sweep_gate=asyncio.Event())
    async with session(skipping, given(), world) as handle:
        await until(handle, lambda _: len(world.swept) == 1)
        await handle.signal(names.GOODBYE, Goodbye("mac-1", "somebody"))
        await handle.signal(names.HELLO, Hello("mac-1", "nonce-1"))  # again: nothing new
        assert (await handle.query(names.SESSION_QUERY, result_type=SessionStatus)).state == "live"
        await handle.signal(names.GOODBYE, Goodbye("mac-1", "nonce-1", "lid closed"))
        status = await until(handle, lambda status: status.state == "away")
        assert status.reason == "said goodbye: lid closed"
        world.sweep_gate.set()
        await stop(handle)


async def test_draining_worker_leaves_its_sweep_to_be_redone(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(0)
    cut = [True]

    def drain(request: SweepRequest) -> SweepResult | None:
        return SweepResult("draining", request.sweep, version=1, num_groups=1) if cut and cut.pop() else None

    world.on_sweep = drain
    async with session(skipping, given(), world) as handle:
        await until(handle, lambda status: status.state == "away")
        await handle.signal(names.HELLO, Hello("mac-1", "nonce-2"))
        status = await until(handle, lambda status: status.num_sweeps == 1)
        await stop(handle)
    assert [one.sweep for one in world.swept] == [0, 0]
    assert status.num_groups == 3


async def test_part_of_an_evaluation_runs_while_there_is_no_room_for_training(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(-1)
    start = given()
    async with session(skipping, start, world) as handle:
        answers = await skipping.client.start_workflow(
            Answers.run, id=names.evaluation_workflow_id(start.run, "v4-every"), task_queue=names.control_queue(start.run)
        )
        await handle.signal(names.EVAL_SWEEP, EvalPart(start.run, "v4-every", 4, 2, ("held-0", "held-1")))
        (answer,) = await answers.result()
        await stop(handle)
    assert answer == EvalPartDone(2, "mac-1", ok=True, keys=("evals/v4-every/2-mac-1",))
    (request,) = world.swept
    assert (request.purpose, request.version, request.question_ids, request.group_size) == ("eval", 4, ("held-0", "held-1"), 1)


async def test_failed_part_is_answered_so_that_another_mac_gets_it(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(-1)

    def fail(request: SweepRequest) -> SweepResult:
        raise ApplicationError("no such version", type="ObjectMissingError", non_retryable=True)

    world.on_sweep = fail
    start = given()
    async with session(skipping, start, world) as handle:
        answers = await skipping.client.start_workflow(
            Answers.run, id=names.evaluation_workflow_id(start.run, "e"), task_queue=names.control_queue(start.run)
        )
        await handle.signal(names.EVAL_SWEEP, EvalPart(start.run, "e", 4, 0, ("held-0",)))
        (answer,) = await answers.result()
        await stop(handle)
    assert not answer.ok
    assert "no such version" in answer.reason


async def test_paused_run_holds_the_mac_and_goes_on_by_itself(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    paused = [True]

    def grant(request: GrantRequest) -> Grant | None:
        return Grant(request.run, request.host, request.sweep, (), run_state="paused") if paused[0] else only(0)(request)

    world.on_grant = grant
    async with session(skipping, given(), world) as handle:
        status = await until(handle, lambda status: bool(status.reason))
        assert (status.state, status.reason) == ("live", "the run is paused")
        paused[0] = False
        await until(handle, lambda status: status.num_sweeps == 1)
        await stop(handle)


async def test_session_that_begins_anew_goes_on_where_the_grants_are(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)

    def grant(request: GrantRequest) -> Grant | None:
        if request.sweep < 11:
            return Grant(request.run, request.host, request.sweep, (), reason="over", newest_sweep=12)
        return only(12)(request)

    world.on_grant = grant
    async with session(skipping, given(), world) as handle:
        await until(handle, lambda status: status.num_sweeps == 1)
        await stop(handle)
    assert [one.sweep for one in world.swept] == [12]
