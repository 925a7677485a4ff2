"""How the worker's process ends: within its time whatever hangs, anew after a long pause, and not at all after two crashes."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from stoa.bucket.store import Store
from stoa.config.host import MacHost
from stoa.config.load import LOOPBACK_KEY, LOOPBACK_SECRET, PROJECT_ROOT, Credentials, load_run
from stoa.contracts.access import PLAIN
from stoa.contracts.errors import AccessDeniedError, BuildTooOldError, NamesakeError, StoaError
from stoa.contracts.fleet_messages import Notice
from worker_mac.ending import LEAVE_SECONDS, LastCall, heed
from worker_mac.identity import Identity
from worker_mac.invited import Entry
from worker_mac.panics import PanicLog
from worker_mac.power import Senses
from worker_mac.sleeps import NoSleeps
from worker_mac.worker import Options, _Worker


@pytest.mark.parametrize(("kind", "fault"), [("revoked", AccessDeniedError), ("too_old", BuildTooOldError), ("name_taken", NamesakeError)])
def test_a_worker_that_may_not_take_part_ends_with_the_reason(
    kind: Literal["revoked", "too_old", "name_taken"], fault: type[StoaError]
) -> None:
    with pytest.raises(fault, match="because"):
        heed(Notice("demo", "mac-1", kind, "because", ends=True))
    heed(Notice("demo", "mac-1", "drained", "thank you", ends=True))
    heed(None)


def test_a_last_call_comes_once_and_only_if_it_was_started() -> None:
    calls: list[float] = []
    never, stopped, call = (LastCall(lambda: calls.append(time.monotonic()), 0.1) for _ in range(3))
    stopped.start()
    stopped.cancel()
    call.start()
    call.start()
    time.sleep(0.4)
    never.cancel()
    assert len(calls) == 1


def test_a_worker_that_hangs_on_a_silent_bucket_is_gone_within_ten_seconds(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        config = tmp_path / "run.toml"
        config.write_text(f'[bucket]\nendpoint = "http://127.0.0.1:{silent.getsockname()[1]}"\n')
        command = [sys.executable, "-m", "worker_mac.worker", str(config), "--state", str(tmp_path / "state")]
        process = subprocess.Popen(command, cwd=PROJECT_ROOT, stderr=subprocess.PIPE)
        connection, _ = silent.accept()  # it has asked, and hangs on the answer
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        connection.close()
    assert process.returncode == 0
    assert time.monotonic() - began <= 10.0
    assert b"worker_cut_short" in said
    assert LEAVE_SECONDS < 10.0


@pytest.fixture
def worker(tmp_path: Path) -> _Worker:
    config = load_run(None, environ={})
    identity = Identity(tmp_path, "mac-1")
    entry = Entry(config, Credentials(LOOPBACK_KEY, LOOPBACK_SECRET), PLAIN)
    store = Store(config.bucket, entry.credentials)
    options = Options(None, tmp_path, "mac-1", "")
    return _Worker(entry, identity, options, MacHost(unload_minutes=0.5), store, PanicLog(tmp_path), NoSleeps())


def unload(worker: _Worker, *, holds_weights: bool = True) -> bool:
    """Whether the worker, looking after the Mac, decides to begin anew."""
    worker._look_after(SimpleNamespace(holds_weights=holds_weights))  # type: ignore[arg-type]
    worker._anew_call.cancel()
    return bool(worker.anew)


def test_a_long_pause_gives_the_memory_of_the_weights_back(worker: _Worker) -> None:
    guest, began = worker._guest, time.monotonic()
    senses = Senses(began - 29.0, on_mains=False)
    guest._probe = SimpleNamespace(read=lambda: senses)
    guest.look()
    assert not unload(worker)
    senses = replace(senses, now_seconds=began - 31.0)
    guest.decision = replace(guest.decision, since_seconds=began - 31.0)
    assert not unload(worker, holds_weights=False)
    with guest.playing():
        assert not unload(worker)
    assert unload(worker)
    assert worker.anew.startswith("the Mac is on battery: memory is given back after 31")
    assert worker._stop.is_set()


def test_weights_that_may_stay_stay(worker: _Worker) -> None:
    guest = worker._guest
    guest.allowed = MacHost(unload_minutes=0.0)
    guest.decision = replace(guest.decision, state="pause", since_seconds=-1e6)
    assert not unload(worker)
    guest.allowed = MacHost()
    guest.decision = replace(guest.decision, state="full")
    assert not unload(worker)


def test_a_worker_that_is_asked_to_end_does_not_begin_anew(worker: _Worker) -> None:
    before = set(threading.enumerate())
    worker._begin_anew("the Mac has slept")
    worker._leave()
    worker._last_call.cancel()
    assert worker.anew == ""
    assert not [
        thread for thread in set(threading.enumerate()) - before if isinstance(thread, threading.Timer) and not thread.finished.is_set()
    ]


def crashed_twice(folder: Path) -> None:
    folder.mkdir()
    (folder / "panics.json").write_text(json.dumps({"began": 0.0, "panics": [time.time() - 7200.0, time.time() - 600.0]}))


@pytest.mark.parametrize(("flags", "code"), [((), 1), (("--parks",), 0)])
def test_after_two_crashes_of_the_mac_the_worker_stays_off_and_says_so(tmp_path: Path, flags: tuple[str, ...], code: int) -> None:
    crashed_twice(tmp_path / "state")
    script = "import sys; from worker_mac.worker import main; print([main(sys.argv[1:]) for _ in range(2)])"
    command = [sys.executable, "-c", script, "--state", str(tmp_path / "state"), *flags]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT)
    assert found.stdout == f"{[code, code]}\n"
    assert "this Mac crashed 2 times in a day while groups were played: it plays no more" in found.stderr
    assert "stoa leave" in found.stderr


def test_a_crash_that_is_reported_late_counts(worker: _Worker, tmp_path: Path) -> None:
    async def look() -> None:
        crashed = time.time() - 600.0
        worker._panics = PanicLog(tmp_path, lambda: [crashed])
        (tmp_path / "panics.json").write_text(json.dumps({"began": crashed - 1.0, "panics": [crashed - 7200.0]}))
        worker._looked_for_crashes = -1e6
        assert not unload(worker)
        assert worker._stop.is_set()
        assert worker._guest.caution.stays_off

    asyncio.run(look())
