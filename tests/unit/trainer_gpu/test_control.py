"""The control process as its parent starts it: two namespaces, real grants, and an end when its input ends."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio import activity
from temporalio.client import Client

from activities.connection import connect, make_worker, setup_namespace
from stoa.bucket.head import HeadWriter
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import claim_run, new_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.run import RunConfig
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.fleet_messages import Hello, SessionInput, SessionStatus, SweepRequest, SweepResult
from stoa.contracts.messages import Ask, RunInput, RunResult, RunStatus, StopConditions
from stoa.weights.layout import layout_of
from tests.servers import CREDENTIALS, TemporalServer
from tests.unit.trainer_gpu.player import POLICY
from trainer_gpu.control import EVENTS

pytestmark = [pytest.mark.loop, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[3]
SEED = bytes(range(32))


@pytest.fixture
def config(store: Store, temporal_server: TemporalServer) -> RunConfig:
    """A run in the bucket whose Macs have a namespace of their own."""
    word = uuid.uuid4().hex[:8]
    temporal = {"address": temporal_server.address, "namespace_core": f"core-{word}", "namespace_mac": f"mac-{word}"}
    config = RunConfig(run="test", model=str(POLICY), bucket=store.settings).model_copy(
        update={"temporal": RunConfig().temporal.model_copy(update=temporal)}
    )
    signer = Signer.from_seed(SEED)
    layout_id = layout_of(json.loads((POLICY / "config.json").read_text()), config.learning.dtype).layout_id
    files = upload_model_files(store, config.run, POLICY)
    claim_run(store, new_run(config, signer, layout_id=layout_id, model_files=files), signer)
    return config


@pytest.fixture
def control(config: RunConfig, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    text = [f'run = "test"\nmodel = "{config.model}"', "[temporal]"]
    text += [f'{key} = "{value}"' for key, value in config.temporal.model_dump().items() if isinstance(value, str) and value]
    text += ["[bucket]", f'endpoint = "{config.bucket.endpoint}"', f'name = "{config.bucket.name}"']
    path = tmp_path / "run.toml"
    path.write_text("\n".join(text) + "\n")
    environment = {
        **os.environ,
        "STOA_STATE": str(tmp_path),
        "STOA_SIGNING_KEY": base64.b64encode(SEED).decode(),
        "STOA_BUCKET_KEY": CREDENTIALS.key,
        "STOA_BUCKET_SECRET": CREDENTIALS.secret,
    }
    command = [sys.executable, "-m", "trainer_gpu.control", "--state", str(tmp_path), str(path)]
    with (tmp_path / "control.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Mac:
    """A Mac that ships nothing."""

    def __init__(self) -> None:
        self.asked: list[SweepRequest] = []

    @activity.defn(name=names.SWEEP)
    async def sweep(self, request: SweepRequest) -> SweepResult:
        self.asked.append(request)
        return SweepResult("done", request.sweep, version=0, num_groups=len(request.question_ids))


async def start(core: Client, mac: Client) -> None:
    rules = RunInput("test", StopConditions(), EvaluationPlan(0, 0, 0), heartbeat_seconds=10.0)
    queue = names.control_queue("test")
    await core.start_workflow(names.RUN_WORKFLOW, rules, id=names.run_workflow_id("test"), task_queue=queue)
    await mac.start_workflow(
        names.MAC_SESSION,
        SessionInput("test", "mac-1", groups=4, heartbeat_seconds=10.0),
        id=names.session_workflow_id("test", "mac-1"),
        task_queue=queue,
        start_signal=names.HELLO,
        start_signal_args=[Hello("mac-1", "n")],
    )


async def test_sessions_and_run_meet_across_namespaces_and_the_process_ends_with_its_input(
    config: RunConfig, control: subprocess.Popen[bytes], store: Store, tmp_path: Path
) -> None:
    temporal = config.temporal
    await setup_namespace(temporal.address, temporal.namespace_core)  # the control process waits for both
    await setup_namespace(temporal.address, temporal.namespace_mac)
    core = await connect(temporal.address, temporal.namespace_core)
    mac = await connect(temporal.address, temporal.namespace_mac)
    writer = HeadWriter(store, "test", Signer.from_seed(SEED), owner="box", interval_seconds=0.0)
    writer.acquire(1001)
    writer.swap(1001, version=0, manifest_key="m", manifest_sha256="s")
    await start(core, mac)
    run = core.get_workflow_handle(names.run_workflow_id("test"), result_type=RunResult)
    session = mac.get_workflow_handle(names.session_workflow_id("test", "mac-1"))
    player = Mac()
    async with make_worker(mac, names.mac_queue("test", "mac-1"), activities=[player.sweep], max_concurrent_activities=1):
        deadline = time.monotonic() + 40
        while True:
            status = await session.query(names.SESSION_QUERY, result_type=SessionStatus)
            fleet = (await run.query(names.STATUS_QUERY, result_type=RunStatus)).num_macs
            if status.num_sweeps >= 3 and fleet == 1:
                break
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.1)
        await run.execute_update(names.STOP, Ask("enough"), result_type=RunStatus)
        assert (await run.result()).end_reason == "enough"
        ended: SessionStatus = await mac.get_workflow_handle(session.id, result_type=SessionStatus).result()
    assert ended.reason == "run stopped: enough"
    assert [len(request.question_ids) for request in player.asked[:3]] == [4, 4, 4]
    questions = [question for request in player.asked for question in request.question_ids]
    assert len(set(questions)) == len(questions)  # far from the end of a pass, no question comes twice
    assert control.poll() is None
    assert control.stdin is not None
    control.stdin.close()
    assert control.wait(20) == 0
    kept = [json.loads(line)["event"] for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert kept.index("control_ready") < kept.index("control_ended"), "for a bundle"


STUCK = """
import threading, time
from trainer_gpu import control
control.END_SECONDS = 0.5
control._on_end_of_input(lambda: None)
print("ready", flush=True)
threading.Thread(target=time.sleep, args=(50,)).start()  # as one that rides out an outage of the bucket
"""


def test_process_without_a_parent_ends_whatever_its_threads_wait_for() -> None:
    stuck = subprocess.Popen([sys.executable, "-c", STUCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stuck.stdin is not None and stuck.stdout is not None
    assert stuck.stdout.readline() == b"ready\n"
    assert stuck.poll() is None
    stuck.stdin.close()
    assert stuck.wait(20) == 1
