"""Fixtures every test may use: real servers, started once a session when the first test asks for them."""

import os
import secrets
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share tests out by file; whole runs go one after another on one process, since each takes both cores."""
    for item in items:
        is_whole_run = any(item.iter_markers("loop")) or any(item.iter_markers("faults"))
        group = "whole runs" if is_whole_run else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["object"]:
    """A real S3 server on loopback: `.endpoint`, `.settings(name)`, `.store(name)`."""
    from tests.servers import bucket_server as start

    with start(tmp_path_factory.mktemp("bucket")) as server:
        yield server


@pytest.fixture
def store(bucket_server: object) -> Iterator["object"]:
    """A `Store` on an empty bucket of this test alone, which is gone afterwards."""
    store = bucket_server.store(f"test-{secrets.token_hex(6)}")  # pyright: ignore[reportAttributeAccessIssue]
    store.ensure_bucket()
    yield store
    store._client.delete_bucket(Bucket=store.settings.name)  # this server deletes what is in it too, and frees its volumes


@pytest.fixture(scope="session")
def temporal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["object"]:
    """A real Temporal dev server with search attributes: `.address`, `.namespace`."""
    from tests.servers import temporal_server as start

    with start(tmp_path_factory.mktemp("temporal")) as server:
        yield server
