"""What a Mac's session makes of its events: pure functions `event, memory -> memory`, and the few decisions it takes.

Who is live, what a lost or failed sweep means, how long to hold. Nothing is awaited here.
"""

import math
from dataclasses import replace
from typing import Final, TypeVar

from stoa.contracts.fleet_messages import (
    Admitted,
    Goodbye,
    Grant,
    Hello,
    MacFacts,
    Notice,
    SessionInput,
    SessionState,
    SessionStatus,
    Standing,
    SweepResult,
)
from workflows.state import SessionProgress, Totals

Number = TypeVar("Number", int, float)
MAX_BACKOFF_SECONDS: Final = 300.0
MAX_EMPTY_SECONDS: Final = 10.0
MIN_EMPTY_SECONDS: Final = 0.5
IDLE_HEAD_SECONDS: Final = 2.0
"""Between two looks at a run whose HEAD told the Mac to wait."""
HOT: Final = {"serious": "the Mac is hot", "critical": "the Mac is too hot"}
"""Why decoding itself is slow; a Mac that slows down is late, and nothing else is wrong with it."""
MAX_TEXT: Final = 200
MAX_BUILD: Final = 64
MAX_UNSENT: Final = 16
OUTAGE_SECONDS: Final = 120.0
"""So long a Mac should be able to play while the control plane is away."""
MAX_HELD_AHEAD: Final = 5
MAX_AHEAD_BYTES: Final = 11_000
"""Of the grants that go with one sweep: a message may have 16 KiB."""
MIN_WAIT_SECONDS: Final = 10.0
MAX_WAIT_SECONDS: Final = 120.0
MAX_GROUPS: Final = 64
"""What a Mac may ask for at a time, as in `rollout.groups`."""
MAX_GROUP_SIZE: Final = 64
DAY_SECONDS: Final = 86_400.0
MAX_TOKENS_PER_SECOND: Final = 1e9
SLOW_SHARE: Final = 0.25
"""What takes more of a sweep's time than this is why a Mac is slow."""
LOST: Final = frozenset({"heartbeat", "schedule_to_start"})
"""Timeouts that mean the Mac itself is gone; a sweep that is only too slow is redone like a failed one."""


def within_bounds(given: SessionInput) -> SessionInput:
    """`given` with numbers that activities and histories can have: they come from a Mac, which may say anything."""
    return replace(
        given,
        groups=_between(given.groups, 1, MAX_GROUPS),
        group_size=_between(given.group_size, 1, MAX_GROUP_SIZE),
        sweep_timeout_seconds=_between(given.sweep_timeout_seconds, 1.0, DAY_SECONDS),
        heartbeat_seconds=_between(given.heartbeat_seconds, 1.0, 3600.0),
        away_expiry_seconds=_between(given.away_expiry_seconds, 1.0, 365 * DAY_SECONDS),
        continue_after_events=_between(given.continue_after_events, 10, 10_000),
        place=_said(given.place),
    )


def _said(text: str, limit: int = MAX_TEXT) -> str:
    """As much of what a Mac says as is kept; JSON can have half of a surrogate pair, and whoever writes UTF-8 fails on it."""
    return text[:limit].encode(errors="replace").decode()


def _between(value: Number, low: Number, high: Number) -> Number:
    """The nearest in [low, high]; `low` for what is no number."""
    return min(max(value, low), high) if value == value else low


def on_hello(state: SessionProgress, hello: Hello, now: float) -> SessionProgress:
    """A Mac is here. The live one again: noted. Another one: it waits until the live one is away or silent.

    Without a nonce it is nobody: it could not be told from one that was admitted.
    """
    if state.state in ("ended", "refused") or not hello.nonce:
        return state
    state = replace(state, invite=hello.invite or state.invite, groups=_asked(hello.groups, state))
    build = _said(hello.build, MAX_BUILD)
    if state.state == "away":
        return _live(state, hello.nonce, build, now)
    if state.state in ("quarantined", "drained") and hello.nonce != state.nonce:
        return replace(state, nonce=hello.nonce, build=build, seen_at=now, owed=state.state)
    if hello.nonce == state.nonce:
        return replace(state, build=build, seen_at=now)
    candidate_at = now if hello.nonce != state.candidate else state.candidate_at
    return replace(state, candidate=hello.nonce, candidate_build=build, candidate_at=candidate_at)


def _asked(groups: int, state: SessionProgress) -> int:
    """Groups to ask for from now on; 0 says nothing new."""
    return _between(groups, 1, MAX_GROUPS) if groups else state.groups


def _live(state: SessionProgress, nonce: str, build: str, now: float) -> SessionProgress:
    return replace(
        state,
        state="live",
        reason="",
        nonce=nonce,
        build=build,
        candidate="",
        candidate_build="",
        seen_at=now,
        joining=state.joining or nonce != state.nonce,
        num_failures=0,
        num_empty=0,
        hold_until=0.0,
        stopped_since=0.0,
        resting=False,
        ready_at=now,
    )


def on_admission(state: SessionProgress, answer: Admitted, nonce: str) -> SessionProgress:
    """The run's word on the worker with `nonce`: welcome, or not (any more)."""
    if answer.ok:
        return replace(state, admitted=nonce)
    if answer.standing == "free":
        return replace(state, state="refused", reason=answer.reason[:MAX_TEXT], owed="too_old")
    standing = Standing("", "", answer.standing, answer.reason)
    return on_standing(replace(state, admitted=nonce), standing)


def on_standing(state: SessionProgress, standing: Standing) -> SessionProgress:
    """The run decided about this Mac. Quarantine ends the present sweep at once, a drain lets it be finished."""
    if state.state in ("ended", "refused") or standing.state == state.standing:
        return state
    after = replace(state, standing=standing.state, standing_reason=standing.reason[:MAX_TEXT])
    if standing.state == "quarantined" and state.state in ("live", "drained"):
        return take_standing(after)
    if standing.state == "free" and state.state in ("quarantined", "drained"):
        return replace(after, state="live", reason="", owed="free", num_failures=0, hold_until=0.0)
    return after


def take_standing(state: SessionProgress) -> SessionProgress:
    """Between sweeps: a Mac that may not play stands by. The same state for one that may."""
    if state.standing in ("free", state.state) or state.state not in ("live", "drained"):
        return state
    return replace(
        state, state=state.standing, reason=state.standing_reason, owed=state.standing, candidate="", candidate_build="", resting=False
    )


def notice_of(state: SessionProgress, kind: str, given: SessionInput) -> Notice:
    """What the Mac's owner is told."""
    match kind:
        case "quarantined":
            text = f"this run takes no more groups from this Mac: {state.reason}"
            return Notice(given.run, given.host, "quarantined", text)
        case "drained":
            text = f"this Mac may leave the run: {state.reason}; it may come back once the run's owner releases it"
            return Notice(given.run, given.host, "drained", text, ends=True)
        case "too_old":
            return Notice(given.run, given.host, "too_old", state.reason, ends=True)
        case "revoked":
            return Notice(given.run, given.host, "revoked", f"this Mac may not take part any more: {state.reason}", ends=True)
        case _:
            return Notice(given.run, given.host, "free", "this Mac plays again")


def presence(state: SessionProgress) -> SessionState:
    """The state that others see."""
    return "resting" if state.state == "live" and state.resting else state.state


def on_goodbye(state: SessionProgress, goodbye: Goodbye, now: float) -> SessionProgress:
    """A Mac leaves; a goodbye of one that is not live changes nothing for the live one."""
    if goodbye.nonce == state.candidate:
        return replace(state, candidate="", candidate_build="")
    if state.state in ("live", "quarantined", "drained") and goodbye.nonce == state.nonce:
        return went_away(state, f"said goodbye: {goodbye.reason}" if goodbye.reason else "said goodbye", now)
    return state


def went_away(state: SessionProgress, reason: str, now: float) -> SessionProgress:
    """The live worker is gone; one that waits takes over at once."""
    if state.candidate:
        return _live(state, state.candidate, state.candidate_build, now)
    return replace(state, state="away", reason=_said(reason))


def take_over_if_due(state: SessionProgress, heartbeat_seconds: float, now: float) -> SessionProgress:
    """While no sweep runs nothing shows whether the live worker lives: a waiting one takes over after its silence."""
    if not state.candidate or now - max(state.candidate_at, state.seen_at) < heartbeat_seconds:
        return state
    return _live(state, state.candidate, state.candidate_build, now)


def ended(state: SessionProgress, reason: str) -> SessionProgress:
    """The session is over."""
    return replace(state, state="ended", reason=reason[:MAX_TEXT])


def may_play(grant: Grant) -> bool:
    """True if a grant is work to do now."""
    return bool(grant.question_ids) and grant.run_state == "running"


def on_wait(state: SessionProgress, grant: Grant, given: SessionInput, asked_at: float, now: float) -> SessionProgress:
    """The grant says wait: ask again, at once if it has waited itself, else after a growing while.

    A run that has stayed stopped for as long as a lost Mac is waited for ends the session. A session that was started
    anew, or reset, is told which sweep to go on with. A Mac that may take part no longer is to be told so.
    """
    if grant.refused:
        return replace(state, state="refused", reason=grant.reason[:MAX_TEXT], owed="revoked")
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
        waits_for=grant.waits_for,
    )
    if stopped_since and now - stopped_since >= given.away_expiry_seconds:
        return ended(after, "the run has stopped")
    return after


def on_grant(state: SessionProgress, grant: Grant) -> SessionProgress:
    """A grant that came while the Mac had nothing to play: what it waited for, if it says so, is what the Mac waited for."""
    return replace(state, waits_for=grant.waits_for or state.waits_for)


def on_result(state: SessionProgress, result: SweepResult, now: float) -> SessionProgress:
    """A sweep has ended by itself; one that was cut short is redone under its number."""
    after = replace(
        state,
        totals=_add(state.totals, result, joining=state.joining),
        joining=False,
        version=result.version if result.purpose == "train" and result.version >= 0 else state.version,
        reason=_said(result.reason),
        num_empty=0,
        stopped_since=0.0,
        resting=result.status == "paused" and result.resting,
        ready_at=now,
        waits_for="",
        unsent=tuple(key[:MAX_TEXT] for key in result.unsent[:MAX_UNSENT] if key.isascii()),
        groups=_asked(result.groups, state),
        heat=_said(result.heat, 16),
    )
    match result.status:
        case "done" | "partial":
            after = _with_speed(after, result)
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
        num_unasked=totals.num_unasked + result.unasked,
    )


def _with_speed(state: SessionProgress, result: SweepResult) -> SessionProgress:
    """How fast the Mac is over all of a sweep's time, and what else than decoding took much of it."""
    weights_seconds = result.pull_seconds + result.apply_seconds
    played_seconds = result.decode_seconds + weights_seconds
    seconds = played_seconds + result.idle_seconds
    if result.purpose != "train" or seconds <= 0:
        return state
    shares = {"fetching weights": weights_seconds / seconds, "waiting": result.idle_seconds / seconds}
    slow = max(shares, key=lambda name: shares[name])
    return replace(
        state,
        sweep_seconds=0.5 * (state.sweep_seconds + played_seconds) if state.sweep_seconds else played_seconds,
        tokens_per_second=round(min(result.num_sampled_tokens / seconds, MAX_TOKENS_PER_SECOND), 1),
        slow_because=f"{shares[slow]:.0%} of its time {slow}" if shares[slow] > SLOW_SHARE else HOT.get(result.heat, ""),
    )


def on_start(state: SessionProgress, now: float) -> SessionProgress:
    """A sweep is handed to the Mac: what it waited for until now is added up."""
    waited = max(0.0, now - state.ready_at) if state.ready_at else 0.0
    waits = dict(state.totals.waits)
    reason = state.waits_for or "answer"
    waits[reason] = round(waits.get(reason, 0.0) + waited, 3)
    return replace(state, totals=replace(state.totals, waits=tuple(sorted(waits.items()))), waits_for="", ready_at=0.0)


def wanted_ahead(state: SessionProgress) -> int:
    """Sweeps beyond the next that the Mac should hold grants for: as many as last through an outage of the control plane."""
    if state.sweep_seconds <= 0:
        return 1
    return max(1, math.ceil(min(MAX_HELD_AHEAD, OUTAGE_SECONDS / state.sweep_seconds)))


def fitting_ahead(grant: Grant, following: tuple[Grant, ...]) -> tuple[Grant, ...]:
    """As many of the grants that follow `grant` as fit into one message beside it."""
    left = MAX_AHEAD_BYTES - _size(grant)
    fitting: list[Grant] = []
    for one in following:
        left -= _size(one)
        if left < 0:
            break
        fitting.append(one)
    return tuple(fitting)


def _size(grant: Grant) -> int:
    return 400 + len(grant.tickets) + sum(len(question.encode()) + 4 for question in grant.question_ids)


def prefetch_wait(num_dry: int) -> float:
    """How long the next fetch waits for room, after `num_dry` that found none: fewer and longer ones while there is none."""
    return min(3 * MIN_WAIT_SECONDS * 2.0 ** min(num_dry, 10), MAX_WAIT_SECONDS)


def grant_wait(state: SessionProgress) -> float:
    """The same while the Mac has nothing to play."""
    return min(MIN_WAIT_SECONDS * 2.0**state.num_empty, MAX_WAIT_SECONDS)


def on_failure(state: SessionProgress, kind: str, text: str, now: float) -> SessionProgress:
    """A sweep failed. A lost Mac is away until it says hello; another failure is tried again after 2^n seconds."""
    totals = replace(state.totals, num_redone=state.totals.num_redone + 1)
    if kind == "timeout" and text in LOST:
        return went_away(replace(state, totals=totals), f"lost: {text} timeout", now)
    return replace(
        state,
        ready_at=now,
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
        state=presence(state),
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
        num_unasked=totals.num_unasked,
        tokens_per_second=state.tokens_per_second,
        slow_because=state.slow_because,
        waits=dict(totals.waits),
        heat=state.heat,
    )


def facts_of(state: SessionProgress, given: SessionInput) -> MacFacts:
    """What a census finds."""
    return MacFacts(
        host=given.host,
        state=presence(state),
        sweep=state.sweep,
        version=state.version,
        tokens_per_second=state.tokens_per_second,
        place=given.place[:48],
        slow_because=(state.reason if state.resting else state.slow_because)[:64],
    )
