"""`stoa join` and `stoa leave` where there is no launchd, and the worker in this window."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoa.config.load import PROJECT_ROOT


def stoa(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = None if home is None else {**os.environ, "HOME": str(home)}
    command = [sys.executable, "-c", "import sys; from cli.main import main; main(sys.argv[1:])", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT, env=environment)


@pytest.mark.skipif(shutil.which("launchctl") is not None, reason="launchd is here")
@pytest.mark.parametrize("arguments", [("join", "--at-login"), ("leave",)])
def test_without_launchd_the_person_is_told(arguments: tuple[str, ...], tmp_path: Path) -> None:
    found = stoa(*arguments, "--state", str(tmp_path))
    assert found.returncode == 2
    assert "for macOS" in found.stderr


@pytest.mark.skipif(shutil.which("launchctl") is not None, reason="launchd is here")
def test_a_wired_set_at_log_in_goes_as_far_as_launchd(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1"}]))
    line = ("join", "--at-login", "--no-doctor", "--hosts", str(tmp_path / "hosts.json"), "--state", str(tmp_path / "state"))
    found = stoa(*line, home=tmp_path)
    assert found.returncode == 2 and "for macOS" in found.stderr
    assert "2 Macs as one worker: each computes some of the layers" in found.stderr
    assert (tmp_path / "stoa-wired" / "venv").is_symlink()


def test_a_mac_that_is_not_fit_is_told_before_the_worker_starts_unless_it_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "panics.json").write_text(json.dumps({"began": 0.0, "panics": [time.time() - 60.0, time.time() - 50.0]}))
    found = stoa("join", "--state", str(tmp_path))
    assert found.returncode == 4
    assert "fail  worker" in found.stderr and "crashed 2 times in a day" in found.stderr
    assert "error: this machine is not fit for it" in found.stderr
    assert "--no-doctor" in found.stderr
    asked = stoa("join", "--state", str(tmp_path), "--no-doctor")
    assert asked.returncode == 1
    assert "it plays no more" in asked.stderr


def test_a_run_is_not_started_on_a_machine_that_is_not_fit(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(PROJECT_ROOT / "environments/search/policy", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace("assistant", "model")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    found = stoa("run", "--detach", "--set", f'model="{model}"')
    assert found.returncode == 4
    assert "fail  chat template" in found.stderr and "token " in found.stderr


def test_joining_in_this_window_becomes_the_worker(tmp_path: Path) -> None:
    (tmp_path / "mac.toml").write_text("idle_minuts = 3.0\n")
    found = stoa("join", "--state", str(tmp_path))
    assert found.returncode == 2
    assert f"error: {tmp_path}/mac.toml:1: idle_minuts is not a setting" in found.stderr
