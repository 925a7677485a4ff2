"""A Mac's worker stopped like a sleeping Mac, asked to end, killed, and put to sleep, each in the middle of a sweep.

Real Temporal, real bucket, real sessions; only the task is paced (`paced_mac.py`), so that a sweep takes seconds.
"""

import asyncio
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from activities.connection import connect, make_worker
from environments import registry
from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.config.load import PROJECT_ROOT
from stoa.contracts import names
from tests.unit.worker_mac.publishing import Publishing
from tests.unit.worker_mac.sessions import Control, events_of, session_of, until, worker_process, write_config
from worker_mac.uploader import Spool
from workflows.mac_session import MacSessionWorkflow

pytestmark = [pytest.mark.faults, pytest.mark.timeout(290)]
HOST = "mac-a"


class Rig:
    """One run with a published version, its control side, and the folder of one Mac."""

    def __init__(self, store: Store, client: Client, folder: Path) -> None:
        self.run = f"signals-{secrets.token_hex(3)}"  # each test's own, or a task meant for this Mac meets the last one's
        self.store, self.client, self.folder = store, client, folder
        self.config, self.state, self.log = folder / "run.toml", folder / "a", folder / f"{HOST}.log"
        self.state.mkdir()

    def worker(self) -> Any:
        return worker_process(self.config, self.state, HOST, module="tests.loop.paced_mac")

    def groups(self, sweep: int = 0) -> dict[str, str]:
        """Keys of a sweep's groups in the bucket, at any version, with their etags."""
        listed = (found.key for found in self.store.list(keys.groups_prefix(self.run)))
        ours = [key for key, parts in keys.ours(listed, keys.parse_group) if parts.sweep == sweep]
        return {key: self.store.get(key, max_bytes=1 << 22).etag for key in ours}

    async def wait_for_groups(self, number: int) -> dict[str, str]:
        """Sweep 0 once it has that many."""
        found: dict[str, str] = {}

        def enough() -> bool:
            found.update(self.groups())
            return len(found) >= number

        await self.until(enough)
        return found

    async def until(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        """Wait; a failure tells the worker's last words and how its session is."""
        try:
            await until(condition, seconds)
        except AssertionError as error:
            status = await session_of(self.client, self.run, HOST)
            raise AssertionError(f"{error}: {status}; the Mac's last words: {self.log.read_text()[-6000:]}") from error

    def said(self, event: str) -> list[dict[str, Any]]:
        return [one for one in events_of(self.log) if one["event"] == event]

    async def sweep_is_whole(self, first: dict[str, str]) -> None:
        """Each of the eight groups is there once, and those that were there first are as they were."""
        found = await self.wait_for_groups(8)
        await self.until(lambda: self.groups(1))
        assert sorted(keys.parse_group(key).group for key in found) == list(range(8))
        assert first.items() <= found.items()


@pytest.fixture
async def rig(store: Store, temporal_server: Any, tmp_path: Path) -> AsyncIterator[Rig]:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_bytes((PROJECT_ROOT / "environments/search/policy" / name).read_bytes())
    client = await connect(temporal_server.address, temporal_server.namespace)
    rig = Rig(store, client, tmp_path)
    async with control_side(client, base, rig.run):
        write_config(rig.config, rig.run, temporal_server.address, store)
        rig.published = Publishing(store, base, run=rig.run, bucket=store.settings)  # type: ignore[attr-defined]
        rig.published.publish()  # type: ignore[attr-defined]
        yield rig
        await client.get_workflow_handle(names.session_workflow_id(rig.run, HOST)).terminate()


@asynccontextmanager
async def control_side(client: Client, base: Path, run: str) -> AsyncIterator[None]:
    questions = list(registry.create("search", {}, (base / "tokenizer.json").read_bytes()).question_ids("train"))
    control = Control(questions)
    async with make_worker(client, names.control_queue(run), workflows=[MacSessionWorkflow], activities=control.activities):
        yield


async def test_a_mac_that_slept_in_a_sweep_is_away_comes_back_and_no_group_is_there_twice(rig: Rig) -> None:
    with rig.worker() as process:
        first = await rig.wait_for_groups(2)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60.0
        while (status := await session_of(rig.client, rig.run, HOST)).state != "away":
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.3)
        assert status.reason == "lost: heartbeat timeout"
        rig.published.publish()  # type: ignore[attr-defined]
        await asyncio.sleep(5.0)  # in all longer than a clock jump must be to mean sleep
        process.send_signal(signal.SIGCONT)
        await rig.sweep_is_whole(first)
        assert (await session_of(rig.client, rig.run, HOST)).state == "live"
        assert "wake" in [event["reason"] for event in rig.said("hello_said")]
        assert process.poll() is None


async def test_a_mac_asked_to_end_in_a_sweep_is_gone_within_ten_seconds_and_has_shipped_what_was_finished(rig: Rig) -> None:
    with rig.worker() as process:
        first = await rig.wait_for_groups(1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert time.monotonic() - began <= 10.0
    first = await asyncio.to_thread(rig.groups) | first
    assert 1 <= len(first) < 8
    assert Spool(rig.state / "runs" / rig.run / "spool").held() == []
    status = await session_of(rig.client, rig.run, HOST)
    assert (status.state, status.num_groups) == ("away", len(first))
    with rig.worker():
        await rig.sweep_is_whole(first)
        assert [event["groups_found"] for event in rig.said("sweep_resumed")] == [len(first)]


async def test_a_mac_killed_in_a_sweep_loses_no_finished_group(rig: Rig) -> None:
    slow = rig.state / "mac.toml"
    slow.write_text("upload_bytes_per_second = 200\n")  # finished groups wait on disk
    spool = rig.state / "runs" / rig.run / "spool"
    with rig.worker() as process:
        await rig.until(lambda: spool.is_dir() and len(Spool(spool).held()) >= 3)
        process.kill()
        await asyncio.to_thread(process.wait, 10)
    held, sent = Spool(spool), await asyncio.to_thread(rig.groups)
    finished = {key: held.read(key) for key in held.held() if key not in sent}
    assert len(finished) >= 2 and len(finished) + len(sent) < 8
    slow.unlink()
    with rig.worker():
        await rig.sweep_is_whole(sent)
    for key, data in finished.items():
        assert rig.store.get(key, max_bytes=1 << 22).data == data
    assert sum(event["groups_found"] for event in rig.said("sweep_resumed")) == len(finished) + len(sent)


async def test_a_mac_that_is_put_to_sleep_is_still_before_and_begins_anew_after(rig: Rig) -> None:
    with rig.worker() as process:
        first = await rig.wait_for_groups(1)
        (rig.state / "sleep").touch()
        await rig.until((rig.state / "sleep-done").exists, 60.0)
        assert rig.said("sleep_awaited")[0]["still"] is True
        still = {**await asyncio.to_thread(rig.groups), **first}
        assert len(still) < 8
        (rig.state / "wake").touch()
        await rig.until(lambda: rig.said("worker_begins_anew"), 60.0)
        await rig.sweep_is_whole(first)
        assert process.poll() is None  # the same process number, which is what launchd watches
        assert subprocess.run(["kill", "-0", str(process.pid)], check=False).returncode == 0
        assert len(rig.said("run_joined")) == 2
