"""What became of uploads, and whether a fenced trainer was obeyed: each planted fault is found, and a clean run stays clean."""

import pytest

from cli.audit import Arrived, HeadSeen, uploads, zombie_writes
from cli.report.record import RunRecord
from stoa.bucket import keys
from tests.unit.cli.records import record, step, version


def key(number: int, of_version: int) -> str:
    return keys.group("demo", of_version, "mac-1", number, 0)


# Versions 0, 1, 2 are published at 100.5, 104.5, 108.5; steps begin at 102, 104, 106, 108 (see records.py).
def run(**changes: object) -> RunRecord:
    steps = (
        step(1, version=0, consumed=(key(1, 0),)),
        step(2, version=0, consumed=(key(2, 0),), dropped={key(3, 0): "stale"}),
        step(3, version=1, consumed=(key(4, 0),), refused=((key(5, 0), "mac-1", "slot_taken"),)),
        step(4, version=1, consumed=(key(6, 1),)),
    )
    return record(**{"steps": steps, **changes})


def arrived(*groups: tuple[int, int, float]) -> list[Arrived]:
    return [Arrived(key(number, of_version), at) for number, of_version, at in groups]


ALL = arrived((1, 0, 101), (2, 0, 101), (3, 0, 101), (4, 0, 102), (5, 0, 103), (6, 1, 105))


def test_groups_trained_on_dropped_or_refused_as_twins_are_accounted_for() -> None:
    found = uploads(run(), ALL, max_staleness_hard=8)
    assert (found.lost, found.refused, found.too_late, found.waiting) == ((), (), (), ())


def test_group_that_came_in_time_and_was_passed_over_is_lost() -> None:
    found = uploads(run(), [*ALL, *arrived((9, 0, 103))], max_staleness_hard=8, grace_seconds=3.0)
    assert found.lost == (key(9, 0),)  # step 4 began at 108, 5 s after it came, and took a group of version 1


@pytest.mark.parametrize("at", [106.0, 120.0])
def test_group_that_no_later_step_could_have_known_waits(at: float) -> None:
    found = uploads(run(), [*ALL, *arrived((9, 0, at))], max_staleness_hard=8, grace_seconds=3.0)
    assert (found.lost, found.waiting) == ((), (key(9, 0),))


def test_group_that_grew_too_old_without_a_word_is_lost() -> None:
    found = uploads(run(), [*ALL, *arrived((9, 0, 100))], max_staleness_hard=1, grace_seconds=60.0)
    assert found.lost == (key(9, 0),)


def test_group_that_a_note_tells_of_is_not_lost() -> None:
    found = uploads(run(), [*ALL, *arrived((9, 0, 100))], max_staleness_hard=1, noted=[key(9, 0)])
    assert found.lost == ()


def test_group_that_was_beyond_the_bound_when_it_came_is_too_late() -> None:
    found = uploads(run(), [*ALL, *arrived((9, 0, 109))], max_staleness_hard=1)
    assert (found.lost, found.too_late) == ((), (key(9, 0),))


def test_honest_group_refused_for_anything_but_a_twin_is_told() -> None:
    steps = (step(1, consumed=(key(1, 0),), refused=((key(7, 0), "mac-1", "wrong_state"),)), step(2), step(3), step(4))
    assert uploads(record(steps=steps), arrived((1, 0, 101), (7, 0, 101)), max_staleness_hard=8).refused == (key(7, 0),)


HEADS = [HeadSeen(100.6, 1, 1001, 0), HeadSeen(104.6, 2, 1001, 1), HeadSeen(108.6, 3, 1001, 2), HeadSeen(110.0, 4, 2001, 2)]


def test_orderly_handing_over_is_no_zombie() -> None:
    assert zombie_writes(run(), HEADS) == ()


def test_head_of_an_older_lease_after_a_newer_one_is_a_zombie() -> None:
    assert zombie_writes(run(), [*HEADS, HeadSeen(111.0, 5, 1001, 3)]) == ("HEAD number 5 is of lease 1001, after lease 2001",)


def test_version_made_after_the_run_was_taken_is_a_zombie() -> None:
    heads = [HeadSeen(100.6, 1, 1001, 0), HeadSeen(104.6, 2, 1001, 1), HeadSeen(107.0, 3, 2001, 1)]
    assert zombie_writes(run(), heads) == ("version 2 of lease 1001 was made after lease 2001 had the run",)


def test_step_or_version_of_an_older_lease_in_the_chain_is_a_zombie() -> None:
    steps = (step(1, epoch=2001), step(2, epoch=1001), step(3, epoch=2001), step(4, epoch=2001))
    versions = (version(0, epoch=2001), version(1, epoch=1001), version(2, epoch=2001))
    found = zombie_writes(record(steps=steps, versions=versions), [])
    assert found == ("version 1 is of lease 1001, after lease 2001", "step 2 is of lease 1001, after lease 2001")
