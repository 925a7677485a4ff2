"""The plan of faults: every kind strikes, nothing is drawn twice, and the same seed gives the same plan."""

from collections import Counter

from benchmarks.chaos_faults import KINDS, draw_faults


def test_every_kind_strikes_before_any_strikes_again() -> None:
    faults = draw_faults(3, 2 * len(KINDS) + 1, 600.0)
    counts = Counter(fault.kind for fault in faults)
    assert set(counts) == set(KINDS)
    assert sorted(counts.values())[-2:] == [2, 3]
    assert sum(counts.values()) == 2 * len(KINDS) + 1


def test_plan_follows_from_the_seed_and_lies_in_its_time() -> None:
    faults = draw_faults(3, 20, 600.0)
    assert faults == draw_faults(3, 20, 600.0) != draw_faults(4, 20, 600.0)
    assert [int(fault.at / 30.0) for fault in faults] == list(range(20))
    assert all(fault.seconds >= 0.5 and 0.0 <= fault.draw < 1.0 for fault in faults)


def test_kinds_cover_every_part_and_the_network() -> None:
    for part in ("mac", "trainer", "control", "temporal", "s3"):
        assert {f"{part}_kill", f"{part}_stop", f"{part}_term"} <= set(KINDS)
    assert {"mac_cut_silent", "trainer_cut_refused", "s3_500", "s3_429"} <= set(KINDS)
