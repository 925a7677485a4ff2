"""Downloads over a real server and links that misbehave: whole files or typed errors, never half a file under a good name."""

import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.proxy import Faults, Seen, fault_proxy, reply
from stoa.bucket import download
from stoa.bucket.download import Downloads, fetch
from stoa.bucket.store import Store
from stoa.bucket.transfer import Transfer, Wanted, journal_of, part_of, put
from stoa.contracts.errors import (
    AccessDeniedError,
    DigestError,
    DiskFullError,
    ObjectMissingError,
    ServiceUnavailableError,
    StoaError,
)
from tests.servers import CREDENTIALS
from tests.unit.bucket.flaky import flaky_proxy

DATA = random.Random(1).randbytes(3 * download.RANGE_BYTES + 12345)
SHA256 = hashlib.sha256(DATA).hexdigest()


def through(store: Store, endpoint: str, patience_seconds: float = 30.0) -> Store:
    return Store(store.settings.model_copy(update={"endpoint": endpoint}), CREDENTIALS, patience_seconds=patience_seconds)


def wanted(path: Path, key: str = "k/big", data: bytes = DATA) -> Wanted:
    return Wanted(key, path, len(data), hashlib.sha256(data).hexdigest())


def test_object_of_several_ranges_arrives_whole_over_a_link_that_breaks(store: Store, tmp_path):
    store.create("k/big", DATA)
    with flaky_proxy(store.settings.endpoint) as proxy:
        proxy.cut_after_bytes, proxy.num_cuts = 1_500_000, 6
        far = through(store, proxy.endpoint)
        assert fetch(far, "k/big", tmp_path / "sub" / "big", num_bytes=len(DATA), sha256=SHA256) == len(DATA)
        assert proxy.num_cuts == 0
        assert proxy.bytes_down < 1.1 * len(DATA)
    assert (tmp_path / "sub" / "big").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["big"]


def test_connections_that_go_silent_are_given_up_and_nothing_is_fetched_twice(store: Store, tmp_path):
    store.create("k/big", DATA)
    faults = Faults(link_rate=12e6, reset_every_bytes=2.5e6, stall_fraction=0.5, seed=4)
    with fault_proxy(store.settings.endpoint, faults) as (proxy, endpoint):
        started = time.monotonic()
        with Downloads(through(store, endpoint), [wanted(tmp_path / "big")], stall_seconds=1.5) as downloads:
            downloads.wait("k/big")
        assert time.monotonic() - started < 30
        assert proxy.counts.num_stalls >= 2
        assert proxy.counts.num_resets >= 2
        assert proxy.counts.bytes_down < 1.06 * len(DATA)
    assert (tmp_path / "big").read_bytes() == DATA


def test_last_range_on_a_silent_connection_does_not_hold_up_the_whole(store: Store, tmp_path):
    store.create("k/big", DATA)
    with fault_proxy(store.settings.endpoint, Faults(link_rate=12e6, reset_every_bytes=4e6, stall_fraction=1.0, seed=2)) as (
        proxy,
        endpoint,
    ):
        started = time.monotonic()
        with Downloads(through(store, endpoint), [wanted(tmp_path / "big")], stall_seconds=20.0) as downloads:
            downloads.wait("k/big")
        assert proxy.counts.num_stalls >= 1
        assert time.monotonic() - started < 15  # each silence alone would cost 20 s


def test_killed_process_leaves_what_it_had_and_the_next_one_fetches_the_rest(store: Store, tmp_path):
    store.create("k/big", DATA)
    program = (
        "import sys; from pathlib import Path; from stoa.bucket.download import fetch; from tests.servers import CREDENTIALS;"
        "from stoa.bucket.store import Store; from stoa.config.run import Bucket;"
        "store = Store(Bucket(endpoint=sys.argv[1], name=sys.argv[2]), CREDENTIALS, patience_seconds=60);"
        "fetch(store, 'k/big', Path(sys.argv[3]), num_bytes=int(sys.argv[4]), sha256=sys.argv[5])"
    )
    path = tmp_path / "big"
    with fault_proxy(store.settings.endpoint, Faults(link_rate=8e6)) as (proxy, endpoint):
        command = [sys.executable, "-c", program, endpoint, store.settings.name, str(path), str(len(DATA)), SHA256]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[3])
        while proxy.counts.bytes_down < 0.7 * len(DATA):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not path.exists()
    assert part_of(path).exists()
    with fault_proxy(store.settings.endpoint) as (proxy, endpoint):
        fetched = fetch(through(store, endpoint), "k/big", path, num_bytes=len(DATA), sha256=SHA256)
        # lost is at most what came after each range's last note, and what was on its way
        assert fetched < 0.3 * len(DATA) + 9 * (1 << 20)
        assert proxy.counts.bytes_down < fetched + 100_000
    assert path.read_bytes() == DATA
    assert [file.name for file in tmp_path.iterdir()] == ["big"]


def test_parts_of_one_anchor_share_the_ranges_and_each_is_done_in_its_turn(store: Store, tmp_path):
    objects = {f"k/{number}": random.Random(number).randbytes(700_000 * (number + 1)) for number in range(6)}
    for key, data in objects.items():
        store.create(key, data)
    with Downloads(store, [wanted(tmp_path / key, key, data) for key, data in objects.items()]) as downloads:
        for key, data in objects.items():
            downloads.wait(key)
            assert (tmp_path / key).read_bytes() == data
        assert downloads.num_bytes == sum(map(len, objects.values()))
    store.create("k/none", b"")
    assert fetch(store, "k/none", tmp_path / "none", num_bytes=0, sha256=hashlib.sha256(b"").hexdigest()) == 0
    assert (tmp_path / "none").read_bytes() == b""


def test_right_file_is_not_downloaded_again_and_a_wrong_one_is_replaced(store: Store, tmp_path):
    data = b"a small delta"
    sha256 = hashlib.sha256(data).hexdigest()
    store.create("k/d", data)
    path = tmp_path / "d"
    for present, expected in ((None, len(data)), (data, 0), (b"another delta", len(data)), (b"", len(data))):
        if present is not None:
            path.write_bytes(present)
        assert fetch(store, "k/d", path, num_bytes=len(data), sha256=sha256) == expected
        assert path.read_bytes() == data


def test_object_with_other_bytes_leaves_no_file(store: Store, tmp_path):
    store.create("k/d", b"tampered bytes")
    for num_bytes in (14, 99):
        with pytest.raises(DigestError):
            fetch(store, "k/d", tmp_path / "d", num_bytes=num_bytes, sha256="0" * 64)
        assert not (tmp_path / "d").exists()
    store.create("k/long", DATA + b"and more")
    with pytest.raises(DigestError, match=f"has {len(DATA) + 8} bytes, {len(DATA)} were promised"):
        fetch(store, "k/long", tmp_path / "d", num_bytes=len(DATA), sha256=SHA256)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ObjectMissingError):
        fetch(store, "k/none", tmp_path / "d", num_bytes=5, sha256=SHA256)


def test_link_that_flips_bits_is_found_by_the_sha256(store: Store, tmp_path):
    store.create("k/big", DATA)
    with fault_proxy(store.settings.endpoint, Faults(garbage_every_bytes=1e6)) as (_, endpoint), pytest.raises(DigestError):
        fetch(through(store, endpoint), "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256)
    assert list(tmp_path.iterdir()) == []
    assert fetch(store, "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256) == len(DATA)


def leave_half(path: Path, etag: str, data: bytes) -> None:
    """What a killed process leaves: the first half of `data`."""
    transfer = Transfer.resume(wanted(path))
    transfer.open()
    assert transfer.agree(etag)
    piece = transfer.take(len(DATA) // 2, 0.0)
    handle = transfer.handle()
    put(handle, data[: len(DATA) // 2], 0)
    os.close(handle)
    assert transfer.advance(piece, len(DATA) // 2, 0.0)
    transfer.leave(piece)
    transfer.close()


def test_half_of_another_object_is_thrown_away(store: Store, tmp_path):
    etag = store.create("k/big", DATA)
    leave_half(tmp_path / "big", '"another"', bytes(len(DATA)))
    assert fetch(store, "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256) == len(DATA)
    (tmp_path / "big").unlink()
    leave_half(tmp_path / "big", etag, DATA)
    assert fetch(store, "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256) == len(DATA) - len(DATA) // 2


def test_half_that_a_power_cut_lost_is_found_by_the_sha256_and_fetched_again(store: Store, tmp_path):
    etag = store.create("k/big", DATA)
    leave_half(tmp_path / "big", etag, bytes(len(DATA)))
    fetch(store, "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256)
    assert (tmp_path / "big").read_bytes() == DATA


def test_object_that_keeps_changing_is_given_up(store: Store, tmp_path):
    store.create("k/big", DATA)
    number = [0]

    def other_etag(seen: Seen) -> bytes | None:
        number[0] += 1
        start, end = seen.headers["range"].removeprefix("bytes=").split("-")
        head = f'HTTP/1.1 206 Partial\r\nETag: "{number[0]}"\r\nContent-Range: bytes {start}-{end}/{len(DATA)}\r\n'
        body = bytes(int(end) - int(start) + 1)
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    with fault_proxy(store.settings.endpoint) as (proxy, endpoint):
        proxy.answer = other_etag
        with pytest.raises(DigestError):
            fetch(through(store, endpoint), "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256)
    assert not (tmp_path / "big").exists()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply(403, "AccessDenied"), AccessDeniedError),
        (reply(401, "Unauthorized"), AccessDeniedError),
        (reply(404, "NoSuchKey"), ObjectMissingError),
        (reply(429, "TooManyRequests"), ServiceUnavailableError),
        (reply(500, "InternalError"), ServiceUnavailableError),
        (reply(503, "SlowDown"), ServiceUnavailableError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n<html>log in</h", ServiceUnavailableError),
        (b"\x00\x01 no http at all\r\n\r\n", ServiceUnavailableError),
        (b"", ServiceUnavailableError),
    ],
    ids=["403", "401", "404", "429", "500", "503", "portal", "garbage", "nothing"],
)
def test_server_that_says_no_for_good_is_a_typed_error(store: Store, tmp_path, answer: bytes, error: type[StoaError]):
    store.create("k/d", b"12345")
    sha256 = hashlib.sha256(b"12345").hexdigest()
    with fault_proxy(store.settings.endpoint) as (proxy, endpoint):
        proxy.answer = lambda seen: answer
        with pytest.raises(error):
            fetch(through(store, endpoint, 0.5), "k/d", tmp_path / "d", num_bytes=5, sha256=sha256)
        assert len(proxy.seen) < 12
        proxy.answer = None
        assert fetch(through(store, endpoint), "k/d", tmp_path / "d", num_bytes=5, sha256=sha256) == 5


@pytest.mark.parametrize("status", [429, 500, 503])
def test_server_that_is_busy_for_a_while_costs_time_only(store: Store, tmp_path, status: int):
    store.create("k/big", DATA)
    left = [20]

    def busy(seen: Seen) -> bytes | None:
        left[0] -= 1
        return reply(status, "SlowDown") if left[0] >= 0 else None

    with fault_proxy(store.settings.endpoint) as (proxy, endpoint):
        proxy.answer = busy
        assert fetch(through(store, endpoint), "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256) == len(DATA)


def test_caller_that_stops_a_download_keeps_what_came(store: Store, tmp_path):
    store.create("k/big", DATA)
    with fault_proxy(store.settings.endpoint, Faults(reset_every_bytes=3e6, seed=1)) as (proxy, endpoint):
        far = through(store, endpoint)

        def stop(reason: str) -> None:
            assert "k/big" in reason
            if proxy.counts.bytes_down > len(DATA) // 2:
                proxy.answer = lambda seen: reply(503, "SlowDown")
                raise ServiceUnavailableError("asked to end")

        proxy.answer = lambda seen: reply(503, "SlowDown") if proxy.counts.bytes_down > 0.8 * len(DATA) else None
        far.on_retry = stop
        with pytest.raises(ServiceUnavailableError, match="asked to end"):
            fetch(far, "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256)
    assert journal_of(tmp_path / "big").exists()
    assert fetch(store, "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256) < 0.7 * len(DATA)


FULL = """
import sys
from pathlib import Path
from stoa.bucket.download import fetch
from stoa.bucket.store import Store
from stoa.config.run import Bucket
from stoa.contracts.errors import DiskFullError
from tests.servers import CREDENTIALS
folder, sha256, num_bytes = Path(sys.argv[3]), sys.argv[5], int(sys.argv[4])
store = Store(Bucket(endpoint=sys.argv[1], name=sys.argv[2]), CREDENTIALS)
(folder / "kept").write_bytes(b"kept")
(folder / "other").write_bytes(bytes(20 << 20))
try:
    fetch(store, "k/big", folder / "big", num_bytes=num_bytes, sha256=sha256)
except DiskFullError as error:
    assert error.hint, error
else:
    raise SystemExit("there was room")
assert (folder / "kept").read_bytes() == b"kept" and not (folder / "big").exists()
(folder / "other").unlink()
assert fetch(store, "k/big", folder / "big", num_bytes=num_bytes, sha256=sha256) == num_bytes
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a disk of its own")
def test_full_disk_is_a_typed_error_and_nothing_is_lost(store: Store, tmp_path):
    store.create("k/big", DATA)
    own = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=32m none {tmp_path} || exit 77; exec "$@"', "sh"]
    arguments = [store.settings.endpoint, store.settings.name, str(tmp_path), str(len(DATA)), SHA256]
    done = subprocess.run(
        [*own, sys.executable, "-c", FULL, *arguments], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=50
    )
    if done.returncode == 77 or "Operation not permitted" in done.stderr:
        pytest.skip("may not mount")
    assert done.returncode == 0, done.stderr


def test_disk_that_fills_up_in_the_middle_is_a_typed_error_too(store: Store, tmp_path, monkeypatch):
    store.create("k/big", DATA)
    written, real = [0], os.pwrite

    def pwrite(file: int, data: bytes, at: int) -> int:
        written[0] += len(data)
        if written[0] > len(DATA) // 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, at)

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", pwrite)
        with pytest.raises(DiskFullError):
            fetch(store, "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256)
    assert fetch(store, "k/big", tmp_path / "big", num_bytes=len(DATA), sha256=SHA256) < 0.6 * len(DATA) + (1 << 20)
    assert (tmp_path / "big").read_bytes() == DATA
