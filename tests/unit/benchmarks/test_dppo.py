"""The DPPO row checker: it agrees with the golden file, and sees a planted fault of each kind."""

import json
from pathlib import Path

import pytest

from benchmarks.dppo import main, measure
from stoa.contracts.errors import FormatError

GOLDEN = Path(__file__).parents[2] / "golden" / "dppo.json"
# A bare list; expected values by hand at threshold 0.2: r = pi / mu, gradient -A r keep.
BARE = [
    {"mu": 0.5, "pi": 0.6999, "advantage": 1.0, "keep": 1, "dloss_dlogpi": -1.3998},
    {"mu": 0.5, "pi": 0.7001, "advantage": 1.0, "keep": 0, "dloss_dlogpi": 0.0},
    {"mu": 0.5, "pi": 0.25, "advantage": -2.0, "keep": 0, "dloss_dlogpi": 0.0},
    {"mu": 0.5, "pi": 0.25, "advantage": 2.0, "keep": 1, "dloss_dlogpi": -1.0},
    {"mu": 0.001, "pi": 0.1, "advantage": -0.5, "keep": 1, "dloss_dlogpi": 10.0},
]


def write(folder: Path, document: object) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(document))
    return path


def test_golden_file_is_answered_in_both_types() -> None:
    found = measure(GOLDEN, 0.15, None, None)
    assert (found["num_rows"], found["num_mismatches"], found["num_mismatches_float32"]) == (23, 0, 0)
    assert found["num_ratio_cap_rows"] == 3
    assert found["num_answers"] == (23 * 2 + 3) * 2 * 2


def test_another_threshold_is_noticed() -> None:
    found = measure(GOLDEN, 0.2, None, None)
    names = {row["name"] for row in found["differing_rows"]}
    assert "hi-prob up .15+, A+" in names
    assert found["num_mismatches"] == len(names)


def test_bare_list_of_rows(tmp_path: Path) -> None:
    found = measure(write(tmp_path, BARE), 0.2, None, None)
    assert (found["num_rows"], found["num_mismatches"], found["differing_rows"]) == (5, 0, [])


@pytest.mark.parametrize(("key", "value"), [("keep", 0), ("dloss_dlogpi", -1.41), ("dloss_dlogpi", 1.3998), ("pi", 0.71)])
def test_planted_fault_is_the_one_row_that_differs(tmp_path: Path, key: str, value: float) -> None:
    found = measure(write(tmp_path, [{**BARE[0], key: value}, *BARE[1:]]), 0.2, None, None)
    assert (found["num_rows"], found["num_mismatches"]) == (5, 1)
    (row,) = found["differing_rows"]
    assert row["index"] == 0
    assert {entry["engine"] for entry in row["found"]} == {"torch", "numpy"}


@pytest.mark.parametrize("row", [{"mu": 0.5, "pi": 0.5}, {**BARE[0], "mu": 0.0}, {**BARE[0], "advantage": "much"}, 3])
def test_row_that_cannot_be_used_is_named(tmp_path: Path, row: object) -> None:
    with pytest.raises(FormatError, match="row 1"):
        measure(write(tmp_path, [BARE[0], row]), 0.2, None, None)


@pytest.mark.parametrize(
    ("content", "options"),
    [(b"\xff", ()), (b"[" * 100_000, ()), (b'{"rows": [], "thresholds": 3}', ()), (b'[{"mu": 0.5}]', ()), (b"[]", ("--tv", "nan"))],
)
def test_what_cannot_be_evaluated_is_one_line(content: bytes, options: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "rows.json").write_bytes(content)
    monkeypatch.setattr("sys.argv", ["dppo", "--vectors", str(tmp_path / "rows.json"), *options])
    with pytest.raises(SystemExit, match=r"error: .*rows\.json"):
        main()


def test_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no rows"):
        measure(write(tmp_path, {"thresholds": {}}), None, None, None)
