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
    Admitted,
    Goodbye,
    Grant,
    GrantRequest,
    Hello,
    Notice,
    ReleaseRequest,
    SessionInput,
    SessionStatus,
    Standing,
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

    @workflow.query
    def seen(self) -> list[EvalPartDone]:
        return self.answers


def given(**changes: object) -> SessionInput:
    base = SessionInput(run=f"r{uuid.uuid4().hex[:8]}", host="mac-1", groups=2, heartbeat_seconds=6, away_expiry_seconds=600, place="attic")
    return replace(base, **changes)  # type: ignore[arg-type]


def only(last: int) -> Callable[[GrantRequest], Grant | None]:
    """Grants up to sweep `last`, then none."""

    def grant(request: GrantRequest) -> Grant | None:
        return None if request.sweep <= last else Grant(request.run, request.host, request.sweep, (), reason="no room")

    return grant


@asynccontextmanager
async def session(
    env: WorkflowEnvironment, start: SessionInput, world: World, *, serve_mac: bool = True, build: str = "0.1.0"
) -> AsyncIterator[Session]:
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
            start_signal_args=[Hello(start.host, "nonce-1", build)],
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
    await handle.signal(names.RUN_STOPPED, ReleaseRequest(handle.id.split("-")[1], "all steps are done"))
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
    assert answer == EvalPartDone(2, "mac-1", ok=True, keys=("evals/v4-every/2-mac-1",), num_episodes=2)
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


async def test_old_build_is_refused_and_its_owner_told_what_to_install(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_admit = lambda request: Admitted(ok=False, reason=f"build {request.build} is too old: install 0.1.0")
    start = given()
    async with session(skipping, start, world, build="0.0.9") as handle:
        status = await handle.result()
    assert (status.state, status.reason) == ("ended", "refused: build 0.0.9 is too old: install 0.1.0")
    assert world.notices == [Notice(start.run, "mac-1", "too_old", "build 0.0.9 is too old: install 0.1.0", ends=True)]
    assert (world.swept, world.fleet) == ([], [])


async def test_revoked_mac_is_told_why_when_it_joins_and_its_session_ends(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    why = "mac-1 was revoked: sold"
    world.on_grant = lambda ask: Grant(ask.run, ask.host, ask.sweep, (), reason=why, run_state="stopped", refused=True)
    start = given()
    async with session(skipping, start, world) as handle:
        status = await handle.result()
    assert (status.state, status.reason) == ("ended", f"refused: {why}")
    assert world.notices == [Notice(start.run, "mac-1", "revoked", f"this Mac may not take part any more: {why}", ends=True)]
    assert world.swept == []


async def test_worker_is_admitted_once_a_start_and_again_under_another_nonce(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(2)
    async with session(skipping, given(), world) as handle:
        await until(handle, lambda status: status.num_sweeps == 3)
        await handle.signal(names.HELLO, Hello("mac-1", "nonce-1", reason="silence"))
        await handle.signal(names.GOODBYE, Goodbye("mac-1", "nonce-1"))
        await until(handle, lambda status: status.state == "away")
        await handle.signal(names.HELLO, Hello("mac-1", "nonce-2"))
        await until(handle, lambda _: len(world.admitted) == 2)
        await stop(handle)
    assert [request.nonce for request in world.admitted] == ["nonce-1", "nonce-2"]


async def test_quarantine_ends_the_sweep_at_once_and_release_lets_the_mac_play_again(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, sweep_gate=asyncio.Event())
    world.on_grant = only(0)
    start = given()
    async with session(skipping, start, world) as handle:
        await until(handle, lambda _: len(world.swept) == 1)
        await handle.signal(names.STANDING, Standing(start.run, "mac-1", "quarantined", "edited rewards"))
        status = await until(handle, lambda status: status.state == "quarantined")
        assert status.reason == "edited rewards"
        world.sweep_gate.set()
        await until(handle, lambda _: bool(world.notices))
        await until(handle, lambda _: [event.event for event in world.fleet] == ["joined", "left"])
        await handle.signal(names.HELLO, Hello("mac-1", "nonce-1", reason="silence"))
        answers = await skipping.client.start_workflow(
            Answers.run, id=names.evaluation_workflow_id(start.run, "e"), task_queue=names.control_queue(start.run)
        )
        await handle.signal(names.EVAL_SWEEP, EvalPart(start.run, "e", 4, 0, ("held-0",)))
        while not (found := await answers.query(Answers.seen)):  # waiting for its result would skip time
            await asyncio.sleep(0.05)
        assert not found[0].ok
        assert (await handle.query(names.SESSION_QUERY, result_type=SessionStatus)).state == "quarantined"
        await handle.signal(names.STANDING, Standing(start.run, "mac-1", "free"))
        await until(handle, lambda status: status.num_sweeps == 1)
        await until(handle, lambda _: [event.event for event in world.fleet] == ["joined", "left", "joined"])
        await stop(handle)
    assert [(notice.kind, notice.ends) for notice in world.notices] == [("quarantined", False), ("free", False)]
    assert "edited rewards" in world.notices[0].text


async def test_quarantined_mac_that_starts_again_is_told_again(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_admit = lambda request: Admitted(ok=False, reason="edited rewards", standing="quarantined")
    start = given()
    async with session(skipping, start, world) as handle:
        await until(handle, lambda _: len(world.notices) == 1)
        await handle.signal(names.HELLO, Hello("mac-1", "nonce-2"))
        await until(handle, lambda _: len(world.notices) == 2)
        assert (await handle.query(names.SESSION_QUERY, result_type=SessionStatus)).state == "quarantined"
        await stop(handle)
    assert world.swept == []


async def test_drained_mac_finishes_its_sweep_and_its_worker_ends(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, sweep_gate=asyncio.Event())
    start = given()
    async with session(skipping, start, world) as handle:
        await until(handle, lambda _: len(world.swept) == 1)
        await handle.signal(names.STANDING, Standing(start.run, "mac-1", "drained", "thank you"))
        await asyncio.sleep(0.3)
        assert (await handle.query(names.SESSION_QUERY, result_type=SessionStatus)).state == "live"
        world.sweep_gate.set()
        await until(handle, lambda _: bool(world.notices))
        await handle.signal(names.GOODBYE, Goodbye("mac-1", "nonce-1", "worker ended"))
        status = await until(handle, lambda status: status.state == "away")
        assert status.num_sweeps == 1
        await stop(handle)
    (notice,) = world.notices
    assert (notice.kind, notice.ends) == ("drained", True)
    assert len(world.swept) == 1


async def test_mac_holds_the_grants_of_the_sweeps_to_come(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, held_from=0)
    world.on_grant = only(9)
    async with session(skipping, given(), world) as handle:
        # While the first sweep is played the next two are fetched; how long one lasts is not known yet.
        await until(handle, lambda _: world.grants[2] == 1)
        await asyncio.sleep(0.3)
        assert sorted(world.grants) == [0, 1, 2]
        world.held_from = 1
        # A sweep takes 2.5 s, so five of those to come do not last for two minutes: as many as may be are fetched.
        await until(handle, lambda _: world.grants[7] == 1)
        world.held_from = None
        await until(handle, lambda status: status.num_sweeps == 10)
        await stop(handle)
    assert [request.sweep for request in world.swept] == list(range(10))
    ahead = [[grant.sweep for grant in request.ahead] for request in world.swept]
    assert ahead[:3] == [[], [2], [3, 4, 5, 6, 7]]
    assert all(world.grants[sweep] == 1 for sweep in range(10))


async def test_owner_who_wants_the_mac_is_seen_as_resting_and_plays_again_later(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(0)
    rests = [True]

    def rest(request: SweepRequest) -> SweepResult | None:
        if rests[0]:
            return SweepResult("paused", request.sweep, reason="paused: on battery", resting=True)
        return None

    world.on_sweep = rest
    async with session(skipping, given(), world) as handle:
        status = await until(handle, lambda status: status.state == "resting")
        assert status.reason == "paused: on battery"
        await until(handle, lambda _: [event.event for event in world.fleet] == ["joined", "left"])
        rests[0] = False
        await skipping.sleep(3)
        await until(handle, lambda status: status.num_sweeps == 1)
        await until(handle, lambda _: [event.event for event in world.fleet] == ["joined", "left", "joined"])
        await stop(handle)


async def test_waits_are_added_up_by_what_was_waited_for(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    answers = [
        Grant("r", "mac-1", 0, (), reason="no version", waits_for="version"),
        Grant("r", "mac-1", 0, (), reason="full", waits_for="room"),
        Grant("r", "mac-1", 0, (), reason="full", waits_for="room"),
    ]

    def grant(request: GrantRequest) -> Grant | None:
        return answers.pop(0) if answers else only(0)(request)

    world.on_grant = grant
    async with session(skipping, given(), world) as handle:
        await skipping.sleep(4)  # holds of 0.5, 1 and 2 s
        status = await until(handle, lambda status: status.num_sweeps == 1)
        await stop(handle)
    assert status.waits.keys() == {"room"}  # what it waited for last is why it waited
    assert 3.4 < status.waits["room"] < 6.0


async def test_a_namesake_of_another_run_is_turned_away_and_never_plays_here(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client, sweep_gate=asyncio.Event())
    world.on_grant = only(1)
    start = given(run="a", host="b-c")
    async with session(skipping, start, world) as handle:
        await until(handle, lambda _: len(world.swept) == 1)
        await handle.signal(names.HELLO, Hello("c", "theirs", "9.9.9"))
        await handle.signal(names.HELLO, Hello("nobody", "nonsense"))
        await handle.signal(names.GOODBYE, Goodbye("c", "nonce-1"))
        await handle.signal(names.STANDING, Standing("a-b", "c", "quarantined", "edited rewards"))
        await handle.signal(names.EVAL_SWEEP, EvalPart("a-b", "e", 4, 0, ("held-0",)))
        await handle.signal(names.RUN_STOPPED, ReleaseRequest("a-b", "another run has ended"))
        world.sweep_gate.set()
        await until(handle, lambda status: status.num_sweeps == 2 and bool(world.notices))
        assert [(one.run, one.host, one.kind, one.ends) for one in world.notices] == [("a-b", "c", "name_taken", True)]
        assert "Mac b-c of run a and Mac c of run a-b" in world.notices[0].text
        assert {(one.run, one.host, one.purpose) for one in world.swept} == {("a", "b-c", "train")}
        assert [one.nonce for one in world.admitted] == ["nonce-1"]
        await handle.signal(names.RUN_STOPPED, ReleaseRequest("a", "enough"))
        assert (await handle.result()).reason == "run stopped: enough"


async def test_a_namesake_does_not_take_the_place_of_a_mac_that_is_away(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(0)
    async with session(skipping, given(run="a", host="b-c", away_expiry_seconds=86_400), world) as handle:
        await until(handle, lambda status: status.num_sweeps >= 1)
        await handle.signal(names.GOODBYE, Goodbye("b-c", "nonce-1"))
        await until(handle, lambda status: status.state == "away")
        await handle.signal(names.HELLO, Hello("c", "theirs"))
        await until(handle, lambda _: bool(world.notices))
        assert (await handle.query(names.SESSION_QUERY, result_type=SessionStatus)).state == "away"
        await handle.signal(names.RUN_STOPPED, ReleaseRequest("a", "enough"))
        await handle.result()
