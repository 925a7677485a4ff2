"""The trainer's main and what it needs: exit codes, the lock, the child that must live, the child that must end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from stoa.contracts.errors import MissingExtraError, WorkerLockedError
from trainer_gpu.child import keep_alive
from trainer_gpu.lock import StateLock
from trainer_gpu.worker import require_extra

ROOT = Path(__file__).parents[3]


def test_missing_extra_names_what_to_install() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require_extra(lambda name: None if name == "megatron" else object())
    assert "megatron-core" in caught.value.message
    assert "pip install 'stoa[gpu]'" in caught.value.hint


def test_unknown_setting_ends_with_2_and_says_where(tmp_path: Path) -> None:
    config = tmp_path / "x.toml"
    config.write_text("[rollout]\ngroup_sze = 8\n")
    command = [sys.executable, "-m", "trainer_gpu.worker", str(config), "--state", str(tmp_path), "--no-control"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 2
    assert "group_sze" in ended.stderr
    assert "group_size" in ended.stderr


def test_second_trainer_in_one_folder_is_refused(tmp_path: Path) -> None:
    with StateLock(tmp_path), pytest.raises(WorkerLockedError), StateLock(tmp_path):
        pass
    with StateLock(tmp_path):
        pass


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A child that notes its start and ends when its input does."""
    code = f"import sys,os; open({str(tmp_path / 'starts')!r},'a').write(str(os.getpid())+'\\n'); sys.stdin.read()"
    return [sys.executable, "-c", code]


def starts(tmp_path: Path) -> list[int]:
    path = tmp_path / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def until(tmp_path: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(starts(tmp_path)) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_killed_child_is_started_again_and_ends_with_us(tmp_path: Path, command: list[str]) -> None:
    stop = asyncio.Event()
    keeping = asyncio.create_task(keep_alive(command, stop))
    await until(tmp_path, 1)
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    await until(tmp_path, 2)
    stop.set()
    await asyncio.wait_for(keeping, 10)
    with pytest.raises(ProcessLookupError):
        os.kill(starts(tmp_path)[1], 0)


async def test_log_names_the_module_of_a_child_and_not_its_last_argument(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import sys; open('starts', 'a').write('1\\n'); sys.stdin.read()")
    stop = asyncio.Event()
    with contextlib.chdir(tmp_path), capture_logs() as said:
        keeping = asyncio.create_task(keep_alive([sys.executable, "-m", "waits", "--state", str(tmp_path)], stop))
        await until(tmp_path, 1)
        stop.set()
        await asyncio.wait_for(keeping, 10)
    assert [event["command"] for event in said if event["event"] == "child_started"] == ["waits"]


def test_child_ends_when_its_parent_is_killed(tmp_path: Path, command: list[str]) -> None:
    code = f"import asyncio; from trainer_gpu.child import keep_alive; asyncio.run(keep_alive({command!r}, asyncio.Event()))"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        asyncio.run(until(tmp_path, 1))
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(starts(tmp_path)[0], 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the child outlived its parent")


@pytest.mark.loop
def test_worker_waits_for_the_bucket_and_ends_cleanly_when_asked(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "STOA_STATE": str(tmp_path),
        "STOA_BUCKET_ENDPOINT": "http://127.0.0.1:9",
        "STOA_TEMPORAL_ADDRESS": "127.0.0.1:9",
    }
    log = tmp_path / "log"
    with log.open("wb") as output:
        worker = subprocess.Popen([sys.executable, "-m", "trainer_gpu.worker"], cwd=ROOT, env=environment, stderr=output)
        try:
            deadline = time.monotonic() + 40
            while b"worker_waiting" not in log.read_bytes() or b"child_started" not in log.read_bytes():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0
        finally:
            worker.kill()
            worker.wait()
    said = log.read_text()
    assert said.count('"event": "worker_waiting"') == 1
    assert "does not answer" in said
    assert "Traceback" not in said
