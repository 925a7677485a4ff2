"""Metric rows reach real sinks: a file, a page that is scraped, and the local stores of trackio and wandb where they are installed."""

import importlib.util
import json
import urllib.request
from pathlib import Path

import pytest

from stoa.contracts.errors import MissingExtraError, PortTakenError
from stoa.telemetry.sinks import JsonLines, MetricRow, Prometheus, Trackio, Wandb

ROWS = [
    MetricRow(1.0, "step", 1, 0, {"reward_mean": 0.25, "staleness_3": 2.0}),
    MetricRow(2.0, "step", 2, 0, {"reward_mean": 0.5, "broken": float("nan")}),
    MetricRow(3.0, "version", 2, 1, {"delta_bytes": 1000.0}),
]
installed = importlib.util.find_spec


def test_lines_are_added_to_a_file_that_is_there_and_hold_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "a" / "metrics.jsonl"
    for part in (ROWS[:1], ROWS[1:]):
        sink = JsonLines(path)
        sink.write(part)
        sink.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["kind"], row["step"], row["version"]) for row in found] == [("step", 1, 0), ("step", 2, 0), ("version", 2, 1)]
    assert found[1]["metrics"] == {"reward_mean": 0.5}


def scrape(url: str) -> dict[str, str]:
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {name: value for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def test_page_has_the_newest_value_of_each_metric_with_its_meaning() -> None:
    sink = Prometheus("demo", port=0)
    try:
        sink.write(ROWS[:1])
        assert scrape(sink.url)['stoa_step_reward_mean{run="demo"}'] == "0.25"
        sink.write(ROWS[1:])
        found = scrape(sink.url)
        assert found['stoa_step_reward_mean{run="demo"}'] == "0.5"
        assert found['stoa_step_staleness_3{run="demo"}'] == "2.0"
        assert (found['stoa_version_delta_bytes{run="demo"}'], found['stoa_version_version{run="demo"}']) == ("1000.0", "1.0")
        with urllib.request.urlopen(sink.url, timeout=10) as page:
            assert "# HELP stoa_version_delta_bytes the size of a version's delta, in bytes" in page.read().decode()
    finally:
        sink.close()
    with pytest.raises(OSError):
        scrape(sink.url)


def test_page_listens_on_this_machine_only_and_a_taken_port_is_told() -> None:
    sink = Prometheus("demo", port=0)
    try:
        assert sink.url.startswith("http://127.0.0.1:")
        with pytest.raises(PortTakenError, match="cannot be used"):
            Prometheus("other", port=int(sink.url.split(":")[2].split("/")[0]))
    finally:
        sink.close()


@pytest.mark.parametrize(("sink", "extra"), [(Trackio, "trackio"), (Wandb, "wandb")])
def test_missing_extra_is_named(sink: type[Trackio] | type[Wandb], extra: str) -> None:
    if installed(extra) is not None:
        pytest.skip(f"{extra} is installed here")
    with pytest.raises(MissingExtraError) as caught:
        sink("demo", {})
    assert f"stoa[{extra}]" in caught.value.hint


@pytest.mark.skipif(installed("trackio") is None, reason="extra trackio is not installed")
def test_trackio_keeps_the_rows_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    sink = Trackio("demo", {"seed": 1})
    sink.write(ROWS)
    sink.close()
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    logs = SQLiteStorage.get_logs("stoa", "demo")
    assert [row["step/reward_mean"] for row in logs if "step/reward_mean" in row] == [0.25, 0.5]


@pytest.mark.skipif(installed("wandb") is None, reason="extra wandb is not installed")
def test_wandb_keeps_the_rows_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = Wandb("demo", {"seed": 1})
    sink.write(ROWS)
    sink.close()
    (kept,) = tmp_path.rglob("*.wandb")
    assert kept.stat().st_size > 0
    assert b"reward_mean" in kept.read_bytes()
