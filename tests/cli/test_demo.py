"""`stoa demo`, whole: it ends by itself, reports, survives kill -9 of its parts, and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.outputs import OUTPUTS, load

STOA = (sys.executable, "-m", "cli.main")
SHORT = ["--set", "evaluation.num_questions=16", "--set", "evaluation.num_questions_final=32", "--set", "evaluation.questions_a_part=16"]


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("STOA_", "AWS_"))}
    command = [*STOA, "demo", "--out", str(out), *SHORT, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)


def left_behind(out: Path) -> list[str]:
    """Command lines of processes that name the demo's folder, or whose working state is in it."""
    found: list[str] = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(out) in line and process.info["pid"] != os.getpid():
            found.append(line)
    return found


def wait_for(condition: "object", seconds: float, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the demo did not come that far"
        time.sleep(0.2)


def processes(out: Path) -> dict[str, int]:
    try:
        return {entry["name"]: entry["pid"] for entry in json.loads((out / "processes.json").read_text())}
    except (FileNotFoundError, ValueError):
        return {}


def steps_done(out: Path) -> int:
    """Steps whose manifest is in metrics.jsonl."""
    try:
        return sum('"kind": "step"' in line for line in (out / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def said_by(out: Path, name: str) -> str:
    """A process's log: with something in it, the process is past its start."""
    try:
        return (out / "logs" / f"{name}.log").read_text(errors="replace")
    except FileNotFoundError:
        return ""


def nothing_left(out: Path, seconds: float = 25.0) -> bool:
    deadline = time.monotonic() + seconds
    while left_behind(out) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left_behind(out) == []


def opened_again(out: Path, report: dict[str, Any]) -> None:
    """The servers of a demo that has ended come up where they were, and what reads a run reads it as it was."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("STOA_", "AWS_"))}
    services = subprocess.Popen([*STOA, "services", "--demo", str(out)], stderr=subprocess.PIPE, text=True, env=env)
    assert services.stderr is not None

    def look(*command: str) -> str:
        done = subprocess.run([*STOA, *command, "--config", str(out / "config.json")], capture_output=True, text=True, timeout=60, env=env)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def told(command: str, *arguments: str) -> dict[str, Any]:
        """With --json: the keys are those of the reference."""
        tree = json.loads(look(*command.split(), *arguments, "--json"))
        tree = tree[-1] if OUTPUTS[command].is_list else tree
        assert set(tree) == OUTPUTS[command].keys(), command
        for key, kind in OUTPUTS[command].rows.items():
            assert {name for row in tree[key] for name in row} == {one.name for one in fields(load(kind))}, (command, key)
        return tree

    try:
        while "Ctrl-C" not in (line := services.stderr.readline()):
            assert line, "it ended before both servers answered"
        status = told("status", "demo")
        assert (status["state"], status["step"], status["version"], status["waiting_for"]) == ("stopped", 8, 2, "")
        assert status["end_reason"] == report["end_reason"] == "all 8 steps are done"
        assert {mac["host"]: mac["bytes_down"] for mac in status["macs"]} == {mac["host"]: mac["bytes_down"] for mac in report["macs"]}
        again = told("report", "demo", "--out", str(out / "again"))
        for name in ("pass_at_1", "groups_trained", "audit", "bytes_pulled", "bytes_pushed", "delta_bytes_median", "trainer_idle_fraction"):
            assert again[name] == report[name], name
        look("live", "demo", "--snapshot", str(out / "live.svg"), "--every", "0.2")
        assert "all 8 steps are done" in (out / "live.svg").read_text().replace("&#160;", " ")
        told("live", "demo")
        assert told("eval", "demo")["version"] == 2
        episode = told("episode ls", "demo", "--limit", "1")["episodes"][0]["id"]
        assert told("episode show", "demo", episode)["turns"]
        assert len(told("weights ls", "demo")["versions"]) == 3
        told("export", "demo", str(out / "exported"))
    finally:
        services.send_signal(signal.SIGINT)
        services.communicate(timeout=30)
    assert services.returncode == 3
    assert nothing_left(out)


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_demo_ends_at_its_last_step_reports_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    process = start(out, "--set", "stop.max_steps=8", "--workers", "2", "--minutes", "4")
    said = process.communicate(timeout=280)[1]
    assert process.returncode == 0, said
    report = json.loads((out / "report.json").read_text())
    assert (report["steps"], report["versions"], report["workers"]) == (8, 2, 2)
    assert report["groups_trained"] == 64
    assert report["pass_at_1"]["num_questions"] == 32
    assert report["audit"]["clean"]
    assert report["restarts"] == {}, "a Mac that ended because the run was over was started again"
    assert report["anchor_bytes"] > report["delta_bytes_median"] > 0
    assert report["bytes_pulled"] > 0
    kinds = [json.loads(line)["kind"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (kinds.count("step"), kinds.count("version")) == (8, 3)
    assert kinds.count("evaluation") >= 2
    assert (out / "report.html").is_file() and (out / "plots" / "learning.png").is_file()
    for part in ("Temporal page: http://127.0.0.1:", "version 2  step 8/8", "held-out at version 2", "pass@1", "search rate", "delta "):
        assert part in said
    assert "stoa services --demo" in said
    assert nothing_left(out)
    opened_again(out, report)
    logs = "".join(path.read_text(errors="replace") for path in (out / "logs").iterdir())
    assert "Traceback" not in logs, "a clean end is told as one"
    for secret in ("stoa-on-loopback", (out / "state" / "signing.key").read_text().strip()):
        assert secret not in logs + said


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_kill_of_a_mac_and_of_the_trainer_loses_and_doubles_nothing(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    process = start(out, "--set", "stop.max_steps=20", "--workers", "2", "--minutes", "4.5", "--set", "publish.anchor_every_versions=4")
    wait_for(lambda: steps_done(out) >= 4, 120, process)
    os.kill(processes(out)["mac-2"], signal.SIGKILL)
    wait_for(lambda: steps_done(out) >= 10, 120, process)
    os.kill(processes(out)["trainer"], signal.SIGKILL)
    said = process.communicate(timeout=250)[1]
    assert process.returncode == 0, said
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 20
    assert report["audit"] == {**report["audit"], "clean": True, "groups_trained_twice": 0, "versions_published_twice": 0}
    assert report["groups_trained"] == 20 * 8
    assert report["restarts"] == {"mac-2": 1, "trainer": 1}
    assert nothing_left(out)


@pytest.mark.faults
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_stopped_or_killed_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "demo"
    process = start(out, "--workers", "1", "--minutes", "1.5")
    wait_for(lambda: "mac-1" in processes(out) and said_by(out, "mac-1"), 60, process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 3)
    assert nothing_left(out)
    if number == signal.SIGKILL:
        again = start(out, "--workers", "1")
        assert "overwrites nothing" in again.communicate(timeout=30)[1]
        assert again.returncode == 2


def test_used_folder_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("mine")
    process = start(tmp_path)
    said = process.communicate(timeout=50)[1]
    assert process.returncode == 2
    assert "not an empty folder" in said.splitlines()[0]
    assert (tmp_path / "report.json").read_text() == "mine"


@pytest.mark.parametrize(("flag", "value"), [("--workers", "0"), ("--minutes", "0"), ("--workers", "two")])
def test_arguments_out_of_range_are_wrong_use(tmp_path: Path, flag: str, value: str) -> None:
    process = start(tmp_path / "new", flag, value)
    assert flag in process.communicate(timeout=50)[1]
    assert process.returncode == 2
    assert not (tmp_path / "new").exists()
