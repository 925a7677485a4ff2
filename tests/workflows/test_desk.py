"""Control activities against a real server: what crosses between a run, its sessions and its evaluations."""

import asyncio
import uuid
from dataclasses import dataclass, field

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.connection import make_worker
from activities.evaluate import EvaluationActivities
from activities.fleet import FleetActivities
from activities.grants import GrantActivities
from stoa.contracts import names
from stoa.contracts.errors import UnknownNameError
from stoa.contracts.evaluation_messages import (
    EvaluationInput,
    EvaluationResult,
    EvaluationStart,
    ListMacsRequest,
    MacList,
    SummariseRequest,
)
from stoa.contracts.fleet_messages import (
    AdmitRequest,
    Admitted,
    Census,
    CensusRequest,
    FleetEvent,
    Grant,
    GrantRequest,
    Hello,
    MacFacts,
    ReleaseRequest,
    SessionInput,
    SessionStatus,
)
from stoa.contracts.ports import Progress
from tests.workflows.test_mac_session import only
from tests.workflows.test_on_server import Fleet
from tests.workflows.world import World
from workflows.mac_session import MacSessionWorkflow

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Engines:
    """Granter, head keeper and evaluator in one, none of which does much."""

    left: list[str] = field(default_factory=list)

    def grant(self, request: GrantRequest, progress: Progress) -> Grant:
        return Grant(request.run, request.host, request.sweep, ("q",))

    def on_the_way(self) -> tuple[int, int]:
        return 5, 3

    def host_left(self, host: str) -> None:
        self.left.append(host)

    def held_out(self, run: str, num_questions: int, seed: int) -> tuple[str, ...]:
        return ()

    def summarise(self, request: SummariseRequest, progress: Progress) -> EvaluationResult:
        raise UnknownNameError("no such run")


@workflow.defn(name=names.RUN_WORKFLOW, sandboxed=False)
class Listener:
    """Stands where a run would and returns the first evaluation it is told of."""

    def __init__(self) -> None:
        self.results: list[EvaluationResult] = []
        self.events: list[FleetEvent] = []

    @workflow.run
    async def run(self) -> EvaluationResult:
        await workflow.wait_condition(lambda: bool(self.results))
        return self.results[0]

    @workflow.signal(name=names.EVAL_DONE)
    def done(self, result: EvaluationResult) -> None:
        self.results.append(result)

    @workflow.signal(name=names.FLEET_EVENT)
    def fleet(self, event: FleetEvent) -> None:
        self.events.append(event)

    @workflow.query
    def seen(self) -> list[FleetEvent]:
        return self.events


async def listen(client: Client, run: str) -> WorkflowHandle[Listener, EvaluationResult]:
    return await client.start_workflow(Listener.run, id=names.run_workflow_id(run), task_queue=names.control_queue(run))


async def do(function: object, argument: object) -> object:
    return await ActivityEnvironment().run(function, argument)


async def test_evaluation_that_is_done_reports_again_instead_of_running_again(client: Client) -> None:
    fleet = Fleet(client, World(client), ("mac-a",))
    first = await fleet.evaluate(num_questions=40, questions_a_part=40)
    async with make_worker(client, names.control_queue(fleet.run), workflows=[Listener], graceful_seconds=0):
        listener = await listen(client, fleet.run)
        start = EvaluationStart(EvaluationInput(fleet.run, "v4-every", 4, 40, 40))
        await do(EvaluationActivities(client, client, Engines()).start, start)
        assert await listener.result() == first
    assert len(fleet.world.swept) == 1


async def test_session_is_listed_while_live_and_ends_when_released(client: Client) -> None:
    run, world, engines = f"r{uuid.uuid4().hex[:8]}", World(client), Engines()
    world.on_grant = only(-1)
    desk = FleetActivities(client, client, engines, None)  # type: ignore[arg-type]
    queue = names.control_queue(run)
    async with make_worker(client, queue, workflows=[MacSessionWorkflow], activities=world.desk_activities(), graceful_seconds=0):
        for host in ("mac-b", "mac-a"):
            await client.start_workflow(
                names.MAC_SESSION,
                SessionInput(run, host, place="attic"),
                id=names.session_workflow_id(run, host),
                task_queue=queue,
                start_signal=names.HELLO,
                start_signal_args=[Hello(host, "n")],
            )
        for _ in range(100):
            if await do(desk.list_macs, ListMacsRequest(run)) == MacList(("mac-a", "mac-b")):
                break
            await asyncio.sleep(0.1)
        assert await do(desk.list_macs, ListMacsRequest(run, limit=1)) == MacList(("mac-a",), "mac-a")
        assert await do(desk.list_macs, ListMacsRequest("another")) == MacList()
        for _ in range(100):
            census = await do(desk.census, CensusRequest(run))
            if census == Census(tuple(MacFacts(host, place="attic") for host in ("mac-a", "mac-b")), 2, "", 5, 3):
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError(census)
        released = await do(desk.release_macs, ReleaseRequest(run, "all steps are done"))
        assert released.num_released == 2  # type: ignore[attr-defined]
        ended = client.get_workflow_handle(names.session_workflow_id(run, "mac-a"), result_type=SessionStatus)
        assert (await ended.result()).reason == "run stopped: all steps are done"


async def test_who_leaves_is_forgotten_by_the_ledger_and_told_to_the_run_if_there_is_one(client: Client) -> None:
    run, engines = f"r{uuid.uuid4().hex[:8]}", Engines()
    desk = FleetActivities(client, client, engines, None)  # type: ignore[arg-type]
    left = FleetEvent(run, "mac-1", "s", "left")
    await do(desk.notify_run, left)  # nobody there: no error
    async with make_worker(client, names.control_queue(run), workflows=[Listener], graceful_seconds=0):
        listener = await listen(client, run)
        await do(desk.notify_run, FleetEvent(run, "mac-1", "s", "joined"))
        await do(desk.notify_run, left)
        events = await listener.query(Listener.seen)
        await listener.terminate()
    assert [event.event for event in events] == ["joined", "left"]
    assert engines.left == ["mac-1", "mac-1"]


async def test_run_name_that_could_change_a_query_is_refused(client: Client) -> None:
    desk = FleetActivities(client, client, Engines(), None)  # type: ignore[arg-type]
    with pytest.raises(ApplicationError) as caught:
        await do(desk.list_macs, ListMacsRequest("x' OR RlRun = 'y"))
    assert (caught.value.type, caught.value.non_retryable) == ("FormatError", True)


async def test_hundreds_of_waiting_grants_do_not_hold_up_one_that_can_be_given() -> None:
    class Full(Engines):
        def grant(self, request: GrantRequest, progress: Progress) -> Grant:
            progress.report("no room")
            ids = ("q",) if request.host == "lucky" else ()
            return Grant(request.run, request.host, request.sweep, ids, reason="no room", waits_for="room")

    grants = GrantActivities(Full())
    loop = asyncio.get_running_loop()
    waiting = [asyncio.create_task(do(grants.grant, GrantRequest("r", f"mac-{i}", 0, 1, wait_seconds=4.0))) for i in range(300)]
    await asyncio.sleep(0.5)
    started = loop.time()
    assert (await do(grants.grant, GrantRequest("r", "lucky", 0, 1))).question_ids == ("q",)  # type: ignore[attr-defined]
    assert loop.time() - started < 2.0
    answers = await asyncio.gather(*waiting)
    assert {answer.waits_for for answer in answers} == {"room"}  # type: ignore[attr-defined]


async def test_pause_is_told_at_once_to_a_short_wait_and_waited_out_by_a_long_one() -> None:
    class Paused(Engines):
        state = "paused"

        def grant(self, request: GrantRequest, progress: Progress) -> Grant:
            progress.report(self.state)
            ids = ("q",) if self.state == "running" else ()
            return Grant(request.run, request.host, request.sweep, ids, run_state=self.state)  # type: ignore[arg-type]

    engines = Paused()
    grants = GrantActivities(engines)
    assert (await do(grants.grant, GrantRequest("r", "mac", 0, 1, 10.0))).run_state == "paused"  # type: ignore[attr-defined]
    waiting = asyncio.create_task(do(grants.grant, GrantRequest("r", "mac", 0, 1, 60.0)))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    engines.state = "running"
    assert (await asyncio.wait_for(waiting, 5)).question_ids == ("q",)  # type: ignore[attr-defined]


async def test_mac_of_an_old_build_is_refused_with_the_version_to_install(client: Client) -> None:
    desk = FleetActivities(client, client, Engines(), None)  # type: ignore[arg-type]
    answer = await do(desk.admit_mac, AdmitRequest("r", "mac-1", "0.0.9"))
    assert not answer.ok  # type: ignore[attr-defined]
    assert "pip install -U 'stoa>=0.1.0'" in answer.reason  # type: ignore[attr-defined]
    assert await do(desk.admit_mac, AdmitRequest(f"r{uuid.uuid4().hex[:8]}", "mac-1", "0.1.0")) == Admitted()
