"""Servers for workflow tests: Temporal's time-skipping test server and its dev server, a fresh one of the first for each test."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities.connection import ATTRIBUTE_TYPES, DATA_CONVERTER, connect
from stoa.contracts import names
from tests.servers import TemporalServer

BIN = Path(sys.executable).parent


@pytest_asyncio.fixture(loop_scope="module")
async def skipping() -> AsyncIterator[WorkflowEnvironment]:
    """A server on which hours pass in milliseconds; it has no visibility queries.

    One a test: an activity that a test leaves unfinished would hold the clock of every later one.
    """
    env = await WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=str(BIN / "temporal-test-server"), data_converter=DATA_CONVERTER
    )
    try:
        await add_attributes(env.client)
        yield env
    finally:
        await env.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def client(temporal_server: TemporalServer) -> Client:
    """A client of the dev server, with the size check."""
    return await connect(temporal_server.address, temporal_server.namespace)


async def add_attributes(client: Client) -> None:
    """Search attributes on the time-skipping server, which cannot list them."""
    attributes = {name: ATTRIBUTE_TYPES[kind] for name, kind in names.SEARCH_ATTRIBUTES.items()}
    request = AddSearchAttributesRequest(namespace=client.namespace, search_attributes=attributes)
    await client.operator_service.add_search_attributes(request)
