"""Who may generate what: how many groups are out, how much room that leaves, and which questions come next.

Pure arithmetic over facts that the bucket holds (grants, arrived groups, step manifests); reading them and writing
grants is the caller's. Nothing is counted up and down here, so facts may be read anew at any time, in any order.

A group is out from its grant until it is trained on, dropped, refused, or lost. Room follows arXiv 2505.24298, eq. 3
(accepted + running <= (S + v + 1) * B) with the groups a version has used in place of v * B, so that versions which a
restart published without training do not count:

    outstanding + consumed since the newest version <= (S + 1) * B

A sweep is granted whole while there is any room, so the bound may be passed by less than one sweep. Trained on in the
order of its grant, a group is then at most S versions old; one that a slow Mac takes several versions to play is older,
which is what the hard bound is for.

Legend: S max_staleness, B groups_per_version.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache

from stoa.bucket.keys import GroupKey


@dataclass(frozen=True, slots=True)
class AdmissionRule:
    """The settings of a run that admission needs."""

    max_staleness: int
    max_staleness_hard: int
    groups_per_version: int
    lost_after_seconds: float
    """Age at which a grant's missing groups count as lost even if nobody said so."""
    max_ahead: int = 1
    """Sweeps a host may be granted beyond the one it plays."""


@dataclass(frozen=True, slots=True)
class GrantRecord:
    """One grant: the question of group i of the sweep is `question_ids[i]`. `granted_at` is Unix seconds."""

    host: str
    sweep: int
    position: int
    """Place of the first question in the endless order of questions."""
    question_ids: tuple[str, ...]
    granted_at: float
    min_version: int = 0


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
    """Groups on the way. waiting: arrived and not settled. running: granted, not arrived, not lost.

    of_host: host -> sweep -> running groups, 0 for sweeps that are over by what has arrived.
    """

    waiting: int
    running: int
    of_host: Mapping[str, Mapping[int, int]] = field(default_factory=dict, compare=False)

    @property
    def total(self) -> int:
        """Both."""
        return self.waiting + self.running

    def left(self, host: str) -> int:
        """Groups this host has still to play."""
        return sum(self.of_host.get(host, {}).values())

    def granted(self, grant: "GrantRecord") -> "Outstanding":
        """The same with one more grant."""
        more = len(grant.question_ids)
        of_host = {**self.of_host, grant.host: {**self.of_host.get(grant.host, {}), grant.sweep: more}}
        return Outstanding(self.waiting, self.running + more, of_host)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to one request. Without a grant, `reason` says what is waited for."""

    grant: GrantRecord | None
    is_new: bool
    room: int
    outstanding: Outstanding
    reason: str = ""


def outstanding(rule: AdmissionRule, facts: Facts, now: float) -> Outstanding:
    """Count the groups on the way at `now` (Unix seconds).

    A sweep is over when `ended_before` says so or when its host has been granted more than `max_ahead` sweeps after it.
    Arrived groups beyond the hard bound can no longer be trained on and do not count. A
    group that arrives after it was given up counts again.
    """
    oldest = facts.version - rule.max_staleness_hard
    waiting = sum(key.version >= oldest for key in facts.arrived if key not in facts.settled)
    over = _over_before(facts, rule.max_ahead)
    open_grants = [
        grant
        for grant in facts.grants
        if grant.sweep >= over.get(grant.host, 0) and grant.host not in facts.away and now - grant.granted_at <= rule.lost_after_seconds
    ]
    open_sweeps = {(grant.host, grant.sweep) for grant in open_grants}
    here = {
        (key.host, key.sweep, key.group)
        for known in (facts.arrived, facts.settled)
        for key in known
        if (key.host, key.sweep) in open_sweeps
    }
    of_host: dict[str, dict[int, int]] = {}
    for grant in open_grants:
        missing = sum((grant.host, grant.sweep, index) not in here for index in range(len(grant.question_ids)))
        of_host.setdefault(grant.host, {})[grant.sweep] = missing
    return Outstanding(waiting, sum(sum(sweeps.values()) for sweeps in of_host.values()), of_host)


def room(rule: AdmissionRule, facts: Facts, now: float) -> int:
    """Groups that may still be granted; below 1 means wait."""
    return _room(rule, facts, outstanding(rule, facts, now))


def decide(
    rule: AdmissionRule,
    facts: Facts,
    order: "QuestionOrder",
    *,
    host: str,
    sweep: int,
    num_groups: int,
    now: float,
    num_kept: int = 0,
    on_the_way: Outstanding | None = None,
) -> Decision:
    """The grant of (host, sweep): the one it has, else a new one of `num_groups` questions if there is room.

    num_kept: groups of room that are kept for others: a Mac that asks ahead must not take what an idle one could play.
    on_the_way: `outstanding` of these facts where the caller has it: counting looks at every group of the window.

    The caller writes a new grant create-only and asks again if another grant took its place.
    """
    on_the_way = on_the_way or outstanding(rule, facts, now)
    num_free = _room(rule, facts, on_the_way)
    for grant in facts.grants:
        if (grant.host, grant.sweep) == (host, sweep):
            return Decision(grant, False, num_free, on_the_way)
    if num_free - num_kept < 1:
        limit = (rule.max_staleness + 1) * rule.groups_per_version
        reason = (
            f"version {facts.version}: {on_the_way.waiting} groups wait for the trainer, {on_the_way.running} are being"
            f" played, {facts.num_consumed} were used; {limit} is the most"
        )
        if num_free > 0:
            reason = f"version {facts.version}: the room for {num_free} groups is kept for Macs that have less to play"
        return Decision(None, False, num_free, on_the_way, reason)
    position = next_position(facts.grants)
    min_version = max(0, facts.version - rule.max_staleness)
    grant = GrantRecord(host, sweep, position, order.take(position, num_groups), now, min_version)
    return Decision(grant, True, num_free, on_the_way)


def next_position(grants: Iterable[GrantRecord]) -> int:
    """Place after the last question granted."""
    return max((grant.position + len(grant.question_ids) for grant in grants), default=0)


class QuestionOrder:
    """The endless order of a run's questions: one permutation of all of them a pass, then another.

    A pass is ordered by blake2b-128 of "seed:pass:question id", so it is the same on every machine and with every
    library, and does not change when a position is computed again.
    """

    def __init__(self, question_ids: Sequence[str], seed: int) -> None:
        """Raises ValueError without questions, or if one is there twice."""
        if not question_ids or len(set(question_ids)) != len(question_ids):
            raise ValueError(f"an order needs questions, each once; got {len(question_ids)}, {len(set(question_ids))} different")
        self._question_ids = tuple(question_ids)
        self._seed = seed
        self._pass = lru_cache(maxsize=2)(self._permutation)

    def take(self, position: int, num: int) -> tuple[str, ...]:
        """The questions at places position ... position + num - 1."""
        size = len(self._question_ids)
        return tuple(self._pass(place // size)[place % size] for place in range(position, position + num))

    def _permutation(self, number: int) -> tuple[str, ...]:
        def rank(question_id: str) -> bytes:
            return hashlib.blake2b(f"{self._seed}:{number}:{question_id}".encode(), digest_size=16).digest()

        return tuple(sorted(self._question_ids, key=lambda question_id: (rank(question_id), question_id)))


def _room(rule: AdmissionRule, facts: Facts, on_the_way: Outstanding) -> int:
    return (rule.max_staleness + 1) * rule.groups_per_version - facts.num_consumed - on_the_way.total


def _over_before(facts: Facts, max_ahead: int) -> dict[str, int]:
    """For each host the lowest sweep that may still be running."""
    over = dict(facts.ended_before)
    for grant in facts.grants:
        over[grant.host] = max(over.get(grant.host, 0), grant.sweep - max_ahead)
    return over
