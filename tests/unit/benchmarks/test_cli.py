"""The command line's benchmark counts what a person would: a fault is named by file, line and key, and with what was meant."""

from pathlib import Path

import pytest

from benchmarks.cli import FILE, Planted, best_seconds, clean_exits, faults_named, names


def test_all_planted_faults_are_named_in_one_answer(tmp_path: Path) -> None:
    assert faults_named(tmp_path) == (14, 14)
    assert sum(isinstance(one, Planted) for one in FILE) == 14


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("  x.toml:3: stop.max_step is not a setting (did you mean stop.max_steps?)", True),
        ("  x.toml:3: stop.max_step is not a setting (did you mean stop.max_minutes?)", False),
        ("  x.toml:4: stop.max_step is not a setting (did you mean stop.max_steps?)", False),
        ("  x.toml:3: stop.max_steps = 9: (did you mean stop.max_steps?)", False),
    ],
)
def test_what_counts_as_named(said: str, named: bool) -> None:
    assert names(said, Path("x.toml"), 3, Planted("max_step = 8", "stop.max_step", "stop.max_steps")) is named


def test_call_that_fails_is_no_clean_exit() -> None:
    """Nobody listens at these addresses."""
    env = {
        "PATH": "/usr/bin:/bin",
        "STOA_TEMPORAL_ADDRESS": "127.0.0.1:9",
        "STOA_BUCKET_ENDPOINT": "http://127.0.0.1:9",
        "HOME": "/nonexistent",
    }
    clean, seconds = clean_exits(env, 1)
    assert clean == 0 and len(seconds) == 1


def test_best_is_the_shortest() -> None:
    assert 0 < best_seconds(["true"], 2) < 5
