"""The checkers that come as tools: layers, lint, types. Each must be clean."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, MOSTLY_WAIT, PLAY_WHOLE_RUNS

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(*command: str) -> str:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout[-6000:] + done.stderr[-2000:]


def test_imports_run_downwards() -> None:
    assert run("lint-imports", "--no-cache") == ""


def test_lint_is_clean() -> None:
    assert run("ruff", "check", ".") == ""


def test_format_is_clean() -> None:
    assert run("ruff", "format", "--check", ".") == ""


@pytest.mark.timeout(300)
def test_types_are_clean() -> None:
    assert run("basedpyright", "--level", "error", "--pythonpath", sys.executable) == ""


def test_files_that_are_named_to_be_played_early_are_there() -> None:
    for path in (*LONGEST, *PLAY_WHOLE_RUNS, *MOSTLY_WAIT):
        assert list(ROOT.glob(f"{path}*")), path
