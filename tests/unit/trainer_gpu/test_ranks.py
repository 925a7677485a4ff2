"""The trainer's processes on one host: what they listen on, how they end, and that a lost one is started again."""

import base64
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stoa.bucket.steps import lineage
from stoa.contracts.messages import AcquireRequest
from tests.servers import BucketServer
from tests.unit.trainer_gpu.runs import Reports, config_of, head_of, ship_sweep
from tests.unit.trainer_gpu.test_two_ranks import SEED, start
from trainer_gpu.engine import TrainerEngine

ROOT = Path(__file__).parents[3]
LAUNCH = "import sys; from trainer_gpu.ranks import launch; m = 'tests.unit.trainer_gpu.lost_rank'; sys.exit(launch(m, sys.argv[1:], "
LAUNCH += "num_processes='2', max_restarts=9, shutdown_seconds=3))"


class Ranks:
    """`python -m trainer_gpu.ranks` with two processes, whose bucket and Temporal are not there."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        nowhere = {"STOA_BUCKET_ENDPOINT": "http://127.0.0.1:9", "STOA_TEMPORAL_ADDRESS": "127.0.0.1:9", "STOA_STATE": str(folder)}
        command = [sys.executable, "-W", "ignore", "-m", "trainer_gpu.ranks", "--nproc-per-node", "2", "--no-control"]
        with self.log.open("wb") as output:
            self.agent = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **nowhere}, stdout=output, stderr=output)

    def until(self, condition: Callable[[], object], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.agent.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.agent.pid), *psutil.Process(self.agent.pid).children(recursive=True)]

    def workers(self) -> list[int]:
        return [p.pid for p in self.processes()[1:] if any("trainer_gpu.worker" in part for part in p.cmdline())]

    def num_waiting(self) -> int:
        return self.log.read_text().count('"event": "worker_waiting"')


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    yield started
    for process in started.processes() if started.agent.poll() is None else []:
        process.kill()
    started.agent.wait()


@pytest.mark.loop
@pytest.mark.timeout(280)
def test_ranks_listen_on_loopback_only_are_started_again_and_end_when_asked(ranks: Ranks) -> None:
    ranks.until(lambda: ranks.num_waiting() == 1)
    first = ranks.workers()
    listening = [c.laddr.ip for p in ranks.processes() for c in p.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3, "the store, and gloo of either process"
    assert set(listening) <= {"127.0.0.1", "::1"}

    os.kill(first[0], signal.SIGKILL)
    ranks.until(lambda: ranks.num_waiting() == 2 and len(ranks.workers()) == 2)
    assert not set(first) & set(ranks.workers())
    ranks.agent.send_signal(signal.SIGTERM)
    assert ranks.agent.wait(80) == 0, ranks.log.read_text()[-3000:]
    said = ranks.log.read_text()
    assert '"event": "worker_ended"' in said and '"event": "follower_ended"' in said
    assert not any(psutil.pid_exists(pid) for pid in first)


@pytest.mark.faults
@pytest.mark.timeout(299)
def test_rank_lost_in_the_middle_of_a_step_costs_no_group_and_trains_none_twice(bucket_server: BucketServer, tmp_path: Path) -> None:
    """The second killed, then the first frozen: each time all end, all are started again, and the step is taken once."""
    store = bucket_server.store(f"lost-rank-{secrets.token_hex(4)}")
    store.ensure_bucket()
    handle = start(store, config_of(store, groups_per_step=3, micro_batch_tokens=600, learning_rate=1e-3))
    player = TrainerEngine(handle)
    try:
        player.acquire(AcquireRequest("test", 1), 1, Reports())
        shipped = ship_sweep(handle, player.prepare(), list(handle.environment.question_ids("train"))[:22], host="mac", sweep=0, seed=1)
    finally:
        player.close()
    faults = {1: (1, signal.SIGKILL), 2: (0, signal.SIGSTOP)}
    for step, (victim, number) in faults.items():
        (tmp_path / f"fault-{step}").write_text(f"{victim} {int(number)}")
    settings = tmp_path / "settings.json"
    settings.write_text(store.settings.model_dump_json())
    environment = {**os.environ, "STOA_SIGNING_KEY": base64.b64encode(SEED).decode()}
    with (tmp_path / "log").open("wb") as output:
        command = [sys.executable, "-W", "ignore", "-c", LAUNCH, str(settings), str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=285)
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0, said[-3000:]
    assert not list(tmp_path.glob("fault-*")), "every fault was planted"
    assert json.loads((tmp_path / "done").read_text()) == {"num_ranks": 2}
    starts = [int(step) for step in (tmp_path / "starts").read_text().split()]
    assert starts == sorted(starts) and set(starts) >= {0, 1}, "each life goes on from the last checkpoint"
    steps = list(lineage(store, head_of(handle)))[::-1]
    assert [manifest.step for manifest in steps] == [1, 2, 3]
    consumed = [key for manifest in steps for key in manifest.consumed]
    dropped = {drop.key for manifest in steps for drop in manifest.dropped}
    assert len(consumed) == len(set(consumed)) == 9
    assert [key for key in shipped if key not in dropped][:9] == consumed, "in order, none passed over"
