"""Groups from the bucket to the optimizer: a thread lists, downloads and admits them while the trainer does other things.

What makes a group honest is `stoa.rollouts.admit`'s, and which ones a step trains on is `stoa.learning.replay`'s. The
thread only fills; the engine's thread takes, settles or puts back. One Intake serves one lease.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from stoa.bucket import keys
from stoa.bucket.steps import Dropped, HostCounts, Refused
from stoa.bucket.store import Store
from stoa.config.run import Learning
from stoa.contracts.errors import (
    BucketError,
    GroupRefusedError,
    InfrastructureFaultError,
    ObjectTooLargeError,
    ServiceUnavailableError,
    StoaError,
)
from stoa.contracts.ports import Progress
from stoa.learning.replay import ReplayBuffer
from stoa.learning.staleness import is_stale
from stoa.rollouts.admit import DuplicateIndex, Reason, Rules, admit
from stoa.rollouts.inbox import Arrival, Inbox
from stoa.rollouts.records import Group
from trainer_gpu.referee import Referee
from trainer_gpu.versions import KnownVersions

NUM_DOWNLOADS = 4
MAX_FETCHED_BYTES = 256 * 1024 * 1024
"""Objects that are fetched ahead of their admission take no more memory together, however many have arrived."""
NOTE_AFTER_SECONDS = 1.0
"""A wait this long tells the admission ledger of dropped groups before the step's manifest can."""
MAX_CANARIES = 32
"""Groups of hosts on trial that wait to be compared: each costs a forward pass."""
MAX_NAMED = 1024
"""Most groups that one step manifest, or one note, names as refused, and as many as dropped: the next ones name the others.

Whoever can write to the bucket can fill it with nonsense, and a manifest that nobody can read would end the run.
"""
MAX_HOSTS = 1024
"""Most hosts that one step manifest counts by name; anybody may invent names."""
LATE_VERSIONS = 2
"""Versions below the staleness bound in which groups are still looked for, to be dropped with a reason."""
NO_SIGNAL_SECONDS = 10.0
"""A step that has looked at `max_refills` times the groups it needs still waits this long: usable ones may be on their way."""
_WAIT_SECONDS = 0.25

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups of one step, and what else its manifest must say."""

    groups: tuple[Group, ...]
    keys: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    refused: tuple[Refused, ...]
    hosts: dict[str, HostCounts]
    wait_seconds: float
    metrics: dict[str, float]
    """What the queue says of itself: `queue_seconds_mean`, `quarantined_share`, and tokens of the stale groups that were read."""


@dataclass(frozen=True, slots=True)
class Starved:
    """No step can be made now, for `reason`; `stopping` if that is because we were asked to end."""

    reason: str
    wait_seconds: float
    stopping: bool = False
    num_missing: int = 0
    """Usable groups that the step still lacks."""
    oldest_version: int = -1
    """Groups of older versions are of no use to it."""
    equal_rewards: Mapping[str, int] = field(default_factory=dict)
    """Groups that came since the last step and teach nothing: all_zero, all_one or all_equal -> how many."""


@dataclass(slots=True)
class _Tally:
    """What one host sent since the last step. Times are of its newest group."""

    num_accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    num_sampled_tokens: int = 0
    num_episodes: int = 0
    num_missing: int = 0
    newest: Group | None = None

    def add(self, later: "_Tally") -> None:
        """Take what came later into account too."""
        self.num_accepted += later.num_accepted
        self.refused += later.refused
        self.num_sampled_tokens += later.num_sampled_tokens
        self.num_episodes += later.num_episodes
        self.num_missing += later.num_missing
        self.newest = later.newest or self.newest

    def counts(self, *, quarantined: bool) -> HostCounts:
        if self.newest is None:
            return HostCounts(refused=dict(self.refused), quarantined=quarantined)
        timings = self.newest.timings
        return HostCounts(
            accepted=self.num_accepted,
            refused=dict(self.refused),
            quarantined=quarantined,
            num_sampled_tokens=self.num_sampled_tokens,
            decode_seconds=timings.decode_seconds,
            pull_latency_seconds=timings.pull_latency_seconds,
            idle_seconds=timings.idle_seconds,
            num_missing_episodes=self.num_missing,
            batch_occupancy=timings.batch_occupancy,
            prefix_hit_share=timings.prefix_hit_share,
            peak_memory_bytes=timings.peak_memory_bytes,
        )


class Intake:
    """Fills itself between `start` and `close`; `take`, `settle` and `put_back` are for the engine's thread."""

    def __init__(
        self,
        store: Store,
        rules: Rules,
        referee: Referee,
        versions: KnownVersions,
        learning: Learning,
        *,
        settled: Iterable[str],
        note: Callable[[Sequence[Dropped]], None],
    ) -> None:
        """`settled`: keys that earlier steps consumed, dropped or refused, of all versions that are looked at.

        `note` tells the ledger of drops early.
        """
        settled = tuple(settled)
        self._store = store
        self._rules = rules
        self._referee = referee
        self._versions = versions
        self._learning = learning
        self._note = note
        self._inbox = Inbox(store, rules.run, settled)
        self._seen = DuplicateIndex()
        for key in settled:
            self._seen.remember_key(key)
        self._buffer = ReplayBuffer(
            num_wanted=learning.groups_per_step,
            max_looked=int(learning.groups_per_step * learning.max_refills),
            max_staleness_hard=learning.max_staleness_hard,
            max_told=MAX_NAMED,
            settled=settled,
        )
        self._refused: list[Refused] = []
        self._tallies: dict[str, _Tally] = {}
        self._num_told = 0
        """Of the refused, those that the step in progress tells of; what comes meanwhile is the next one's."""
        self._told: dict[str, _Tally] = {}
        """Tallies the same."""
        self._counted_from = self._told_at = time.monotonic()
        """When the tallies began, and when those that are told of ended."""
        self._noted: set[str] = set()
        self._quarantined: frozenset[str] = frozenset()
        self._on_trial: frozenset[str] = frozenset()
        self._canaries: deque[tuple[str, Group]] = deque(maxlen=MAX_CANARIES)
        self._away = False
        self._known_hosts: set[str] = set()
        self._offered_at: dict[str, float] = {}
        self._read_twice: set[str] = set()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._filling: Future[None] | None = None

    def start(self) -> None:
        """Begin to look for groups."""
        self._filling = self._thread.submit(self._fill)

    def close(self) -> None:
        """Stop looking. The thread ends by itself, at the latest after the request it is in."""
        self._closing.set()
        self._thread.shutdown(wait=False)

    def quarantine(self, hosts: Collection[str], on_trial: Collection[str] = ()) -> None:
        """Take nothing of these hosts from here on, also of what has come; of all others again.

        on_trial: of them, those whose groups are judged all the same and kept apart; see `canaries`.
        """
        with self._changed:
            self._quarantined, self._on_trial = frozenset(hosts), frozenset(on_trial)
            self._buffer.drop_hosts(self._quarantined)

    def canaries(self) -> list[tuple[str, Group]]:
        """Keys and groups of hosts on trial that were admitted since this was last asked, the newest few; none is trained on."""
        with self._changed:
            found = [(key, group) for key, group in self._canaries if group.host in self._on_trial]
            self._canaries.clear()
        return found

    @property
    def refused(self) -> tuple[Refused, ...]:
        """Groups refused of which no step has told."""
        with self._changed:
            return tuple(self._refused)

    def take(self, version: int, progress: Progress, wait_seconds: float = 0.0) -> Taken | Starved:
        """Groups for one step with `version` newest; waits for them at most `wait_seconds`, reporting progress.

        Without `wait_seconds` that is the run's `starved_seconds`.

        Raises what the thread failed with, if it did.
        """
        started = time.monotonic()
        longest = min(wait_seconds or self._learning.starved_seconds, self._learning.starved_seconds)
        no_signal = False
        while True:
            if self._filling is not None and self._filling.done():
                self._filling.result()
            with self._changed:
                choice, groups = self._buffer.take(version)
                waited = time.monotonic() - started
                if choice.status == "ready":
                    return self._taken(groups, choice.taken, waited)
                num_waiting = self._buffer.num_waiting
                no_signal = no_signal or choice.status == "no_signal"
                if no_signal and waited > min(NO_SIGNAL_SECONDS, self._learning.starved_seconds / 2):
                    return self._starved("almost all groups have equal rewards: there is little left to learn from them", version, waited)
                if progress.cancelled or progress.stopping:
                    return Starved("asked to end", waited, stopping=True)
                if waited > longest:
                    reason = f"{num_waiting} of {self._learning.groups_per_step} groups came in {waited:.0f} s"
                    return self._starved(reason, version, waited)
                fresh = self._unnoted() if waited > NOTE_AFTER_SECONDS else ()
            if fresh:
                self._note(fresh)
            progress.report(f"waiting for groups: {num_waiting} of {self._learning.groups_per_step}")
            with self._changed:
                self._changed.wait(_WAIT_SECONDS)

    def _starved(self, reason: str, version: int, waited: float) -> Starved:
        missing = max(1, self._learning.groups_per_step - self._buffer.num_waiting)
        oldest = max(0, version - self._learning.max_staleness_hard)
        return Starved(reason, waited, num_missing=missing, oldest_version=oldest, equal_rewards=self._buffer.flat)

    def settle(self) -> None:
        """The manifest of the step is written."""
        with self._changed:
            self._buffer.settle()
            del self._refused[: self._num_told]
            self._num_told = 0
            self._told = {}
            self._counted_from = self._told_at
            self._forget_old()

    def expel(self, found: Collection[str]) -> None:
        """Refuse groups that wait, because no step can be taken with them."""
        with self._changed:
            for key in self._buffer.withdraw(found):
                self._offered_at.pop(key, None)
                self._note_refused(key, keys.parse_group(key).host, Reason.NON_FINITE)

    def put_back(self) -> None:
        """The step failed: its groups wait again."""
        with self._changed:
            self._buffer.put_back()
            for host, tally in self._told.items():
                tally.add(self._tallies.get(host, _Tally()))
                self._tallies[host] = tally
            self._num_told, self._told = 0, {}

    def _taken(self, groups: tuple[Group, ...], keys: tuple[str, ...], waited: float) -> Taken:
        drops = tuple(Dropped(drop.key, drop.reason) for drop in self._buffer.told)
        # Those shut out are named in every step: what they did before must not count against them after a release.
        self._num_told, self._told, self._tallies = min(len(self._refused), MAX_NAMED), self._tallies, {}
        self._told_at = time.monotonic()
        hosts = self._hosts()
        refused = tuple(self._refused[: self._num_told])
        metrics = self._metrics(keys) | self._fleet_metrics() | self._refused_metrics()
        metrics["groups_untold"] = float(len(self._refused) - len(refused) + len(self._buffer.drops) - len(drops))
        metrics["hosts_untold"] = float(len(self._told.keys() | self._quarantined) - len(hosts))
        return Taken(groups, keys, drops, refused, hosts, waited, metrics)

    def _hosts(self) -> dict[str, HostCounts]:
        """Counts by host; of more than MAX_HOSTS those that are shut out or brought most, then those of most refusals."""
        tallies = {name: self._told.get(name, _Tally()) for name in self._told.keys() | self._quarantined}

        def rank(name: str) -> tuple[bool, int, int, str]:
            return name not in self._quarantined, -tallies[name].num_accepted, -tallies[name].refused.total(), name

        named = sorted(sorted(tallies, key=rank)[:MAX_HOSTS])
        return {name: tallies[name].counts(quarantined=name in self._quarantined) for name in named}

    def _refused_metrics(self) -> dict[str, float]:
        """All that was refused since the step before, by reason, named in the manifest or not."""
        reasons: Counter[str] = sum((tally.refused for tally in self._told.values()), Counter[str]())
        return {"groups_refused": float(reasons.total()), **{f"refused_{reason}": float(num) for reason, num in reasons.items()}}

    def _forget_old(self) -> None:
        """Of what was refused and is not told yet, what nobody looks at any more; and notes of what has been told."""
        oldest = self._versions.newest - self._learning.max_staleness_hard - LATE_VERSIONS
        self._refused = [one for one in self._refused if keys.parse_group(one.key).version >= oldest]
        self._noted &= {drop.key for drop in self._buffer.drops} | {one.key for one in self._refused}

    def _metrics(self, taken: tuple[str, ...]) -> dict[str, float]:
        now = time.monotonic()
        for drop in self._buffer.drops:
            self._offered_at.pop(drop.key, None)
        found = {"queue_seconds_mean": sum(now - self._offered_at.pop(key, now) for key in taken) / len(taken)}
        # One Mac may well be at fault; several at once are no accident of one of them.
        num = len(self._quarantined)
        found["quarantined_share"] = num / len(self._known_hosts | self._quarantined) if num > 1 else 0.0
        stale = [drop.num_tokens for drop in self._buffer.drops if drop.reason == "stale" and drop.num_tokens]
        return found | ({"stale_group_tokens_mean": sum(stale) / len(stale)} if stale else {})

    def _fleet_metrics(self) -> dict[str, float]:
        """What the fleet brought since the step before, and how busy those say they are that do."""
        seconds = max(self._told_at - self._counted_from, 1e-3)
        tallies = self._told.values()
        found = {
            "groups_accepted": float(sum(tally.num_accepted for tally in tallies)),
            "groups_waiting": float(self._buffer.num_waiting),
            "fleet_tokens_per_second": sum(tally.num_sampled_tokens for tally in tallies) / seconds,
            "fleet_episodes_per_hour": 3600.0 * sum(tally.num_episodes for tally in tallies) / seconds,
        }
        said = [tally.newest.timings for tally in tallies if tally.newest is not None and tally.newest.timings.peak_memory_bytes]
        if said:
            found["batch_occupancy_mean"] = sum(one.batch_occupancy for one in said) / len(said)
            found["prefix_hit_mean"] = sum(one.prefix_hit_share for one in said) / len(said)
            found["peak_memory_bytes_max"] = float(max(one.peak_memory_bytes for one in said))
        return found

    def _unnoted(self) -> tuple[Dropped, ...]:
        """Groups dropped or refused, and not told of, of which no note was made, as many as a note names; they count as noted."""
        drops = [Dropped(one.key, one.reason) for one in (*self._buffer.drops, *self._refused) if one.key not in self._noted]
        self._noted.update(drop.key for drop in drops[:MAX_NAMED])
        return tuple(sorted(drops[:MAX_NAMED]))

    def _fill(self) -> None:
        """The thread: look, download, admit, until closed. What it fails with is raised by `take`."""
        with ThreadPoolExecutor(NUM_DOWNLOADS, thread_name_prefix="download") as pool:
            while not self._closing.is_set():
                # A little beyond the bound, so that most groups that come too late are dropped with a reason.
                oldest = self._versions.newest - self._learning.max_staleness_hard - LATE_VERSIONS
                arrivals = self._look(max(0, oldest))
                fresh = [arrival for arrival in arrivals if not self._dropped_unread(arrival)]
                any_done = False
                for part in self._portions(fresh):
                    for arrival, data in zip(part, pool.map(self._read, part), strict=True):
                        if self._closing.is_set():
                            return
                        any_done = self._admit(arrival, data) or any_done
                if not any_done:
                    self._closing.wait(self._learning.intake_poll_seconds)

    def _portions(self, arrivals: Sequence[Arrival]) -> Iterator[list[Arrival]]:
        """Arrivals by time, as many at once as fit in MAX_FETCHED_BYTES: of two that share episodes the later is the copy."""
        size = max(1, MAX_FETCHED_BYTES // self._rules.max_group_bytes)
        ordered = sorted(arrivals, key=lambda arrival: (arrival.modified_at, arrival.named.version, arrival.key))
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]

    def _look(self, oldest: int) -> tuple[Arrival, ...]:
        """What arrived; nothing while the bucket is away, however long that is: the engine's own calls say so."""
        try:
            found = self._inbox.look(oldest)
        except ServiceUnavailableError as error:
            if not self._away:
                log.warning("inbox_unreachable", error=error.message)
            self._away = True
            return ()
        self._away = False
        return found

    def _dropped_unread(self, arrival: Arrival) -> bool:
        if self._inbox.is_barred(arrival.key):
            self._refuse(arrival, Reason.TOO_LARGE, "sent again under the key of one that was too large")
            return True
        if arrival.num_bytes > self._rules.max_group_bytes:
            self._inbox.bar(arrival)  # its ticket may outlive the clearing of it
            self._refuse(arrival, Reason.TOO_LARGE, f"{arrival.num_bytes} bytes, no group of this run has as many")
            return True
        if arrival.named.host in self._quarantined - self._on_trial:
            self._refuse(arrival, Reason.QUARANTINED, "its host is quarantined")
            return True
        if not is_stale(self._versions.newest, arrival.named.version, self._learning.max_staleness_hard):
            return False
        with self._changed:
            self._buffer.drop_stale(arrival.key)
            self._changed.notify_all()
        return True

    def _read(self, arrival: Arrival) -> bytes | StoaError:
        try:
            return self._store.get(arrival.key, max_bytes=self._rules.max_group_bytes).data
        except (BucketError, ServiceUnavailableError) as error:
            return error

    def _admit(self, arrival: Arrival, data: bytes | StoaError) -> bool:
        """Accept or refuse; False if the answer is put off, because something could not be read."""
        try:
            if isinstance(data, StoaError):
                raise data
            group = admit(
                data,
                arrival.key,
                rules=self._rules,
                prompt_ids_of=self._referee.prompt_ids_of,
                rescore=self._referee.rescore,
                seen=self._seen,
            )
        except GroupRefusedError as error:
            self._refuse(arrival, error.reason, error.message)
        except ObjectTooLargeError as error:
            self._refuse(arrival, Reason.TOO_LARGE, error.message)
        except (BucketError, ServiceUnavailableError, InfrastructureFaultError) as error:
            # Bytes lost on the way are asked for again; what is wrong in the bucket (the group, or the grant it was
            # played for) is wrong the second time too.
            if isinstance(error, BucketError) and arrival.key in self._read_twice:
                self._refuse(arrival, Reason.UNREADABLE, error.message)
                return True
            self._read_twice.add(arrival.key)
            self._inbox.put_back(arrival.key)
            return False
        else:
            self._accept(arrival, group)
        return True

    def _accept(self, arrival: Arrival, group: Group) -> None:
        with self._changed:
            if group.host in self._on_trial:
                self._canaries.append((arrival.key, group))
                self._refuse(arrival, Reason.CANARY, "its host is on trial")
                return
            if group.host in self._quarantined:  # since its group was listed
                self._refuse(arrival, Reason.QUARANTINED, "its host is quarantined")
                return
            self._known_hosts.add(group.host)
            if self._buffer.offer(arrival.key, group):
                self._offered_at[arrival.key] = time.monotonic()
                tally = self._tallies.setdefault(group.host, _Tally())
                tally.num_accepted += 1
                tally.num_sampled_tokens += sum(len(episode.logprobs) for episode in group.episodes)
                tally.num_episodes += len(group.episodes)
                tally.num_missing += self._rules.group_size - len(group.episodes)
                tally.newest = group
            self._changed.notify_all()

    def _refuse(self, arrival: Arrival, reason: str, message: str) -> None:
        log.warning("group_refused", key=arrival.key, host=arrival.named.host, reason=reason, error=message)
        with self._changed:
            self._note_refused(arrival.key, arrival.named.host, reason)
            self._changed.notify_all()

    def _note_refused(self, key: str, host: str, reason: str) -> None:
        self._refused.append(Refused(key, host, reason))
        self._tallies.setdefault(host, _Tally()).refused[reason] += 1
