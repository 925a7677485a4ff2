"""What a person finds in the history of a session and a run: grants, sweep results and steps, as plain JSON."""

import json
from collections.abc import Iterator

import pytest
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client

from stoa.contracts import names
from stoa.contracts.messages import StopConditions
from tests.workflows.test_mac_session import given, only, session, stop
from tests.workflows.test_mac_session import until as until_session
from tests.workflows.test_on_server import Env
from tests.workflows.test_run_workflow import rules, running
from tests.workflows.world import World

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, object]


async def calls(client: Client, workflow_id: str, name: str) -> list[tuple[Json, Json]]:
    """Argument and result of each finished activity `name`, read as the UI reads them: without a codec of ours."""
    raw = await Client.connect(client.service_client.config.target_host, namespace=client.namespace)
    events = [event async for event in raw.get_workflow_handle(workflow_id).fetch_history_events()]
    asked = {event.event_id: event for event in events if event.activity_task_scheduled_event_attributes.activity_type.name == name}
    return list(_finished(events, asked))


def _finished(events: list[HistoryEvent], asked: dict[int, HistoryEvent]) -> Iterator[tuple[Json, Json]]:
    for event in events:
        done = event.activity_task_completed_event_attributes
        if done.scheduled_event_id in asked:
            scheduled = asked[done.scheduled_event_id].activity_task_scheduled_event_attributes
            yield json.loads(scheduled.input.payloads[0].data), json.loads(done.result.payloads[0].data)


async def test_grant_and_sweep_result_can_be_read_in_a_sessions_history(client: Client) -> None:
    world = World(client)
    world.on_grant = only(2)
    async with session(Env(client), given(), world) as handle:
        await until_session(handle, lambda status: status.num_sweeps == 3)
        await stop(handle)
    grants = await calls(client, handle.id, names.GRANT_SWEEP)
    asked, granted = grants[1]
    assert (asked["host"], asked["sweep"], asked["num_groups"]) == ("mac-1", 1, 2)
    assert granted["question_ids"] == ["q1-0", "q1-1"]
    request, result = (await calls(client, handle.id, names.SWEEP))[1]
    assert (request["sweep"], request["question_ids"]) == (1, ["q1-0", "q1-1"])
    assert (result["status"], result["num_groups"], result["decode_seconds"], result["version"]) == ("done", 2, 2.0, 3)


async def test_step_can_be_read_in_a_runs_history(client: Client) -> None:
    world = World(client)
    async with running(Env(client), rules(stop=StopConditions(max_steps=2)), world) as handle:
        await handle.result()
    steps = await calls(client, handle.id, names.TRAIN_STEP)
    assert [(asked["step"], done["status"], done["num_groups"], done["reward_mean"]) for asked, done in steps] == [
        (1, "done", 8, 0.01),
        (2, "done", 8, 0.02),
    ]
