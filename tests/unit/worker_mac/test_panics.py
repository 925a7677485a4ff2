"""Crashes of the whole Mac: only those while the worker was at work count, and each makes it more careful."""

import os
from pathlib import Path

import pytest

from worker_mac.panics import BACK_OFF_SECONDS, Caution, PanicLog, decide, panic_reports

NOW = 1_800_000_000.0
HOUR = 3600.0


class Mac:
    """A clock and the reports of a Mac in the test's hands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.reports = folder, NOW, list[float]()

    def log(self) -> PanicLog:
        return PanicLog(self.folder, lambda: self.reports, lambda: self.now)

    def crash(self) -> None:
        """The Mac goes down, and comes up two minutes later with a report."""
        self.reports.append(self.now + 60.0)
        self.now += 120.0


@pytest.mark.parametrize(
    ("panics", "expected"),
    [
        ([], Caution()),
        ([NOW - 25 * HOUR], Caution()),
        ([NOW - 60.0], Caution(until=NOW - 60.0 + BACK_OFF_SECONDS, share=0.5)),
        ([NOW - 20 * HOUR], Caution(until=NOW - 20 * HOUR + BACK_OFF_SECONDS, share=0.5)),
        ([NOW - 25 * HOUR, NOW - HOUR], Caution(until=NOW - HOUR + BACK_OFF_SECONDS, share=0.5)),
        ([NOW - 20 * HOUR, NOW - HOUR], Caution(stays_off="this Mac crashed 2 times in a day while groups were played")),
    ],
)
def test_one_crash_waits_and_narrows_two_in_a_day_stay_off(panics: list[float], expected: Caution) -> None:
    assert decide(panics, NOW) == expected


def test_a_wait_says_until_when_and_ends() -> None:
    caution = decide([NOW], NOW + 1.0)
    assert "waiting until" in caution.waits(NOW + 1.0)
    assert caution.waits(NOW + BACK_OFF_SECONDS) == ""


def test_a_crash_while_at_work_is_noticed_at_the_next_start_and_forgiven_after_a_day(tmp_path: Path) -> None:
    mac = Mac(tmp_path)
    assert mac.log().begin() == Caution()
    mac.now += HOUR
    mac.crash()
    crashed_at = mac.reports[0]
    assert mac.log().look() == mac.log().begin() == Caution(until=crashed_at + BACK_OFF_SECONDS, share=0.5)
    mac.log().end()
    mac.now += 25 * HOUR
    assert mac.log().begin() == Caution()


def test_the_second_crash_in_a_day_stays_off_until_a_person_wants_it_again(tmp_path: Path) -> None:
    mac = Mac(tmp_path)
    for _ in range(2):
        assert not mac.log().begin().stays_off
        mac.crash()
    for _ in range(3):
        assert mac.log().begin().stays_off
    mac.log().forget()
    assert mac.log().begin() == Caution()


def test_crashes_before_the_first_start_and_after_a_clean_end_are_not_ours(tmp_path: Path) -> None:
    mac = Mac(tmp_path)
    mac.crash()
    assert mac.log().begin() == Caution()
    mac.log().end()
    mac.crash()
    mac.crash()
    assert mac.log().begin() == Caution()


def test_a_report_that_comes_after_the_next_start_counts_even_if_that_one_ends_well(tmp_path: Path) -> None:
    mac = Mac(tmp_path)
    mac.log().begin()
    mac.now += 120.0
    started = mac.log()
    assert started.begin() == Caution()  # macOS has not written its report yet
    mac.reports.append(mac.now + 5.0)
    mac.now += 60.0
    assert started.look().share == 0.5
    started.end()
    assert mac.log().begin().share == 0.5


def test_a_torn_record_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "panics.json").write_text('{"began":')
    assert Mac(tmp_path).log().begin() == Caution()


def test_reports_are_the_panic_files_also_those_put_aside(tmp_path: Path) -> None:
    (tmp_path / "Retired").mkdir()
    for name, at in (("panic-full-2026-11-30-0101.panic", 200), ("Retired/Kernel_2026-11-29.panic", 100), ("python_2026.ips", 300)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (at, at))
    assert panic_reports(tmp_path) == [100.0, 200.0]
    assert panic_reports(tmp_path / "none") == []


def test_a_disk_without_room_for_the_note_stops_no_worker(tmp_path: Path) -> None:
    """What cannot be written is told in the log; what was noted before stands."""
    folder = tmp_path / "state"
    folder.write_text("in the place of a folder nothing can be written")
    log = PanicLog(folder, lambda: [NOW], lambda: NOW)
    assert log.begin() == Caution()
    log.end()
