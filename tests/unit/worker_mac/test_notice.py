"""What the run says reaches a Mac's owner: a quarantine while it plays, and a build that is too old at its next start."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from temporalio import activity

from activities.connection import connect, make_worker
from environments import registry
from stoa.bucket import keys
from stoa.bucket.store import Store
from stoa.config.load import PROJECT_ROOT
from stoa.contracts import names
from stoa.contracts.fleet_messages import AdmitRequest, Admitted, Standing
from tests.servers import TemporalServer
from tests.unit.worker_mac.publishing import Publishing
from tests.unit.worker_mac.sessions import Control, events_of, session_of, until, worker_process, write_config
from workflows.mac_session import MacSessionWorkflow


class Strict(Control):
    """Lets in what `answer` says."""

    answer = Admitted()
    asked: AdmitRequest | None = None

    @activity.defn(name=names.ADMIT_MAC)
    async def judge(self, request: AdmitRequest) -> Admitted:
        self.asked = request
        return self.answer

    @property
    def activities(self) -> list[Callable]:
        return [self.grant, self.judge, self.notify]


@pytest.mark.loop
@pytest.mark.timeout(200)
async def test_owner_reads_why_the_mac_stopped_and_what_to_install(store: Store, temporal_server: TemporalServer, tmp_path: Path) -> None:
    run, config, base = "notice", tmp_path / "run.toml", tmp_path / "base"
    write_config(config, run, temporal_server.address, store)
    base.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_bytes((PROJECT_ROOT / "environments/search/policy" / name).read_bytes())
    Publishing(store, base, run=run, bucket=store.settings).publish()
    client = await connect(temporal_server.address, temporal_server.namespace)
    control = Strict(list(registry.create("search", {}, (base / "tokenizer.json").read_bytes()).question_ids("train")))
    session = client.get_workflow_handle(names.session_workflow_id(run, "mac-n"))
    log = tmp_path / "mac-n.log"

    def said(kind: str) -> list[str]:
        return [event["text"] for event in events_of(log) if event["event"] == "run_says" and event["kind"] == kind]

    queue = names.control_queue(run)
    async with make_worker(client, queue, workflows=[MacSessionWorkflow], activities=control.activities, graceful_seconds=1):
        with worker_process(config, tmp_path / "n", "mac-n") as process:
            await until(lambda: list(store.list(keys.groups_of_version(run, 0))))
            assert control.asked is not None and control.asked.build
            await session.signal(names.STANDING, Standing(run, "mac-n", "quarantined", "edited rewards"))
            (text,) = await until(lambda: said("quarantined"))  # type: ignore[misc]
            assert "edited rewards" in text
            assert (await session_of(client, run, "mac-n")).state == "quarantined"
            shipped = len(list(store.list(keys.groups_prefix(run))))
            await asyncio.sleep(3)
            assert len(list(store.list(keys.groups_prefix(run)))) <= shipped + 8  # what was finished may still arrive
            assert process.poll() is None
            await session.signal(names.STANDING, Standing(run, "mac-n", "free"))
            await until(lambda: said("free"))
            process.terminate()
            assert await asyncio.to_thread(process.wait, 30) == 0
        control.answer = Admitted(ok=False, reason="build 0.1.0 is too old for this run: `pip install -U 'stoa>=9.0.0'`")
        with worker_process(config, tmp_path / "n", "mac-n") as process:
            assert await asyncio.to_thread(process.wait, 60) == 2
        assert said("too_old") == [control.answer.reason]
        assert "error: build 0.1.0 is too old" in log.read_text()
