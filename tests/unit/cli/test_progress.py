"""The live view: plain lines in a pipe, once each; one block on a terminal."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from cli.live.progress import Progress, block, curve
from stoa.contracts.fleet_messages import SessionStatus
from tests.unit.cli.records import evaluation, record, session, version


def lines_of(*records: object) -> list[str]:
    stream = io.StringIO()
    with Progress(96, console=Console(file=stream, width=200, highlight=False)) as progress:
        for each in records:
            progress.show(each)  # type: ignore[arg-type]
    return stream.getvalue().splitlines()


def test_pipe_gets_each_fact_once() -> None:
    lines = lines_of(record(), record(), record())
    assert len(lines) == len(set(lines)) == 1 + 2 + 1 + 1
    assert sum("version 2  step 4/96" in line for line in lines) == 1


def test_version_line_has_steps_reward_search_bytes_and_fleet() -> None:
    line = next(line for line in lines_of(record()) if "version 2  " in line)
    for part in ("step 4/96", "reward 0.25", "search 0.50", "delta 2.0 kB", "Macs 2", "down 90.0 kB", "up 1.0 kB"):
        assert part in line


def test_evaluation_line_has_the_interval() -> None:
    result = replace(evaluation(4, 0.5), key="k", interval_95=(0.4, 0.6))
    assert any(
        "pass@1 0.500 (0.400 to 0.600), search rate 0.500, 100 questions" in line for line in lines_of(record(evaluations=(result,)))
    )


def test_mac_that_goes_away_is_told_with_its_reason() -> None:
    away = record(sessions=(session("mac-1", state="away", reason="no heartbeat"), session("mac-2")))
    lines = lines_of(record(), away)
    assert lines[-1].endswith("mac-1 is away: no heartbeat")


def shown(now: object, width: int = 80) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(block(now, 96, ""))  # type: ignore[arg-type]
    return stream.getvalue().splitlines()


def test_80_columns_cut_no_number_and_a_reason_stands_once_under_the_macs_it_is_of() -> None:
    hosts = [session(f"mac-{n:08x}", reason="no room within the staleness bound", bytes_up=715_600) for n in (1, 2)]
    text = "\n".join(shown(record(state="running", sessions=tuple(hosts))))
    assert "\u2026" not in text
    for part in ("version", "sweeps", "tokens/s", "45.0 kB", "715.6 kB", "mac-00000001, mac-00000002: no room within the staleness bound"):
        assert text.count(part) >= 1, part
    assert text.count("no room") == 1


def test_ended_run_tells_why_it_ended_not_what_it_was_doing_then() -> None:
    ended = record(state="stopped", end_reason="all 96 steps are done", waiting_for="ending: telling HEAD and the Macs")
    assert "all 96 steps are done" in shown(ended)[0]
    for lines in (shown(ended), lines_of(ended)):
        assert not any("telling HEAD" in line for line in lines)


def test_terminal_block_shows_what_is_waited_for() -> None:
    stream = io.StringIO()
    now = record(state="running", waiting_for="step 5: waiting for groups", live_step=6, versions=(version(0), version(1), version(2)))
    now = replace(now, sessions=(session("mac-1", tokens_per_second=2000.0),))
    Console(file=stream, width=160, force_terminal=True, color_system=None).print(block(now, 96, "http://127.0.0.1:1"))
    text = " ".join(stream.getvalue().split())
    for part in (
        "step 5: waiting for groups",
        "step 6/96",
        "version 2",
        "mac-1",
        "2000",
        "http://127.0.0.1:1",
        "delta 2.0 kB, anchor 40.0 kB",
    ):
        assert part in text


def test_curve_grows_with_reward_and_stays_in_bounds() -> None:
    assert curve([0.0, 0.5, 1.0, 2.0, -1.0]) == " +@@ "
    assert len(curve([0.1] * 500)) == 48


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_says_nothing_on_a_terminal_or_in_a_pipe(terminal: bool) -> None:
    out = io.StringIO()
    with Progress(8, console=Console(file=out, force_terminal=terminal), quiet=True) as progress:
        progress.say("a line")
        progress.show(record())
    assert out.getvalue() == ""


def test_what_nobody_counted_of_a_mac_is_no_zero() -> None:
    told = SessionStatus("mac-1", "ended", 0, 1, num_groups=4, num_sampled_tokens=60, reason="told by the bucket alone")
    row = next(line.split() for line in shown(record(sessions=(told,))) if line.startswith("mac-1 "))
    assert row == ["mac-1", "ended", "1", "-", "4", "-", "-", "-", "-"]


def test_speed_of_a_mac_is_that_which_other_screens_show() -> None:
    text = "\n".join(shown(record(state="running", sessions=(session("mac-1", tokens_per_second=718.4),))))
    assert " 718 " in text
    assert "2000" not in text, "over all its decoding: another number, which the report has"


def test_status_of_a_paused_run_says_what_its_macs_do_and_what_tokens_a_second_mean() -> None:
    macs = (session("mac-1", tokens_per_second=718.4),)
    lines = shown(record(state="paused", held="waits", sessions=macs))
    assert next(line.split()[:2] for line in lines if line.startswith("mac-1 ")) == ["mac-1", "waits"]
    assert any(line.startswith("mac-1: the run is paused") for line in lines)
    assert any(line.startswith("tokens/s: sampled in a Mac's newest sweep") for line in lines)
    assert not any(line.startswith("tokens/s:") for line in shown(record(state="running"))), "no speed, no word on it"


def test_evaluations_of_before_are_not_told_as_if_made_now() -> None:
    """A resumed run has many; the newest says how it stands."""
    old, new = (evaluation(0, 0.2), evaluation(2, 0.4)), evaluation(4, 0.6)
    lines = [line for line in lines_of(record(evaluations=old), record(evaluations=(*old, new))) if "held-out" in line]
    assert [line.split("  ")[-1].split(":")[0] for line in lines] == ["so far, held-out at version 2", "held-out at version 4"]
