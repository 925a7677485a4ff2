import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from stoa.contracts.errors import AccessDeniedError, ObjectExistsError, ServiceUnavailableError, StoaError
from worker_mac.uploader import WAIT_SECONDS, Spool, Uploader


class Target:
    """A bucket in memory that can be away."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: StoaError | None = None
        self.tries = 0
        self.open = threading.Event()
        self.open.set()

    def create(self, key: str, data: bytes, *, kind: str = "") -> str:
        self.open.wait(20)
        self.tries += 1
        if self.fault is not None:
            raise self.fault
        if self.objects.setdefault(key, data) != data:
            raise ObjectExistsError(key)
        return "etag"


def test_objects_arrive_in_order_and_leave_the_spool(tmp_path: Path) -> None:
    target, spool = Target(), Spool(tmp_path)
    uploader = Uploader(target, spool)
    for index in range(5):
        uploader.put(f"runs/r/groups/{index}", bytes([index]) * 10)
    assert uploader.wait(10)
    uploader.close()
    assert list(target.objects.items()) == [(f"runs/r/groups/{index}", bytes([index]) * 10) for index in range(5)]
    assert spool.held() == []
    assert (uploader.num_sent, uploader.bytes_sent) == (5, 50)


def test_an_object_is_on_disk_before_it_is_sent(tmp_path: Path) -> None:
    target = Target()
    target.open.clear()
    uploader = Uploader(target, Spool(tmp_path))
    uploader.put("runs/r/a", b"one")
    assert Spool(tmp_path).read("runs/r/a") == b"one"
    assert uploader.pending() == ["runs/r/a"]
    assert not uploader.wait(0.05)
    target.open.set()
    assert uploader.wait(10)
    uploader.close()


def test_the_disk_a_spool_takes_is_known_while_objects_come_and_go(tmp_path: Path) -> None:
    spool, ended = Spool(tmp_path / "spool"), threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            spool.add("runs/r/b", bytes(62))
            spool.remove("runs/r/b")

    spool.add("runs/r/a", bytes(22))  # and 8 bytes of their sum
    moving = threading.Thread(target=come_and_go)
    moving.start()
    try:
        assert {spool.num_bytes for _ in range(300)} <= {30, 100}
    finally:
        ended.set()
        moving.join()
    shutil.rmtree(tmp_path / "spool")
    assert spool.num_bytes == 0


def test_an_outage_is_waited_out(tmp_path: Path) -> None:
    target = Target()
    target.fault = ServiceUnavailableError("away")
    uploader = Uploader(target, Spool(tmp_path))
    uploader.put("runs/r/a", b"one")
    deadline = time.monotonic() + 10
    while target.tries < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    target.fault = None
    assert uploader.wait(10)
    uploader.close()
    assert target.objects == {"runs/r/a": b"one"}
    assert target.tries >= 3


def test_an_outage_of_hours_is_waited_out(tmp_path: Path) -> None:
    target = Target()
    target.fault = ServiceUnavailableError("away")
    uploader = Uploader(target, Spool(tmp_path), wait_seconds=(0.0001, 0.002))
    uploader.put("runs/r/a", b"one")
    deadline = time.monotonic() + 30
    while target.tries < 2200 and time.monotonic() < deadline:  # six hours of the longest wait
        time.sleep(0.01)
    assert target.tries >= 2200
    assert WAIT_SECONDS[1] * 2200 > 6 * 3600
    target.fault = None
    assert uploader.wait(10)
    uploader.close()
    assert target.objects == {"runs/r/a": b"one"}


def test_what_a_mac_that_lost_power_left_half_written_is_dropped(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    keys = [f"runs/r/{name}" for name in ("empty", "cut", "flipped", "whole")]
    for key in keys:
        spool.add(key, bytes(range(100)))
    empty, cut, flipped, _ = (tmp_path / quote(key, safe="") for key in keys)
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:50])
    flipped.write_bytes(b"?" + flipped.read_bytes()[1:])
    target = Target()
    uploader = Uploader(target, spool)
    assert uploader.recover(lambda key: True) == 1
    assert uploader.wait(10)
    uploader.close()
    assert target.objects == {"runs/r/whole": bytes(range(100))}
    assert spool.held() == []


FULL = """
import resource, signal, sys
from pathlib import Path
from stoa.contracts.errors import DiskFullError
from worker_mac.uploader import Spool
spool = Spool(Path(sys.argv[1]))
spool.add("runs/r/small", bytes(100))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    spool.add("runs/r/large", bytes(20_000))
except DiskFullError as error:
    print(error.retryable, spool.held())
"""


def test_a_full_disk_is_an_error_that_may_pass_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=50)
    assert done.stdout == "True ['runs/r/small']\n", done.stderr
    assert len(list(tmp_path.iterdir())) == 1


def test_spool_that_was_removed_under_a_living_worker_costs_only_what_was_in_it(tmp_path: Path) -> None:
    target = Target()
    target.fault = ServiceUnavailableError("away")
    uploader = Uploader(target, Spool(tmp_path / "spool"))
    for key in ("runs/r/a", "runs/r/b"):
        uploader.put(key, b"one")
    shutil.rmtree(tmp_path / "spool")
    target.fault = None
    uploader.put("runs/r/c", b"two")
    assert uploader.wait(10)
    uploader.close()
    assert target.objects["runs/r/c"] == b"two"
    assert "runs/r/b" not in target.objects


def test_a_key_taken_by_other_bytes_is_counted_and_given_up(tmp_path: Path) -> None:
    target, spool = Target(), Spool(tmp_path)
    target.objects["runs/r/a"] = b"earlier"
    uploader = Uploader(target, spool)
    uploader.put("runs/r/a", b"later")
    uploader.put("runs/r/b", b"two")
    assert uploader.wait(10)
    uploader.close()
    assert (uploader.num_refused, uploader.num_sent, spool.held()) == (1, 1, [])
    assert target.objects == {"runs/r/a": b"earlier", "runs/r/b": b"two"}


def test_a_refused_key_for_the_bucket_is_told_and_the_object_kept(tmp_path: Path) -> None:
    target, spool = Target(), Spool(tmp_path)
    target.fault = AccessDeniedError("no")
    uploader = Uploader(target, spool)
    uploader.put("runs/r/a", b"one")
    with pytest.raises(AccessDeniedError):
        while uploader.wait(5):
            time.sleep(0.01)
    uploader.close()
    assert spool.held() == ["runs/r/a"]


def test_only_bytes_are_taken(tmp_path: Path) -> None:
    uploader = Uploader(Target(), Spool(tmp_path))
    with pytest.raises(TypeError, match="bytearray"):
        uploader.put("runs/r/a", bytearray(b"one"))  # pyright: ignore[reportArgumentType]
    uploader.close()


def test_recovery_sends_what_is_wanted_and_drops_the_rest_and_torn_files(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.add("runs/r/old", b"1")
    spool.add("runs/r/new", b"2")
    (tmp_path / "runs%2Fr%2Ftorn.part").write_bytes(b"ha")
    target = Target()
    uploader = Uploader(target, Spool(tmp_path))
    assert uploader.recover(lambda key: key.endswith("new")) == 1
    assert uploader.wait(10)
    uploader.close()
    assert target.objects == {"runs/r/new": b"2"}
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from pathlib import Path
from stoa.contracts.errors import ServiceUnavailableError
from worker_mac.uploader import Spool, Uploader
class Away:
    def create(self, key, data, *, kind=""):
        raise ServiceUnavailableError("away")
uploader = Uploader(Away(), Spool(Path(sys.argv[1])))
for index in range(8):
    uploader.put(f"runs/r/groups/{index}", bytes([index]) * 100_000)
print("spooled", flush=True)
time.sleep(60)
"""


def test_a_killed_process_loses_no_object_it_took(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any("spooled" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    target = Target()
    uploader = Uploader(target, Spool(tmp_path))
    assert uploader.recover(lambda key: True) == 8
    assert uploader.wait(10)
    uploader.close()
    assert target.objects == {f"runs/r/groups/{index}": bytes([index]) * 100_000 for index in range(8)}
