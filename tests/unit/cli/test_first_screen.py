"""The first screen of a run keeps to what is known, and its numbers are the layout's."""

from dataclasses import replace
from pathlib import Path

import pytest

from cli.first_screen import Promise, budget_line, first_screen, macs_line
from cli.follow import reached
from cli.report.write import MetricsFile
from stoa.config.run import Publish, RunConfig, Stop
from stoa.weights.layout import layout_of
from tests.unit.cli.records import record
from tests.unit.weights.small_run import MODEL_CONFIG

LAYOUT = layout_of(MODEL_CONFIG, "float32")
PROMISE = Promise(Path("mine.toml"), "mine", ("mac-1", "mac-2"), Path("runs/mine"))
SETTINGS = RunConfig(run="mine", stop=Stop(max_steps=8), publish=Publish(anchor_every_versions=5))


def test_every_promised_line_is_there() -> None:
    text = "\n".join(first_screen(SETTINGS, LAYOUT, PROMISE))
    delta = LAYOUT.num_codes * 0.005 * 10.3 / 8
    assert 0 < delta < LAYOUT.num_bytes / 50
    for words in (
        "run mine is started: environments/search/policy on search",
        "2: mac-1, mac-2",
        f"about {delta:.0f} B a version",
        "of full weights every 5 versions",
        "ends at   8 steps",
        "worker mine.toml",
        "runs/mine/report.html",
        "stoa live mine",
        "stoa stop mine",
    ):
        assert words in text, words
    assert "take the name from theirs" not in text


def test_what_differs_is_told() -> None:
    text = "\n".join(first_screen(SETTINGS, LAYOUT, replace(PROMISE, file_run="demo", resume=True, detach=True, macs=())))
    for words in ("run mine goes on", 'run = "mine": workers take', "none yet", "`stoa report mine`"):
        assert words in text, words
    assert "report.html" not in text, "nobody writes one while nobody follows"


def test_of_many_macs_some_are_named() -> None:
    assert macs_line(tuple(f"m{i}" for i in range(10))) == "10: m0, m1, m2, m3, m4, m5, m6, m7 and 2 more"


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (Stop(max_steps=0), "`stoa stop`: no limit is set"),
        (Stop(max_steps=4, max_minutes=1.0), "4 steps or 1 minute"),
        (Stop(max_steps=0, max_dollars=2.0, dollars_per_gpu_hour=1.0, on_alarm=True), "2 dollars or an alarm that pauses"),
    ],
)
def test_budget_is_every_limit(stop: Stop, words: str) -> None:
    assert budget_line(stop) == words
    assert not reached(Stop(max_steps=0), record())


def test_metrics_are_kept_every_ten_seconds_and_at_the_end(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "runs" / "metrics.jsonl"
    file = MetricsFile(path, lambda: now[0])
    running = replace(record(), state="running")

    def lines(at: float, told: object) -> int:
        now[0] = at
        file.keep(told)  # type: ignore[arg-type]
        return len(path.read_text().splitlines())

    assert lines(0.0, replace(running, steps=running.steps[:1])) == 6
    assert lines(9.0, running) == 6, "not yet"
    assert lines(10.5, running) == 9
    assert lines(11.0, replace(running, state="stopped", evaluations=())) == 7
