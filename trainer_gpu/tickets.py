"""What an invited Mac gets beside its questions: tickets for the objects it will write, or a reason why it gets nothing.

Part of the control process. A group's key names the version it is played at, which is known only when it is played; so
a grant holds tickets for the versions it may come to. A Mac that has a finished object and no good ticket for it says so
with its next request. No torch here.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

import structlog

from stoa.bucket import keys
from stoa.bucket.keys import GroupKey
from stoa.bucket.revocations import Revoked
from stoa.bucket.tickets import MAX_KEYS, MAX_SIGNATURES, Mint, Slots
from stoa.contracts.errors import FormatError
from stoa.contracts.fleet_messages import Grant, GrantRequest
from stoa.contracts.sealed import host_of, is_invite
from stoa.rollouts.shard import MAX_GROUP_BYTES

MIN_VERSIONS: Final = 4
MAX_VERSIONS: Final = 12
"""Versions one grant has tickets for, beginning with the newest at the time of the grant."""
_MAX_PARTS: Final = 4096

log = structlog.get_logger()


class TicketCounter:
    """Hands out tickets for one run. One thread at a time."""

    def __init__(self, run: str, mint: Mint, revoked: Revoked, is_granted: Callable[[GroupKey], bool], *, max_staleness_hard: int) -> None:
        """`is_granted`: whether a group's slot was ever granted."""
        self._run, self._mint, self._revoked, self._is_granted = run, mint, revoked, is_granted
        self._max_staleness_hard = max_staleness_hard
        self._version_at: dict[str, int] = {}
        self._parts: dict[str, None] = {}
        self._flooding: dict[str, str] = {}

    def refusal(self, request: GrantRequest) -> str | None:
        """Why this Mac gets nothing at all; None if it may."""
        if request.invite and (not is_invite(request.invite) or host_of(request.invite) != request.host):
            return f"{request.host} says hello with an invitation of another host"
        return self._flooding.get(request.host) or self._revoked.reason(request.host, request.invite)

    def note_size(self, key: GroupKey, num_bytes: int) -> None:
        """Look at a group's size as listed: a ticket cannot bound it, so a host that sends more than any group has gets no more."""
        if num_bytes > MAX_GROUP_BYTES and key.host not in self._flooding:
            self._flooding[key.host] = f"{key.host} sent an object of {num_bytes} bytes, where {MAX_GROUP_BYTES} is the most"
            log.warning("host_flooding", host=key.host, bytes=num_bytes)

    def part_ticket(self, request: GrantRequest) -> Grant:
        """Tickets for a part of an evaluation, and for what the Mac has not sent yet."""
        key = keys.eval_part(self._run, request.version, request.evaluation, request.part, request.host)
        self._parts[key] = None
        if len(self._parts) > _MAX_PARTS:
            del self._parts[next(iter(self._parts))]
        whole = [key, *(one for one in self._may_send(request, request.version) if one != key)]
        tickets = self._mint.make(request.invite, request.host, whole=whole[:MAX_KEYS]) if request.invite else ""
        return Grant(self._run, request.host, request.sweep, (), tickets=tickets)

    def with_tickets(self, request: GrantRequest, grant: Grant, version: int, arrived: Collection[int]) -> Grant:
        """`grant` with what its Mac needs to ship it, and with the numbers of its groups that have arrived. `version`: HEAD's."""
        grant = replace(grant, shipped=tuple(sorted(arrived)))
        whole = self._may_send(request, version)
        if not request.invite or not (grant.question_ids or whole):
            return grant
        slots = [self._slots(request, grant, version, MAX_SIGNATURES - len(whole))] if grant.question_ids else []
        return replace(grant, tickets=self._mint.make(request.invite, request.host, slots, whole))

    def _slots(self, request: GrantRequest, grant: Grant, version: int, num_signatures: int) -> Slots:
        """Versions a sweep may come to be played at: the faster they come and the further ahead it is granted, the more."""
        pace = version - self._version_at.get(grant.host, version)
        self._version_at[grant.host] = version
        num_ahead = max(0, grant.sweep - request.ended_before)
        wanted = min(max(MIN_VERSIONS, (2 + num_ahead) * pace + 2), MAX_VERSIONS)
        num_groups = len(grant.question_ids)
        return Slots(grant.sweep, version, max(1, min(wanted, num_signatures // num_groups)), num_groups)

    def _may_send(self, request: GrantRequest, version: int) -> list[str]:
        """Of the keys a Mac says it has no ticket for, those it may write: its own granted groups, and parts it was dealt."""
        return [key for key in dict.fromkeys(request.unsent[:MAX_KEYS]) if key in self._parts or self._is_own_group(key, request, version)]

    def _is_own_group(self, key: str, request: GrantRequest, version: int) -> bool:
        try:
            slot = keys.parse_group(key)
        except FormatError:
            return False
        fits = version - self._max_staleness_hard <= slot.version <= version
        return fits and (slot.run, slot.host) == (self._run, request.host) and self._is_granted(slot)
