"""A Mac's worker as a process, and the control side of its run: real sessions on a real server, grants without a ledger."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from temporalio import activity
from temporalio.client import Client

from stoa.bucket.store import Store
from stoa.config.load import PROJECT_ROOT
from stoa.contracts import names
from stoa.contracts.fleet_messages import AdmitRequest, Admitted, FleetEvent, Grant, GrantRequest, SessionStatus


class Control:
    """The control side of one run: real sessions, grants of the first training questions, notices kept."""

    def __init__(self, questions: list[str]) -> None:
        self.questions, self.events = questions, []

    @activity.defn(name=names.GRANT_SWEEP)
    async def grant(self, request: GrantRequest) -> Grant:
        first = request.sweep * request.num_groups
        return Grant(request.run, request.host, request.sweep, tuple(self.questions[first : first + request.num_groups]))

    @activity.defn(name=names.ADMIT_MAC)
    async def admit(self, request: AdmitRequest) -> Admitted:
        return Admitted()

    @activity.defn(name=names.NOTIFY_RUN)
    async def notify(self, event: FleetEvent) -> None:
        self.events.append(event)

    @property
    def activities(self) -> list[Callable]:
        return [self.grant, self.admit, self.notify]


def write_config(path: Path, run: str, temporal: str, store: Store) -> None:
    path.write_text(
        f'run = "{run}"\n[temporal]\naddress = "{temporal}"\n'
        f'[bucket]\nendpoint = "{store.settings.endpoint}"\nname = "{store.settings.name}"\n'
        "[timeouts]\nheartbeat_seconds = 6.0\nhead_poll_seconds = 0.5\n"
    )


@contextmanager
def worker_process(config: Path, folder: Path, host: str, *, module: str = "worker_mac.worker") -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", module, str(config), "--state", str(folder), "--host", host, "--place", "here"]
    with (folder.parent / f"{host}.log").open("a") as log:
        process = subprocess.Popen(command, cwd=PROJECT_ROOT, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)


async def until(condition: Callable[[], object], seconds: float = 40.0) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = await asyncio.to_thread(condition)
        if found:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError("it did not happen in time")


def events_of(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


async def session_of(client: Client, run: str, host: str) -> SessionStatus:
    return await client.get_workflow_handle(names.session_workflow_id(run, host)).query(names.SESSION_QUERY, result_type=SessionStatus)
