"""The search for repeats and holes in a lineage, on lineages with planted ones."""

from types import SimpleNamespace

import pytest

from benchmarks.resume import curve, faults_of

STREAM = [f"g{number}" for number in range(8)]


def manifest(step: int, consumed: list[str], *, dropped: tuple[str, ...] = (), **metrics: float) -> SimpleNamespace:
    return SimpleNamespace(
        step=step, consumed=tuple(consumed), dropped=tuple(SimpleNamespace(key=key) for key in dropped), refused=(), metrics=metrics
    )


@pytest.mark.parametrize(
    ("second", "dropped", "repeats", "holes"),
    [
        (["g2", "g3"], (), 0, 0),
        (["g1", "g2"], (), 1, 0),
        (["g3", "g4"], (), 0, 1),
        (["g3", "g4"], ("g2",), 0, 0),
        (["g5", "g5"], (), 1, 3),
    ],
)
def test_repeats_and_holes_are_counted(second: list[str], dropped: tuple[str, ...], repeats: int, holes: int) -> None:
    lineage = [manifest(2, second, dropped=dropped), manifest(1, ["g0", "g1"])]
    assert faults_of(SimpleNamespace(step=2), lineage, STREAM) == (repeats, holes)


def test_lineage_that_lacks_a_step_is_an_error() -> None:
    with pytest.raises(AssertionError, match="every step once"):
        faults_of(SimpleNamespace(step=3), [manifest(3, ["g2"]), manifest(1, ["g0"])], STREAM)


def test_curve_leaves_out_what_the_fleet_brought_meanwhile_and_keeps_what_the_step_measured() -> None:
    timed = dict.fromkeys(("fleet_tokens_per_second", "trainer_wait_share", "groups_waiting", "peak_memory_bytes_max", "hosts_untold"), 7.0)
    assert curve([manifest(1, [], loss=1.0, empty_retrieval_rate=0.5, **timed)]) == [{"loss": 1.0, "empty_retrieval_rate": 0.5}]


def test_curve_leaves_out_what_depends_on_when_groups_came() -> None:
    steps = [manifest(2, [], loss=2.0, staleness_max=3.0), manifest(1, [], loss=1.0, alarm_zero_variance_fraction=1.0, dropped_stale=1.0)]
    assert curve(steps) == [{"loss": 1.0}, {"loss": 2.0}]
