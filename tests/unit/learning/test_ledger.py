"""Admission: what is out counts, what is lost does not, and over any history a run neither stalls nor overruns."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet_measure import admission
from stoa.bucket.keys import GroupKey
from stoa.learning.ledger import AdmissionRule, Decision, GrantRecord, Ledger, QuestionOrder
from tests.unit.learning.reference_ledger import Facts, count, ledger_of, tell

RULE = AdmissionRule(max_staleness=3, max_staleness_hard=8, groups_per_version=32, lost_after_seconds=900.0)
QUESTIONS = tuple(f"q{i}" for i in range(10))
ORDER = QuestionOrder(QUESTIONS, seed=0)


def grant(host: str, sweep: int, position: int = 0, num: int = 8, granted_at: float = 0.0) -> GrantRecord:
    return GrantRecord(host, sweep, position, ORDER.take(position, num), granted_at)


def facts(**changes: object) -> Facts:
    return Facts(**{"version": 5, "num_consumed": 0, "grants": (), "arrived": frozenset(), "settled": frozenset(), **changes})


def outstanding(rule: AdmissionRule, known: Facts, now: float) -> Ledger:
    return ledger_of(rule, known, now)


def room(rule: AdmissionRule, known: Facts, now: float) -> int:
    return ledger_of(rule, known, now).room


def decide(
    rule: AdmissionRule, known: Facts, order: QuestionOrder, *, host: str, sweep: int, num_groups: int, now: float, num_kept: int = 0
) -> Decision:
    ledger = ledger_of(rule, known, now)
    return ledger.decide(order, host=host, sweep=sweep, num_groups=num_groups, now=now, kept=lambda: num_kept)


def group(host: str, sweep: int, index: int, version: int = 5) -> GroupKey:
    return GroupKey("toy", version, host, sweep, index)


def test_an_idle_run_has_room_for_all_versions_ahead():
    assert room(RULE, facts(), 0.0) == 4 * 32


def test_running_waiting_and_used_groups_take_room():
    arrived = frozenset(group("mac-a", 0, i) for i in range(5))
    settled = frozenset(group("mac-a", 0, i) for i in range(2))
    known = facts(grants=(grant("mac-a", 0),), arrived=arrived, settled=settled, num_consumed=1)
    assert outstanding(RULE, known, 0.0).waiting == 3
    assert outstanding(RULE, known, 0.0).running == 3
    assert room(RULE, known, 0.0) == 128 - 1 - 6


def test_versions_published_without_training_give_no_room():
    grants = tuple(grant("mac-a", i) for i in (0, 1))
    assert room(RULE, facts(grants=grants, version=5), 0.0) == room(RULE, facts(grants=grants, version=50), 0.0) == 128 - 16


def test_a_group_settled_before_it_was_seen_to_arrive_is_not_running():
    known = facts(grants=(grant("mac-a", 0, num=1),), settled=frozenset({group("mac-a", 0, 0)}))
    assert (outstanding(RULE, known, 0.0).waiting, outstanding(RULE, known, 0.0).running) == (0, 0)


def test_a_slot_that_arrived_under_two_versions_is_not_running_and_waits_once_for_each():
    twice = frozenset({group("mac-a", 0, 0, 4), group("mac-a", 0, 0, 5)})
    known = facts(grants=(grant("mac-a", 0, num=1),), arrived=twice, settled=frozenset({group("mac-a", 0, 0, 5)}))
    assert (outstanding(RULE, known, 0.0).waiting, outstanding(RULE, known, 0.0).running) == (1, 0)


def test_what_a_lost_mac_owes_does_not_count_until_it_asks_again():
    known = facts(grants=(grant("mac-a", 0), grant("mac-b", 0, 8)))
    assert outstanding(RULE, known, 0.0).running == 16
    assert outstanding(RULE, replace(known, away=frozenset({"mac-a"})), 0.0).running == 8


def test_what_a_finished_sweep_did_not_bring_is_lost():
    known = facts(grants=(grant("mac-a", 0), grant("mac-a", 1, 8)), arrived=frozenset({group("mac-a", 0, 0)}))
    assert outstanding(RULE, known, 0.0).running == 15
    assert outstanding(RULE, replace(known, ended_before={"mac-a": 1}), 0.0).running == 8
    third = replace(known, grants=(*known.grants, grant("mac-a", 2, 16)))
    assert outstanding(RULE, third, 0.0).running == 16


def test_an_old_grants_missing_groups_are_lost():
    known = facts(grants=(grant("mac-a", 0, granted_at=100.0),))
    assert outstanding(RULE, known, 1000.0).running == 8
    assert outstanding(RULE, known, 1000.1).running == 0


def test_groups_too_old_to_train_on_do_not_wait():
    arrived = frozenset({group("mac-a", 0, 0, 1), group("mac-a", 0, 1, 2)})
    assert outstanding(RULE, facts(version=10, arrived=arrived), 0.0).waiting == 1


def test_a_new_grant_continues_the_order_and_says_how_old_weights_may_be():
    known = facts(grants=(grant("mac-a", 0), grant("mac-b", 0, position=8, num=4)))
    decision = decide(RULE, known, ORDER, host="mac-b", sweep=1, num_groups=3, now=7.0)
    assert decision.is_new
    assert decision.grant == GrantRecord("mac-b", 1, 12, ORDER.take(12, 3), 7.0, min_version=2)


def test_a_redone_sweep_gets_its_grant_again_even_without_room():
    first = grant("mac-a", 0)
    known = facts(grants=(first,), num_consumed=500)
    decision = decide(RULE, known, ORDER, host="mac-a", sweep=0, num_groups=99, now=1e6)
    assert decision.grant == first
    assert not decision.is_new


def test_who_brings_nothing_holds_no_more_than_a_small_sweep():
    ledger = Ledger(RULE)
    ledger.see(5, 0)

    def ask(sweep: int, num_groups: int, now: float) -> int:
        decision = ledger.decide(ORDER, host="mac-a", sweep=sweep, num_groups=num_groups, now=now)
        if decision.grant is None:
            return 0
        ledger.grant(decision.grant)
        return len(decision.grant.question_ids)

    assert ask(0, 64, 0.0) == 8, "a stranger gets 8, however many it asks for"
    assert ask(1, 1, 0.0) == 0
    for index in range(3):
        ledger.arrive(group("mac-a", 0, index))
    assert ask(1, 8, 1.0) == 0, "5 to play and 8 more are over 4 x 3"
    ledger.arrive(group("mac-a", 0, 3))
    assert ask(1, 8, 1.0) == 8, "4 and 8 are not over 4 x 4"
    for index in range(4, 8):
        ledger.arrive(group("mac-a", 0, index))
    assert ask(2, 24, 2.0) == 24, "8 and 24 are not over 4 x 8"
    assert ask(3, 1, 2.0) == 0
    assert ledger.running == 32
    ledger.pass_time(1000.0)
    assert ledger.running == 0, "it has played none of it for too long"
    assert (ask(4, 64, 1000.0), ask(5, 1, 1000.0)) == (8, 0), "and begins again"


def test_without_room_the_reason_has_the_numbers():
    arrived = frozenset(group("mac-b", i // 8, i % 8) for i in range(120))
    known = facts(grants=(grant("mac-a", 0),), arrived=arrived, num_consumed=4)
    decision = decide(RULE, known, ORDER, host="mac-a", sweep=1, num_groups=8, now=0.0)
    assert decision.grant is None
    assert decision.room == -4
    assert decision.reason == ("version 5: 120 groups wait for the trainer, 8 are being played, 4 were used; 128 is the most")


def test_a_mac_may_be_granted_as_many_sweeps_ahead_as_the_rule_says():
    known = facts(grants=tuple(grant("mac-a", sweep, 8 * sweep) for sweep in range(4)))
    assert outstanding(RULE, known, 0.0).running == 16
    assert outstanding(replace(RULE, max_ahead=3), known, 0.0).running == 32


def test_room_that_is_kept_for_idle_macs_is_not_given_to_one_that_asks_ahead():
    known = facts(arrived=frozenset(group("mac-b", i // 8, i % 8) for i in range(120)))
    ahead = decide(RULE, known, ORDER, host="mac-a", sweep=1, num_groups=8, now=0.0, num_kept=8)
    assert (ahead.grant, ahead.room) == (None, 8)
    assert "kept for Macs that have less to play" in ahead.reason
    assert decide(RULE, known, ORDER, host="mac-c", sweep=0, num_groups=8, now=0.0).grant is not None
    assert decide(RULE, known, ORDER, host="mac-a", sweep=1, num_groups=8, now=0.0, num_kept=7).grant is not None


def test_a_whole_sweep_is_granted_while_there_is_any_room():
    known = facts(arrived=frozenset(group("mac-b", i // 8, i % 8) for i in range(127)))
    decision = decide(RULE, known, ORDER, host="mac-a", sweep=0, num_groups=8, now=0.0)
    assert decision.grant is not None
    assert len(decision.grant.question_ids) == 8


def test_each_pass_asks_every_question_once_in_an_order_of_its_own():
    passes = [ORDER.take(number * 10, 10) for number in range(4)]
    assert all(sorted(one) == sorted(QUESTIONS) for one in passes)
    assert len(set(passes)) == 4
    assert ORDER.take(7, 6) == passes[0][7:] + passes[1][:3]


def test_the_order_is_the_documented_hash_and_depends_on_the_seed():
    import hashlib

    ranked = sorted(QUESTIONS, key=lambda q: hashlib.blake2b(f"3:1:{q}".encode(), digest_size=16).digest())
    assert QuestionOrder(QUESTIONS, seed=3).take(10, 10) == tuple(ranked)
    assert QuestionOrder(tuple(reversed(QUESTIONS)), seed=3).take(10, 10) == tuple(ranked)
    assert QuestionOrder(QUESTIONS, seed=4).take(10, 10) != tuple(ranked)


@pytest.mark.parametrize("questions", [(), ("a", "a")])
def test_an_order_needs_questions_that_differ(questions):
    with pytest.raises(ValueError, match="questions"):
        QuestionOrder(questions, seed=0)


@dataclass
class Fate:
    """What happens to groups and hosts: chances between 0 and 1."""

    flat: float
    refused: float
    lost: float
    host_dies: float
    trainer_dies: float


@dataclass
class Simulation:
    """Macs of different speed, a trainer, and a bucket of facts, driven by a clock; the ledger decides alone.

    A host asks one sweep ahead. The trainer needs `groups_per_step` usable groups; found unusable ones are told at once,
    as a drop note would. A trainer that dies loses the steps since its last publish and publishes a version for free.
    """

    rule: AdmissionRule
    steps_per_version: int
    speeds: list[float]
    num_groups: int
    fate: Fate
    chance: random.Random
    seconds_a_step: float
    order: QuestionOrder = field(default_factory=lambda: QuestionOrder([f"q{i}" for i in range(37)], 1))
    now: float = 0.0
    version: int = 0
    steps: int = 0
    consumed_now: int = 0
    saved: tuple[int, frozenset[GroupKey]] = (0, frozenset())
    grants: dict[tuple[str, int], GrantRecord] = field(default_factory=dict)
    arrived: set[GroupKey] = field(default_factory=set)
    settled: set[GroupKey] = field(default_factory=set)
    usable: dict[GroupKey, bool] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    ended_before: dict[str, int] = field(default_factory=dict)
    consumed: list[GroupKey] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    largest: int = 0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    num_events: int = 0
    ledger: Ledger = field(init=False)
    """Told of everything as it happens, and never anew."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.rule)

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now + seconds, self.num_events, act))

    def facts(self) -> Facts:
        return Facts(self.version, self.consumed_now, tuple(self.grants.values()), self.arrived, self.settled, self.ended_before, self.away)

    def ask(self, host: str, sweep: int, speed: float) -> None:
        """The host has ended sweep - 1 and wants this one."""
        self.away.discard(host)
        self.ended_before[host] = sweep
        ledger = self.ledger
        ledger.come_back(host)
        tell(ledger, self.facts(), self.now)
        before = count(self.rule, self.facts(), self.now)
        assert (ledger.waiting, ledger.running, ledger.left(host)) == (before.waiting, before.running, before.left.get(host, 0))
        decision = ledger.decide(self.order, host=host, sweep=sweep, num_groups=self.num_groups, now=self.now)
        if decision.grant is None:
            self.at(10.0, lambda: self.ask(host, sweep, speed))
            return
        self.grants[host, sweep] = decision.grant
        ledger.grant(decision.grant)
        after = ledger.waiting + ledger.running
        assert after == before.total + len(decision.grant.question_ids)
        self.largest = max(self.largest, after + self.consumed_now)
        self.play(decision.grant, speed)

    def play(self, granted: GrantRecord, speed: float) -> None:
        version = self.version
        if self.chance.random() < self.fate.host_dies:
            self.at(speed / 2, lambda: self.away.add(granted.host))
            self.at(speed * 3, lambda: self.ask(granted.host, granted.sweep + 1, speed))
            return
        for index in range(len(granted.question_ids)):
            if self.chance.random() >= self.fate.lost:
                key = GroupKey("toy", version, granted.host, granted.sweep, index)
                self.at(speed * self.chance.random(), lambda key=key: self.arrive(key))
        self.at(speed, lambda: self.ask(granted.host, granted.sweep + 1, speed))

    def arrive(self, key: GroupKey) -> None:
        self.arrived.add(key)
        draw = self.chance.random()
        self.usable[key] = draw >= self.fate.flat + self.fate.refused

    def train(self) -> None:
        per_step = self.rule.groups_per_version // self.steps_per_version
        waiting = [key for key in self.arrived if key not in self.settled]
        self.settled |= {key for key in waiting if not self.usable[key] or self.version - key.version > self.rule.max_staleness_hard}
        ready = sorted((k for k in waiting if k not in self.settled), key=lambda k: (k.version, k.host, k.sweep, k.group))[:per_step]
        if len(ready) == per_step:
            self.settled |= set(ready)
            self.consumed += ready
            self.lags += [self.version - key.version for key in ready]
            self.steps += 1
            self.consumed_now += per_step
            if self.chance.random() < self.fate.trainer_dies:
                self.steps, self.settled = self.saved[0], set(self.saved[1])
                self.ledger.settle_only(self.settled)
                del self.consumed[self.steps * per_step :]
                self.publish()
            elif self.steps % self.steps_per_version == 0:
                self.publish()
        self.at(self.seconds_a_step, self.train)

    def publish(self) -> None:
        self.version += 1
        self.consumed_now = 0
        self.saved = (self.steps, frozenset(self.settled))

    def run(self, steps: int, limit_seconds: float) -> None:
        for number, speed in enumerate(self.speeds):
            self.at(0.0, lambda number=number, speed=speed: self.ask(f"mac-{number}", 0, speed))
        self.at(0.0, self.train)
        while self.steps < steps and self.now < limit_seconds:
            self.now, _, act = heapq.heappop(self.events)
            act()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    staleness=st.integers(0, 4),
    shape=st.sampled_from([(1, 4), (2, 4), (4, 8), (1, 1)]),
    speeds=st.lists(st.floats(20, 120), min_size=1, max_size=5),
    num_groups=st.integers(1, 12),
    fate=st.builds(
        Fate, st.floats(0, 0.5), st.floats(0, 0.3), st.floats(0, 0.5), st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from([0.0, 0.1])
    ),
    seconds_a_step=st.floats(5, 40),
)
def test_no_history_stalls_the_run_or_overruns_the_bound(seed, staleness, shape, speeds, num_groups, fate, seconds_a_step):
    steps_per_version, groups_per_step = shape
    rule = AdmissionRule(staleness, 8, steps_per_version * groups_per_step, lost_after_seconds=900.0)
    run = Simulation(rule, steps_per_version, speeds, num_groups, fate, random.Random(seed), seconds_a_step)
    run.run(steps=8, limit_seconds=50_000.0)
    assert run.steps == 8
    assert len(run.consumed) == len(set(run.consumed)) == 8 * groups_per_step
    if fate.host_dies == fate.trainer_dies == 0.0:
        assert run.largest < (staleness + 1) * rule.groups_per_version + num_groups
    asked = sorted((grant.position, len(grant.question_ids)) for grant in run.grants.values())
    assert [position for position, _ in asked] == [sum(size for _, size in asked[:i]) for i in range(len(asked))]


def test_fourteen_macs_of_mixed_speed_waste_no_group_and_few_are_older_than_planned():
    """More Macs than the trainer can use; the slowest takes twice the time of a version for one sweep."""
    rule = AdmissionRule(3, 8, 32, 900.0)
    run = Simulation(rule, 4, [10.0 + 3.0 * i for i in range(14)], 8, Fate(0.2, 0.0, 0.0, 0.0, 0.0), random.Random(5), seconds_a_step=6.0)
    run.run(steps=120, limit_seconds=1e6)
    counts = Counter(run.lags)
    assert run.steps == 120
    # The trainer is never idle once the first sweeps are in.
    assert run.now < 120 * 6.0 + 60.0
    assert sum(num for lag, num in counts.items() if lag > 3) <= 0.05 * len(run.lags)
    assert max(counts) <= 5
    assert not [key for key in run.arrived if run.version - key.version > 8 and run.usable[key] and key not in run.consumed]


def test_the_position_follows_the_last_question_granted():
    assert Ledger(RULE).next_position == 0
    assert ledger_of(RULE, facts(grants=(grant("mac-a", 0, 16, 8), grant("mac-b", 0, 0, 16))), 0.0).next_position == 24


def test_ledger_knows_what_came_of_a_sweep_and_forgets_what_is_too_old():
    ledger = ledger_of(
        RULE, facts(version=5, arrived=frozenset({group("mac-a", 0, 0), group("mac-a", 0, 2, 4), group("mac-a", 1, 0)})), 0.0
    )
    ledger.settle(group("mac-a", 0, 7))
    assert ledger.arrived_of("mac-a", 0) == {0, 2}  # what was only settled is not known to be there
    ledger.see(13, 0)
    assert ledger.arrived_of("mac-a", 0) == {0}
    ledger.see(14, 0)
    assert (ledger.arrived_of("mac-a", 0), ledger.waiting) == (frozenset(), 0)
    ledger.arrive(group("mac-a", 0, 0))
    assert ledger.waiting == 0


def test_sweeps_of_a_host_that_are_not_finished_are_counted_while_it_is_there():
    rule = replace(RULE, max_ahead=3)
    ledger = ledger_of(rule, facts(grants=tuple(grant("mac-a", sweep, 8 * sweep, num=2) for sweep in range(3))), 0.0)
    assert [ledger.num_unfinished_before("mac-a", sweep) for sweep in (0, 1, 2, 3)] == [0, 1, 2, 3]
    ledger.arrive(group("mac-a", 0, 0))
    ledger.arrive(group("mac-a", 0, 1))
    assert (ledger.num_unfinished_before("mac-a", 3), ledger.left("mac-a"), ledger.num_present) == (2, 4, 1)
    ledger.leave("mac-a")
    assert (ledger.num_unfinished_before("mac-a", 3), ledger.left("mac-a"), ledger.num_present, ledger.running) == (0, 0, 0, 0)
    assert not ledger.is_away("mac-b")
    assert ledger.newest_sweep("mac-b") == -1


def test_answer_of_a_large_fleet_costs_what_that_of_a_small_one_does():
    small, large = admission(30, num_asks=300), admission(3000, num_asks=300)
    # Counting all groups anew at each request took a hundred times as long for a hundred times the Macs.
    assert large.answer_seconds < 10 * small.answer_seconds
    assert large.arrival_seconds < 10 * small.arrival_seconds
