"""Statistics of the gate study, by hand."""

import pytest

from benchmarks.gate_study import Point, Trial, interval, main, summarise


def trial(gate: str, seed: int, final: float, *, ended: int | None = None) -> Trial:
    quiet = (0.0, 0.01, 0.1, 0.9, 0.5, 0.0)
    return Trial(1e-3, gate, seed, (Point(0, 0.3, *quiet), Point(1, None, *quiet), Point(2, final, *quiet)), ended, ())


def test_interval_is_students() -> None:
    """Mean 2, standard deviation 1, three seeds: 4.303 / sqrt(3) = 2.484 either way."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-3)
    assert interval([0.5]) == (0.5, 0.5)


def test_difference_is_paired_by_seed_and_not_by_place() -> None:
    rows = summarise([trial("off", 0, 0.5), trial("off", 1, 0.2, ended=1), trial("tv", 1, 0.6), trial("tv", 0, 0.7)])
    off, tv = rows
    assert (off["minus_off"], off["num_without_signal"], off["mean"]) == ([], 1, 0.35)
    assert tv["minus_off"] == [0.4, 0.2]
    assert tv["worst_pass_at_1"] == [0.3, 0.3]
    assert tv["drop_rate_mean"] == 0.1


@pytest.mark.parametrize("asked", [("--seeds", "0"), ("--seeds", "11"), ("--versions", "0")])
def test_study_that_cannot_be_summarised_is_not_begun(asked: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gate_study", *asked])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
