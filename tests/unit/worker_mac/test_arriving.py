"""A Mac that joins says how far its weights have come: in heartbeats, and to whoever looks at the worker."""

import time
from collections.abc import Callable

import pytest

from stoa.telemetry import log as telemetry
from stoa.telemetry.arriving import Arrival
from worker_mac import arriving
from worker_mac.worker import read_options


class Beats:
    """Heartbeats, kept."""

    stopping = cancelled = False

    def __init__(self) -> None:
        self.said: list[str] = []

    def report(self, detail: str, *, version: int = -1, key: str = "") -> None:
        self.said.append(detail)


def run_through(readings: list[Arrival | None]) -> list[str]:
    """What heartbeats say while these are found, one after the other."""
    beats, left, down = Beats(), list(readings), iter(range(1000))
    look: Callable[[], Arrival | None] = lambda: left.pop(0) if left else None  # noqa: E731
    with arriving.reported(look, lambda: next(down) if left else 0, beats, seconds=0.01):
        while left:
            time.sleep(0.01)
    return beats.said


GB = 10**9


@pytest.mark.parametrize("level", ["info", "warning"])
def test_heartbeats_and_the_log_have_the_share_of_the_total(level: str, capfd: pytest.CaptureFixture[str]) -> None:
    telemetry.configure(level=level, json_lines=True)
    try:
        said = run_through([None, Arrival(4 * GB, 9 * GB), Arrival(5 * GB, 9 * GB), None])
    finally:
        telemetry.configure()
    assert said[0] == "pulling weights"
    assert "pulling weights: 44 %, 4000000000 of 9000000000 bytes" in said
    lines = [line for line in capfd.readouterr().err.splitlines() if "weights_arriving" in line]
    # --quiet is the level `warning`: heartbeats go on, nothing is shown
    assert len(lines) == (3 if level == "info" else 0)
    if lines:
        assert '"percent": 44' in lines[0] and '"percent": 55' in lines[1] and '"percent": 100' in lines[2]


def test_a_delta_that_is_here_in_no_time_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    telemetry.configure(level="info", json_lines=True)
    run_through([Arrival(0, arriving.LEAST_BYTES - 1)] * 3)
    assert "weights_arriving" not in capfd.readouterr().err


def test_quiet_is_an_option_of_the_worker() -> None:
    assert read_options(["--quiet"]).quiet and not read_options([]).quiet
