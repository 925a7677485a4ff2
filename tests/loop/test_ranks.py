"""A trainer of two ranks, end to end: it trains, is asked to end in the middle, and another one goes on."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.test_by_hand import SHORT, Desk
from tests.servers import bucket_server

RANKS = ["-m", "trainer_gpu.ranks", "--nproc-per-node", "2"]
LEARN = ["--set", "rollout.record_routing=true", "--set", "evaluation.every_versions=0", "--set", "learning.micro_batch_tokens=1024"]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def pair_of_ranks(desk: Desk, name: str) -> subprocess.Popen[bytes]:
    return desk.start(name, sys.executable, *RANKS)


def events(log: Path) -> list[dict[str, object]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{")]


def names(log: Path) -> list[object]:
    return [event["event"] for event in events(log)]


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_two_ranks_train_a_run_and_another_pair_goes_on_after_sigterm(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    with bucket_server(tmp_path / "bucket", ports=desk.bucket_ports):
        desk.temporal()
        desk.worker("worker_mac")
        pair = pair_of_ranks(desk, "first")
        answers: list[subprocess.CompletedProcess[str]] = []
        run = threading.Thread(target=lambda: answers.append(desk.stoa("run", *SHORT, *LEARN, "--set", "stop.max_steps=8", seconds=270)))
        run.start()
        log = tmp_path / "first.log"
        deadline = time.monotonic() + 150
        while "step_done" not in names(log):
            assert pair.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        pair.send_signal(signal.SIGTERM)
        pair.wait(45)
        said = names(log)
        assert "worker_ended" in said and "follower_ended" in said, "both ranks ended by themselves"
        assert not {"rank_lost", "leader_lost", "worker_crashed", "lease_not_served"} & set(said)

        pair_of_ranks(desk, "second")
        run.join(200)
        assert answers, (tmp_path / "second.log").read_text()[-3000:]
        assert answers[0].returncode == 0, answers[0].stderr + answers[0].stdout
    steps = [event["step"] for name in ("first", "second") for event in events(tmp_path / f"{name}.log") if event["event"] == "step_done"]
    assert set(steps) >= set(range(1, 9))
