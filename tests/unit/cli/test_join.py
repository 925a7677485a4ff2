"""`stoa join` and `stoa leave` where there is no launchd, and the worker in this window."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoa.config.load import PROJECT_ROOT


def stoa(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from cli.main import main; main(sys.argv[1:])", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT)


@pytest.mark.skipif(shutil.which("launchctl") is not None, reason="launchd is here")
@pytest.mark.parametrize("arguments", [("join", "--at-login"), ("leave",)])
def test_without_launchd_the_person_is_told(arguments: tuple[str, ...], tmp_path: Path) -> None:
    found = stoa(*arguments, "--state", str(tmp_path))
    assert found.returncode == 2
    assert "for macOS" in found.stderr


def test_joining_in_this_window_becomes_the_worker(tmp_path: Path) -> None:
    (tmp_path / "mac.toml").write_text("idle_minuts = 3.0\n")
    found = stoa("join", "--state", str(tmp_path))
    assert found.returncode == 2
    assert f"error: {tmp_path}/mac.toml:1: idle_minuts is not a setting" in found.stderr
