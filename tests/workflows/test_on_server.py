"""Workflows on Temporal's dev server, with stand-in activities: what the time-skipping server cannot show."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities.connection import make_worker
from activities.fleet import FleetActivities
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationInput, EvaluationResult
from stoa.contracts.fleet_messages import (
    AdmitRequest,
    Admitted,
    Census,
    FleetEvent,
    FleetPage,
    FleetQuery,
    Hello,
    SessionInput,
    Standing,
    Standings,
    StandingsQuery,
    SweepRequest,
    SweepResult,
)
from stoa.contracts.messages import (
    AnchorCadence,
    Ask,
    MacAsk,
    RunStatus,
    StepRequest,
    StepResult,
    StopConditions,
    VersionsPage,
    VersionsQuery,
)
from tests.workflows.folder import Folder, FolderGranter, FolderKeeper
from tests.workflows.test_mac_session import given, only, session, stop
from tests.workflows.test_mac_session import until as until_session
from tests.workflows.test_run_workflow import rules, running, until
from tests.workflows.world import World
from workflows.evaluation import EvaluationWorkflow
from workflows.mac_session import MacSessionWorkflow
from workflows.run import RunWorkflow

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Env:
    """What the stand-in harness needs of an environment."""

    client: Client


async def _admit(client: Client, root: Path, run: str, *hosts: str) -> list[Admitted]:
    """What the activity answers these Macs, asked together."""
    folder = Folder(root)
    fleet = FleetActivities(client, client, FolderGranter(folder), FolderKeeper(folder))
    asks = (ActivityEnvironment().run(fleet.admit_mac, AdmitRequest(run, host, "0.3.0", "n")) for host in hosts)
    return list(await asyncio.gather(*asks))


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


async def test_signals_and_updates_that_come_while_the_run_continues_as_new_are_not_lost(client: Client) -> None:
    world = World(client, step_seconds=0.02)
    given = rules(stop=StopConditions(), continue_after_events=60, census_seconds=1e9)
    hosts = [f"mac-{number:03d}" for number in range(150)]
    async with running(Env(client), given, world) as handle:
        newest = client.get_workflow_handle_for(RunWorkflow.run, handle.id)
        for number, host in enumerate(hosts):
            await newest.signal(names.FLEET_EVENT, FleetEvent(given.run, host, "s", "joined", number))
            if number % 25 == 10:
                await newest.execute_update(names.QUARANTINE, MacAsk(host, "test"), result_type=RunStatus)
            await asyncio.sleep(0.02)
        await until(newest, lambda status: status.num_macs == len(hosts))
        pages = [await newest.query(names.FLEET_QUERY, FleetQuery(limit=40), result_type=FleetPage)]
        while pages[-1].next_host:
            pages.append(await newest.query(names.FLEET_QUERY, FleetQuery(pages[-1].next_host, 40), result_type=FleetPage))
        members = [member for page in pages for member in page.members]
        chain = await num_runs(client, handle.id)
        await newest.execute_update(names.STOP, Ask("enough"), result_type=RunStatus)
        result = await newest.result()
    assert [(member.host, member.sweep) for member in members] == [(host, number) for number, host in enumerate(hosts)]
    quarantined = [f"mac-{number:03d}" for number in (10, 35, 60, 85, 110, 135)]
    assert [member.host for member in members if member.state == "quarantined"] == quarantined
    assert sorted({standing.host for standing in world.told}) == quarantined
    assert chain >= 4
    assert [step for _, step in world.trained] == list(range(1, result.step + 1))
    assert len(world.acquisitions) == 1


async def test_run_that_waits_for_a_trainer_for_weeks_does_not_outgrow_its_history(client: Client) -> None:
    world = World(client)
    given = rules(stop=StopConditions(), continue_after_events=40, census_seconds=1e9)
    queue = names.control_queue(given.run)
    async with make_worker(client, queue, workflows=[RunWorkflow], activities=world.desk_activities(), graceful_seconds=0):
        await client.start_workflow(RunWorkflow.run, given, id=names.run_workflow_id(given.run), task_queue=queue)
        newest = client.get_workflow_handle_for(RunWorkflow.run, names.run_workflow_id(given.run))
        for number in range(40):
            event = "joined" if number % 2 == 0 else "left"
            await newest.signal(names.FLEET_EVENT, FleetEvent(given.run, f"mac-{number // 2 % 3}", "s", event))  # type: ignore[arg-type]
            await asyncio.sleep(0.02)
        status = await until(newest, lambda status: "waiting for a trainer" in status.waiting_for)
        chain = await num_runs(client, newest.id)
        assert (await newest.describe()).history_length < 80
        await newest.execute_update(names.STOP, Ask("enough"), result_type=RunStatus)
        assert (await newest.result()).end_reason == "enough"
    assert status.num_macs == 0
    assert chain >= 2


async def num_runs(client: Client, workflow_id: str) -> int:
    """Runs of one workflow so far, each the continuation of the one before."""
    found = 0
    for _ in range(50):  # what can be listed is a moment behind
        listed = [one.run_id async for one in client.list_workflows(f"WorkflowId = '{workflow_id}'")]
        if len(listed) == found > 1:
            break
        found = len(listed)
        await asyncio.sleep(0.2)
    return found


async def test_run_refuses_what_changes_nothing_and_shows_its_versions(client: Client, tmp_path: Path) -> None:
    world = World(client, hosts=("mac-1", "mac-2"), step_gate=asyncio.Event())
    async with running(Env(client), rules(stop=StopConditions(max_steps=12)), world) as handle:
        await until(handle, lambda s: "step 1" in s.waiting_for)
        status = await handle.execute_update(names.SET_ANCHOR_CADENCE, AnchorCadence(2), result_type=RunStatus)
        assert status.anchor_every_versions == 2
        for update, argument, words in (
            (names.SET_ANCHOR_CADENCE, AnchorCadence(0), "must be 1 to"),
            (names.RELEASE, MacAsk("mac-1"), "mac-1 is neither quarantined nor drained"),
            (names.QUARANTINE, MacAsk("No Name"), "is no name of a Mac"),
            (names.QUARANTINE, MacAsk("mac1"), "has met no Mac mac1, did you mean mac-1? it knows mac-1, mac-2"),
            (names.DRAIN_MAC, MacAsk("mack-2"), "did you mean mac-2?"),
            (names.RESUME, Ask(), "is not paused"),
        ):
            with pytest.raises(WorkflowUpdateFailedError) as caught:
                await handle.execute_update(update, argument, result_type=RunStatus)
            assert words in str(caught.value.cause)
        await handle.execute_update(names.QUARANTINE, MacAsk("mac-9", "before it comes", unseen=True), result_type=RunStatus)
        await handle.execute_update(names.RELEASE, MacAsk("mac-9"), result_type=RunStatus)
        await handle.execute_update(names.DRAIN_MAC, MacAsk("mac-1", "thanks"), result_type=RunStatus)
        with pytest.raises(WorkflowUpdateFailedError):
            await handle.execute_update(names.DRAIN_MAC, MacAsk("mac-1"), result_type=RunStatus)
        assert (await handle.execute_update(names.QUARANTINE, MacAsk("mac-1", "lies"), result_type=RunStatus)).num_quarantined == 1
        standings = await handle.query(names.STANDINGS_QUERY, StandingsQuery(("mac-1", "mac-2")), result_type=Standings)
        assert [(one.host, one.state, one.reason) for one in standings.not_free] == [("mac-1", "quarantined", "lies")]
        admitted = await _admit(client, tmp_path, handle.id.removeprefix("run-"), "mac-1", "mac-2")
        assert admitted == [Admitted(ok=False, reason="lies", standing="quarantined"), Admitted(reason="", standing="free")]
        assert await _admit(client, tmp_path, "no-such-run", "mac-1") == [Admitted()], "nobody to ask: the trainer looks at all it sends"
        world.step_gate.set()
        result = await handle.result()
        page = await handle.query(names.VERSIONS_QUERY, VersionsQuery(limit=2), result_type=VersionsPage)
        last = await handle.query(names.VERSIONS_QUERY, VersionsQuery(page.next_version), result_type=VersionsPage)
    assert [(row.version, row.step) for row in (*page.versions, *last.versions)] == [(0, 0), (1, 4), (2, 8), (3, 12)]
    assert (page.num_versions, last.next_version, result.version) == (4, -1, 3)
    assert [published[2] for published in world.published] == [False, True, True]  # every second, and the last
    assert [standing.state for standing in world.told if standing.host == "mac-1"] == ["drained", "quarantined"]
    assert ("mac-1",) in [request.quarantined for request in world.steps]


async def test_drained_run_uses_up_what_is_on_the_way_and_ends(client: Client) -> None:
    world = World(client)
    left = [3]

    def starve(request: StepRequest) -> StepResult | None:
        if not left[0]:
            return StepResult("starved", request.step, wait_seconds=request.wait_seconds, reason="few", num_missing=8)
        left[0] -= 1
        return None

    world.on_step = starve
    world.on_census = lambda request: Census((), 0, "", num_groups_running=0, num_groups_waiting=3)
    given = rules(stop=StopConditions(), groups_per_step=8)
    async with running(Env(client), given, world) as handle:
        status = await handle.execute_update(names.DRAIN, Ask("enough"), result_type=RunStatus)
        assert status.state == "draining"
        result = await handle.result()
    assert (result.step, result.end_reason) == (3, "drained: 3 groups were left")
    assert world.head_states == ["draining", "stopped"]


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


async def test_quarantined_session_continues_as_new_while_its_mac_says_hello_for_weeks(client: Client) -> None:
    world = World(client)
    start = given(continue_after_events=60)
    async with session(Env(client), start, world) as handle:
        await handle.signal(names.STANDING, Standing(start.run, "mac-1", "quarantined", "edited rewards"))
        newest = client.get_workflow_handle_for(MacSessionWorkflow.run, handle.id)
        for _ in range(60):
            await newest.signal(names.HELLO, Hello("mac-1", "nonce-1", reason="silence"))
            await asyncio.sleep(0.02)
        status = await until_session(newest, lambda status: status.state == "quarantined")
        assert status.reason == "edited rewards"
        description = await newest.describe()
        assert description.run_id != handle.first_execution_run_id
        assert description.history_length < 90
        await newest.signal(names.STANDING, Standing(start.run, "mac-1", "free"))
        before = status.num_sweeps
        await until_session(newest, lambda status: status.num_sweeps > before)
        await stop(newest)
    assert [notice.kind for notice in world.notices] == ["quarantined", "free"]


class Fleet:
    """Sessions of some Macs with one world, and an evaluation among them."""

    def __init__(self, client: Client, world: World, hosts: tuple[str, ...]) -> None:
        self.client, self.world, self.hosts = client, world, hosts
        self.run = f"r{uuid.uuid4().hex[:8]}"
        world.hosts = hosts
        world.on_grant = only(-1)
        self.serving: list[tuple[Worker, asyncio.Task[None]]] = []

    def serve(self, worker: Worker) -> None:
        self.serving.append((worker, asyncio.create_task(worker.run())))

    def serve_control(self) -> None:
        control, workflows = names.control_queue(self.run), [MacSessionWorkflow, EvaluationWorkflow]
        self.serve(make_worker(self.client, control, workflows=workflows, activities=self.world.desk_activities(), graceful_seconds=0))

    async def end(self, worker: Worker, task: asyncio.Task[None]) -> None:
        await worker.shutdown()
        await task

    async def replace_control(self) -> None:
        """The control process ends; another comes, which remembers no workflow."""
        await self.end(*self.serving.pop(0))
        self.serve_control()

    async def evaluate(
        self, *, serve: tuple[str, ...] | None = None, meanwhile: Callable[[], Awaitable[None]] | None = None, **changes: object
    ) -> EvaluationResult:
        control = names.control_queue(self.run)
        self.serve_control()
        for host in self.hosts if serve is None else serve:
            queue, plays = names.mac_queue(self.run, host), self.world.mac_activities()
            self.serve(make_worker(self.client, queue, activities=plays, max_concurrent_activities=1, graceful_seconds=0))
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
            handle = await self.client.start_workflow(EvaluationWorkflow.run, start, id=workflow_id, task_queue=control)
            if meanwhile is not None:
                await meanwhile()
            return await handle.result()
        finally:
            await asyncio.gather(*(self.end(*one) for one in self.serving))


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


async def test_parts_that_were_no_good_are_played_again_by_other_macs(client: Client) -> None:
    world = World(client, liar="mac-b")
    await Fleet(client, world, ("mac-a", "mac-b")).evaluate(num_questions=120, questions_a_part=20)
    first, last = world.summarised
    lied = {key.rsplit("/", 1)[1] for key in first.keys if key.endswith("mac-b")}
    assert lied, "both Macs play"
    assert {key.rsplit("/", 1)[1] for key in last.keys} - lied == {f"{part}-mac-a" for part in range(6)}


async def test_parts_that_nobody_plays_well_end_after_so_many_deals(client: Client) -> None:
    world = World(client, liar="mac-b")
    result = await Fleet(client, world, ("mac-b",)).evaluate(num_questions=40, questions_a_part=20)
    assert [request.questions_a_part for request in world.summarised] == [20, 20, 0]
    assert world.reported == [result]


async def test_part_of_a_silent_mac_is_given_to_another(client: Client) -> None:
    world = World(client)
    fleet = Fleet(client, world, ("mac-a", "mac-b"))
    await fleet.evaluate(serve=("mac-b",), num_questions=80, questions_a_part=40, part_timeout_seconds=3)
    (summarised,) = world.summarised
    assert [key.split("-")[-1] for key in summarised.keys] == ["b", "b"]


async def test_evaluation_outlives_its_control_process_and_a_mac_killed_in_the_middle_of_a_part(client: Client) -> None:
    world = World(client, frozen_host="mac-a", sweep_gate=asyncio.Event())
    gate = world.sweep_gate
    assert gate is not None
    fleet = Fleet(client, world, ("mac-a", "mac-b"))

    async def meanwhile() -> None:
        while {request.host for request in world.swept} != {"mac-a", "mac-b"}:
            await asyncio.sleep(0.05)
        await fleet.replace_control()
        gate.set()

    result = await fleet.evaluate(meanwhile=meanwhile, num_questions=80, questions_a_part=40, part_timeout_seconds=4)
    (summarised,) = world.summarised
    assert sorted(key.rsplit("/", 1)[1] for key in summarised.keys) == ["0-mac-b", "1-mac-b"]
    assert world.reported == [result]


async def test_evaluation_without_macs_fails_in_time_and_says_so(client: Client) -> None:
    world = World(client)
    fleet = Fleet(client, world, ())
    with pytest.raises(WorkflowFailureError) as caught:
        await fleet.evaluate(num_questions=80, questions_a_part=40, timeout_seconds=3)
    assert "0 of 2 parts came within 3 s" in str(caught.value.cause)
    (reported,) = world.reported
    assert "0 of 2 parts" in reported.error
