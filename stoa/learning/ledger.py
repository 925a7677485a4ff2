"""Who may generate what: how many groups are out, how much room that leaves, and which questions come next.

Arithmetic over facts that the bucket holds (grants, arrived groups, step manifests); reading them and writing grants is
the caller's. Facts may be told in any order and again: each counts once. Telling one costs the same however many
were told before, and asking costs nothing to speak of, so that ten thousand Macs may ask all the time.

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
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache

from stoa.bucket.keys import GroupKey

CREDIT = 4
"""Groups a host may hold for each that it has brought."""


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
    untried_groups: int = 8
    """Groups that a host which has brought nothing may hold."""


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
class Decision:
    """The answer to one request. Without a grant, `reason` says what is waited for."""

    grant: GrantRecord | None
    is_new: bool
    room: int
    reason: str = ""


@dataclass(slots=True)
class _Sweep:
    """A sweep that was granted. missing: groups that have not come. lost: nothing more is expected of it."""

    grant: GrantRecord
    missing: set[int]
    lost: bool = False


@dataclass(slots=True)
class _Host:
    """One Mac. over_before: sweeps with a lower number are over. left: groups that it has still to play."""

    sweeps: dict[int, _Sweep] = field(default_factory=dict)
    newest: int = -1
    over_before: int = 0
    left: int = 0
    brought: int = 0
    """Groups that have come since this host last let a grant grow too old."""
    away: bool = False


class Ledger:
    """The groups on the way of one run, kept up to date by what it is told. One thread at a time.

    A sweep is over when `end` says so or when its host has been granted more than `max_ahead` sweeps after it: what has
    not come of it is lost, as is what a Mac owes that is gone. Arrived groups beyond the hard bound can no longer be trained
    on and do not count. A group that arrives after it was given up counts again.
    """

    def __init__(self, rule: AdmissionRule) -> None:
        self._rule = rule
        self._hosts: defaultdict[str, _Host] = defaultdict(_Host)
        self._version = 0
        self._num_consumed = 0
        self._arrived: defaultdict[int, set[GroupKey]] = defaultdict(set)
        self._settled: defaultdict[int, set[GroupKey]] = defaultdict(set)
        self._waiting: defaultdict[int, int] = defaultdict(int)
        self._here: defaultdict[tuple[str, int], set[GroupKey]] = defaultdict(set)
        """Groups of a sweep that have arrived or are settled, of the versions that can be trained on."""
        self._running = 0
        self._num_present = 0
        self._next_position = 0
        self._by_age: list[tuple[float, str, int]] = []

    @property
    def waiting(self) -> int:
        """Groups that arrived and are not settled."""
        return sum(self._waiting.values())

    @property
    def running(self) -> int:
        """Groups granted, not arrived and not lost."""
        return self._running

    @property
    def room(self) -> int:
        """Groups that may still be granted; below 1 means wait."""
        rule = self._rule
        return (rule.max_staleness + 1) * rule.groups_per_version - self._num_consumed - self.waiting - self._running

    @property
    def next_position(self) -> int:
        """Place after the last question granted."""
        return self._next_position

    @property
    def num_present(self) -> int:
        """Hosts that were granted something and are not gone."""
        return self._num_present

    def newest_sweep(self, host: str) -> int:
        """The highest sweep this host was granted; -1 without any."""
        return self._hosts[host].newest if host in self._hosts else -1

    def left(self, host: str) -> int:
        """Groups this host has still to play."""
        known = self._hosts.get(host)
        return known.left if known is not None and not known.away else 0

    def left_from(self, host: str, sweep: int) -> int:
        """Of those, groups of `sweep` and later ones."""
        known = self._hosts.get(host)
        if known is None or known.away:
            return 0
        return sum(len(one.missing) for number, one in known.sweeps.items() if number >= sweep and _counts(known, number))

    def num_unfinished_before(self, host: str, sweep: int) -> int:
        """Sweeps of this host below `sweep` of which groups are still to come."""
        known = self._hosts.get(host)
        if known is None or known.away:
            return 0
        return sum(number < sweep and _counts(known, number) and bool(one.missing) for number, one in known.sweeps.items())

    def arrived_of(self, host: str, sweep: int) -> frozenset[int]:
        """Numbers of a sweep's groups that were told to have arrived, at versions that can be trained on."""
        return frozenset(key.group for key in self._here.get((host, sweep), ()) if key in self._arrived.get(key.version, ()))

    def is_away(self, host: str) -> bool:
        """True for a host that was said to have left."""
        return host in self._hosts and self._hosts[host].away

    def see(self, version: int, num_consumed: int) -> None:
        """The newest published version, and groups trained on by steps whose manifest names it: their room comes with the next."""
        self._version, self._num_consumed = version, num_consumed
        oldest = version - self._rule.max_staleness_hard
        for old in [number for number in {*self._arrived, *self._settled} if number < oldest]:
            for key in self._arrived.pop(old, set()) | self._settled.pop(old, set()):
                self._forget(key)
            self._waiting.pop(old, None)

    def grant(self, grant: GrantRecord) -> None:
        """A grant that was given. Sweeps of its host that can no longer be open are forgotten."""
        host = self._hosts[grant.host]
        if grant.sweep in host.sweeps:
            return
        if not host.sweeps and not host.away:
            self._num_present += 1
        here = {key.group for key in self._here.get((grant.host, grant.sweep), ())}
        host.sweeps[grant.sweep] = _Sweep(grant, set(range(len(grant.question_ids))) - here)
        host.newest = max(host.newest, grant.sweep)
        self._next_position = max(self._next_position, grant.position + len(grant.question_ids))
        heapq.heappush(self._by_age, (grant.granted_at, grant.host, grant.sweep))
        if _counts(host, grant.sweep):
            self._owe(host, len(host.sweeps[grant.sweep].missing))
        self.end(grant.host, host.newest - self._rule.max_ahead)
        for old in [number for number in host.sweeps if number < host.newest - self._rule.max_ahead]:
            del host.sweeps[old]

    def arrive(self, key: GroupKey) -> None:
        """A group is in the bucket."""
        self._take_off(key)
        if self._is_too_old(key) or key in self._arrived[key.version]:
            return
        self._arrived[key.version].add(key)
        self._hosts[key.host].brought += 1
        self._here[key.host, key.sweep].add(key)
        self._waiting[key.version] += key not in self._settled[key.version]

    def settle(self, key: GroupKey) -> None:
        """A group was consumed, dropped or refused, by the lineage of HEAD or a drop note."""
        self._take_off(key)
        if self._is_too_old(key) or key in self._settled[key.version]:
            return
        self._settled[key.version].add(key)
        self._here[key.host, key.sweep].add(key)
        self._waiting[key.version] -= key in self._arrived[key.version]

    def settle_only(self, settled: AbstractSet[GroupKey]) -> None:
        """Of all groups these are settled, and no others: a new lease may have given steps back."""
        self._settled.clear()
        self._here.clear()
        for version, arrived in self._arrived.items():
            self._waiting[version] = len(arrived)
            for key in arrived:
                self._here[key.host, key.sweep].add(key)
        for key in settled:
            self.settle(key)

    def end(self, host: str, before: int) -> None:
        """Sweeps of this host with a lower number than `before` are over: what they still owe is lost."""
        known = self._hosts[host]
        if before <= known.over_before:
            return
        for number, sweep in known.sweeps.items():
            if number < before and _counts(known, number):
                self._owe(known, -len(sweep.missing))
        known.over_before = before

    def leave(self, host: str) -> None:
        """This host is gone: what it owes is lost until it is back."""
        known = self._hosts[host]
        if not known.away:
            known.away = True
            self._running -= known.left
            self._num_present -= bool(known.sweeps)

    def come_back(self, host: str) -> None:
        """This host asks for something."""
        known = self._hosts[host]
        if known.away:
            known.away = False
            self._running += known.left
            self._num_present += bool(known.sweeps)

    def pass_time(self, now: float) -> None:
        """It is `now` (Unix seconds): grants beyond their age are given up."""
        while self._by_age and now - self._by_age[0][0] > self._rule.lost_after_seconds:
            _, name, number = heapq.heappop(self._by_age)
            host = self._hosts[name]
            sweep = host.sweeps.get(number)
            if sweep is not None and not sweep.lost:
                if _counts(host, number):
                    self._owe(host, -len(sweep.missing))
                    host.brought = 0 if sweep.missing and not host.away else host.brought
                sweep.lost = True

    def decide(
        self, order: "QuestionOrder", *, host: str, sweep: int, num_groups: int, now: float, kept: Callable[[], int] = lambda: 0
    ) -> Decision:
        """The grant of (host, sweep): the one it has, else a new one of `num_groups` questions if there is room.

        A host holds a sweep of `untried_groups` until it brings something, then CREDIT groups for each that has come: who
        asks and never plays holds no more room than that, and a Mac that plays is never short of it.

        kept: groups of room that are kept for others, asked for only where there is room: a Mac that asks ahead must not take
        what an idle one could play. The caller writes a new grant create-only, and tells the one that stands.
        """
        room = self.room
        known = self._hosts[host].sweeps.get(sweep) if host in self._hosts else None
        if known is not None:
            return Decision(known.grant, False, room)
        if room < 1:
            limit = (self._rule.max_staleness + 1) * self._rule.groups_per_version
            reason = (
                f"version {self._version}: {self.waiting} groups wait for the trainer, {self._running} are being"
                f" played, {self._num_consumed} were used; {limit} is the most"
            )
            return Decision(None, False, room, reason)
        if room - kept() < 1:
            reason = f"version {self._version}: the room for {room} groups is kept for Macs that have less to play or wait longer"
            return Decision(None, False, room, reason)
        held = self.left(host)
        most = max(self._rule.untried_groups, CREDIT * (self._hosts[host].brought if host in self._hosts else 0))
        if held and held + num_groups > most:
            reason = f"version {self._version}: this Mac has {held} groups to play, more once it has brought some of them"
            return Decision(None, False, room, reason)
        num_groups = min(num_groups, most)
        position = self._next_position
        min_version = max(0, self._version - self._rule.max_staleness)
        return Decision(GrantRecord(host, sweep, position, order.take(position, num_groups), now, min_version), True, room)

    def _is_too_old(self, key: GroupKey) -> bool:
        return key.version < self._version - self._rule.max_staleness_hard

    def _take_off(self, key: GroupKey) -> None:
        """A group is no longer to come."""
        host = self._hosts.get(key.host)
        sweep = host.sweeps.get(key.sweep) if host is not None else None
        if host is None or sweep is None or key.group not in sweep.missing:
            return
        sweep.missing.discard(key.group)
        if _counts(host, key.sweep):
            self._owe(host, -1)

    def _owe(self, host: _Host, more: int) -> None:
        host.left += more
        if not host.away:
            self._running += more

    def _forget(self, key: GroupKey) -> None:
        here = self._here.get((key.host, key.sweep))
        if here is not None:
            here.discard(key)
            if not here:
                del self._here[key.host, key.sweep]


def _counts(host: _Host, sweep: int) -> bool:
    """True if something is still expected of a sweep."""
    return sweep >= host.over_before and not host.sweeps[sweep].lost


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
