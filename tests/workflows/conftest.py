"""Servers for workflow tests: Temporal's time-skipping test server and its dev server, one of each a module."""

import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities.connection import ATTRIBUTE_TYPES, DATA_CONVERTER, connect, setup_namespace
from stoa.contracts import names

BIN = Path(sys.executable).parent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def skipping() -> AsyncIterator[WorkflowEnvironment]:
    """A server on which hours pass in milliseconds; it has no visibility queries."""
    env = await WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=str(BIN / "temporal-test-server"), data_converter=DATA_CONVERTER
    )
    try:
        await add_attributes(env.client)
        yield env
    finally:
        await env.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[str]:
    """Address of a real dev server whose namespace `default` is set up."""
    env = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(BIN / "temporal"), ip="127.0.0.1", port=free_port(), dev_server_log_level="error"
    )
    try:
        address = env.client.service_client.config.target_host
        await setup_namespace(address, "default")
        yield address
    finally:
        await env.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: str) -> Client:
    """A client of the dev server, with the size check."""
    return await connect(server, "default")


async def add_attributes(client: Client) -> None:
    """Search attributes on the time-skipping server, which cannot list them."""
    attributes = {name: ATTRIBUTE_TYPES[kind] for name, kind in names.SEARCH_ATTRIBUTES.items()}
    request = AddSearchAttributesRequest(namespace=client.namespace, search_attributes=attributes)
    await client.operator_service.add_search_attributes(request)


def free_port() -> int:
    """A free loopback port below 55535."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port < 55_535:
            return port
