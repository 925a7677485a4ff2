"""The Macs of a run as they are now: whom the run lists and whose sessions are open, each by what its session says of itself.

One answer for every command, so that none shows a Mac that another does not. What the run itself lists is as old as its
last census; who plays since then is asked directly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from cli.report.record import Held, RunRecord
from cli.temporal import CONTROL_SILENT
from stoa.contracts.errors import RunMissingError, ServiceError
from stoa.contracts.fleet_messages import FleetMember, FleetPage, SessionStatus
from stoa.contracts.sealed import host_of, is_invite

_BARRED: Final = ("quarantined", "drained")
SPEED: Final = "tokens/s: sampled in a Mac's newest sweep, over all of its time, pulls and waits too"
"""What is meant wherever one number of a Mac's tokens a second stands."""


class Fleet(Protocol):
    """Who can tell: `cli.temporal.Control`."""

    def fleet_view(self, run: str) -> FleetPage:
        """All members that the run lists."""
        ...

    def present(self, run: str) -> tuple[str, ...]:
        """Hosts whose sessions are open."""
        ...

    def sessions(self, run: str, hosts: tuple[str, ...]) -> tuple[SessionStatus, ...]:
        """What these hosts' sessions say; those that do not answer are left out."""
        ...


@dataclass(frozen=True, slots=True)
class Macs:
    """`sessions` by host. num_macs: all that can play, also those the run does not list; slowest: in a sentence, or ""."""

    sessions: tuple[SessionStatus, ...]
    num_macs: int
    slowest: str

    @property
    def num_unlisted(self) -> int:
        """Macs that play and are in no row."""
        return max(0, self.num_macs - sum(one.state == "live" for one in self.sessions))


def macs_of(control: Fleet, run: str, known: Mapping[str, SessionStatus] | None = None) -> Macs:
    """The Macs of a run; of one whose session does not answer what was `known` of it, by host. Raises what `control` raises."""
    known = known or {}
    page = control.fleet_view(run)
    listed = {member.host: member for member in page.members}
    hosts = tuple(dict.fromkeys((*known, *listed, *control.present(run))))
    told = {**known, **{said.host: said for said in control.sessions(run, hosts)}}
    rows = {host: _row(listed.get(host), told.get(host)) for host in hosts if host in listed or host in told}
    sessions = tuple(rows[host] for host in sorted(rows))
    num_live = sum(one.state == "live" for one in sessions)
    # Only a run that counts more Macs than it lists knows better than the rows how many there are.
    return Macs(sessions, max(num_live, page.num_macs) if page.num_macs > len(page.members) else num_live, page.slowest)


def macs_or_left(control: Fleet, run: str, collect: Callable[[], RunRecord]) -> tuple[Macs, str]:
    """The Macs of a run, and "". Of one for which nobody answers: what is known of them, and in a sentence why it is not more.

    Raises ServiceError while Temporal itself is away, unless the run has ended.
    """
    try:
        return macs_of(control, run), ""
    except (ServiceError, RunMissingError) as problem:
        record = collect()
        if record.state in ("stopped", "failed"):
            return Macs(record.sessions, 0, ""), f"run {run} is {record.state}: this is what its Macs said last"
        if isinstance(problem, ServiceError) and CONTROL_SILENT not in problem.message:
            raise
        known = {one.host: one for one in record.sessions}
        here = {host: known.get(host, SessionStatus(host, "live", 0, -1)) for host in control.present(run)}
        rows = known | {host: replace(one, state="live", reason="its session does not answer") for host, one in here.items()}
        return Macs(tuple(rows[host] for host in sorted(rows)), len(here), ""), f"run {run} is {record.state}: {record.waiting_for}"


def held_by(state: str, head_state: str) -> Held:
    """What a run that is in `state`, whose HEAD tells Macs `head_state` ("" before there is one), has its Macs do."""
    if state != "paused":
        return ""
    return "ahead" if head_state == "running" else "waits"


def doing(mac: SessionStatus, held: Held) -> tuple[str, str]:
    """The state of a Mac in a word, and why it is so: a pause of the run is no state of a session's own."""
    if mac.state != "live" or not held:
        return mac.state, mac.reason
    if held == "ahead":
        return "ahead", mac.reason or "plays on while the trainer is paused"
    return "waits", mac.reason or "the run is paused"


def with_revoked(macs: Macs, revoked: Mapping[str, str]) -> Macs:
    """`macs`, and as refused those that were revoked: by their name, or by an invitation (then only one that plays no more).

    revoked: hosts and ids of invitations -> why, in a sentence.
    """
    rows = {one.host: one for one in macs.sessions}
    for what, why in revoked.items():
        host = host_of(what) if is_invite(what) else what
        row = rows.get(host, SessionStatus(host, "refused", 0, -1))
        if host == what or row.state not in ("live", "resting", *_BARRED):
            rows[host] = replace(row, state="refused", reason=why)
    sessions = tuple(rows[host] for host in sorted(rows))
    return replace(macs, sessions=sessions)


def _row(member: FleetMember | None, said: SessionStatus | None) -> SessionStatus:
    """What a session says, under what the run has decided; without one that answers, what the run knows."""
    if member is None or (said is not None and member.state not in _BARRED):
        if said is None:
            raise ValueError("nobody tells of this host")
        return said
    if said is not None:
        return replace(said, state=member.state, reason=member.slow_because or said.reason)
    barred = member.state in _BARRED
    return SessionStatus(
        member.host,
        member.state,
        member.sweep,
        member.version,
        reason=member.slow_because if barred else "",
        place=member.place,
        tokens_per_second=member.tokens_per_second,
        slow_because="" if barred else member.slow_because,
    )
