"""What an owner reads in the worker's window: plain lines on a terminal, every event as JSON elsewhere."""

import contextlib
import io
import json
import os
import re

import pytest
import structlog

from stoa.telemetry import log as telemetry
from worker_mac.window import line_of

SWEEP = {
    "event": "sweep_played", "level": "info", "run": "demo", "host": "mac-1", "worker": "mac", "sweep": 12, "purpose": "train",
    "version": 8, "status": "done", "groups": 8, "episodes": 64, "tokens": 3210, "seconds": 4.04, "heat": "",
}  # fmt: skip


def plain(event: dict[str, object]) -> str:
    """The line without its time of day."""
    line = line_of(event)
    assert not line or re.match(r"\d\d:\d\d:\d\d  ", line)
    return line[10:]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (SWEEP, "sweep 12 of version 8: 8 groups, 64 episodes, 3210 tokens in 4.0 s"),
        ({**SWEEP, "status": "paused"}, "sweep 12 of version 8: 8 groups, 64 episodes, 3210 tokens in 4.0 s (paused)"),
        ({**SWEEP, "purpose": "eval"}, "a part of an evaluation of version 8: 8 groups, 64 episodes, 3210 tokens in 4.0 s"),
        ({"event": "delta_applied", "level": "info", "version": 3}, ""),
        ({"event": "hello_said", "level": "info", "reason": "silence"}, ""),
        (
            {"event": "hello_said", "level": "info", "reason": "start", "run": "demo", "host": "mac-1"},
            "takes part in run demo as mac-1",
        ),
        ({"event": "guest_decided", "level": "info", "state": "pause", "reason": "on battery", "heat": ""}, "pauses: on battery"),
        ({"event": "guest_decided", "level": "info", "state": "full", "reason": ""}, "plays"),
        ({"event": "worker_waiting", "level": "info", "reason": "no run", "hint": "start it"}, "waits: no run (start it)"),
        ({"event": "run_says", "level": "warning", "kind": "drained", "text": "this Mac may leave"}, "the run says: this Mac may leave"),
        ({"event": "object_refused", "level": "error", "key": "a/b", "reason": "no key"}, "error: object refused: key a/b: no key"),
        ({"event": "run_says", "level": "warning", "text": "\x1b[2Jgone\r"}, "the run says:  [2Jgone "),
        ({"event": "update_unreachable", "level": "warning"}, "warning: version ? cannot be fetched, plays on with ?: ?"),
        ({"event": "worker_ended", "level": "info", "run_stopped": True, "anew": ""}, "ends: the run has stopped"),
    ],
)
def test_an_event_has_the_line_that_its_owner_needs(event: dict[str, object], line: str) -> None:
    assert plain(event) == line


def test_a_crash_keeps_its_trace() -> None:
    line = plain({"event": "worker_crashed", "level": "error", "exception": "Traceback\n  here"})
    assert line == "error: worker crashed\nTraceback\n  here"


def test_a_terminal_gets_lines_and_a_pipe_gets_each_event_as_json() -> None:
    master, slave = os.openpty()
    log = structlog.get_logger("test")
    try:
        with open(slave, "w", encoding="utf-8") as terminal, contextlib.redirect_stderr(terminal):
            telemetry.configure(line_of=line_of, worker="mac", run="demo")
            log.info("delta_applied", version=3)
            log.info("worker_waiting", reason="the run has stopped")
            terminal.flush()
            shown = os.read(master, 4096).decode()
        with contextlib.redirect_stderr(io.StringIO()) as pipe:
            telemetry.configure(line_of=line_of, worker="mac", run="demo")
            log.info("delta_applied", version=3)
    finally:
        os.close(master)
        telemetry.configure()
    assert len(shown.splitlines()) == 1
    assert shown.rstrip().endswith("  waits: the run has stopped")
    assert json.loads(pipe.getvalue())["event"] == "delta_applied"
