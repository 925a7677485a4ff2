"""What a Mac's session makes of its events: pure functions `event, memory -> memory`, and the few decisions it takes.

Who is live, what a lost or failed sweep means, how long to hold. Nothing is awaited here.
"""

from dataclasses import replace
from typing import Final

from stoa.contracts.fleet_messages import Goodbye, Grant, Hello, SessionInput, SessionStatus, SweepResult
from workflows.state import SessionProgress, Totals

MAX_BACKOFF_SECONDS: Final = 300.0
MAX_EMPTY_SECONDS: Final = 10.0
MIN_EMPTY_SECONDS: Final = 0.5
IDLE_HEAD_SECONDS: Final = 2.0
"""Between two looks at a run whose HEAD told the Mac to wait."""
MAX_TEXT: Final = 200
LOST: Final = frozenset({"heartbeat", "schedule_to_start"})
"""Timeouts that mean the Mac itself is gone; a sweep that is only too slow is redone like a failed one."""


def on_hello(state: SessionProgress, hello: Hello, now: float) -> SessionProgress:
    """A Mac is here. The live one again: noted. Another one: it waits until the live one is away or silent."""
    if state.state == "ended":
        return state
    if state.state == "away":
        return _live(state, hello.nonce, now)
    if hello.nonce == state.nonce:
        return replace(state, seen_at=now)
    return replace(state, candidate=hello.nonce, candidate_at=now if hello.nonce != state.candidate else state.candidate_at)


def _live(state: SessionProgress, nonce: str, now: float) -> SessionProgress:
    return replace(
        state,
        state="live",
        reason="",
        nonce=nonce,
        candidate="",
        seen_at=now,
        joining=state.joining or nonce != state.nonce,
        num_failures=0,
        num_empty=0,
        hold_until=0.0,
        stopped_since=0.0,
    )


def on_goodbye(state: SessionProgress, goodbye: Goodbye, now: float) -> SessionProgress:
    """A Mac leaves; a goodbye of one that is not live changes nothing for the live one."""
    if goodbye.nonce == state.candidate:
        return replace(state, candidate="")
    if state.state == "live" and goodbye.nonce == state.nonce:
        return went_away(state, f"said goodbye: {goodbye.reason}" if goodbye.reason else "said goodbye", now)
    return state


def went_away(state: SessionProgress, reason: str, now: float) -> SessionProgress:
    """The live worker is gone; one that waits takes over at once."""
    if state.candidate:
        return _live(state, state.candidate, now)
    return replace(state, state="away", reason=reason[:MAX_TEXT])


def take_over_if_due(state: SessionProgress, heartbeat_seconds: float, now: float) -> SessionProgress:
    """While no sweep runs nothing shows whether the live worker lives: a waiting one takes over after its silence."""
    if not state.candidate or now - max(state.candidate_at, state.seen_at) < heartbeat_seconds:
        return state
    return _live(state, state.candidate, now)


def ended(state: SessionProgress, reason: str) -> SessionProgress:
    """The session is over."""
    return replace(state, state="ended", reason=reason[:MAX_TEXT])


def may_play(grant: Grant) -> bool:
    """True if a grant is work to do now."""
    return bool(grant.question_ids) and grant.run_state == "running"


def on_wait(state: SessionProgress, grant: Grant, given: SessionInput, asked_at: float, now: float) -> SessionProgress:
    """The grant says wait: ask again, at once if it has waited itself, else after a growing while.

    A run that has stayed stopped for as long as a lost Mac is waited for ends the session. A session that was started
    anew, or reset, is told which sweep to go on with.
    """
    if grant.newest_sweep > state.sweep:
        return replace(state, sweep=grant.newest_sweep, hold_until=0.0)
    waited_itself = now - asked_at >= MAX_EMPTY_SECONDS / 2
    hold_seconds = 0.0 if waited_itself else min(MIN_EMPTY_SECONDS * 2.0**state.num_empty, MAX_EMPTY_SECONDS)
    stopped_since = (state.stopped_since or now) if grant.run_state == "stopped" else 0.0
    after = replace(
        state,
        reason=(grant.reason or f"the run is {grant.run_state}")[:MAX_TEXT],
        num_empty=min(state.num_empty + 1, 10),
        hold_until=now + hold_seconds,
        stopped_since=stopped_since,
    )
    if stopped_since and now - stopped_since >= given.away_expiry_seconds:
        return ended(after, "the run has stopped")
    return after


def on_result(state: SessionProgress, result: SweepResult, now: float) -> SessionProgress:
    """A sweep has ended by itself; one that was cut short is redone under its number."""
    after = replace(
        state,
        totals=_add(state.totals, result, joining=state.joining),
        joining=False,
        version=result.version if result.purpose == "train" and result.version >= 0 else state.version,
        reason=result.reason[:MAX_TEXT],
        num_empty=0,
        stopped_since=0.0,
    )
    match result.status:
        case "done" | "partial":
            sweep = state.sweep + 1 if result.purpose == "train" else state.sweep
            return replace(after, sweep=sweep, num_failures=0, hold_until=0.0)
        case "draining":
            return went_away(after, "its worker is shutting down", now)
        case "paused" | "stopped":
            return replace(after, hold_until=now + IDLE_HEAD_SECONDS)


def _add(totals: Totals, result: SweepResult, *, joining: bool) -> Totals:
    trains = result.purpose == "train"
    return replace(
        totals,
        num_sweeps=totals.num_sweeps + (trains and result.status in ("done", "partial")),
        num_groups=totals.num_groups + (result.num_groups if trains else 0),
        num_episodes=totals.num_episodes + result.num_episodes,
        num_sampled_tokens=totals.num_sampled_tokens + result.num_sampled_tokens,
        decode_seconds=totals.decode_seconds + result.decode_seconds,
        pull_seconds=totals.pull_seconds + result.pull_seconds,
        pull_latency_seconds_last=result.pull_latency_seconds or totals.pull_latency_seconds_last,
        apply_seconds=totals.apply_seconds + result.apply_seconds,
        idle_seconds=totals.idle_seconds + result.idle_seconds,
        join_seconds=result.pull_seconds + result.apply_seconds if joining else totals.join_seconds,
        bytes_up=totals.bytes_up + result.bytes_up,
        bytes_down=totals.bytes_down + result.bytes_down,
    )


def on_failure(state: SessionProgress, kind: str, text: str, now: float) -> SessionProgress:
    """A sweep failed. A lost Mac is away until it says hello; another failure is tried again after 2^n seconds."""
    totals = replace(state.totals, num_redone=state.totals.num_redone + 1)
    if kind == "timeout" and text in LOST:
        return went_away(replace(state, totals=totals), f"lost: {text} timeout", now)
    return replace(
        state,
        totals=totals,
        reason=f"sweep {state.sweep} failed: {kind}: {text}"[:MAX_TEXT],
        num_failures=state.num_failures + 1,
        hold_until=now + min(2.0**state.num_failures, MAX_BACKOFF_SECONDS),
    )


def status_of(state: SessionProgress, given: SessionInput) -> SessionStatus:
    """Answer of the session's query."""
    totals = state.totals
    return SessionStatus(
        host=given.host,
        state=state.state,
        sweep=state.sweep,
        version=state.version,
        reason=state.reason,
        place=given.place,
        num_sweeps=totals.num_sweeps,
        num_groups=totals.num_groups,
        num_episodes=totals.num_episodes,
        num_sampled_tokens=totals.num_sampled_tokens,
        decode_seconds=totals.decode_seconds,
        pull_seconds=totals.pull_seconds,
        pull_latency_seconds_last=totals.pull_latency_seconds_last,
        apply_seconds=totals.apply_seconds,
        idle_seconds=totals.idle_seconds,
        join_seconds=totals.join_seconds,
        bytes_up=totals.bytes_up,
        bytes_down=totals.bytes_down,
        num_redone=totals.num_redone,
    )
