"""A run by hand: services, two workers without arguments, `stoa run`; pause, stop, resume by name, report, export."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cli.processes import Household
from cli.services import Ports, start_services
from stoa.config.load import Credentials

SHORT = ["--set", "evaluation.num_questions=16", "--set", "evaluation.num_questions_final=16", "--set", "evaluation.questions_a_part=16"]


def stoa(env: dict[str, str], *arguments: str, seconds: float = 200.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=seconds, env=env)


def worker(stack: ExitStack, module: str, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A worker without arguments, in a group of its own, ended with the stack."""
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, "-m", module], env=env, stdout=output, stderr=output, start_new_session=True)

    def end() -> None:
        for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(process.pid, number)
                process.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    stack.callback(end)
    return process


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STOA_", "AWS_"))}
    with Household(folder) as house:
        started = start_services(house, folder, folder / "logs", Credentials("stoa", "stoa-on-loopback"), Ports())
        yield {
            **clean,
            "OMP_NUM_THREADS": "1",
            "STOA_TEMPORAL_ADDRESS": started.temporal_address,
            "STOA_BUCKET_ENDPOINT": started.bucket_endpoint,
            "STOA_STATE": str(folder / "state"),
        }


def wait_until(condition: "object", seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.3)


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_workers_that_came_first_work_once_a_run_is_there_and_a_stopped_run_goes_on_by_name(tmp_path: Path) -> None:
    with servers(tmp_path / "servers") as env, ExitStack() as stack:
        worker(stack, "worker_mac.worker", env, tmp_path / "mac.log")
        worker(stack, "trainer_gpu.worker", env, tmp_path / "trainer.log")
        wait_until(lambda: "worker_waiting" in (tmp_path / "mac.log").read_text(), 60)

        first = stoa(env, "run", "--out", str(tmp_path / "run"), *SHORT, "--set", "stop.max_steps=4")
        assert first.returncode == 0, first.stderr
        assert "ended at step 4, version 1" in first.stderr
        assert (tmp_path / "run" / "report.html").is_file()
        assert '"kind": "step"' in (tmp_path / "run" / "metrics.jsonl").read_text()

        wait_until(lambda: "worker_ended" in (tmp_path / "mac.log").read_text(), 30)
        assert "goodbye_failed" not in (tmp_path / "mac.log").read_text()
        worker(stack, "worker_mac.worker", env, tmp_path / "mac2.log")
        other = stoa(env, "run", "--resume", *SHORT, "--set", "learning.learning_rate=0.5")
        assert other.returncode == 2
        assert "learning.learning_rate: " in other.stderr and "-> 0.5" in other.stderr

        second = stoa(env, "run", "--resume", "--detach", *SHORT, "--set", "stop.max_steps=400")
        assert second.returncode == 0, second.stderr
        wait_until(lambda: json.loads(stoa(env, "status", "demo", "--json").stdout)["step"] > 4, 90)
        assert stoa(env, "pause", "demo", "--reason", "lunch").returncode == 0
        assert json.loads(stoa(env, "status", "demo", "--json").stdout)["state"] == "paused"
        twice = stoa(env, "pause", "demo")
        assert twice.returncode == 2 and "pause was refused: run demo is paused already: lunch" in twice.stderr
        assert stoa(env, "resume", "demo").returncode == 0
        wait_until(lambda: json.loads(stoa(env, "status", "demo", "--json").stdout)["step"] >= 10, 90)
        examined = stoa(env, "eval", "demo", "--version", "0", "--questions", "16", "--samples", "2", "--name", "mine", "--json")
        assert examined.returncode == 0, examined.stderr
        (exam,) = json.loads(examined.stdout)
        assert (exam["evaluation"], exam["version"], exam["measures"]["num_questions"], exam["measures"]["num_samples"]) == (
            "mine",
            0,
            16,
            2,
        )
        assert sum(player["num_questions"] for player in exam["players"]) == 32
        assert stoa(env, "stop", "demo", "--reason", "enough").returncode == 0
        wait_until(lambda: json.loads(stoa(env, "status", "demo", "--json").stdout)["state"] == "stopped", 90)

        late = stoa(env, "stop", "demo")
        assert late.returncode == 2 and "stop was refused: the run has ended" in late.stderr
        assert "hint: there is nothing left to do; `stoa status demo` tells how it ended" in late.stderr
        late = stoa(env, "eval", "demo", "--version", "-1")
        assert late.returncode == 2 and "`stoa export demo DIR`, then `stoa eval DIR`" in late.stderr

        kept = {exam["evaluation"]: exam for exam in json.loads(stoa(env, "eval", "demo", "--json").stdout)}
        assert {"v0-first", "mine"} <= kept.keys()
        compared = json.loads(stoa(env, "eval", "demo", "--compare", "v0-first", "mine", "--json").stdout)
        assert compared["num_questions"] == 16, "both ask the same questions"

        report = stoa(env, "report", "demo", "--out", str(tmp_path / "report"), "--json")
        assert report.returncode == 0, report.stderr
        summary = json.loads(report.stdout)
        assert summary["audit"]["clean"], summary["audit"]["faults"]
        assert summary["steps"] >= 10
        assert summary == json.loads((tmp_path / "report" / "report.json").read_text())

        exported = stoa(env, "export", "demo", str(tmp_path / "mlx"))
        assert exported.returncode == 0, exported.stderr
        assert f"version {summary['versions']} of run demo" in exported.stderr
        assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {p.name for p in (tmp_path / "mlx").iterdir()}
        again = stoa(env, "export", "demo", str(tmp_path / "mlx"))
        assert again.returncode == 2 and "overwrites nothing" in again.stderr
