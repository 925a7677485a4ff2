"""No process outlives the command that started it, however that command ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cli.processes import FILE_NAME, Household, Identity, end_leftovers
from stoa.contracts.errors import ServiceUnavailableError, UsageError

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A process that ignores SIGTERM and has a child of its own, like a worker with its control process.
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(p.pid, flush=True); time.sleep(60)",
]
OWNER = """
import sys, time
from pathlib import Path
from cli.processes import Household
with Household(Path(sys.argv[1])) as house:
    child = house.start("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], env={}, log=Path(sys.argv[1]) / "log")
    print(child.identity.pid, flush=True)
    time.sleep(60)
"""


def gone(pid: int, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


def printed_pid(log: Path) -> int:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if log.is_file() and (text := log.read_text().strip()):
            return int(text.splitlines()[0])
        time.sleep(0.05)
    raise AssertionError(f"nothing in {log}")


def owner(folder: Path) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_leaving_the_block_ends_children_and_removes_the_file(tmp_path: Path) -> None:
    with Household(tmp_path) as house:
        child = house.start("a", SLEEP, env={}, log=tmp_path / "logs" / "a.log")
        assert child.exit_code is None
        assert [e["name"] for e in json.loads((tmp_path / FILE_NAME).read_text())] == ["owner", "a"]
    assert gone(child.identity.pid)
    assert not (tmp_path / FILE_NAME).exists()


def test_an_exception_ends_children_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Household(tmp_path) as house:
        pid = house.start("a", SLEEP, env={}, log=tmp_path / "a.log").identity.pid
        _ = 1 // 0
    assert gone(pid)


def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with Household(tmp_path) as house:
        child = house.start("a", STUBBORN, env={}, log=log)
        grandchild = printed_pid(log)
        started = time.monotonic()
        house.stop([child], grace_seconds=0.5)
        assert time.monotonic() - started < 5
        assert house.children == ()
    assert gone(child.identity.pid)
    assert gone(grandchild)


def test_kill_9_of_the_owner_ends_its_children(tmp_path: Path) -> None:
    process, pid = owner(tmp_path)
    process.kill()
    process.wait()
    assert gone(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_owner_end_its_children(tmp_path: Path, number: signal.Signals) -> None:
    process, pid = owner(tmp_path)
    process.send_signal(number)
    process.wait(20)
    assert gone(pid)


def test_leftovers_are_told_by_start_time_not_by_number_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen(SLEEP, start_new_session=True)
    left = subprocess.Popen(SLEEP, start_new_session=True)
    threading.Thread(target=left.wait, daemon=True).start()  # as init does for a process whose parent has died
    try:
        with Household(tmp_path / "real") as house:
            started = house.start("x", SLEEP, env={}, log=tmp_path / "x").identity.started_at
        entries = [
            {"name": "owner", "pid": 2**22 + 1, "started_at": 1.0},
            {"name": "reused number", "pid": bystander.pid, "started_at": started - 3600},
            {"name": "left", "pid": left.pid, "started_at": _created(left.pid)},
        ]
        (tmp_path / FILE_NAME).write_text(json.dumps(entries))
        assert end_leftovers(tmp_path) == ("left",)
        assert left.wait(10) == -signal.SIGTERM
        assert bystander.poll() is None
        assert not (tmp_path / FILE_NAME).exists()
    finally:
        bystander.kill()
        left.kill()
        bystander.wait()
        left.wait()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with Household(tmp_path), pytest.raises(UsageError, match="in use by process"):
        end_leftovers(tmp_path)


def test_no_file_means_no_leftovers(tmp_path: Path) -> None:
    assert end_leftovers(tmp_path) == ()


def test_a_program_that_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    with Household(tmp_path) as house, pytest.raises(ServiceUnavailableError, match="nosuchprogram"):
        house.start("a", ["nosuchprogram"], env={"PATH": "/nowhere"}, log=tmp_path / "a.log")


def test_the_end_of_a_log_is_kept_for_messages(tmp_path: Path) -> None:
    with Household(tmp_path) as house:
        child = house.start("a", [sys.executable, "-c", "for i in range(30): print(i)"], env={}, log=tmp_path / "a.log")
        child.process.wait(20)
        assert child.last_lines(3) == "27\n28\n29"
        assert child.exit_code == 0


def test_identity_of_an_ended_process_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    identity = Identity("x", process.pid, time.time())
    process.wait()
    assert not identity.alive


def _created(pid: int) -> float:
    import psutil

    return psutil.Process(pid).create_time()


def test_processes_end_also_where_their_list_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "house"
    with Household(folder) as house:
        children = [house.start(name, SLEEP, env={}, log=tmp_path / "log") for name in ("one", "two")]
        shutil.rmtree(folder)
    assert all(gone(child.identity.pid) for child in children)


def test_a_killed_process_starts_again_as_it_was(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import os, time; print(os.getpid()); print(os.environ['MARK'], os.getcwd(), flush=True); time.sleep(60)",
    ]
    with Household(tmp_path / "house") as house:
        first = house.start("sleeper", command, env={"MARK": "m1"}, log=tmp_path / "log", cwd=tmp_path)
        printed_pid(tmp_path / "log")
        os.kill(first.identity.pid, signal.SIGKILL)
        second = house.again(first)
        assert house.children == (second,)
        deadline = time.monotonic() + 15
        while len(lines := (tmp_path / "log").read_text().splitlines()) < 4:
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
    mark = f"m1 {tmp_path}"
    assert lines == [str(first.identity.pid), mark, str(second.identity.pid), mark]
    assert gone(second.identity.pid)
