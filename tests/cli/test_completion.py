"""The completion script is one the shell itself accepts, and it knows the commands and flags."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def stoa(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"HOME": str(home), "SHELL": "/bin/bash"} if home else {})}
    return subprocess.run([sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=50, env=env)


@pytest.mark.parametrize("shell", ["zsh", "bash", "fish"])
def test_script_knows_the_commands(shell: str) -> None:
    done = stoa("completion", shell)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("demo", "weights", "verify"))


def test_bash_completes_a_command_and_a_flag(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash
    script = tmp_path / "stoa.bash"
    script.write_text(stoa("completion", "bash").stdout)
    asked = (
        f"source {script}; COMP_WORDS=(stoa wei); COMP_CWORD=1; _stoa; echo ${{COMPREPLY[@]}};"
        "COMP_WORDS=(stoa demo --see); COMP_CWORD=2; _stoa; echo ${COMPREPLY[@]}"
    )
    said = subprocess.run([bash, "-c", asked], capture_output=True, text=True, timeout=50).stdout.split()
    assert said == ["weights", "--seed"]


def test_install_writes_into_the_home_folder_and_twice_is_as_once(tmp_path: Path) -> None:
    for _ in range(2):
        done = stoa("completion", "bash", "--install", home=tmp_path)
        assert done.returncode == 0, done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and "_stoa()" in path.read_text()]
    assert len(written) == 1
    assert str(written[0]) in done.stderr
    startup = tmp_path / ".bashrc"
    assert not startup.exists() or startup.read_text().count(str(written[0])) <= 2


def test_unknown_shell_is_wrong_use() -> None:
    assert stoa("completion", "tcsh").returncode == 2
