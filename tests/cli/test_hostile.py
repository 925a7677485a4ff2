"""What a person or a machine can do wrong to `stoa demo` is told in a sentence, with the right exit code, and costs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def demo(out: Path, *arguments: str, seconds: float = 55.0) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("STOA_", "AWS_"))}
    command = [sys.executable, "-m", "cli.main", "demo", "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds, check=False)


@pytest.mark.parametrize("parent", ["/dev/null", "/proc"])
def test_folder_that_cannot_be_made_is_wrong_use(parent: str) -> None:
    done = demo(Path(parent) / "demo")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {parent}/demo: cannot be made: ")


def test_wrong_setting_leaves_no_folder(tmp_path: Path) -> None:
    done = demo(tmp_path / "demo", "--set", "learning.learning_rat=1")
    assert done.returncode == 2
    assert "did you mean learning.learning_rate?" in done.stderr
    assert not (tmp_path / "demo").exists()
