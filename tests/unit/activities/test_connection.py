"""Connecting, setting up, supervising and bounding messages, on Temporal's dev server where a server is needed."""

import asyncio
import uuid
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.connection import (
    DATA_CONVERTER,
    connect,
    connect_forever,
    make_worker,
    require_setup,
    setup_namespace,
    supervise,
)
from activities.fleet import page
from stoa.contracts import names
from stoa.contracts.errors import MessageTooLargeError, ServiceUnavailableError, SetupMissingError, StoaError
from stoa.contracts.evaluation_messages import EvalPart, EvaluationPlan, ListMacsRequest, MacList
from stoa.contracts.messages import RunInput, StopConditions
from tests.servers import TemporalServer, free_ports
from tests.workflows.relay import Relay

NOWHERE = f"127.0.0.1:{free_ports(1)[0]}"


@activity.defn(name="nothing")
async def nothing() -> None:
    """An activity nobody calls."""


def test_message_above_16_kib_is_refused_and_never_retried() -> None:
    ids = tuple(f"question-{i:08d}" for i in range(2000))
    with pytest.raises(MessageTooLargeError) as caught:
        DATA_CONVERTER.payload_converter.to_payloads([EvalPart("r", "e", 1, 0, ids)])
    assert isinstance(caught.value, ApplicationError)
    assert caught.value.non_retryable
    assert "EvalPart" in caught.value.message
    assert caught.value.hint


def test_part_of_64_long_ids_fits_and_carried_state_may_be_larger() -> None:
    converter = DATA_CONVERTER.payload_converter
    converter.to_payloads([EvalPart("r", "e", 1, 0, tuple("x" * 48 for _ in range(64)))])
    rules = RunInput("r", StopConditions(), EvaluationPlan(), carried="x" * 200_000)
    converter.to_payloads([rules])
    with pytest.raises(MessageTooLargeError):
        converter.to_payloads([RunInput("r", StopConditions(), EvaluationPlan(), carried="x" * 300_000)])


async def test_no_server_is_a_typed_error_after_the_bound_and_each_wait_is_told() -> None:
    told: list[StoaError] = []
    with pytest.raises(ServiceUnavailableError) as caught:
        await connect_forever(NOWHERE, "default", on_wait=lambda error, _: told.append(error), give_up_seconds=1.5)
    assert NOWHERE in caught.value.message
    assert "temporal server start-dev" in caught.value.hint
    assert told


async def test_sdk_writes_nothing_where_a_command_writes_data(temporal_server: TemporalServer, capfd: pytest.CaptureFixture[str]) -> None:
    """A call that is tried again and again, because the server is away, is logged by the SDK: to standard output, if at all."""
    async with Relay(temporal_server.address) as path:
        client = await connect(path.address, temporal_server.namespace)
        path.cut()
        with pytest.raises(RPCError):
            await client.count_workflows(rpc_timeout=timedelta(seconds=5))
    assert capfd.readouterr().out == ""


async def test_setup_makes_a_namespace_usable_and_again_changes_nothing(temporal_server: TemporalServer) -> None:
    namespace = f"n{uuid.uuid4().hex[:8]}"
    client = await connect(temporal_server.address, namespace)
    with pytest.raises(SetupMissingError) as caught:
        await require_setup(client)
    assert namespace in caught.value.message
    assert "stoa setup" in caught.value.hint
    with pytest.raises(SetupMissingError):
        await connect_forever(temporal_server.address, namespace, give_up_seconds=0.2)
    await setup_namespace(temporal_server.address, namespace)
    await require_setup(client)
    await setup_namespace(temporal_server.address, namespace)
    count = await client.count_workflows("RlRun = 'x' AND RlVersion > 3 AND RlReward < 1.0")
    assert count.count == 0


async def test_worker_waits_until_the_set_up_is_made(temporal_server: TemporalServer) -> None:
    namespace = f"n{uuid.uuid4().hex[:8]}"
    waiting = asyncio.create_task(connect_forever(temporal_server.address, namespace))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await setup_namespace(temporal_server.address, namespace)
    client = await asyncio.wait_for(waiting, 15)
    assert client.namespace == namespace


async def test_failed_worker_is_made_anew_and_stop_ends_it(temporal_server: TemporalServer) -> None:
    stop, healthy = asyncio.Event(), asyncio.Event()
    made: list[str] = []

    async def make() -> Worker:
        made.append("worker")
        if len(made) == 1:
            raise ServiceUnavailableError("not yet")
        client = await connect(temporal_server.address, temporal_server.namespace)
        healthy.set()
        return make_worker(client, "queue-of-this-test", activities=[nothing], graceful_seconds=0)

    task = asyncio.create_task(supervise(make, stop))
    await asyncio.wait_for(healthy.wait(), 10)
    await asyncio.sleep(0.3)
    stop.set()
    await asyncio.wait_for(task, 10)
    assert made == ["worker", "worker"]


async def test_worker_that_never_starts_is_given_up() -> None:
    async def make() -> Worker:
        raise ServiceUnavailableError("no server")

    with pytest.raises(ServiceUnavailableError, match="failed 2 times, the last time with: no server"):
        await supervise(make, asyncio.Event(), max_failures=2)


def test_fleet_is_paged_by_name() -> None:
    hosts = {f"mac-{i:02d}" for i in range(5)}
    first = page(hosts, ListMacsRequest("r", limit=3))
    assert first == MacList(("mac-00", "mac-01", "mac-02"), "mac-02")
    assert page(hosts, ListMacsRequest("r", first.next_host, 3)) == MacList(("mac-03", "mac-04"))


def test_every_search_attribute_has_a_known_type() -> None:
    assert set(names.SEARCH_ATTRIBUTES.values()) == {"Keyword", "Int", "Double"}
