"""Plan and apply of a run, driven by a simulated world that fails at random: invariants over whole runs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.contracts.evaluation_messages import EvalAsk, EvaluationPlan, EvaluationResult, MacList
from stoa.contracts.fleet_messages import Census, FleetEvent, MacFacts, Released
from stoa.contracts.messages import (
    Acquired,
    AnchorCadence,
    Checkpointed,
    HeadStateResult,
    LeaseFound,
    Published,
    RunInput,
    StepResult,
    StopConditions,
    VersionFacts,
)
from workflows import anchors, plan
from workflows.apply import apply
from workflows.events import (
    Asked,
    CensusTaken,
    DeskFailed,
    EvaluationLost,
    EvaluationOpened,
    Event,
    Told,
    TrainerFailed,
    VersionPublished,
)
from workflows.state import RunProgress, dump, first_run_progress

RULES = RunInput(
    "demo",
    StopConditions(max_steps=12),
    EvaluationPlan(every_versions=2, num_questions=8, num_questions_final=16, timeout_seconds=50),
    steps_per_version=4,
    anchor_every_versions=2,
    checkpoint_every_versions=2,
    heartbeat_seconds=5,
)


class Simulation:
    """A world in which every command either works or fails, as `fates` say; time passes with each turn."""

    def __init__(self, rules: RunInput, fates: list[int]) -> None:
        self.rules, self.fates, self.now = rules, fates, 1000.0
        self.state = replace(first_run_progress(rules, self.now), strict_leases=True, lease_unknown=True)
        self.commands: list[object] = []
        self.head = {"epoch": 0, "version": -1, "step": 0, "state": "running"}
        self.memory = 0  # step of the trainer that holds the lease
        self.published: list[tuple[int, int]] = []
        self.open: list[str] = []

    def fate(self) -> int:
        return self.fates.pop(0) if self.fates else 0

    def take(self, event: Event) -> None:
        self.state = apply(event, self.state, self.rules, self.now)
        text = dump(self.state)
        assert len(text) < 256 * 1024
        assert first_run_progress(replace(self.rules, carried=text), 0.0) == self.state

    def run(self, max_turns: int = 400) -> RunProgress:
        for _ in range(max_turns):
            for lost in plan.expired(self.state, self.rules, self.now):
                self.take(EvaluationLost(lost, "late"))
            trainer = plan.next_for_trainer(self.state, self.rules, self.now)
            desk = plan.next_for_desk(self.state, self.rules, self.now, trainer_idle=trainer is None)
            if trainer is None and desk is None and plan.is_finished(self.state, self.rules, self.now):
                return self.state
            for command in (trainer, desk):
                if command is not None:
                    self.commands.append(command)
                    self.take(self.do(command))
            if self.open and self.fate() % 2 == 0:
                name, version = self.open.pop(0).split("@")
                self.take(EvaluationResult("demo", name, int(version), 16, 0.5, (0.4, 0.6), 0.5))
            if self.state.paused:
                self.take(Asked("resume", ""))
            self.now += 1.0 if trainer or desk else 10.0
        raise AssertionError(f"no end: {self.state}")

    def do(self, command: object) -> Event:
        failed = TrainerFailed(type(command).__name__, "timeout", "heartbeat", hopeless=False)
        fate = self.fate()
        match command:
            case plan.FindLease():
                return failed if fate == 3 else LeaseFound(self.head["epoch"])
            case plan.Acquire():
                if fate == 3:
                    return failed
                token = command.lease_number * 1000 + 1
                if token <= self.head["epoch"]:
                    return TrainerFailed("Acquire", "FencedError", "too old", hopeless=True)
                self.head |= {"epoch": token, "version": self.head["version"] + 1}
                self.memory = self.head["step"]
                self.published.append((self.head["version"], self.memory))
                return Acquired(token, "box", f"gpu-demo-e{token}", self.memory, self.head["version"], self.head["state"])
            case plan.Train():
                assert command.step == self.memory + 1
                if fate == 3:
                    return failed
                if fate == 2:
                    return StepResult("starved", command.step, reason="no groups", wait_seconds=300)
                self.memory += 1
                return StepResult("done", command.step, reward_mean=0.5)
            case plan.PublishVersion():
                assert command.step == self.memory
                if fate == 3:
                    return failed
                self.head["version"] += 1
                self.head["step"] = command.step if command.checkpoint else self.head["step"]
                self.published.append((self.head["version"], command.step))
                return VersionPublished(Published(self.head["version"], command.step, "m"), command.checkpoint)
            case plan.SaveCheckpoint():
                self.head["step"] = command.step
                return Checkpointed(command.step, "c")
            case plan.SetHead():
                if fate == 3:
                    return DeskFailed("SetHead", "no bucket")
                self.head["state"] = command.state
                return HeadStateResult(command.state, self.head["version"], self.memory, self.head["epoch"])
            case plan.FindMacs():
                return MacList(("mac-1",))
            case plan.OpenEvaluation():
                self.open.append(f"{command.evaluation.name}@{command.evaluation.version}")
                return EvaluationOpened(command.evaluation)
            case plan.Release():
                return Released(1)
            case plan.TakeCensus():
                if fate == 3:
                    return DeskFailed("TakeCensus", "no server")
                return CensusTaken(command.after_host, self.now, Census((MacFacts("mac-1"),), 1))
            case plan.TellMac():
                return Told(command.standing.host)
        raise AssertionError(command)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=150))
def test_run_ends_whatever_fails_and_its_chain_of_versions_has_no_hole(fates: list[int]) -> None:
    world = Simulation(RULES, fates)
    state = world.run()
    assert state.step == 12
    assert state.published_step == 12
    assert [version for version, _ in world.published] == list(range(len(world.published)))
    assert state.version == world.published[-1][0]
    assert state.released
    if not any(isinstance(command, plan.SetHead) and command.state == "stopped" for command in world.commands):
        raise AssertionError("HEAD was never told to stop")
    asked = [command.evaluation.name for command in world.commands if isinstance(command, plan.OpenEvaluation)]
    assert len(asked) == len(set(asked))
    assert sum(name.endswith("-first") for name in asked) == 1
    assert sum(name.endswith("-last") for name in asked) == 1
    assert not state.opened
    assert not state.wanted


def test_starved_run_publishes_one_anchor_of_a_version_and_no_more() -> None:
    """No Mac may have a way to the newest version: an anchor is one. A fleet that is only gone costs one, not one a wait."""
    state = replace(RunProgress(1000.0), token=1001, version=3, step=10, published_step=8, anchored_version=2)
    starved = StepResult("starved", 11, reason="no groups", wait_seconds=300)
    state = apply(starved, state, RULES, 2000.0)
    assert plan.next_for_trainer(state, RULES, 2000.0) == plan.PublishVersion(10, anchor=True, checkpoint=True, announce=True)
    state = apply(VersionPublished(Published(4, 10, "m", anchor_bytes=9), True), state, RULES, 2001.0)
    assert plan.next_for_trainer(state, RULES, 2001.0) == plan.Train(11)
    state = apply(starved, state, RULES, 3000.0)
    assert plan.next_for_trainer(state, RULES, 3000.0) == plan.Train(11)
    ended = apply(StepResult("stopped", 11, reason="asked to end"), replace(state, version=5), RULES, 3000.0)
    assert plan.next_for_trainer(ended, RULES, 3100.0) == plan.Train(11)


def test_without_failures_every_step_is_done_once_and_published_by_cadence() -> None:
    world = Simulation(RULES, [])
    world.run()
    assert [command.step for command in world.commands if isinstance(command, plan.Train)] == list(range(1, 13))
    published = [command for command in world.commands if isinstance(command, plan.PublishVersion)]
    # versions 1, 2, 3: 2 is the turn of the anchor and the checkpoint; the last version is always saved, with an anchor of its own
    assert [(one.step, one.anchor, one.checkpoint) for one in published] == [(4, False, False), (8, True, True), (12, True, True)]


def at(step: int, **changes: object) -> RunProgress:
    base = RunProgress(0.0, lease_number=1, token=1001, owner="box", queue="q", step=step, version=3, published_step=8, fleet_known=True)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_lost_lease_falls_back_to_what_head_names() -> None:
    failed = TrainerFailed("Train", "LostStateError", "memory is gone", hopeless=True)
    after = apply(failed, at(11), RULES, 100.0)
    assert (after.token, after.step, after.paused) == (0, 8, False)
    assert plan.next_for_trainer(after, RULES, 100.0) == plan.Acquire(2)


def test_five_failures_in_a_row_pause_and_a_step_forgives_them() -> None:
    failed = TrainerFailed("Train", "timeout", "heartbeat", hopeless=False)
    state = at(8)
    for num in range(1, 5):
        state = apply(failed, state, RULES, 100.0)
        assert (state.num_failures, state.paused) == (num, False)
    assert apply(StepResult("done", 9), state, RULES, 100.0).num_failures == 0
    assert apply(failed, state, RULES, 100.0).paused


def test_waits_between_failures_grow_to_a_minute() -> None:
    state, waits = at(8), []
    for _ in range(9):
        state = replace(apply(TrainerFailed("Acquire", "timeout", "x", hopeless=False), state, RULES, 0.0), paused=False)
        waits.append(state.trainer_hold_until)
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_stop_asked_twice_goes_without_the_last_evaluation() -> None:
    once = apply(Asked("stop", "enough"), at(8, checkpoint_step=8), RULES, 5.0)
    assert plan.last_evaluation(once, RULES, 5.0) is not None
    twice = apply(Asked("stop", "now"), once, RULES, 6.0)
    assert plan.last_evaluation(twice, RULES, 6.0) is None
    assert plan.wanted_head(twice, RULES, 6.0) == "stopped"


def test_wall_clock_interrupts_a_waiting_step_but_never_a_publish() -> None:
    rules = replace(RULES, stop=StopConditions(max_seconds=60))
    assert plan.next_deadline(at(8), rules, 10.0) == 60.0
    assert not plan.interrupts(plan.Train(9), at(8), rules, 59.9)
    assert plan.interrupts(plan.Train(9), at(8), rules, 60.0)
    assert not plan.interrupts(plan.PublishVersion(8, False, False), at(8), rules, 60.0)


def test_pause_reaches_head_while_a_step_runs() -> None:
    paused = apply(Asked("pause", "lunch"), at(9), RULES, 1.0)
    assert plan.next_for_desk(paused, RULES, 1.0, trainer_idle=False) == plan.SetHead("paused", "demo-1-0-paused")
    assert plan.next_for_trainer(paused, RULES, 1.0) is None


def test_ending_run_whose_macs_are_all_gone_does_not_wait_for_its_evaluation() -> None:
    state = apply(FleetEvent("demo", "mac-1", "s", "joined"), at(12, published_step=12, checkpoint_step=12), RULES, 0.0)
    last = plan.last_evaluation(state, RULES, 0.0)
    assert last is not None
    state = apply(EvaluationOpened(last), state, RULES, 10.0)
    assert plan.expired(state, RULES, 50.0) == ()
    gone = apply(FleetEvent("demo", "mac-1", "s", "left"), state, replace(RULES, evaluation=replace(RULES.evaluation)), 20.0)
    rules = replace(RULES, evaluation=replace(RULES.evaluation, timeout_seconds=10_000))
    assert plan.expired(gone, rules, 79.0) == ()
    assert [one.name for one in plan.expired(gone, rules, 80.0)] == [last.name]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (plan.Acquire(2), "waiting for a trainer on queue gpu-demo since 40 s"),
        (plan.Train(9), "step 9: box trains or waits for groups of version >= 0 since 40 s"),
        (plan.PublishVersion(8, False, False), "waiting for box to publish version 4 since 40 s"),
    ],
)
def test_status_says_in_one_sentence_what_is_waited_for(command: plan.TrainerCommand, words: str) -> None:
    status = plan.status_of(at(8), RULES, 140.0, command=command, since=100.0)
    assert status.waiting_for == words


@pytest.mark.parametrize(("hosts", "words"), [(("mac-1",), "by 1 Mac"), (("mac-1", "mac-2"), "by 2 Macs")])
def test_status_of_an_ending_run_counts_its_macs_in_words(hosts: tuple[str, ...], words: str) -> None:
    state = apply(Asked("stop", "enough"), at(8, checkpoint_step=8), RULES, 5.0)
    for host in hosts:
        state = apply(FleetEvent("demo", host, "s", "joined"), state, RULES, 5.0)
    last = plan.last_evaluation(state, RULES, 5.0)
    assert last is not None
    state = apply(EvaluationOpened(last), state, RULES, 6.0)
    assert plan.status_of(state, RULES, 6.0, command=None, since=0.0).waiting_for.endswith(words)


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        (StopConditions(max_gpu_hours=2.0), "2 GPU hours are used"),
        (StopConditions(max_dollars=6.0, dollars_per_gpu_hour=3.0), "6 dollars are spent"),
    ],
)
def test_budget_ends_the_run_when_the_leases_have_used_it(stop: StopConditions, reason: str) -> None:
    rules = replace(RULES, stop=stop)
    acquired = Acquired(1001, "box", "q", 0, 0, num_gpus=4)
    state = apply(acquired, RunProgress(0.0), rules, 1000.0)
    assert plan.end_reason(state, rules, 2500.0) == ""
    # 4 GPUs for 900 s are one hour. The lease is lost, nothing runs for a while, then another is taken.
    state = apply(TrainerFailed("Train", "timeout", "heartbeat", hopeless=False), state, rules, 1900.0)
    assert plan.status_of(state, rules, 5000.0, command=None, since=0.0).gpu_hours == 1.0
    state = apply(acquired, state, rules, 10_000.0)
    assert plan.next_deadline(state, rules, 10_000.0) == 10_900.0
    assert plan.end_reason(state, rules, 10_899.0) == ""
    assert plan.end_reason(state, rules, 10_900.0) == reason


def test_target_counts_once_its_lower_bound_is_reached() -> None:
    rules = replace(RULES, stop=StopConditions(target_pass_at_1=0.6))
    lucky = EvaluationResult("demo", "v4-every", 4, 64, 0.65, (0.53, 0.76), 0.9)
    state = apply(lucky, at(8), rules, 0.0)
    assert plan.end_reason(state, rules, 0.0) == ""
    sure = replace(lucky, evaluation="v8-every", version=8, num_questions=512, interval_95=(0.609, 0.69))
    assert plan.end_reason(apply(sure, state, rules, 0.0), rules, 0.0) == "pass@1 has reached 0.6: at least 0.609 at version 8"


def test_alarm_pauses_or_ends_as_the_run_says() -> None:
    alarm = StepResult("done", 9, alarm="ess_fraction 0.1 < 0.2")
    assert apply(alarm, at(8), RULES, 0.0).paused
    ends = replace(RULES, stop=StopConditions(on_alarm=True))
    assert plan.end_reason(apply(alarm, at(8), ends, 0.0), ends, 0.0) == "alarm at step 9: ess_fraction 0.1 < 0.2"


def test_step_is_asked_for_in_parts_so_that_the_run_can_say_what_is_missing() -> None:
    rules = replace(RULES, groups_per_step=16, starved_seconds=100.0)
    state, now, waits = at(8, anchored_version=2, num_macs=1), 1000.0, []
    for missing in (12, 10, 9):
        command = plan.next_for_trainer(state, rules, now)
        assert isinstance(command, plan.Train)
        waits.append(command.wait_seconds)
        now += command.wait_seconds
        result = StepResult("starved", 9, wait_seconds=command.wait_seconds, reason="few", num_missing=missing, oldest_version=7)
        state = apply(result, state, rules, now)
        assert not state.anchor_wanted
    assert waits == [10.0, 20.0, 60.0]
    status = plan.status_of(state, rules, 1100.0, command=plan.Train(9), since=1090.0)
    assert status.waiting_for == "step 9: waiting for 9 groups of version >= 7 since 100 s"
    assert plan.next_for_trainer(state, rules, now) == plan.Train(9, 10.0)
    state = apply(StepResult("starved", 9, wait_seconds=10.0, reason="few", num_missing=9, oldest_version=7), state, rules, 1100.0)
    assert state.anchor_wanted
    assert apply(StepResult("done", 9), state, rules, 1101.0).starving_since == 0.0


def test_sentence_counts_groups_of_equal_rewards_until_a_step_is_done() -> None:
    def said(**equal: int) -> tuple[RunProgress, str]:
        result = StepResult("starved", 9, wait_seconds=10.0, num_missing=8, oldest_version=0, equal_rewards=equal)
        state = apply(result, at(8, num_macs=1), RULES, 1010.0)
        return state, plan.status_of(state, RULES, 1046.0, command=plan.Train(9), since=1040.0).waiting_for

    waits = "step 9: waiting for 8 groups of version >= 0 since 46 s"
    assert said()[1] == waits
    assert said(all_zero=97)[1] == f"{waits}; 97 groups had equal rewards: all 0"
    assert said(all_equal=1)[1] == f"{waits}; 1 group had equal rewards: all alike"
    state, sentence = said(all_one=3, all_zero=20, invented=5)
    assert sentence == f"{waits}; 23 groups had equal rewards: 20 all 0, 3 all 1"
    assert first_run_progress(replace(RULES, carried=dump(state)), 0.0).equal_rewards == state.equal_rewards
    assert apply(StepResult("done", 9), state, RULES, 1101.0).equal_rewards == ()


def test_alarm_of_a_step_that_cannot_be_made_pauses_the_run() -> None:
    alarm = StepResult("starved", 9, wait_seconds=10.0, num_missing=8, alarm="zero_variance_fraction is 0.93, above 0.9")
    state = apply(alarm, at(8), RULES, 1010.0)
    assert (state.paused, state.reason) == (True, "alarm at step 9: zero_variance_fraction is 0.93, above 0.9")
    ends = replace(RULES, stop=StopConditions(on_alarm=True))
    assert plan.end_reason(apply(alarm, at(8), ends, 0.0), ends, 0.0) == "alarm at step 9: zero_variance_fraction is 0.93, above 0.9"


def test_status_tells_the_limits_in_force() -> None:
    rules = replace(RULES, stop=StopConditions(max_steps=77, max_seconds=5.0))
    assert plan.status_of(at(8), rules, 0.0, command=None, since=0.0).stop == StopConditions(max_steps=77, max_seconds=5.0)


def test_anchors_follow_the_cadence_a_person_sets() -> None:
    state = apply(AnchorCadence(3), at(12), RULES, 0.0)
    assert [anchors.is_due(state, RULES, version) for version in (4, 5, 6, 9)] == [False, False, True, True]
    assert [anchors.is_due(at(12), RULES, version) for version in (4, 5, 6)] == [True, False, True]


def test_anchors_by_join_cost_come_when_sending_and_joining_together_cost_least() -> None:
    rules = replace(RULES, anchor_every_versions=20, anchor_by_join_cost=True)
    # An anchor of 8 GB, deltas of 50 MB, 5 joins a version: sqrt(2 * 8e9 / (5 * 5e7)) = 8 versions.
    state = at(12, anchored_version=10, weights_bytes=8_000_000_000, delta_bytes=50_000_000, joins_a_version=5.0)
    assert anchors.best_distance(state) == 8.0
    assert [anchors.is_due(state, rules, version) for version in (17, 18)] == [False, True]
    nobody = replace(state, joins_a_version=0.0)
    assert [anchors.is_due(nobody, rules, version) for version in (29, 30)] == [False, True]
    crowd = replace(state, joins_a_version=5000.0)
    assert anchors.is_due(crowd, rules, 11)


def test_joins_a_version_are_counted_of_macs_that_come_without_weights() -> None:
    state = at(8)
    for host, sweep in (("mac-a", 0), ("mac-b", 0), ("mac-c", 17)):
        state = apply(FleetEvent("demo", host, "s", "joined", sweep), state, RULES, 0.0)
    state = apply(VersionPublished(Published(4, 8, "m", arrived_version=3, arrived_delta_bytes=77), False), state, RULES, 0.0)
    assert (round(state.joins_a_version, 3), state.num_joins, state.delta_bytes) == (0.2, 0, 77)


def test_version_on_its_way_is_not_one_that_head_must_name() -> None:
    """Its lease may be lost before it arrives; the next one begins from the version before it, and nobody put HEAD back."""
    state = apply(Acquired(1001, "box", "q", 0, 3, anchor_version=0), RunProgress(0.0), RULES, 1.0)
    assert (state.version, state.arrived_version) == (3, 3)
    state = apply(VersionPublished(Published(4, 4, "", arrived_version=3), True), state, RULES, 2.0)
    assert (state.version, state.arrived_version) == (4, 3)
    state = apply(VersionPublished(Published(5, 8, "", arrived_version=4), True), state, RULES, 3.0)
    assert (state.version, state.arrived_version) == (5, 4)
    waited_for = apply(VersionPublished(Published(6, 12, "manifest", arrived_version=6), True), state, RULES, 4.0)
    assert (waited_for.version, waited_for.arrived_version) == (6, 6)


def test_versions_are_remembered_with_their_size_and_result() -> None:
    state = apply(Acquired(1001, "box", "q", 0, 0, anchor_version=0), RunProgress(0.0), RULES, 1.0)
    state = apply(VersionPublished(Published(1, 4, "m"), False), replace(state, reward_mean=0.25), RULES, 2.0)
    state = apply(
        VersionPublished(Published(2, 8, "m", anchor_bytes=9, arrived_version=1, arrived_delta_bytes=77), True), state, RULES, 3.0
    )
    state = apply(EvaluationResult("demo", "v1-every", 1, 8, 0.5, (0.2, 0.8), 0.5), state, RULES, 4.0)
    assert state.versions == (
        VersionFacts(0, 0, 1.0, has_anchor=True),
        VersionFacts(1, 4, 2.0, 0.25, 77, False, 0.5),
        VersionFacts(2, 8, 3.0, 0.25, 0, True),
    )


def test_person_who_stops_a_run_without_macs_does_not_wait_a_minute() -> None:
    state = apply(Asked("stop", "enough"), at(8, published_step=8, checkpoint_step=8, num_macs=0), RULES, 0.0)
    last = plan.last_evaluation(state, RULES, 0.0)
    assert last is not None
    state = apply(EvaluationOpened(last), state, RULES, 1.0)
    assert plan.expired(state, RULES, 10.9) == ()
    assert len(plan.expired(state, RULES, 11.0)) == 1


def test_lease_is_numbered_above_the_one_in_head_and_asked_for_again_after_a_fence() -> None:
    """So it goes after a reset: the workflow's count has gone back, HEAD's has not."""
    state = RunProgress(0.0, lease_number=2, strict_leases=True)
    assert plan.next_for_trainer(state, RULES, 0.0) == plan.Acquire(3)
    state = apply(TrainerFailed("Acquire", "FencedError", "too old", hopeless=True), state, RULES, 0.0)
    assert not state.ending
    assert plan.next_for_trainer(state, RULES, 0.0) == plan.FindLease()
    state = apply(LeaseFound(7002), state, RULES, 0.0)
    assert plan.next_for_trainer(state, RULES, 0.0) == plan.Acquire(8)
    # A HEAD without a lease, or an older one, does not take a number back that was asked for.
    assert plan.next_for_trainer(apply(LeaseFound(0), replace(state, lease_unknown=True), RULES, 0.0), RULES, 0.0) == plan.Acquire(8)


def test_asked_evaluation_is_opened_with_the_runs_numbers_and_holds_its_end_up() -> None:
    state = at(8, published_step=8, checkpoint_step=8, version=2, full_version=2, num_macs=1)
    asked = EvalAsk("mine", num_samples=8)
    assert plan.no_evaluation(asked, state) == ""
    evaluation = plan.asked_evaluation(asked, state, RULES)
    assert (evaluation.version, evaluation.num_questions, evaluation.num_samples) == (2, 16, 8)
    state = apply(evaluation, state, RULES, 1.0)
    assert plan.next_for_desk(replace(state, fleet_known=True), RULES, 1.0, trainer_idle=False) == plan.OpenEvaluation(evaluation)
    state = apply(Asked("stop", "enough"), apply(EvaluationOpened(evaluation), state, RULES, 2.0), RULES, 3.0)
    assert not plan.is_finished(replace(state, head_state="stopped", released=True), RULES, 4.0)
    state = apply(EvaluationResult("demo", "mine", 2, 16, 0.5, (0.2, 0.8), 0.5), state, RULES, 5.0)
    assert plan.is_finished(replace(state, head_state="stopped", released=True), RULES, 6.0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (EvalAsk("mine", version=3), "version 3 is not published"),
        (EvalAsk("mine", version=-2), "version -2 is not published"),
        (EvalAsk("v2-last"), "is no name"),
        (EvalAsk("../x"), "is no name"),
        (EvalAsk("known"), "was asked for before"),
        (EvalAsk("mine", num_samples=17), "at most"),
        (EvalAsk("mine", num_questions=-1), "at most"),
    ],
)
def test_evaluation_that_cannot_be_is_refused_with_the_reason(asked: EvalAsk, words: str) -> None:
    state = apply(EvaluationResult("demo", "known", 1, 8, 0.5, (0.2, 0.8), 0.5), at(8, version=2), RULES, 0.0)
    assert words in plan.no_evaluation(asked, state)


def test_no_more_evaluations_are_taken_than_can_be_played() -> None:
    state = at(8, version=2)
    for number in range(3):
        asked = EvalAsk(f"mine-{number}")
        assert plan.no_evaluation(asked, state) == ""
        state = apply(plan.asked_evaluation(asked, state, RULES), state, RULES, 0.0)
    assert "under way" in plan.no_evaluation(EvalAsk("one-more"), state)
