"""Which Macs are here already is asked of Temporal itself, without any worker; a server that is away tells none."""

import asyncio
import secrets
import time
from typing import Any

import pytest
from temporalio.client import Client

from activities.connection import setup_namespace
from cli.temporal import Control
from stoa.config.run import Temporal
from stoa.contracts import names
from stoa.contracts.errors import ServiceUnavailableError
from tests.servers import free_ports


def test_open_sessions_of_this_run_are_told_and_of_no_other(temporal_server: Any) -> None:
    core = f"core-{secrets.token_hex(4)}"

    async def start() -> None:
        client = await Client.connect(temporal_server.address, namespace=temporal_server.namespace)
        for run, host in (("here", "mac-2"), ("here", "mac-1"), ("here2", "mac-9"), ("elsewhere", "mac-3")):
            await client.start_workflow(names.MAC_SESSION, id=names.session_workflow_id(run, host), task_queue="nobody")

    async def start_runs() -> None:
        client = await Client.connect(temporal_server.address, namespace=core)
        for run in ("live-2", "live"):
            await client.start_workflow(names.RUN_WORKFLOW, id=names.run_workflow_id(run), task_queue="nobody")

    asyncio.run(start())
    asyncio.run(setup_namespace(temporal_server.address, core))
    with Control(Temporal(address=temporal_server.address, namespace_core=core)) as control:
        deadline = time.monotonic() + 20  # what is started is listed a moment later
        while (found := control.present("here")) != ("mac-1", "mac-2"):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        asyncio.run(start_runs())
        while (runs := control.live_runs()) != ("live", "live-2"):
            assert time.monotonic() < deadline, runs
            time.sleep(0.2)
    with Control(Temporal(address=f"127.0.0.1:{free_ports(1)[0]}")) as control:
        assert control.present("here") == control.live_runs() == ()


def test_order_that_no_worker_takes_is_given_up(temporal_server: Any) -> None:
    run = f"alone-{secrets.token_hex(4)}"

    async def start() -> None:
        client = await Client.connect(temporal_server.address, namespace=temporal_server.namespace)
        await client.start_workflow(names.RUN_WORKFLOW, id=names.run_workflow_id(run), task_queue="nobody")

    asyncio.run(start())
    settings = Temporal(address=temporal_server.address, namespace_core=temporal_server.namespace)
    with (
        Control(settings, update_seconds=1.0) as control,
        pytest.raises(ServiceUnavailableError, match="its control process does not answer; drain may still be taken"),
    ):
        control.ask_mac(run, names.DRAIN_MAC, "mac-1", "tea")
