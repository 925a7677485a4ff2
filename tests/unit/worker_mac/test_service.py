"""The agent: what launchd is told, what it says, and that a worker which cannot start is parked."""

import json
import os
import plistlib
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoa.contracts.errors import StoaError, UsageError, WorkerLockedError
from worker_mac.identity import Identity
from worker_mac.service import LABEL, Attempts, Said, Service, run_launchctl

PRINTED = """gui/501/run.stoa.worker = {
	active count = 1
	path = /Users/ada/Library/LaunchAgents/run.stoa.worker.plist
	state = running
	program = /opt/homebrew/bin/python3
	runs = 4
	pid = 4711
	last exit code = 1
}
"""


class Launchd:
    """Keeps what is loaded, as launchctl's verbs do."""

    def __init__(self) -> None:
        self.loaded: dict[str, dict] = {}
        self.refuses = False
        self.pid = 4711
        self.asked: list[str] = []

    def __call__(self, arguments: Sequence[str]) -> Said:
        verb, where = arguments[0], arguments[1]
        self.asked.append(verb)
        if verb == "bootstrap":
            if self.refuses or f"{where}/{LABEL}" in self.loaded:
                return Said(5, "Bootstrap failed: 5: Input/output error\n")
            self.loaded[f"{where}/{LABEL}"] = plistlib.loads(Path(arguments[2]).read_bytes())
            return Said(0, "")
        if where not in self.loaded:
            return Said(113, "Could not find service\n")
        if verb == "bootout":
            del self.loaded[where]
            return Said(0, "")
        return Said(0, PRINTED.replace("4711", str(self.pid)))


@pytest.fixture
def launchd() -> Launchd:
    return Launchd()


@pytest.fixture
def service(tmp_path: Path, launchd: Launchd) -> Service:
    return Service(tmp_path / "LaunchAgents", tmp_path / "state", launchd, user_id=501)


def test_an_installed_agent_starts_at_login_and_again_after_a_crash_only(service: Service, launchd: Launchd, tmp_path: Path) -> None:
    service.install(tmp_path / "run.toml")
    service.install(tmp_path / "run.toml")  # the second replaces the first
    agent = launchd.loaded[f"gui/501/{LABEL}"]
    assert agent["RunAtLoad"] is True
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ThrottleInterval"] == 30
    assert agent["ProcessType"] == "Standard"
    config, state = str(tmp_path / "run.toml"), str(tmp_path / "state")
    assert agent["ProgramArguments"] == [sys.executable, "-m", "worker_mac.worker", config, "--state", state, "--parks", "--kept"]
    assert agent["StandardErrorPath"].startswith(state)


def test_the_workers_command_line_takes_what_the_agent_gives(service: Service, launchd: Launchd) -> None:
    from worker_mac.worker import read_options

    service.install()
    options = read_options(launchd.loaded[f"gui/501/{LABEL}"]["ProgramArguments"][3:])
    assert (options.parks, options.kept) == (True, True)


def test_a_second_worker_on_the_folder_is_refused_by_name_and_no_agent_is_left(service: Service, launchd: Launchd, tmp_path: Path) -> None:
    by_hand = Identity(tmp_path / "state")
    with pytest.raises(WorkerLockedError, match=f"process {os.getpid()} is a worker"):
        service.install()
    assert launchd.loaded == {} and not service.status().installed
    by_hand.close()
    service.install()
    assert launchd.loaded


def test_an_agent_is_left_as_it_is_where_a_worker_started_by_hand_has_the_folder(
    service: Service, launchd: Launchd, tmp_path: Path
) -> None:
    service.install(tmp_path / "first.toml")
    agent = dict(launchd.loaded)
    by_hand = Identity(tmp_path / "state")  # this process, while launchd says that the agent's is 4711
    launchd.asked.clear()
    with pytest.raises(WorkerLockedError, match=f"process {os.getpid()} is a worker"):
        service.install(tmp_path / "second.toml")
    by_hand.close()
    assert launchd.loaded == agent and launchd.asked == ["print"]
    assert service.status().installed and service.status().loaded


def test_an_agent_that_is_replaced_has_time_to_let_its_folder_go(service: Service, launchd: Launchd, tmp_path: Path) -> None:
    service.install()
    running, launchd.pid = Identity(tmp_path / "state"), os.getpid()
    threading.Timer(0.5, running.close).start()
    service.install()
    assert launchd.asked.count("bootstrap") == 2


def test_a_mac_that_stays_off_after_crashes_says_so_until_a_person_looks(service: Service, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "panics.json").write_text(json.dumps({"began": 0.0, "panics": [time.time() - 5.0, time.time() - 4.0]}))
    assert "crashed 2 times" in service.status().parked
    service.remove()
    assert service.status().parked == ""


def test_status_tells_pid_last_exit_and_what_is_there(service: Service) -> None:
    before = service.status()
    assert (before.installed, before.loaded, before.pid, before.last_exit, before.parked) == (False, False, 0, "", "")
    service.install()
    after = service.status()
    assert (after.installed, after.loaded, after.pid, after.last_exit) == (True, True, 4711, "1")


def test_removing_leaves_nothing_behind(service: Service, launchd: Launchd, tmp_path: Path) -> None:
    assert not service.remove()
    service.install()
    assert service.remove()
    assert launchd.loaded == {}
    assert list((tmp_path / "LaunchAgents").iterdir()) == []


def test_a_refused_agent_says_why_and_is_not_left_half_installed(service: Service, launchd: Launchd, tmp_path: Path) -> None:
    launchd.refuses = True
    with pytest.raises(StoaError, match="Input/output error"):
        service.install()
    assert not service.status().installed


def test_three_quick_failures_park_with_the_reason_and_installing_again_frees(service: Service, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    assert [Attempts(state).failed(f"reason {number}") for number in range(2)] == ["", ""]
    assert Attempts(state).failed("no MLX") == "3 starts in a row failed soon: no MLX"
    assert service.status().parked.endswith("no MLX")
    service.install()
    assert service.status().parked == ""


def test_a_failure_after_long_work_starts_the_count_anew(tmp_path: Path) -> None:
    now = [0.0]
    for _ in range(2):
        Attempts(tmp_path, lambda: now[0]).failed("quick")
    long = Attempts(tmp_path, lambda: now[0])
    now[0] = 120.0
    assert long.failed("late") == ""
    assert [Attempts(tmp_path, lambda: now[0]).failed("quick") for _ in range(2)] == ["", ""]


def test_three_starts_that_were_killed_soon_park_and_say_so(tmp_path: Path) -> None:
    assert [Attempts(tmp_path / "state").begin() for _ in range(3)] == ["", "", ""]
    assert Attempts(tmp_path / "state").parked() == ""  # the third is at work
    assert "3 starts in a row failed soon: it was killed" in Attempts(tmp_path / "state").begin()


def test_a_start_that_lived_or_ended_well_is_no_failure_if_it_is_killed(tmp_path: Path) -> None:
    for _ in range(5):
        attempts = Attempts(tmp_path)
        assert attempts.begin() == ""
        attempts.forget()  # after two minutes, and at a clean end
    for _ in range(2):
        attempts = Attempts(tmp_path)
        assert attempts.begin() == ""
        assert attempts.failed("no MLX") == ""
    assert Attempts(tmp_path).begin() == ""
    assert "it was killed" in Attempts(tmp_path).begin()


def test_attempts_that_cannot_be_noted_stop_nobody(tmp_path: Path) -> None:
    for name in ("attempts.json.part", "starting.part"):
        (tmp_path / name).mkdir()
    attempts = Attempts(tmp_path)
    assert (attempts.begin(), attempts.failed("the disk is full")) == ("", "")


@pytest.mark.skipif(shutil.which("launchctl") is not None, reason="launchd is here")
def test_without_launchd_the_person_is_told() -> None:
    with pytest.raises(UsageError, match="macOS"):
        run_launchctl(("print", "gui/501"))
