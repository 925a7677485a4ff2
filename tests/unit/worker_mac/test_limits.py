"""Caps and budgets, by a clock that only moves when somebody waits."""

import contextlib
import random
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from stoa.bucket.store import Store
from stoa.config.host import MacHost
from worker_mac.limits import SAVE_BYTES, Budgets, Cap, CappedMeters


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def most_in_a_minute(passed: list[tuple[float, int]]) -> int:
    return max(sum(size for at, size in passed if start <= at < start + 60.0) for start, _ in passed)


@pytest.mark.parametrize("largest", [1_000, 64 * 1024, 400_000])
def test_no_minute_has_more_than_the_cap_and_five_percent(largest: int) -> None:
    clock, numbers, passed = Clock(), random.Random(largest), []
    cap = Cap(10_000, clock, clock.sleep)
    while clock.now < 1000.0 + 1200:
        size = numbers.randint(1, largest)
        cap.take(size)
        passed.append((clock.now, size))
        if numbers.random() < 0.1:
            clock.now += numbers.uniform(0, 30)
    assert most_in_a_minute(passed) <= 600_000 * 1.05


def test_a_busy_sender_reaches_the_cap() -> None:
    clock, total = Clock(), 0
    cap = Cap(10_000, clock, clock.sleep)
    while clock.now < 1600:
        cap.take(5_000)
        total += 5_000
    assert total / 600 == pytest.approx(10_000, rel=0.05)


def test_no_cap_waits_for_nothing() -> None:
    cap = Cap(0, sleep=lambda seconds: pytest.fail("waited"))
    for _ in range(100):
        cap.take(1 << 30)


def test_a_piece_larger_than_a_minute_passes_and_is_made_good() -> None:
    clock = Clock()
    cap = Cap(1_000, clock, clock.sleep)
    cap.take(180_000)
    assert clock.now == 1000.0
    cap.take(1)
    assert clock.now == 1060.0  # nobody waits longer at once
    cap.take(1)
    cap.take(1)
    assert clock.now >= 1180.0


def test_a_budget_outlives_the_process_and_ends_with_its_period(tmp_path: Path) -> None:
    now = [datetime(2026, 3, 30, 23, 0)]
    path = tmp_path / "state" / "network.json"
    first = Budgets(path, 5_000, 9_000, lambda: now[0])
    first.add(4_000)
    assert first.spent() == ""
    first.close()
    second = Budgets(path, 5_000, 9_000, lambda: now[0])
    second.add(1_000)
    assert second.spent().startswith("this day's network budget")
    now[0] = datetime(2026, 3, 31, 0, 0)
    assert (second.used_bytes("day"), second.used_bytes("month"), second.spent()) == (0, 5_000, "")
    second.add(4_000)
    assert second.spent().startswith("this month's network budget")
    now[0] = datetime(2026, 4, 1, 0, 0)
    assert second.spent() == ""
    second.add(7)
    assert (second.used_bytes("day"), second.used_bytes("month")) == (7, 7)


def test_a_killed_process_forgets_less_than_a_mebibyte(tmp_path: Path) -> None:
    killed = Budgets(tmp_path / "network.json", 0, 0)
    for _ in range(70):
        killed.add(64 * 1024)
    kept = Budgets(tmp_path / "network.json", 0, 0).used_bytes("month")
    assert 70 * 64 * 1024 - SAVE_BYTES < kept <= 70 * 64 * 1024


def test_a_disk_that_takes_nothing_stops_no_transfer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    budgets = Budgets(tmp_path / "file" / "network.json", 1 << 30, 0)
    for _ in range(3):
        budgets.add(SAVE_BYTES)
    assert budgets.used_bytes("day") == 3 * SAVE_BYTES
    budgets.close()


@pytest.mark.parametrize("text", ["", "{", '{"day": 3}', "[]"])
def test_a_torn_file_of_budgets_stops_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "network.json").write_text(text)
    budgets = Budgets(tmp_path / "network.json", 100, 100)
    budgets.add(100)
    assert budgets.spent()


def test_a_store_with_capped_meters_sends_and_reads_no_faster(store: Store, tmp_path: Path) -> None:
    budgets = Budgets(tmp_path / "network.json", 0, 0)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        time.sleep(seconds)

    meters = CappedMeters(MacHost(upload_bytes_per_second=100_000, download_bytes_per_second=200_000), budgets, sleep)
    store.meters = meters
    began = time.monotonic()
    for name in "ab":
        store.create(f"runs/demo/{name}", b"x" * 50_000)
    assert time.monotonic() - began >= 0.5
    began = time.monotonic()
    for _ in range(3):
        store.get("runs/demo/a", max_bytes=1 << 20)
    assert time.monotonic() - began >= 0.5
    assert budgets.used_bytes("day") == 250_000
    assert meters.total().bytes_up == 100_000
    assert len(waited) == 3


def test_the_directions_do_not_wait_for_each_other(tmp_path: Path) -> None:
    blocked = threading.Event()
    release = threading.Event()

    def sleep(_: float) -> None:
        blocked.set()
        release.wait(5)
        raise SystemExit  # ends the thread that waits

    meters = CappedMeters(MacHost(upload_bytes_per_second=1), Budgets(tmp_path / "n.json", 0, 0), sleep)
    meters.add("group", up=10)

    def send() -> None:
        with contextlib.suppress(SystemExit):
            meters.add("group", up=10)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert blocked.wait(5)
    meters.add("delta", down=1 << 20)
    release.set()
