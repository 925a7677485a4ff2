"""Workers without arguments, started before anything else, on a plain `temporal server start-dev`; a run without servers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.servers import binary, bucket_server, free_ports

SHORT = ["--set", "evaluation.num_questions=16", "--set", "evaluation.num_questions_final=16", "--set", "evaluation.questions_a_part=16"]


class Desk:
    """Endpoints, state folders and the processes a person has open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporal_port, *others = free_ports(3)
        self.temporal_others = others
        self.bucket_ports = free_ports(5, reserve_offset=10000)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("STOA_", "AWS_"))}
        self.environment = {
            **clean,
            "STOA_TEMPORAL_ADDRESS": f"127.0.0.1:{self.temporal_port}",
            "STOA_BUCKET_ENDPOINT": f"http://127.0.0.1:{self.bucket_ports[0]}",
            "STOA_STATE": str(folder / "state"),
        }

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=self.folder, start_new_session=True)
        self.processes[name] = process
        return process

    def worker(self, wing: str) -> subprocess.Popen[bytes]:
        return self.start(wing, sys.executable, "-m", f"{wing}.worker")

    def temporal(self) -> None:
        http, metrics = self.temporal_others
        command = [binary("temporal"), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(self.temporal_port)]
        self.start("temporal", *command, "--http-port", str(http), "--metrics-port", str(metrics), "--headless", "--log-level", "error")

    def stoa(self, *arguments: str, seconds: float = 200.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, cwd=self.folder, timeout=seconds, check=False)

    def close(self) -> None:
        for kind, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            living = [p for p in self.processes.values() if p.poll() is None]
            for process in living:
                os.killpg(process.pid, kind)
            deadline = time.monotonic() + seconds
            while any(p.poll() is None for p in living) and time.monotonic() < deadline:
                time.sleep(0.1)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def listening_beyond_loopback(process: subprocess.Popen[bytes]) -> list[str]:
    """Addresses other than loopback on which the process or its children accept connections."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    sockets = [c for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in sockets if not c.laddr.ip.startswith("127.") and c.laddr.ip != "::1"]


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_workers_that_came_before_plain_servers_work_once_a_run_is_there(desk: Desk, tmp_path: Path) -> None:
    mac = desk.worker("worker_mac")
    trainer = desk.worker("trainer_gpu")
    time.sleep(3.0)
    assert mac.poll() is None and trainer.poll() is None, "a worker did not wait for its servers"

    (tmp_path / "bucket").mkdir()
    with bucket_server(tmp_path / "bucket", ports=desk.bucket_ports):
        desk.temporal()
        first = desk.stoa("run", *SHORT, "--set", "stop.max_steps=4")
        assert first.returncode == 0, first.stderr + first.stdout
        assert listening_beyond_loopback(trainer) == []

        again = desk.stoa("run", *SHORT, seconds=30)
        assert again.returncode == 2
        assert "demo" in again.stderr and "--resume" in again.stderr


@pytest.mark.loop
def test_a_run_without_servers_says_which_one_is_missing(desk: Desk) -> None:
    alone = desk.stoa("run", seconds=50)
    assert alone.returncode == 1
    assert alone.stderr.startswith("error: ")
    assert "stoa services" in alone.stderr
