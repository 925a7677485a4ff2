"""A run that got what it was started for is told from one whose time was over."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cli import follow as following
from cli.follow import GONE_LOOKS, Found, find_run, follow, reached
from cli.report.record import RunRecord
from stoa.config.run import Stop
from stoa.contracts.errors import ServiceUnavailableError
from tests.unit.cli.records import record


@pytest.mark.parametrize(
    ("stop", "done"),
    [
        (Stop(max_steps=4), True),
        (Stop(max_steps=5), False),
        (Stop(max_steps=0, max_versions=2), True),
        (Stop(max_steps=0, max_versions=3), False),
        (Stop(max_steps=96, target_pass_at_1=0.7), True),
        (Stop(max_steps=96, target_pass_at_1=0.71), False),
        (Stop(max_steps=0, max_minutes=1.0), False),
    ],
)
def test_reached(stop: Stop, done: bool) -> None:
    """What counts of a target is the lower end of the interval: 0.7 of 0.8."""
    evaluations = tuple(replace(one, interval_95=(one.pass_at_1 - 0.1, 1.0)) for one in record().evaluations)
    assert reached(stop, replace(record(), evaluations=evaluations)) is done


def test_silent_bucket_of_a_demo_is_told_with_the_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOA_BUCKET_ENDPOINT", "http://127.0.0.1:1")

    def hint(config: Path | None) -> str:
        with pytest.raises(ServiceUnavailableError) as caught, find_run("demo", config):
            pass
        return caught.value.hint

    assert "--config" not in hint(None)
    demo = Path("runs", "demo-1")
    (demo / "state" / "bucket").mkdir(parents=True)
    config = demo / "config.json"
    config.write_text(json.dumps({"run": "demo"}))
    assert hint(None).endswith("add `--config runs/demo-1/config.json`")
    assert hint(config).endswith("`stoa services --demo runs/demo-1` first")


def test_following_outlives_an_outage_of_the_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    """The run rides it out; whoever watches it must not be told that it failed."""
    ended = replace(record(), state="stopped")
    answers: list[RunRecord | ServiceUnavailableError] = [ServiceUnavailableError("the bucket does not answer"), ended]

    def collect() -> RunRecord:
        answer = answers.pop(0)
        if isinstance(answer, ServiceUnavailableError):
            raise answer
        return answer

    found = SimpleNamespace(
        document=SimpleNamespace(run="demo"),
        collector=SimpleNamespace(collect=collect),
        control=SimpleNamespace(is_running=lambda _: False),
    )
    assert follow(cast(Found, found), 8) == ended
    assert "waiting: the bucket does not answer" in capsys.readouterr().err


def test_following_ends_once_temporal_has_no_such_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workflow was terminated, or Temporal's history of it is over: it never says that it ended, and HEAD says running."""
    monkeypatch.setattr(following, "POLL_SECONDS", 0.0)
    looks: list[bool] = []
    # Away for a moment at its start: that is not the end of it.
    there = [False] * (GONE_LOOKS - 1) + [True] + [False] * GONE_LOOKS

    def is_running(_: str) -> bool:
        looks.append(True)
        return there[len(looks) - 1]

    found = SimpleNamespace(
        document=SimpleNamespace(run="demo"),
        collector=SimpleNamespace(collect=lambda: replace(record(), state="running")),
        control=SimpleNamespace(is_running=is_running),
    )
    told = follow(cast(Found, found), 8)
    assert (told.state, len(looks)) == ("gone", 2 * GONE_LOOKS)
    assert "--resume" in told.end_reason


def test_silence_of_temporal_is_not_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket still tells how far it is."""
    monkeypatch.setattr(following, "POLL_SECONDS", 0.0)
    states = ["running"] * (2 * GONE_LOOKS) + ["stopped"]

    def is_running(_: str) -> bool:
        if len(states) > 0:
            raise ServiceUnavailableError("Temporal does not answer")
        return False

    found = SimpleNamespace(
        document=SimpleNamespace(run="demo"),
        collector=SimpleNamespace(collect=lambda: replace(record(), state=states.pop(0))),
        control=SimpleNamespace(is_running=is_running),
    )
    assert follow(cast(Found, found), 8).state == "stopped"
