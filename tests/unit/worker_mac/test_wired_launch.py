"""The supervisor of a wired set, with a script in place of `mlx.launch`; and the script that is in place of SSH."""

import json
import os
import stat
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoa.contracts.errors import WiredError
from tests.unit.worker_mac.test_service import Launchd
from tests.unit.worker_mac.test_wired_hosts import IFCONFIG, PORTS
from worker_mac.cluster import agent, sitting
from worker_mac.cluster import launch as launching
from worker_mac.cluster.hosts import WiredHost
from worker_mac.cluster.install import install_lines, link_here, ours
from worker_mac.cluster.launch import Supervisor
from worker_mac.cluster.probe import Said
from worker_mac.cluster.rank import USUAL_FRACTION
from worker_mac.cluster.rank import Options as RankOptions
from worker_mac.cluster.rank import read_options as read_rank_options
from worker_mac.service import LABEL, Service

DONE = 'ended.write_text(json.dumps({"code": 0, "lost": ""}))'
HOSTS = (WiredHost("127.0.0.1"), WiredHost("127.0.0.1"))
STAND_IN = """#!{python}
import json, os, pathlib, sys, time
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
port = words[words.index("--starting-port") + 1]
ended = pathlib.Path(words[words.index("--ended") + 1])
with (folder / "starts").open("a") as file:
    file.write(f"{{port}} {{os.getcwd()}} {{sys.stdin.readline().strip()}}\\n")
number = len((folder / "starts").read_text().splitlines())
{body}
"""


def supervisor(folder: Path, body: str, hosts: tuple[WiredHost, ...] = HOSTS, probe: object = None, *, patient: bool = False) -> Supervisor:
    program = folder / "mlx.launch"
    program.write_text(STAND_IN.format(python=sys.executable, folder=str(folder), body=body))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    said: list[str] = []
    made = Supervisor(
        hosts, probe or NoProbe(), ("--state", "x"), folder, available=("ring",), say=said.append, home=folder, program=str(program),
        patient=patient,
    )  # fmt: skip
    made.lines = said
    return made


class NoProbe:
    def ask(self, host: WiredHost, command: object) -> Said:
        raise AssertionError("ranks on one machine need no wire")


class SleepyMac:
    """A Mac that SSH reaches again and again for `up` questions, each time after it was asked `down` times."""

    def __init__(self, down: int, up: int) -> None:
        self.down, self.up, self.asked = down, up, 0

    def ask(self, host: WiredHost, command: Sequence[str]) -> Said:
        if not host.is_here and command[0] == "ifconfig":
            self.asked += 1
            if (self.asked - 1) % (self.down + self.up) < self.down:
                return Said(255, "ssh: connect to host mini.local port 22: Operation timed out")
        return Said(0, IFCONFIG if command[0] == "ifconfig" else PORTS)


def starts(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "starts").read_text().splitlines()]


def test_a_set_whose_port_is_taken_moves_to_another_and_ends_with_its_worker(tmp_path: Path) -> None:
    made = supervisor(
        tmp_path,
        'if number == 1:\n    sys.exit("RuntimeError: [ring] Couldn\'t bind socket (error: 49)")\n' + DONE,
    )
    assert made.run() == 0
    found = starts(tmp_path)
    assert [port for port, *_ in found] == ["3700", "3800"]
    assert {place for _, place, _ in found} == {str(tmp_path)}
    assert len({secret for *_, secret in found}) == 2 and all(len(secret) == 32 for *_, secret in found)
    assert [line.split("--starting-port ")[1].split()[0] for line in made.lines] == ["3700", "3800"]


def test_a_lost_rank_starts_the_whole_again_and_the_code_is_the_workers(tmp_path: Path) -> None:
    made = supervisor(
        tmp_path, 'ended.write_text(json.dumps({"code": 75 if number == 1 else 2, "lost": "Mac 1 is gone" if number == 1 else ""}))'
    )
    assert made.run() == 2
    assert len(starts(tmp_path)) == 2
    assert len(made.lines) == 1, "the line is told once"


def test_a_set_that_never_stays_up_is_given_up_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MAX_STARTS", 2)
    made = supervisor(tmp_path, 'sys.exit("no room")')
    with pytest.raises(WiredError, match="2 starts in a row failed soon: it ended without a word: no room"):
        made.run()


class Restarting:
    """Macs whose address on the wire is another one each time they are asked."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, host: WiredHost, command: Sequence[str]) -> Said:
        if command[0] != "ifconfig":
            return Said(0, PORTS)
        self.asked += 1
        return Said(0, f"bridge0: flags=8863<UP>\n\tinet 169.254.7.{self.asked} netmask 0xffff0000\n")


def test_each_start_uses_the_addresses_of_now_and_a_set_that_lived_long_begins_to_count_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MAX_STARTS", 2)
    monkeypatch.setattr(launching, "LONG_SECONDS", 0.0)  # as if each had lived for minutes
    keep = 'words_at = words.index("--hostfile") + 1\n(folder / f"hosts{number}").write_text(pathlib.Path(words[words_at]).read_text())\n'
    body = keep + 'ended.write_text(json.dumps({"code": 75 if number < 3 else 0, "lost": "Mac 1 is gone" if number < 3 else ""}))'
    made = supervisor(tmp_path, body, (WiredHost("127.0.0.1"), WiredHost("mini.local")), Restarting())
    assert made.run() == 0
    used = [[row["ips"] for row in json.loads((tmp_path / f"hosts{number}").read_text())] for number in (1, 2, 3)]
    assert used == [[[f"169.254.7.{first}"], [f"169.254.7.{first + 1}"]] for first in (1, 3, 5)]
    assert [line.split("--control ")[1].split()[0] for line in made.lines] == [f"169.254.7.{first}:3750" for first in (1, 3, 5)]


@pytest.mark.parametrize(
    ("text", "words"), [("#!/bin/sh\nexec <&-; echo no room >&2\n", "without a word: no room"), (None, "cannot be started: No such file")]
)
def test_a_launcher_that_ends_at_once_or_is_not_there_is_told(
    text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MAX_STARTS", 1)
    # The secret is only said once it has ended, as on a machine that is busy.
    monkeypatch.setattr(launching.secrets, "token_hex", lambda _: time.sleep(0.3) or "s")
    made = supervisor(tmp_path, "")
    program = tmp_path / "mlx.launch"
    program.unlink()
    if text is not None:
        program.write_text(text)
        program.chmod(0o700)
    with pytest.raises(WiredError, match=words):
        made.run()


def test_macs_that_are_not_up_yet_are_waited_for_at_log_in_and_after_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "UNREACHED_SECONDS", 0.01)
    hosts = (WiredHost("127.0.0.1"), WiredHost("mini.local"))
    lost_once = 'ended.write_text(json.dumps({"code": 75 if number == 1 else 0, "lost": "Mac 1 is gone" if number == 1 else ""}))'
    with pytest.raises(WiredError, match=r"mini\.local cannot be asked: ssh: .*Operation timed out"):
        supervisor(tmp_path, lost_once, hosts, SleepyMac(1, 1)).run()
    # Eight times more than there are starts before a set is given up.
    patient = SleepyMac(8, 1)
    assert supervisor(tmp_path, lost_once, hosts, patient, patient=True).run() == 0
    assert patient.asked == 18 and len(starts(tmp_path)) == 2
    made = supervisor(tmp_path, lost_once, hosts, SleepyMac(9, 0), patient=True)
    threading.Timer(0.2, made.end).start()
    assert made.run() == 0


def test_a_set_that_begins_anew_has_not_failed_however_often(tmp_path: Path) -> None:
    anew = '{"code": 76, "lost": "the whole begins anew"}'
    made = supervisor(tmp_path, f"ended.write_text('{anew}') if number <= {launching.MAX_STARTS + 1} else {DONE}")
    assert made.run() == 0
    assert len(starts(tmp_path)) == launching.MAX_STARTS + 2


def test_what_the_first_macs_owner_allows_and_whether_to_be_quiet_holds_on_every_mac(tmp_path: Path) -> None:
    hosts, folder = tmp_path / "hosts.json", tmp_path / "state"
    hosts.write_text('[{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1"}]')
    folder.mkdir()

    def line(asked: agent.Set, *, at_login: bool = False) -> tuple[list[str], list[str]]:
        words = list(agent.supervisor_of(asked, lambda _: None, at_login=at_login).plan().line())
        ranks_at = words.index("worker_mac.cluster.rank")
        worker_at = words.index("--", ranks_at)
        return words[ranks_at:worker_at], words[worker_at + 1 :]

    usual, worker = line(agent.Set(hosts, None, folder))
    assert "--quiet" not in usual and "--memory-fraction" not in usual and worker == ["--state", str(folder)]
    (folder / "mac.toml").write_text("memory_fraction = 0.5\n")
    words, worker = line(agent.Set(hosts, tmp_path / "run.toml", folder, quiet=True), at_login=True)
    assert words[words.index("--memory-fraction") + 1] == "0.5" and "--quiet" in words
    assert worker == [str(tmp_path / "run.toml"), "--state", str(folder), "--kept", "--quiet"]
    assert read_rank_options([*words[1:], "--", *worker]).memory_fraction == 0.5


def test_an_examination_takes_what_the_first_macs_owner_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOA_STATE", str(tmp_path))
    (tmp_path / "mac").mkdir()
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1"}]')

    def options() -> RankOptions:
        words = list(sitting.supervisor_of(hosts, tmp_path / "task.json", tmp_path).plan().line())
        return read_rank_options(words[words.index("worker_mac.cluster.rank") + 1 :])

    assert options().exam and options().memory_fraction == USUAL_FRACTION
    (tmp_path / "mac" / "mac.toml").write_text("memory_fraction = 0.5\n")
    assert options().memory_fraction == 0.5 and options().worker == (str(tmp_path / "task.json"),)


def test_launchd_starts_the_set_and_what_fails_three_times_is_parked(tmp_path: Path) -> None:
    launchd = Launchd()
    service = Service(tmp_path / "LaunchAgents", tmp_path / "state", launchd, user_id=501)
    asked = agent.Set(tmp_path / "hosts.json", tmp_path / "run.toml", tmp_path / "state")
    service.install(command=asked.command())
    told = launchd.loaded[f"gui/501/{LABEL}"]
    assert told["ProgramArguments"][:3] == [sys.executable, "-m", "worker_mac.cluster.agent"]
    assert agent.read_options(told["ProgramArguments"][3:]) == asked
    assert told["RunAtLoad"] is True and told["KeepAlive"] == {"SuccessfulExit": False}
    # There is no hosts.json: as launchd starts it again and again.
    assert [agent.main(told["ProgramArguments"][3:]) for _ in range(4)] == [1, 1, 0, 0]
    assert "no such file" in service.status().parked
    service.install(command=asked.command())
    assert service.status().parked == ""


def test_asked_to_end_the_set_is_told_and_ends(tmp_path: Path) -> None:
    made = supervisor(
        tmp_path,
        'word = sys.stdin.readline().strip()\n(folder / "word").write_text(word)\nended.write_text(json.dumps({"code": 0, "lost": ""}))',
    )

    def end() -> None:
        deadline = time.monotonic() + 20
        while not (tmp_path / "starts").is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        made.end()

    threading.Thread(target=end).start()
    assert made.run() == 0
    assert (tmp_path / "word").read_text() == "end"


def test_what_hangs_after_the_worker_has_ended_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "LEAVE_SECONDS", 0.3)
    made = supervisor(tmp_path, 'ended.write_text(json.dumps({"code": 0, "lost": ""}))\ntime.sleep(60)')
    began = time.monotonic()
    assert made.run() == 0
    assert time.monotonic() - began < 30


def test_a_rank_that_is_frozen_does_not_hold_the_others_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "LEAVE_SECONDS", 0.3)
    frozen = 'print("\\033[33m[WARN] Node with rank 1 exited with code 75 \\033[0m", file=sys.stderr, flush=True)\n    time.sleep(60)\n'
    began = time.monotonic()
    assert supervisor(tmp_path, f"if number == 1:\n    {frozen}{DONE}").run() == 0
    assert len(starts(tmp_path)) == 2 and time.monotonic() - began < 30


def test_the_program_stands_under_one_relative_path_in_every_home(tmp_path: Path) -> None:
    link_here(tmp_path)
    assert (tmp_path / "stoa-wired" / "venv" / "bin" / "python").resolve() == Path(sys.executable).resolve()
    link_here(tmp_path, prefix=tmp_path)
    assert os.readlink(tmp_path / "stoa-wired" / "venv") == str(tmp_path)
    lines = install_lines(WiredHost("ann@mini.local"), Path("/tmp/stoa-0.1.0-py3-none-any.whl"))
    assert lines[1][-1] == "ann@mini.local:stoa-wired/"
    assert f"mlx=={ours().split()[1]}" in lines[2][-1] and "stoa-wired/stoa-0.1.0-py3-none-any.whl[mac]" in lines[2][-1]
