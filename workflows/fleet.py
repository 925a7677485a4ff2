"""Who is in a run's fleet: pure functions over members, censuses, and those that may not play.

Members come and go by signals and are put right by the census, page by page. Nothing here awaits.
"""

from dataclasses import replace
from difflib import get_close_matches
from statistics import median
from typing import Final

from stoa.contracts import names
from stoa.contracts.fleet_messages import FleetEvent, FleetMember, FleetPage, FleetQuery, MacFacts, Standing
from stoa.contracts.messages import CanaryNews, RunInput
from workflows.events import CensusTaken, Decided
from workflows.state import Banned, Member, RunProgress

MAX_MEMBERS: Final = 1000
"""So many are listed by the run; all are counted. With their texts they stay under the limit of carried memory."""
MAX_BANNED: Final = 200
MAX_LEFT: Final = 200
"""Hosts that are remembered after they left."""
MAX_NAMED: Final = 12
"""Hosts that one refusal names."""
MAX_PAGE: Final = 40
MAX_PLACE_BYTES: Final = 20
MAX_WHY_BYTES: Final = 32
MAX_REASON_BYTES: Final = 64
JOIN_SECONDS: Final = 15
"""A Mac that joined so recently may be missing from a census."""


def cut(text: str, num_bytes: int) -> str:
    """As much of `text` as fits."""
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")


def count(state: RunProgress) -> int:
    """Macs that play, as far as is known."""
    return state.num_macs if state.num_macs >= 0 else len(state.members)


def on_event(state: RunProgress, event: FleetEvent, now: float) -> RunProgress:
    """A Mac joined or left."""
    known = any(member.host == event.host and member.state == "live" for member in state.members)
    others = tuple(member for member in state.members if member.host != event.host)
    num_macs = count(state)
    if event.event == "joined":
        joined = Member(event.host, event.sweep, cut(event.place, MAX_PLACE_BYTES), seen_at=int(now))
        # A Mac that asks for its first sweep has no weights yet: it is one that an anchor serves.
        state = replace(state, num_joins=state.num_joins + (event.sweep == 0))
        return _with(state, (*others, joined), num_macs + (not known), now)
    return _with(state, others, num_macs - known, now)


def on_found(state: RunProgress, hosts: tuple[str, ...], now: float) -> RunProgress:
    """Live Macs that the run did not know of."""
    known = {member.host for member in state.members}
    found = tuple(Member(host, seen_at=int(now)) for host in hosts if host not in known)
    return _with(state, (*state.members, *found), len(state.members) + len(found), now)


def on_census(state: RunProgress, taken: CensusTaken, now: float) -> RunProgress:
    """A page replaces what was known of its stretch of names, except what is newer than it."""
    census = taken.census
    here = {facts.host for facts in census.macs}

    def stays(member: Member) -> bool:
        if member.host in here:
            return False
        in_page = member.host > taken.after_host and (not census.next_host or member.host <= census.next_host)
        return not in_page or member.seen_at > taken.asked_at - JOIN_SECONDS

    kept = tuple(member for member in state.members if stays(member))
    after = _with(state, (*kept, *(_member(facts, now) for facts in census.macs)), census.num_macs, now)
    return replace(after, census_at=now, census_cursor=census.next_host)


def _member(facts: MacFacts, now: float) -> Member:
    return Member(
        facts.host,
        facts.sweep,
        cut(facts.place, MAX_PLACE_BYTES),
        facts.state,
        facts.version,
        facts.tokens_per_second,
        cut(facts.slow_because, MAX_WHY_BYTES),
        int(now),
    )


def _with(state: RunProgress, members: tuple[Member, ...], num_macs: int, now: float) -> RunProgress:
    num_macs = max(0, num_macs)
    kept = members[-MAX_MEMBERS:]
    here = {member.host for member in kept}
    gone = [member.host for member in state.members if member.host not in here]
    return replace(
        state,
        members=tuple(sorted(kept, key=lambda member: member.host)),
        left=tuple(host for host in dict.fromkeys((*state.left, *gone)) if host not in here)[-MAX_LEFT:],
        num_macs=num_macs,
        empty_since=now if count(state) and not num_macs else state.empty_since,
    )


def on_decision(state: RunProgress, decided: Decided) -> RunProgress:
    """A Mac is quarantined, drained, or free again; its session is to be told."""
    others = tuple(one for one in state.banned if one.host != decided.host)
    if decided.state != "free":
        banned = Banned(decided.host, decided.state, cut(decided.reason, MAX_REASON_BYTES), decided.on_trial)
        others = (*others, banned)[-MAX_BANNED:]
    if decided.on_trial:
        return replace(state, banned=others)
    untold = (*(host for host in state.untold if host != decided.host), decided.host)
    return replace(state, banned=others, untold=untold)


def on_suspect(state: RunProgress, host: str, reason: str, num_canaries: int) -> RunProgress:
    """The trainer suspects a Mac: it plays on for `num_canaries` clean sweeps without knowing it, or with 0 is told and stops."""
    return on_decision(state, Decided(host, "quarantined", f"by the trainer: {reason}", on_trial=num_canaries > 0))


def on_canaries(state: RunProgress, news: CanaryNews) -> RunProgress:
    """A trial has gone on, or ended: trusted again, or told and out. A person's decision since then stands."""
    trial = next((one for one in state.banned if one.host == news.host and one.on_trial), None)
    if trial is None:
        return state
    if news.verdict == "clean":
        return replace(state, banned=tuple(one for one in state.banned if one is not trial))
    if news.verdict == "failed":
        return on_decision(state, Decided(news.host, "quarantined", f"by the trainer: {news.reason}"))
    moved = replace(trial, num_clean=news.num_clean)
    return replace(state, banned=tuple(moved if one is trial else one for one in state.banned))


def stranger_reason(state: RunProgress, run: str, host: str) -> str:
    """Why `host` is taken for a slip of the pen: the run has not met it. Empty if it has, or if it cannot know them all."""
    known = sorted({*(member.host for member in state.members), *(one.host for one in state.banned), *state.left})
    if host in known or not state.fleet_known or count(state) > len(state.members):
        return ""
    if not known:
        return f"run {run} has met no Mac {host}, and no other yet"
    near = get_close_matches(host, known, n=1)
    meant = f", did you mean {near[0]}?" if near else ";"
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    return f"run {run} has met no Mac {host}{meant} it knows {', '.join(known[:MAX_NAMED])}{more}"


def standing_of(state: RunProgress, run: str, host: str) -> Standing:
    """How a Mac stands, as far as it may know."""
    banned = next((one for one in state.banned if one.host == host and not one.on_trial), None)
    return Standing(run, host, "free") if banned is None else Standing(run, host, banned.state, banned.reason)


def quarantined(state: RunProgress) -> tuple[str, ...]:
    """Hosts whose groups the trainer does not train on."""
    return tuple(one.host for one in state.banned if one.state == "quarantined")


def drained(state: RunProgress) -> tuple[str, ...]:
    """Hosts that were let go and stay out until they are released."""
    return tuple(one.host for one in state.banned if one.state == "drained")


def on_trial(state: RunProgress) -> tuple[str, ...]:
    """Of them, those that do not know it."""
    return tuple(one.host for one in state.banned if one.on_trial)


def page(state: RunProgress, rules: RunInput, query: FleetQuery) -> FleetPage:
    """One page of Macs, each with its session's id; those that may not play are among them, with the reason."""
    banned = {one.host: one for one in state.banned}
    rows = {member.host: _row(rules.run, member) for member in state.members}
    for host, one in banned.items():
        row = rows.get(host, FleetMember(host, names.session_workflow_id(rules.run, host)))
        seen = f"; {one.num_clean} of {rules.canary_sweeps} canary sweeps clean" if one.on_trial else ""
        rows[host] = replace(row, state=one.state, slow_because=one.reason + seen)
    rest = [rows[host] for host in sorted(rows) if host > query.after_host]
    shown = tuple(rest[: min(query.limit, MAX_PAGE)])
    more = shown[-1].host if shown and len(rest) > len(shown) else ""
    return FleetPage(shown, count(state), more, slowest(state))


def _row(run: str, member: Member) -> FleetMember:
    return FleetMember(
        member.host,
        names.session_workflow_id(run, member.host),
        member.sweep,
        member.state,
        member.version,
        member.tokens_per_second,
        member.place,
        member.slow_because,
    )


def slowest(state: RunProgress) -> str:
    """The slowest Mac that has played, how it compares, and why; "" with fewer than two to compare."""
    played = [member for member in state.members if member.state == "live" and member.tokens_per_second > 0]
    if len(played) < 2:
        return ""
    worst = min(played, key=lambda member: (member.tokens_per_second, member.host))
    # Of two there is no middle one.
    what, than = ("the other has", max) if len(played) == 2 else ("the median is", median)
    other = than(member.tokens_per_second for member in played)
    place = f" ({worst.place})" if worst.place else ""
    why = worst.slow_because or "its decoding is slow"
    return f"{worst.host}{place}: {worst.tokens_per_second:g} tokens/s, {what} {other:g}; {why}"
