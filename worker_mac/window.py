"""What a Mac's owner reads in the worker's window: one line for what matters to them, at most one for a sweep.

Each is made of an event of the log; one that is of use to a helper alone makes no line. A file or a pipe gets every event
whole, as JSON (`stoa.telemetry.log`). What a run or a server says is shown without characters that steer a terminal.
"""

import time
from collections.abc import Mapping
from typing import Final

_BOUND: Final = frozenset({"event", "level", "timestamp", "exception", "worker", "run", "host", "version"})
_TROUBLE: Final = ("warning", "error", "critical")

_LINES: Final = {
    "worker_waiting": "waits: {reason}",
    "selftest_passed": "this Mac computes as the run's other Macs do: the self-test passed",
    "run_joined": "has the weights of version {version}, after {seconds} s",
    "version_rebuilt": "made the weights of version {version} anew in {seconds} s",
    "spool_recovered": "sends {objects} finished groups of an earlier start",
    "weights_arriving": "weights on their way: {percent} %",
    "sweep_resumed": "goes on with sweep {sweep}: {groups_found} groups of it were finished before",
    "run_says": "the run says: {text}",
    "worker_begins_anew": "begins anew: {reason}",
    "goodbye_said": "said goodbye: {reason}",
    "run_over": "{reason}",
    "hello_failed": "the run does not take the hello, and is asked again: {error}",
    "update_unreachable": "version {version} cannot be fetched, plays on with {playing}: {reason}",
    "set_says": "{text}",
    "set_wired": "{macs} Macs are wired as one",
}

_STATES: Final = {
    "full": "plays",
    "gentle": "plays gently",
    "hold": "begins no new group",
    "finish": "finishes the groups in hand, then pauses",
    "pause": "pauses",
}


def line_of(event: Mapping[str, object]) -> str:
    """The line for one event of the log, with the time of day in front; "" for one that needs none."""
    said = _said(event)
    if not said:
        return ""
    shown = "".join(char if char.isprintable() else " " for char in said)
    trace = event.get("exception")
    return f"{time.strftime('%H:%M:%S')}  {shown}" + (f"\n{trace}" if trace else "")


def _said(event: Mapping[str, object]) -> str:
    name, level = str(event.get("event", "")), str(event.get("level", "info"))
    sign = f"{level}: " if level in _TROUBLE and name != "run_says" else ""
    match name:
        case "sweep_played":
            return _sweep(event)
        case "guest_decided":
            what = _STATES.get(str(event.get("state")), "?")
            return f"{what}: {event['reason']}" if event.get("reason") else what
        case "hello_said":
            return f"takes part in run {event.get('run')} as {event.get('host')}" if event.get("reason") == "start" else ""
        case "worker_ended":
            return "" if event.get("anew") else "ends: the run has stopped" if event.get("run_stopped") else "ends"
        case _:
            pass
    hint = f" ({event['hint']})" if event.get("hint") else ""
    if name in _LINES:
        return sign + _LINES[name].format_map(_Shown(event)) + hint
    if not sign:
        return ""
    facts = ", ".join(f"{key} {value}" for key, value in event.items() if key not in _BOUND | {"reason", "error", "message", "hint"})
    why = next((str(event[key]) for key in ("reason", "error", "message") if event.get(key)), "")
    return ": ".join(part for part in (f"{sign}{name.replace('_', ' ')}", facts, why) if part) + hint


def _sweep(event: Mapping[str, object]) -> str:
    shown = _Shown(event)
    what = "a part of an evaluation" if event.get("purpose") == "eval" else "sweep {sweep}".format_map(shown)
    line = what + " of version {version}: {groups} groups, {episodes} episodes, {tokens} tokens in {seconds} s".format_map(shown)
    return line if event.get("status") == "done" else f"{line} ({event.get('status')})"


class _Shown(dict[str, str]):
    """Fields as people read them; one that is missing is a question mark, for a line must not end a worker."""

    def __init__(self, event: Mapping[str, object]) -> None:
        super().__init__({key: f"{value:.1f}" if isinstance(value, float) else str(value) for key, value in event.items()})

    def __missing__(self, key: str) -> str:
        return "?"
