"""Floods of refused groups at the trainer's intake: told in parts, counted whole, never told late."""

from dataclasses import replace
from unittest.mock import ANY

from stoa.bucket import keys
from stoa.bucket.steps import MAX_STEP_BYTES, STEP_FORMAT, Dropped, StepManifest, write_step
from stoa.bucket.store import Store
from stoa.rollouts.inbox import Arrival
from tests.unit.trainer_gpu.runs import Reports
from tests.unit.trainer_gpu.test_intake import group, intake, noted, put  # noqa: F401 - fixtures
from trainer_gpu.intake import Intake, Starved, Taken


def test_flood_of_refused_groups_under_invented_names_is_told_in_parts_and_counted_whole(store: Store, intake: Intake) -> None:  # noqa: F811
    """2,500 groups of as many hosts, and 40 of one that also brought something: no manifest names more than 1,024 of either."""
    names = [f"x{number:04d}" for number in range(2500)] + ["mac"] * 40
    arrivals = [
        Arrival(key, keys.parse_group(key), 10, 0.0)
        for key in (keys.group("test", 5, host, 7 + number // 100, number % 100) for number, host in enumerate(names))
    ]
    for arrival in arrivals:
        intake._refuse(arrival, "malformed", "junk")
    told: list[str] = []
    for part, (untold, slots) in enumerate([(1516, (0, 1)), (492, (2, 3)), (0, (4, 5))]):
        for slot in slots:
            put(store, group(slot, version=5))
        taken = intake.take(5, Reports())
        assert isinstance(taken, Taken)
        told += [one.key for one in taken.refused]
        assert taken.metrics["groups_untold"] == untold
        if part == 0:
            assert taken.metrics["groups_refused"] == taken.metrics["refused_malformed"] == 2540.0
            assert taken.metrics["hosts_untold"] == 2501 - 1024
            assert len(taken.hosts) == 1024
            assert (taken.hosts["mac"].accepted, taken.hosts["mac"].refused) == (2, {"malformed": 40})
            manifest = manifest_for(taken)
            assert len(store.get(write_step(store, manifest), max_bytes=MAX_STEP_BYTES // 8).data) > 0
            intake.put_back()
            assert intake.take(5, Reports()) == replace(taken, metrics=ANY, wait_seconds=ANY), "a step that failed told nobody"
        else:
            assert taken.metrics["groups_refused"] == 0.0, "counted once, though named later"
            assert sorted(taken.hosts) == ["mac"]
        intake.settle()
    assert told == [arrival.key for arrival in arrivals]


def test_flood_is_noted_in_parts_while_no_step_can_be_taken(store: Store, intake: Intake, noted: list[Dropped]) -> None:  # noqa: F811
    for number in range(2100):
        key = keys.group("test", 5, f"x{number:04d}", 0, 0)
        intake._refuse(Arrival(key, keys.parse_group(key), 10, 0.0), "malformed", "junk")
    sizes: list[int] = []
    intake._note = lambda found: (sizes.append(len(found)), noted.extend(found))  # pyright: ignore
    assert isinstance(intake.take(5, Reports(), wait_seconds=2.5), Starved)
    assert sizes == [1024, 1024, 52]
    assert len({drop.key for drop in noted}) == 2100


def test_what_nobody_looks_at_any_more_is_not_told_late(store: Store, intake: Intake) -> None:  # noqa: F811
    for number in range(1500):
        key = keys.group("test", 0, f"x{number:04d}", 0, 0)
        intake._refuse(Arrival(key, keys.parse_group(key), 10, 0.0), "malformed", "junk")
    for slot in (0, 1):
        put(store, group(slot, version=5))
    assert isinstance(intake.take(5, Reports()), Taken)
    intake.settle()
    assert intake.refused == ()


def manifest_for(taken: Taken) -> StepManifest:
    return StepManifest(
        STEP_FORMAT, "test", 1001, 1, 5, "", taken.keys, taken.dropped, taken.refused, taken.hosts, taken.metrics, 0.0, 0.0, 0.0
    )
