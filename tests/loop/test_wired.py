"""A run in which one of two workers is a wired set of two ranks with different homes; one rank is killed in the middle.

Real servers, real trainer, MLX's real ring on loopback. Only SSH is played: a script on PATH that runs what it is given in
the other user's home.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.loop.test_by_hand import SHORT, Desk
from tests.servers import bucket_server

SSH = """#!/bin/bash
while [ $# -gt 0 ]; do
  case "$1" in
    -o) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
shift
export HOME={home}
cd "$HOME"
exec bash -c "$*"
"""
IFCONFIG = """#!/bin/bash
echo "bridge0: flags=8863<UP> mtu 1500"
echo "	inet 127.0.0.1 netmask 0xff000000"
"""


def tool(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    homes, tools = [tmp_path / "studio", tmp_path / "mini"], tmp_path / "tools"
    for folder in (*homes, tools, tmp_path / "bucket"):
        folder.mkdir()
    tool(tools, "ssh", SSH.format(home=homes[1]))
    tool(tools, "ifconfig", IFCONFIG)
    # What `stoa join --hosts` would install there.
    (homes[1] / "stoa-wired").mkdir()
    (homes[1] / "stoa-wired" / "venv").symlink_to(sys.prefix)
    desk.environment |= {"HOME": str(homes[0]), "PATH": f"{tools}:{desk.environment['PATH']}"}
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "ann@mini.local"}]))
    yield desk
    desk.close()


def ranks_of(desk: Desk) -> list[psutil.Process]:
    """The ranks' processes, by rank, without what they started themselves."""
    family = psutil.Process(desk.processes["set"].pid).children(recursive=True)
    found = [one for one in family if "worker_mac.cluster.rank" in one.cmdline() and "python" in one.name()]
    ours = {one.pid for one in found}
    return sorted((one for one in found if one.ppid() not in ours), key=lambda one: one.environ().get("MLX_RANK", ""))


def logged(desk: Desk, words: str) -> int:
    path = desk.folder / "set.log"
    return path.read_text().count(words) if path.is_file() else 0


def until(what: str, done: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what} in {seconds} s"
        time.sleep(0.2)


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_a_run_ends_as_usual_though_a_rank_of_one_of_its_workers_is_killed(desk: Desk) -> None:
    with bucket_server(desk.folder / "bucket", ports=desk.bucket_ports):
        desk.temporal()
        join = ("join", "--hosts", str(desk.folder / "hosts.json"), "--state", str(desk.folder / "set"), "--no-doctor")
        desk.start("set", sys.executable, "-m", "cli.main", *join)
        until("the ranks to find each other", lambda: logged(desk, "worker_waiting"), 120)
        desk.worker("worker_mac")
        desk.worker("trainer_gpu")
        run = desk.start("run", sys.executable, "-m", "cli.main", "run", *SHORT, "--set", "stop.max_steps=32")
        until("a sweep of the set", lambda: logged(desk, '"purpose": "train"'), 120)
        first, second = ranks_of(desk)
        assert [one.environ()["HOME"].rpartition("/")[2] for one in (first, second)] == ["studio", "mini"]
        os.kill(second.pid, signal.SIGKILL)
        until("the run to end", lambda: run.poll() is not None, 200)
        until("the set to start again or end", lambda: logged(desk, "set_ended"), 30)
        assert run.returncode == 0
        until("the set to end with its run", lambda: desk.processes["set"].poll() is not None, 90)
        again = desk.stoa("status", "demo", "--json", seconds=30)
    assert again.returncode == 0 and json.loads(again.stdout)["step"] == 32
    assert logged(desk, "RankLostError") >= 1
    # The end of the run is no loss: nothing is said of one but by the kill.
    assert desk.processes["set"].returncode == 0 and logged(desk, "wired_set_lost") == 1
