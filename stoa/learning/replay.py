"""Which waiting groups the next optimizer step trains on: first in first out, each at most once.

A group leaves in one of three ways: trained on, dropped with a reason, or put back because the step failed. What the
bucket holds and what a step manifest says is the caller's. A group that is too old or whose rewards are all equal is
dropped as soon as it is looked at, not when its turn comes, so that the next step manifest frees its place in the
admission ledger.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stoa.learning.advantages import is_constant
from stoa.learning.staleness import is_stale
from stoa.rollouts.records import Group

DropReason = Literal["stale", "all_zero", "all_one", "all_equal", "quarantined"]
"""Too old; all rewards are 0, are 1, or are some other equal number; or its host may take part no more."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One group in the queue. `flat` says why it gives no gradient, "" if it does."""

    key: str
    version: int
    flat: Literal["", "all_zero", "all_one", "all_equal"]


@dataclass(frozen=True, slots=True)
class Drop:
    """A group that is not trained on, and why."""

    key: str
    reason: DropReason
    num_tokens: int = 0
    """Of all its episodes; 0 if it was dropped unread."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next step does. `taken` is empty unless `status` is ready.

    waiting: too few usable groups have come. no_signal: the step has looked at as many groups as it may and too few
    are usable.
    """

    status: Literal["ready", "waiting", "no_signal"]
    taken: tuple[str, ...]
    dropped: tuple[Drop, ...]


def choose(
    queue: Sequence[Waiting],
    *,
    version: int,
    num_wanted: int,
    max_looked: int,
    max_staleness_hard: int,
    num_flat_before: int = 0,
) -> Choice:
    """Choose from `queue`, which is in order of arrival.

    Args:
        version: newest published version.
        num_wanted: usable groups of a step.
        max_looked: groups a step may look at: usable ones that wait and those found flat since the last step.
        num_flat_before: groups found flat since the last step, by earlier choices.
    """
    in_order = sorted(queue, key=lambda waiting: waiting.version)
    dropped: list[Drop] = []
    usable: list[str] = []
    num_flat = num_flat_before
    for waiting in in_order:
        if is_stale(version, waiting.version, max_staleness_hard):
            dropped.append(Drop(waiting.key, "stale"))
        elif waiting.flat:
            dropped.append(Drop(waiting.key, waiting.flat))
            num_flat += 1
        else:
            usable.append(waiting.key)
    if len(usable) >= num_wanted:
        return Choice("ready", tuple(usable[:num_wanted]), tuple(dropped))
    status = "no_signal" if num_flat + len(usable) >= max_looked else "waiting"
    return Choice(status, (), tuple(dropped))


def flatness(group: Group) -> Literal["", "all_zero", "all_one", "all_equal"]:
    """Why a group gives no gradient, "" if it does."""
    rewards = group.rewards
    if not is_constant(rewards):
        return ""
    return {0.0: "all_zero", 1.0: "all_one"}.get(float(rewards[0]), "all_equal")  # pyright: ignore[reportReturnType]


class ReplayBuffer:
    """Holds admitted groups until a step takes them. One thread at a time.

    A step: `take`; then `settle` once its manifest is written, or `put_back` if it failed. `drops` are those that no
    settled step has told of, `told` those of them that the step in progress tells of.
    """

    def __init__(
        self, *, num_wanted: int, max_looked: int, max_staleness_hard: int, max_told: int = 1024, settled: Iterable[str] = ()
    ) -> None:
        """`settled`: keys consumed, dropped or refused in the run so far; they are never taken again.

        max_told: most drops that a step tells of; the next ones tell of the others.
        """
        self._num_wanted = num_wanted
        self._max_told = max_told
        self._max_looked = max_looked
        self._max_staleness_hard = max_staleness_hard
        self._known = set(settled)
        self._queue: dict[str, tuple[Waiting, Group]] = {}
        self._taken: dict[str, tuple[Waiting, Group]] = {}
        self._drops: list[Drop] = []
        self._num_told = 0
        """Of the drops, those that the step in progress tells of."""
        self._num_flat = 0
        self._flat: Counter[str] = Counter()

    @property
    def flat(self) -> Mapping[str, int]:
        """Groups of equal rewards that were looked at since the last step: all_zero, all_one or all_equal -> how many."""
        return dict(self._flat)

    @property
    def num_waiting(self) -> int:
        """Groups in the queue."""
        return len(self._queue)

    @property
    def drops(self) -> tuple[Drop, ...]:
        """Groups dropped of which no settled step has told."""
        return tuple(self._drops)

    @property
    def told(self) -> tuple[Drop, ...]:
        """Those of them that the step in progress tells of: the oldest."""
        return tuple(self._drops[: self._num_told])

    def offer(self, key: str, group: Group) -> bool:
        """Queue an admitted group. False if this key was offered or settled before."""
        if key in self._known:
            return False
        self._known.add(key)
        self._queue[key] = (Waiting(key, group.version, flatness(group)), group)
        return True

    def drop_stale(self, key: str) -> bool:
        """Drop a group by its key alone, unread, because its version is too old. False if the key was known."""
        if key in self._known:
            return False
        self._known.add(key)
        self._drops.append(Drop(key, "stale"))
        return True

    def withdraw(self, keys: Collection[str]) -> tuple[str, ...]:
        """Let waiting groups go, whose fate the caller tells; returns those of `keys` that waited."""
        return tuple(key for key in keys if self._queue.pop(key, None) is not None)

    def drop_hosts(self, hosts: Collection[str]) -> None:
        """Drop the waiting groups of these hosts."""
        for key in [key for key, (_, group) in self._queue.items() if group.host in hosts]:
            del self._queue[key]
            self._drops.append(Drop(key, "quarantined"))

    def take(self, version: int) -> tuple[Choice, tuple[Group, ...]]:
        """Choose for the next step with `version` newest. Raises RuntimeError if the step before is neither settled nor put back."""
        if self._taken:
            raise RuntimeError("take() before the last step was settled or put back")
        choice = choose(
            [waiting for waiting, _ in self._queue.values()],
            version=version,
            num_wanted=self._num_wanted,
            max_looked=self._max_looked,
            max_staleness_hard=self._max_staleness_hard,
            num_flat_before=self._num_flat,
        )
        for drop in choice.dropped:
            _, group = self._queue.pop(drop.key)
            self._drops.append(replace(drop, num_tokens=group.num_tokens))
        flat = Counter(drop.reason for drop in choice.dropped if drop.reason != "stale")
        self._num_flat += flat.total()
        self._flat.update(flat)
        if choice.status == "no_signal":
            self._num_flat = 0
        self._taken = {key: self._queue.pop(key) for key in choice.taken}
        self._num_told = min(len(self._drops), self._max_told)
        return choice, tuple(group for _, group in self._taken.values())

    def settle(self) -> None:
        """The step manifest with the taken groups and the drops up to then is written: forget them."""
        self._taken = {}
        del self._drops[: self._num_told]
        self._num_told = 0
        self._num_flat = 0
        self._flat.clear()

    def put_back(self) -> None:
        """The step failed: its groups wait again, before all that came later."""
        self._queue = {**self._taken, **self._queue}
        self._taken = {}
