"""Events that a process keeps for a helper: whole, masked, of bounded size, and never in the way."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from cli.bundle import logs_in, tail
from stoa.telemetry import log
from stoa.telemetry.kept import KeptEvents


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    log.keep(None)
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before)


def test_events_are_kept_as_json_beside_stderr_and_a_bundle_finds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trainer" / "events.log"
    path.parent.mkdir()
    log.configure(line_of=lambda _: "", json_lines=False, worker="trainer")
    log.keep(path)
    structlog.get_logger().info("step_done", step=3, api_secret="hunter2", where=tmp_path)
    assert capsys.readouterr().err == ""
    ((name, found),) = logs_in((tmp_path,))
    assert name.endswith("trainer/events.log")
    told = json.loads(tail(found))
    assert (told["event"], told["step"], told["worker"], told["api_secret"], told["level"]) == ("step_done", 3, "trainer", "***", "info")
    assert path.stat().st_mode & 0o777 == 0o600
    log.configure(json_lines=True)
    structlog.get_logger().info("another_process")
    assert len(path.read_text().splitlines()) == 1, "who sets logging up anew keeps nothing until told to"


def test_newest_events_are_kept_within_the_bound_and_lines_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    for life in range(3):
        kept = KeptEvents(path, most_bytes=2000)
        for number in range(100):
            kept.write({"event": "step_done", "number": 100 * life + number})
        kept.close()
    before = path.with_name("events.before.log")
    assert {one.name for one in tmp_path.iterdir()} == {path.name, before.name}
    assert path.stat().st_size <= 1000 and before.stat().st_size <= 1000
    numbers = [json.loads(line)["number"] for file in (before, path) for line in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 300)) and len(numbers) > 20


def test_what_cannot_be_written_is_let_go(tmp_path: Path) -> None:
    gone = KeptEvents(tmp_path / "none" / "events.log")
    gone.write({"event": "lost"})
    (tmp_path / "none").mkdir()
    gone.write({"event": "kept"})
    gone.close()
    assert json.loads((tmp_path / "none" / "events.log").read_text()) == {"event": "kept"}
    full = KeptEvents(Path("/dev/full"))
    full.write({"event": "lost"})
    full.close()
