"""What is on the way by the words of the rule, counted anew over all facts: slow and plain, for holding the ledger against it."""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from stoa.bucket.keys import GroupKey
from stoa.learning.ledger import AdmissionRule, GrantRecord, Ledger


@dataclass(frozen=True, slots=True)
class Facts:
    """The run as the bucket and the sessions show it."""

    version: int
    """Newest published version."""
    num_consumed: int
    """Groups trained on by steps whose manifest names this version: their room comes back with the next version."""
    grants: Collection[GrantRecord]
    """All grants ever given, or at least every open one and the newest."""
    arrived: Set[GroupKey]
    settled: Set[GroupKey]
    """Consumed, dropped or refused, by the lineage of HEAD or a drop note."""
    ended_before: Mapping[str, int] = field(default_factory=dict)
    """Host -> sweeps with a lower number are over: what they still owe is lost."""
    away: Set[str] = frozenset()
    """Hosts that are gone: what they owe is lost until they ask again."""


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Groups on the way. waiting: arrived and not settled. running: granted, not arrived, not lost; `left` is that by host."""

    waiting: int
    running: int
    left: Mapping[str, int]

    @property
    def total(self) -> int:
        return self.waiting + self.running


def count(rule: AdmissionRule, facts: Facts, now: float) -> Outstanding:
    """At `now`, Unix seconds."""
    oldest = facts.version - rule.max_staleness_hard
    waiting = sum(key.version >= oldest for key in facts.arrived if key not in facts.settled)
    over = dict(facts.ended_before)
    for grant in facts.grants:
        over[grant.host] = max(over.get(grant.host, 0), grant.sweep - rule.max_ahead)
    here = {(key.host, key.sweep, key.group) for key in facts.arrived | facts.settled}
    left: dict[str, int] = {}
    for grant in facts.grants:
        is_open = grant.sweep >= over.get(grant.host, 0) and grant.host not in facts.away
        if is_open and now - grant.granted_at <= rule.lost_after_seconds:
            missing = sum((grant.host, grant.sweep, index) not in here for index in range(len(grant.question_ids)))
            left[grant.host] = left.get(grant.host, 0) + missing
    return Outstanding(waiting, sum(left.values()), left)


def tell(ledger: Ledger, facts: Facts, now: float) -> None:
    """Tell the ledger of all facts, whether it knows them or not."""
    ledger.see(facts.version, facts.num_consumed)
    for grant in facts.grants:
        ledger.grant(grant)
    for key in facts.arrived:
        ledger.arrive(key)
    for key in facts.settled:
        ledger.settle(key)
    for host, before in facts.ended_before.items():
        ledger.end(host, before)
    for host in facts.away:
        ledger.leave(host)
    ledger.pass_time(now)


def ledger_of(rule: AdmissionRule, facts: Facts, now: float) -> Ledger:
    """A ledger that was told these facts; what it counts is what the rule's words count."""
    ledger = Ledger(rule)
    tell(ledger, facts, now)
    found = count(rule, facts, now)
    assert (ledger.waiting, ledger.running) == (found.waiting, found.running)
    return ledger
