"""Real servers for tests: a bucket (`weed mini`) and Temporal's dev server, on free loopback ports, in folders of their own.

Each is ready when a real call succeeds, not when its port opens, and is ended by its process id, together with its
children. Nothing here is for production: `cli/services.py` starts the servers a person sees.
"""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError

from cli.services import Keys
from stoa.bucket.store import Store
from stoa.config.load import Credentials
from stoa.config.run import Bucket
from stoa.contracts import names
from stoa.contracts.errors import StoaError

CREDENTIALS = Credentials("stoa", "stoa-on-loopback")
MAC_CREDENTIALS = Credentials("stoa-mac", "stoa-mac-on-loopback")
_READY_SECONDS = 40.0


@dataclass(frozen=True)
class BucketServer:
    """A running S3 server."""

    endpoint: str
    pid: int

    def settings(self, name: str) -> Bucket:
        return Bucket(endpoint=self.endpoint, name=name, head_interval_seconds=0.0)

    def store(self, name: str, *, patience_seconds: float = 0.0, credentials: Credentials = CREDENTIALS) -> Store:
        return Store(self.settings(name), credentials, patience_seconds=patience_seconds)


@dataclass(frozen=True)
class TemporalServer:
    """A running Temporal dev server with the project's search attributes in its namespaces."""

    address: str
    namespace: str
    pid: int


def free_ports(count: int, *, reserve_offset: int = 0) -> list[int]:
    """Ports of 127.0.0.1 that are free now; with an offset, port + offset is free too. Both below the range of outgoing connections."""
    found: list[int] = []
    chance = random.Random(os.urandom(8))
    while len(found) < count:
        port = chance.randrange(11000, 22000)
        if port not in found and _is_free(port) and (not reserve_offset or _is_free(port + reserve_offset)):
            found.append(port)
    return found


def binary(name: str) -> str:
    """A program that was installed beside this interpreter."""
    return str(Path(sys.executable).parent / name)


@contextmanager
def bucket_server(folder: Path, *, ports: list[int] | None = None) -> Iterator[BucketServer]:
    """A `weed mini` in `folder`; give the ports to start it again on the same ones."""
    s3, master, volume, filer, admin = ports or free_ports(5, reserve_offset=10000)
    command = [binary("weed"), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
    command += [f"-admin.port={admin}", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.telemetry=false", "-s3.autoCreateBucket=false"]
    command += ["-volume.max=2000"]  # every bucket of every test takes several volumes
    (folder / "keys.json").write_text(Keys(CREDENTIALS, MAC_CREDENTIALS).document())
    command += [f"-s3.config={folder / 'keys.json'}"]
    with _process(command, folder / "weed.log", {}) as process:
        server = BucketServer(f"http://127.0.0.1:{s3}", process.pid)
        probe = server.store("readiness")
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                probe.ensure_bucket()
                probe.create(f"probe/{time.monotonic_ns()}", b"ready")
                break
            except StoaError:
                _check_alive(process, deadline, folder / "weed.log")
        yield server


@contextmanager
def temporal_server(folder: Path, *, namespaces: tuple[str, ...] = ("default",)) -> Iterator[TemporalServer]:
    """A `temporal server start-dev` without UI, its database in `folder`."""
    port, http, metrics = free_ports(3)
    command = [binary("temporal"), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(port), "--http-port", str(http)]
    command += ["--metrics-port", str(metrics), "--headless", "--log-level", "error", "--db-filename", str(folder / "temporal.db")]
    command += ["--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=NORMAL"]
    for namespace in namespaces:
        command += ["--namespace", namespace]
    with _process(command, folder / "temporal.log", {"TEMPORAL_VERSION_CHECK_DISABLED": "1"}) as process:
        deadline = time.monotonic() + _READY_SECONDS
        address = f"127.0.0.1:{port}"
        for namespace in namespaces:
            while True:
                try:
                    asyncio.run(_add_search_attributes(address, namespace))
                    break
                except (RPCError, RuntimeError, TimeoutError):
                    _check_alive(process, deadline, folder / "temporal.log")
        yield TemporalServer(address, namespaces[0], process.pid)


async def _add_search_attributes(address: str, namespace: str) -> None:
    """Connect, describe the namespace, register what the workflows set."""
    client = await Client.connect(address, namespace=namespace)
    kinds = {"Keyword": "KEYWORD", "Int": "INT", "Double": "DOUBLE"}
    wanted = {name: IndexedValueType.Value(f"INDEXED_VALUE_TYPE_{kinds[kind]}") for name, kind in names.SEARCH_ATTRIBUTES.items()}
    request = AddSearchAttributesRequest(namespace=namespace, search_attributes=wanted)
    await client.operator_service.add_search_attributes(request)
    await client.count_workflows("RlRun = 'none'")


@contextmanager
def _process(command: list[str], log: Path, extra_environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a process group of its own; end the group when the block ends."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "STOA_"))}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**environment, **extra_environment}, cwd=log.parent, start_new_session=True
        )
    try:
        yield process
    finally:
        for kind, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(process.pid, kind)
            except ProcessLookupError:
                break
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                continue


def _check_alive(process: subprocess.Popen[bytes], deadline: float, log: Path) -> None:
    """Raises RuntimeError with the end of the log if the server died or took too long."""
    if process.poll() is not None or time.monotonic() > deadline:
        tail = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"server did not become ready (exit {process.poll()}): {tail}")
    time.sleep(0.05)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
