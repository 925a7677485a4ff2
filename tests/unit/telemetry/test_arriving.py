"""What is shown of a download: from 0 to 100, never less than before, whatever is found on disk."""

import io
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from stoa.telemetry.arriving import Arrival, Shown, shown

READINGS = st.lists(st.integers(-50, 1500), min_size=1, max_size=30)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=120, color_system=None), stream


@settings(deadline=None)
@given(READINGS, st.integers(0, 1000))
def test_what_is_told_rises_from_0_to_100_whatever_is_read(readings: list[int], total: int) -> None:
    told: list[Arrival] = []
    bar = Shown("weights", told.append, console=console(terminal=False)[0])
    for num_bytes in readings:
        bar.show(Arrival(num_bytes, total))
        assert 0 <= Arrival(num_bytes, total).percent <= 100
    bar.whole()
    percents = [one.percent for one in told]
    assert percents == sorted(set(percents)) and all(0 <= percent <= 100 for percent in percents)
    if any(num_bytes < total for num_bytes in readings) and told:
        assert percents[-1] == 100


def test_lines_come_each_ten_percent_and_go_on_where_an_earlier_process_was() -> None:
    told: list[Arrival] = []
    bar = Shown("weights", told.append, console=console(terminal=False)[0])
    for num_bytes in (4_500, 4_600, 5_100, 5_000, 7_999, 9_999, 10_000):
        bar.show(Arrival(num_bytes, 10_000))
    # 99.99 % is not yet all of it
    assert [one.percent for one in told] == [45, 51, 79, 99, 100]


def test_what_is_here_already_or_nearly_is_not_shown() -> None:
    told: list[Arrival] = []
    bar = Shown("weights", told.append, console=console(terminal=False)[0], least_bytes=100)
    for found in (Arrival(1000, 1000), Arrival(901, 1000), Arrival(0, 0)):
        bar.show(found)
    bar.whole()
    assert told == []
    bar.show(Arrival(900, 1000))
    assert told == [Arrival(900, 1000)]


def test_another_total_is_another_download() -> None:
    told: list[Arrival] = []
    bar = Shown("weights", told.append, console=console(terminal=False)[0])
    for found in (Arrival(50, 100), Arrival(10, 1000), Arrival(9, 1000)):
        bar.show(found)
    assert told == [Arrival(50, 100), Arrival(10, 1000)]


def test_terminal_has_one_bar_that_ends_at_100() -> None:
    screen, stream = console(terminal=True)
    told: list[Arrival] = []
    readings = iter([Arrival(2_000_000, 8_000_000), Arrival(6_000_000, 8_000_000)])
    last = [Arrival(6_000_000, 8_000_000)]
    with shown(Shown("weights", told.append, console=screen), lambda: next(readings, last[0]), seconds=0.02):
        time.sleep(0.3)
    assert told == []
    text = stream.getvalue()
    assert "25%" in text and " 0%" not in text, "it goes on where an earlier process was"
    assert "100% 8.0/8.0 MB" in text.rpartition("\r")[2]


def test_block_that_fails_does_not_end_at_100() -> None:
    told: list[Arrival] = []
    look = Shown("weights", told.append, console=console(terminal=False)[0])
    with pytest.raises(RuntimeError), shown(look, lambda: Arrival(300, 1000), seconds=0.01):
        while not told:
            time.sleep(0.01)
        raise RuntimeError
    assert [one.percent for one in told] == [30]
