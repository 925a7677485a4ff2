"""A run's fleet played through event by event, without a server: who waits for whom, how old groups get, what passes.

The rules are the run's own, in miniature: admission (`stoa.learning.ledger`), first in first out by version and the hard
bound (`stoa.learning.replay`), a deltas' way to a Mac that stages while it plays (`worker_mac/versions.py`), a lost
Mac's grants (`workflows/session_plan.py`). Machines, lines and absences are numbers. Seconds and bytes throughout.

Left out: evaluations, damaged objects, restarts of the trainer, and lines that are anything but full or silent.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from cli.plan.fleet_model import Fleet, Mac, Outcome

WARM_SHARE: Final = 0.25
"""Share of the time that is let pass before anything is counted."""
ASK_AGAIN_SECONDS: Final = 0.5
"""Between room and the grant that takes it: sessions ask now and then."""
NOTE_AFTER_SECONDS: Final = 1.0
"""A trainer that has waited so long tells at once of groups that teach nothing; else the next step does."""


@dataclass(slots=True)
class _Machine:
    """A Mac as it goes."""

    mac: Mac
    chance: random.Random
    """Its own, so that two fleets of the same Macs have the same days."""
    epoch: int = 0
    """Goes up when what was planned for it must not happen any more."""
    present: bool = True
    counted: bool = True
    """Its grants are in the ledger."""
    granted: int = 0
    """Sweeps granted and not begun."""
    asked_since: float = -1.0
    """Since when it has nothing to play; below 0 while it plays."""
    left_of_sweep: int = 0
    """Groups of the present sweep still to come."""
    staged: int = -1
    line_down_free_at: float = 0.0
    line_up_free_at: float = 0.0
    gone_at: float = 0.0


@dataclass(slots=True)
class _Tally:
    trainer_wait: float = 0.0
    trainer_busy: float = 0.0
    mac_wait: float = 0.0
    mac_pull: float = 0.0
    mac_away: float = 0.0
    versions: int = 0
    steps: int = 0
    arrived: int = 0
    flat: int = 0
    stale: int = 0
    sweeps: int = 0
    bytes_down: float = 0.0
    bytes_up: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)


class Simulation:
    """One fleet, once, from a seed."""

    def __init__(self, fleet: Fleet, seed: int = 0) -> None:
        self._fleet, self._chance = fleet, random.Random(f"fleet {seed}")
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._machines = [_Machine(mac, random.Random(f"mac {seed} {index}")) for index, mac in enumerate(fleet.macs)]
        self._running = 0
        """Groups granted to Macs that count, and still to come."""
        self._published_at: list[float] = [0.0]
        """When HEAD named each version."""
        self._trainer_version = 0
        self._queue: list[tuple[int, int]] = []
        """Usable groups, by version and then arrival."""
        self._flat: list[int] = []
        """Versions of flat groups that no step has told of yet."""
        self._consumed: Counter[int] = Counter()
        self._training = 0
        self._steps_since_publish = 0
        self._waiting_since = 0.0
        self._trainer_waits = True
        self._tally = _Tally()
        self._warm_at = 0.0
        self._asking = False

    def run(self, seconds: float) -> Outcome:
        """Play `seconds` of it."""
        self._warm_at = seconds * WARM_SHARE
        for machine in self._machines:
            self._join(machine)
        while self._events and self._events[0][0] < seconds:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self._now = seconds
        self._count_trainer_wait()
        for machine in self._machines:
            self._count_wait(machine)
            if not machine.present:
                self._tally.mac_away += self._warm(machine.gone_at)
        return self._outcome(seconds - self._warm_at)

    def _outcome(self, seconds: float) -> Outcome:
        tally, alive = self._tally, seconds * max(1, len(self._machines))
        present = max(1e-9, alive - tally.mac_away)
        return Outcome(
            seconds,
            tally.versions,
            tally.steps,
            tally.trainer_wait / max(1e-9, tally.trainer_wait + tally.trainer_busy),
            tally.mac_wait / present,
            tally.mac_pull / present,
            tally.mac_away / alive,
            sum(tally.staleness.values()),
            tally.arrived,
            tally.flat,
            tally.stale,
            dict(sorted(tally.staleness.items())),
            tally.bytes_down,
            tally.bytes_up,
            tally.sweeps,
        )

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self._now), next(self._order), event))

    def _warm(self, since: float) -> float:
        """Seconds from `since` until now that count."""
        return max(0.0, self._now - max(since, self._warm_at))

    @property
    def _counts(self) -> bool:
        return self._now >= self._warm_at

    # Macs

    def _join(self, machine: _Machine) -> None:
        """A first join, or one after an absence: weights come first, whole if there are none."""
        mac, version = machine.mac, self._version
        num_bytes = self._bytes_to(machine, version)
        ready = self._now + _transfer(num_bytes, mac.down_rate, mac.round_trip_seconds)
        self._carry_down(num_bytes)
        machine.staged, machine.line_down_free_at = version, ready
        self._plan_absence(machine)
        self._when(machine, ready, lambda: self._idle(machine))

    def _when(self, machine: _Machine, when: float, event: Callable[[], None]) -> None:
        """An event that an absence cancels."""
        epoch = machine.epoch

        def happen() -> None:
            if machine.epoch == epoch:
                event()

        self._at(when, happen)

    def _idle(self, machine: _Machine) -> None:
        """Nothing to play: the next sweep is begun if it is granted, else asked for."""
        machine.asked_since = self._now
        if machine.left_of_sweep or machine.granted:
            self._begin(machine)
        else:
            self._ask()

    def _begin(self, machine: _Machine) -> None:
        self._count_wait(machine)
        fleet, mac = self._fleet, machine.mac
        if not machine.left_of_sweep:
            machine.granted -= 1
            machine.left_of_sweep = fleet.rules.groups
        version = self._version
        ready = self._bring(machine, version)
        decode = mac.sweep_seconds * machine.chance.lognormvariate(0.0, fleet.sweep_jitter) * machine.left_of_sweep / fleet.rules.groups
        self._tally.mac_pull += max(0.0, ready - max(self._now, self._warm_at))
        machine.line_up_free_at = max(machine.line_up_free_at, ready)
        num = machine.left_of_sweep
        for place in range(num):
            share = 1.0 if num == 1 else fleet.first_group + (1.0 - fleet.first_group) * place / (num - 1)
            self._when(machine, ready + decode * share, lambda last=place == num - 1: self._ship(machine, version, last=last))
        self._ask()

    def _bring(self, machine: _Machine, version: int) -> float:
        """When the weights of `version` serve: what was published during the last sweep was staged beside it."""
        mac, fleet = machine.mac, self._fleet
        head_read = self._now + mac.round_trip_seconds
        if machine.staged >= version:
            return head_read
        if fleet.full_sync:
            num_bytes = fleet.sizes.full_bytes
            free_at = max(machine.line_down_free_at, self._published_at[version] + fleet.rules.head_poll_seconds / 2)
            machine.line_down_free_at = free_at + _transfer(num_bytes, mac.down_rate, mac.round_trip_seconds)
            self._carry_down(num_bytes)
        else:
            for number in range(machine.staged + 1, version + 1):
                seen = self._published_at[number] + min(fleet.rules.head_poll_seconds / 2, max(0.0, self._now - self._published_at[number]))
                begun = max(machine.line_down_free_at, seen)
                machine.line_down_free_at = begun + _transfer(fleet.sizes.delta_bytes, mac.down_rate, 2 * mac.round_trip_seconds)
                self._carry_down(fleet.sizes.delta_bytes)
        machine.staged = version
        return max(head_read, machine.line_down_free_at) + fleet.apply_seconds

    def _ship(self, machine: _Machine, version: int, *, last: bool) -> None:
        mac, fleet = machine.mac, self._fleet
        begun = max(self._now, machine.line_up_free_at)
        arrives = begun + _transfer(fleet.sizes.group_bytes, mac.up_rate, mac.round_trip_seconds)
        machine.line_up_free_at = arrives
        if self._counts:
            self._tally.bytes_up += fleet.sizes.group_bytes
        self._when(machine, arrives, lambda: self._arrive(machine, version))
        if last:
            self._tally.mac_pull += arrives - self._now if self._counts else 0.0
            self._when(machine, arrives + 1e-6, lambda: self._end(machine))

    def _arrive(self, machine: _Machine, version: int) -> None:
        machine.left_of_sweep -= 1
        self._running -= 1
        self._tally.arrived += self._counts
        flat = machine.chance.random() < self._fleet.rules.flat_fraction
        self._at(self._now + self._fleet.trainer.intake_seconds, lambda: self._admit(version, flat=flat))
        self._waiting += 1

    def _end(self, machine: _Machine) -> None:
        self._tally.sweeps += self._counts
        turn = self._fleet.turn_seconds + 2 * machine.mac.round_trip_seconds
        self._when(machine, self._now + turn, lambda: self._idle(machine))

    # absences

    def _plan_absence(self, machine: _Machine) -> None:
        absences = self._fleet.absences
        kinds = (
            (absences.sleeps_per_hour, absences.sleep_seconds, False),
            (absences.crashes_per_hour, absences.crash_seconds, False),
            (absences.leaves_per_hour, absences.leave_seconds, True),
        )
        drawn = [(machine.chance.expovariate(rate / 3600.0), mean, told) for rate, mean, told in kinds if rate > 0]
        if drawn:
            after, mean, told = min(drawn)
            self._when(machine, self._now + after, lambda: self._go(machine, mean, told=told))

    def _go(self, machine: _Machine, mean_seconds: float, *, told: bool) -> None:
        """Gone: what it played is lost, what it sent is not. Without a goodbye its grants count until its silence is noticed."""
        self._count_wait(machine)
        machine.epoch += 1
        machine.present, machine.asked_since, machine.gone_at = False, -1.0, self._now
        silence = 0.0 if told else self._fleet.rules.heartbeat_seconds
        away = machine.chance.expovariate(1.0 / mean_seconds)
        if away > silence:
            self._when(machine, self._now + silence, lambda: self._forget(machine))
        self._at(self._now + away, lambda: self._return(machine))

    def _forget(self, machine: _Machine) -> None:
        machine.counted = False
        self._running -= self._owed(machine)
        self._ask()

    def _return(self, machine: _Machine) -> None:
        self._tally.mac_away += self._warm(machine.gone_at)
        machine.epoch += 1
        if not machine.counted:
            self._running += self._owed(machine)
        machine.present = machine.counted = True
        self._join(machine)

    # admission

    @property
    def _version(self) -> int:
        return len(self._published_at) - 1

    def _room(self) -> int:
        rules = self._fleet.rules
        return (rules.max_staleness + 1) * rules.groups_per_version - self._consumed[self._version] - self._running - self._waiting

    def _owed(self, machine: _Machine) -> int:
        return machine.left_of_sweep + machine.granted * self._fleet.rules.groups

    def _ask(self) -> None:
        """Grants are given a moment after there is room: many changes at one time are one."""
        if not self._asking:
            self._asking = True
            self._at(self._now + ASK_AGAIN_SECONDS * self._chance.random(), self._grant)

    def _grant(self) -> None:
        """Room goes to the Macs that have least left to play: those with nothing first."""
        self._asking = False
        room = self._room()
        if room < 1:
            return
        idle = [m for m in self._machines if m.present and m.asked_since >= 0 and not m.granted and not m.left_of_sweep]
        ahead = [m for m in self._machines if m.present and m.asked_since < 0 and m.left_of_sweep and m.granted < self._fleet.max_ahead]
        self._chance.shuffle(idle)
        self._chance.shuffle(ahead)
        ahead.sort(key=self._owed)
        for machine in (*idle, *ahead):
            if room < 1:
                return
            machine.granted += 1
            self._running += self._fleet.rules.groups
            room -= self._fleet.rules.groups
            if machine.asked_since >= 0:
                self._begin(machine)

    # the trainer

    def _admit(self, version: int, *, flat: bool) -> None:
        if flat:
            self._tally.flat += self._counts
            self._flat.append(version)
            if self._trainer_waits and self._now - self._waiting_since > NOTE_AFTER_SECONDS:
                self._tell_flat()
            return
        heapq.heappush(self._queue, (version, next(self._order)))
        if self._trainer_waits:
            self._take()

    def _tell_flat(self) -> None:
        self._waiting -= len(self._flat)
        self._flat.clear()
        self._ask()

    def _take(self) -> None:
        rules = self._fleet.rules
        while self._queue and self._trainer_version - self._queue[0][0] > rules.max_staleness_hard:
            heapq.heappop(self._queue)
            self._tally.stale += self._counts
            self._waiting -= 1
        if len(self._queue) < rules.groups_per_step:
            return
        self._count_trainer_wait()
        self._trainer_waits = False
        for _ in range(rules.groups_per_step):
            version, _ = heapq.heappop(self._queue)
            if self._counts:
                self._tally.staleness[self._trainer_version - version] += 1
        seconds = self._fleet.trainer.step_seconds * self._chance.lognormvariate(0.0, self._fleet.trainer.step_jitter)
        self._at(self._now + seconds, lambda: self._step_done(seconds))

    def _step_done(self, seconds: float) -> None:
        rules, trainer = self._fleet.rules, self._fleet.trainer
        self._tally.trainer_busy += min(seconds, self._warm(0.0))
        self._tally.steps += self._counts
        self._waiting -= rules.groups_per_step
        self._consumed[self._trainer_version] += rules.groups_per_step
        self._steps_since_publish += 1
        self._tell_flat()
        free_at = self._now + trainer.step_overhead_seconds
        if self._steps_since_publish == rules.steps_per_version:
            self._steps_since_publish = 0
            free_at += trainer.hold_seconds
            self._at(free_at, self._scan_done)
        self._at(free_at, self._wait_for_groups)

    def _scan_done(self) -> None:
        self._trainer_version += 1
        self._at(self._now + self._fleet.trainer.publish_seconds, self._publish)

    def _publish(self) -> None:
        self._published_at.append(self._now)
        self._tally.versions += self._counts
        self._ask()

    def _wait_for_groups(self) -> None:
        self._trainer_waits, self._waiting_since = True, self._now
        self._take()

    # books

    _waiting = 0
    """Groups in the bucket that the ledger does not know to be settled."""

    def _count_trainer_wait(self) -> None:
        if self._trainer_waits:
            self._tally.trainer_wait += self._warm(self._waiting_since)

    def _count_wait(self, machine: _Machine) -> None:
        if machine.asked_since >= 0:
            self._tally.mac_wait += self._warm(machine.asked_since)
            machine.asked_since = -1.0

    def _carry_down(self, num_bytes: float) -> None:
        if self._counts:
            self._tally.bytes_down += num_bytes

    def _bytes_to(self, machine: _Machine, version: int) -> float:
        sizes = self._fleet.sizes
        if machine.staged < 0:
            return sizes.full_bytes
        return min(sizes.full_bytes, (version - machine.staged) * sizes.delta_bytes)


def _transfer(num_bytes: float, rate: float, round_trip_seconds: float) -> float:
    return round_trip_seconds + (num_bytes / rate if rate else 0.0)


def simulate(fleet: Fleet, seconds: float, seeds: Sequence[int] = (0,)) -> list[Outcome]:
    """One outcome a seed."""
    return [Simulation(fleet, seed).run(seconds) for seed in seeds]
