import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from stoa.contracts.errors import AccessDeniedError, ObjectExistsError, ObjectTooLargeError, ServiceUnavailableError, StoaError
from worker_mac.uploader import MAX_REFUSED, REFUSED, WAIT_SECONDS, Spool, Uploader


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


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert holds()


def test_an_object_for_which_our_key_was_refused_is_tried_again_and_nothing_more_is_made_meanwhile(tmp_path: Path) -> None:
    target, spool = Target(), Spool(tmp_path)
    target.fault = AccessDeniedError("no such key")
    uploader = Uploader(target, spool, again_seconds=0.05)
    uploader.put("runs/r/a", b"one")
    until(lambda: target.tries >= 3)
    assert "no such key" in uploader.trouble
    assert uploader.pending() == ["runs/r/a"] and spool.held() == ["runs/r/a"]
    target.fault = None
    until(lambda: not uploader.trouble and uploader.num_sent == 1)
    uploader.close()
    assert target.objects == {"runs/r/a": b"one"} and spool.held() == []


def test_what_the_bucket_will_never_take_is_put_aside_with_the_reason_and_is_in_nobodys_way(tmp_path: Path) -> None:
    target, spool = Target(), Spool(tmp_path)
    target.objects["runs/r/a"] = b"earlier"
    uploader = Uploader(target, spool)
    uploader.put("runs/r/a", b"later")
    assert uploader.wait(10)
    target.fault = ObjectTooLargeError("at most 64 MiB")
    uploader.put("runs/r/b", b"two")
    with pytest.raises(ObjectTooLargeError):
        while uploader.wait(5):
            time.sleep(0.01)
    uploader.close()
    assert uploader.num_refused == 2
    assert spool.refused() == {"runs/r/a": spool.refused()["runs/r/a"], "runs/r/b": "at most 64 MiB"}
    assert "taken by other bytes" in spool.refused()["runs/r/a"]
    assert (tmp_path / REFUSED / quote("runs/r/a", safe="")).read_bytes()[:5] == b"later"
    assert (spool.held(), spool.num_bytes) == ([], 0)
    assert Uploader(Target(), Spool(tmp_path)).recover(lambda key: True) == 0


def test_only_the_last_of_what_was_put_aside_are_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(MAX_REFUSED + 2):
        spool.add(f"runs/r/{number}", b"1")
        os.utime(tmp_path / quote(f"runs/r/{number}", safe=""), ns=(number, number))
        spool.put_aside(f"runs/r/{number}", str(number))
        os.utime(tmp_path / REFUSED / f"{quote(f'runs/r/{number}', safe='')}.why", ns=(number, number))
    assert sorted(spool.refused().values(), key=int) == [str(number) for number in range(2, MAX_REFUSED + 2)]
    assert len(list((tmp_path / REFUSED).iterdir())) == 2 * MAX_REFUSED


class Faulty(Target):
    """Fails in a way that nobody foresaw, for some keys and so many times."""

    def __init__(self, failing: dict[str, int]) -> None:
        super().__init__()
        self.failing = failing

    def create(self, key: str, data: bytes, *, kind: str = "") -> str:
        if self.failing.get(key, 0):
            self.failing[key] -= 1
            raise RuntimeError(f"a fault of {key}")
        return super().create(key, data, kind=kind)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_unexpectedly_is_counted_told_and_replaced(tmp_path: Path) -> None:
    target = Faulty({"runs/r/a": 2})
    target.open.clear()
    uploader = Uploader(target, Spool(tmp_path), wait_seconds=(0.01, 0.05))
    uploader.put("runs/r/a", b"one")
    until(lambda: uploader.num_failures == 2)
    assert "RuntimeError: a fault of runs/r/a" in uploader.trouble
    target.open.set()
    assert uploader.wait(10)
    uploader.close()
    assert target.objects == {"runs/r/a": b"one"}
    assert (uploader.trouble, uploader.num_refused) == ("", 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_object_that_ends_the_thread_again_and_again_is_put_aside_and_the_others_go(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    target = Faulty({"runs/r/a": 100})
    uploader = Uploader(target, spool, wait_seconds=(0.01, 0.05))
    uploader.put("runs/r/a", b"one")
    uploader.put("runs/r/b", b"two")
    assert uploader.wait(10)
    uploader.close()
    assert target.objects == {"runs/r/b": b"two"}
    assert (uploader.num_failures, uploader.num_refused, uploader.trouble) == (3, 1, "")
    assert spool.refused() == {"runs/r/a": "RuntimeError: a fault of runs/r/a"}


FULL_AND_SENDING = """
import json, resource, sys, time
from pathlib import Path
from stoa.contracts.errors import ServiceUnavailableError
from worker_mac.uploader import Spool, Uploader
class Away:
    objects, away = {}, True
    def create(self, key, data, *, kind=""):
        if self.away:
            raise ServiceUnavailableError("away")
        self.objects[key] = len(data)
def until(holds):
    while not holds():
        time.sleep(0.01)
target, spool = Away(), Spool(Path(sys.argv[1]))
uploader = Uploader(target, spool, wait_seconds=(0.01, 0.05), again_seconds=0.1)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
uploader.put("runs/r/first", bytes(20_000))
uploader.put("runs/r/second", bytes(20_000))
said = [uploader.trouble, uploader.pending(), spool.held()]
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
until(lambda: not uploader.trouble)
said += [spool.held()]
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
uploader.put("runs/r/third", bytes(20_000))
said += [uploader.trouble]
target.away = False
until(lambda: uploader.wait(1.0))
said += [target.objects, uploader.trouble, spool.held()]
print(json.dumps(said))
"""


def test_a_group_that_finds_no_room_on_the_disk_waits_in_memory_is_told_and_is_sent(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_AND_SENDING, str(tmp_path)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    full, pending, kept, room, full_again, sent, over, held = json.loads(done.stdout.splitlines()[-1])
    assert full == "the disk is full: 2 finished groups wait in memory"
    assert (pending, kept) == (["runs/r/first", "runs/r/second"], [])
    assert sorted(room) == ["runs/r/first", "runs/r/second"]
    assert full_again == "the disk is full: 1 finished groups wait in memory"
    assert sent == dict.fromkeys(("runs/r/first", "runs/r/second", "runs/r/third"), 20_000)
    assert (over, held) == ("", [])


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
