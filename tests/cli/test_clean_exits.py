"""Every command that connects ends with 0 and without a word on stderr, time after time, while a run is there.

The SDK's threads may call into an interpreter that is being taken down, which then aborts: each command must end before.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_services import Server, services, stoa  # noqa: F401 - a fixture

pytestmark = [pytest.mark.loop, pytest.mark.timeout(280)]
RUN = "exits"
TIMES = 10
"""Of the command that people call most; the others are called fewer times each."""


@pytest.fixture(scope="module")
def running(services: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    """A run whose workflow answers: its control process is there, its trainer and Macs are not."""
    path = tmp_path_factory.mktemp("exits") / "run.toml"
    path.write_text(f'run = "{RUN}"\n')
    started = stoa("run", str(path), "--detach", env=services.env)
    assert started.returncode == 0, started.stderr
    log = path.parent / "control.log"
    command = [sys.executable, "-m", "trainer_gpu.control", str(path)]
    with log.open("ab") as output:
        control = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=services.env)
    for _ in range(60):
        status = stoa("status", RUN, "--json", env=services.env)
        if status.returncode == 0 and "trainer" in json.loads(status.stdout)["waiting_for"]:
            break
        time.sleep(0.5)
    else:
        raise AssertionError(status.stderr + status.stdout + log.read_text())
    yield services
    assert control.stdin is not None
    control.stdin.close()
    assert control.wait(30) == 0


def clean(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


COMMANDS: list[tuple[list[tuple[str, ...]], str]] = [
    ([("status", RUN)] * TIMES, f"waiting for a trainer on queue gpu-{RUN}"),
    ([("fleet", RUN)], "has no Macs"),
    ([("pause", RUN), ("resume", RUN)], f"run {RUN} "),
    ([("anchors", RUN, "--every", "7")], "at least every 7 versions"),
    ([("quarantine", RUN, "mac-1", "--reason", "a test", "--unseen")], "takes no more groups of mac-1"),
    ([("drain", RUN, "mac-1")], "lets mac-1 finish its sweep"),
    ([("quarantine", RUN, "mac-1", "--release")], "takes groups of mac-1 again"),
    ([("quarantine", RUN, "mac-2", "--unseen")], "takes no more groups of mac-2"),
    ([("setup",)], "/stoa: ready"),
]


def test_commands_end_cleanly_time_after_time_also_when_the_run_has_ended_and_goes_on(running: Server, tmp_path: Path) -> None:
    """One run, so one order: its commands, a stop that is prompt without Macs or trainer, and a resume that remembers."""
    for commands, words in COMMANDS:
        for command in commands:
            assert words in clean(stoa(*command, env=running.env))
    mistyped = stoa("drain", RUN, "mac2", env=running.env)
    assert mistyped.returncode == 2
    assert "met no Mac mac2, did you mean mac-2? it knows mac-2" in mistyped.stderr
    began = time.monotonic()
    assert "is ending" in clean(stoa("stop", RUN, env=running.env))
    while json.loads(clean(stoa("status", RUN, "--json", env=running.env)))["state"] != "stopped":
        assert time.monotonic() - began < 45
        time.sleep(1)
    (tmp_path / "run.toml").write_text(f'run = "{RUN}"\n')
    goes_on = ("run", str(tmp_path / "run.toml"), "--resume", "--detach", "--set", "stop.max_steps=12345")
    assert stoa(*goes_on, env=running.env).returncode == 0
    assert "step 0/12345" in clean(stoa("status", RUN, env=running.env)), "the limit in force"
    listed = json.loads(clean(stoa("fleet", RUN, "--json", env=running.env)))["macs"]
    assert [(one["host"], one["state"]) for one in listed] == [("mac-2", "quarantined")]
