"""The first screen of a run keeps to what is known, and its numbers are the layout's."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cli.first_screen import Promise, budget_line, delta_bytes, first_screen, macs_line
from cli.follow import reached
from cli.report.write import MetricsFile
from cli.say import bytes_text
from stoa.config.load import PROJECT_ROOT
from stoa.config.run import Publish, RunConfig, Stop
from stoa.weights.layout import Layout, layout_of
from tests.unit.cli.records import record
from tests.unit.weights.small_run import MODEL_CONFIG

LAYOUT = layout_of(MODEL_CONFIG, "float32")
PROMISE = Promise(Path("mine.toml"), "mine", ("mac-1", "mac-2"), Path("runs/mine"))
SETTINGS = RunConfig(run="mine", stop=Stop(max_steps=8), publish=Publish(anchor_every_versions=5))


def test_every_promised_line_is_there() -> None:
    text = "\n".join(first_screen(SETTINGS, LAYOUT, PROMISE))
    delta = delta_bytes(LAYOUT, 0.005)
    for words in (
        "run mine is started: environments/search/policy on search",
        "2: mac-1, mac-2",
        f"about {bytes_text(delta)} a version",
        "of weights and headers, every 5 versions",
        "ends at   8 steps",
        "worker mine.toml",
        "runs/mine/report.html",
        "stoa live mine",
        "stoa stop mine",
    ):
        assert words in text, words
    assert "take the name from theirs" not in text


# Share of the codes that changed and bytes of the delta, as a recorded demo (seed 0) logged them at versions 1, 2, 4, 8, 12, 16 and 17.
RECORDED = (
    (0.004876, 9896),
    (0.003998, 9715),
    (0.005307, 10086),
    (0.007388, 11006),
    (0.006234, 10723),
    (0.008690, 11305),
    (0.010180, 11691),
)


@pytest.mark.parametrize(("changed", "size"), RECORDED)
def test_a_demo_s_deltas_are_foretold(changed: float, size: int) -> None:
    config = json.loads((PROJECT_ROOT / "environments/search/policy/config.json").read_text())
    assert delta_bytes(layout_of(config, "float32"), changed) == pytest.approx(size, rel=0.04)


def test_a_large_model_s_deltas_are_near_shannon_s_bound() -> None:
    # docs/log.md: 8.3e9 codes, 0.5 % of them changed: 51.7 MB, 0.989 of the bound for independent changes; by hand 52.2 MB.
    large = cast(Layout, SimpleNamespace(num_codes=8_300_000_000, num_raw=0, raw_dtype="bfloat16"))
    assert delta_bytes(large, 0.005) == pytest.approx(52.3e6, rel=0.01)
    raw = replace_raw(large, 1_600_000)
    assert 0 < delta_bytes(raw, 0.005) - delta_bytes(large, 0.005) < 0.04 * 1_600_000 * 2


def replace_raw(layout: Layout, num_raw: int) -> Layout:
    return cast(Layout, SimpleNamespace(num_codes=layout.num_codes, num_raw=num_raw, raw_dtype=layout.raw_dtype))


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
