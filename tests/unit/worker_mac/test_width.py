from pathlib import Path

import pytest

from worker_mac.bench import Measured, keep
from worker_mac.bench_update import Update
from worker_mac.width import CALM_SWEEPS, Learned, choose_groups, learn, read_knee, read_learned, write_learned

FRESH = Learned()


@pytest.mark.parametrize(
    ("asked", "memory", "knee", "learned", "groups", "words"),
    [
        (None, 64, 0, FRESH, 8, ""),  # nothing is known: as wide as a sweep is
        (None, 3, 0, FRESH, 3, "memory"),
        (None, 64, 12, FRESH, 12, "faster"),
        (None, 10, 12, FRESH, 10, "memory"),
        (None, 64, 12, Learned(900.0, 5), 5, "staleness"),
        (4, 64, 12, Learned(900.0, 2), 4, ""),  # a number that was asked for stands
        (8, 3, 12, FRESH, 8, "3 of 8"),
    ],
)
def test_groups_are_the_least_of_memory_knee_and_staleness(
    asked: int | None, memory: int, knee: int, learned: Learned, groups: int, words: str
) -> None:
    found, reason = choose_groups(asked, memory_groups=memory, knee=knee, learned=learned)
    assert found == groups
    assert words in reason
    assert bool(words) == bool(reason)


def lesson(before: Learned, groups: int, lag: int, mean: float = 0.0) -> Learned:
    return learn(before, groups=groups, mean_tokens=mean, lag=lag, most_lag=3, memory_groups=8)


def test_a_sweep_longer_than_staleness_allows_narrows_the_next_by_as_much() -> None:
    assert lesson(FRESH, 8, lag=6).most_groups == 4
    assert lesson(FRESH, 8, lag=4).most_groups == 6
    assert lesson(FRESH, 2, lag=20).most_groups == 1
    assert lesson(FRESH, 8, lag=3) == FRESH


def test_short_sweeps_widen_it_again_one_by_one_up_to_what_memory_holds() -> None:
    learned = lesson(FRESH, 8, lag=6)
    widths = []
    for _ in range(5 * CALM_SWEEPS):
        groups, _ = choose_groups(None, memory_groups=8, knee=0, learned=learned)
        widths.append(groups)
        learned = lesson(learned, groups, lag=1)
    assert widths == [4] * CALM_SWEEPS + [5] * CALM_SWEEPS + [6] * CALM_SWEEPS + [7] * CALM_SWEEPS + [8] * CALM_SWEEPS
    assert learned.most_groups == 0


def test_a_sweep_that_was_too_long_ends_the_row_of_calm_ones() -> None:
    narrowed = learn(Learned(0.0, 6, CALM_SWEEPS - 1), groups=6, mean_tokens=0.0, lag=6, most_lag=3, memory_groups=8)
    assert (narrowed.most_groups, narrowed.num_calm) == (3, 0)


def test_a_sweep_that_used_up_half_of_what_is_allowed_is_no_reason_to_widen() -> None:
    learned = Learned(0.0, 4, CALM_SWEEPS - 1)
    assert lesson(learned, 4, lag=2) == Learned(0.0, 4, 0)
    # A narrow sweep, of the groups that were left over, says nothing.
    assert lesson(learned, 2, lag=0) == Learned(0.0, 4, 0)


def test_lengths_are_averaged_with_newer_sweeps_counting_more() -> None:
    learned = lesson(FRESH, 8, lag=0, mean=100.0)
    assert learned.mean_tokens == 100.0
    assert lesson(learned, 8, lag=0, mean=200.0).mean_tokens == 150.0
    assert lesson(learned, 8, lag=0).mean_tokens == 100.0


def test_what_was_learned_is_kept_and_what_is_damaged_is_forgotten(tmp_path: Path) -> None:
    assert (read_knee(tmp_path, "m"), read_learned(tmp_path)) == (0, FRESH)
    keep(tmp_path, Measured("m", 8, {12: 1.0}, 12, 0.1, 1, "f", "cpu", Update(10, 9, 0.1, 0.2, 0.3)))
    write_learned(tmp_path, Learned(812.5, 5, 2))
    assert (read_knee(tmp_path, "m"), read_learned(tmp_path)) == (12, Learned(812.5, 5, 2))
    for path in tmp_path.iterdir():
        path.write_text('{"format": 1, "model": "m", "knee_groups": "many", "mean_tokens": []}')
    assert (read_knee(tmp_path, "m"), read_learned(tmp_path)) == (0, FRESH)
    for number in ("NaN", "Infinity", "-3"):  # JSON as Python reads it
        (tmp_path / "width.json").write_text(f'{{"mean_tokens": {number}, "most_groups": 1, "num_calm": 0}}')
        assert read_learned(tmp_path) == FRESH
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xff\x00{")
    assert (read_knee(tmp_path, "m"), read_learned(tmp_path)) == (0, FRESH)


def test_a_folder_that_takes_nothing_costs_nothing_but_what_was_learned(tmp_path: Path) -> None:
    write_learned(tmp_path / "gone", Learned(1.0, 1, 1))
    assert read_learned(tmp_path / "gone") == FRESH
