"""How a draining run ends: by what is on the way, or by its bound, and what it says until then."""

from dataclasses import replace

from stoa.contracts.fleet_messages import Census
from stoa.contracts.messages import HeadStateResult, StepResult, StopConditions
from tests.unit.workflows.test_run_plan import RULES, at
from workflows import plan
from workflows.apply import apply
from workflows.events import Asked, CensusTaken


def test_draining_run_trains_on_what_is_on_the_way_and_then_ends() -> None:
    rules = replace(RULES, groups_per_step=8, stop=StopConditions())
    state = apply(Asked("drain", "enough"), at(8), rules, 0.0)
    assert plan.run_state(state, rules, 0.0) == "draining"
    assert plan.next_for_desk(state, rules, 0.0, trainer_idle=False) == plan.SetHead("draining", "demo-1-0-draining")
    state = apply(HeadStateResult("draining", 3, 8, 1001), state, rules, 1.0)
    assert plan.next_for_trainer(state, rules, 1.0) == plan.Train(9, 5.0)
    state = apply(StepResult("starved", 9, wait_seconds=5.0, num_missing=4), state, rules, 6.0)
    assert plan.next_for_desk(state, rules, 6.0, trainer_idle=False) == plan.TakeCensus("")
    state = apply(CensusTaken("", 6.0, Census((), 0, "", 8, 4)), state, rules, 6.0)
    assert plan.end_reason(state, rules, 6.0) == ""  # eight groups are being played
    state = apply(StepResult("done", 9), state, rules, 20.0)
    state = apply(StepResult("starved", 10, wait_seconds=5.0, num_missing=6), state, rules, 30.0)
    state = apply(CensusTaken("", 30.0, Census((), 0, "", 0, 2)), state, rules, 30.0)
    assert plan.end_reason(state, rules, 30.0) == "drained: 2 groups were left"
    closing = plan.next_for_trainer(state, rules, 30.0)
    assert closing == plan.PublishVersion(9, anchor=True, checkpoint=True, announce=True)


def test_drain_does_not_wait_for_ever_for_a_mac_that_plays_on() -> None:
    rules = replace(RULES, groups_per_step=8, stop=StopConditions())
    state = replace(apply(Asked("drain", ""), at(8), rules, 0.0), head_state="draining")
    late = 1.5 * rules.evaluation.part_timeout_seconds + rules.starved_seconds
    playing = Census((), 1, "", 8, 0)
    assert plan.end_reason(apply(CensusTaken("", 0.0, playing), state, rules, late - 1), rules, late - 1) == ""
    assert plan.end_reason(apply(CensusTaken("", 0.0, playing), state, rules, late), rules, late) == "drained: 8 groups were left"


def test_drain_ends_by_its_bound_though_nobody_answers_and_says_so_before() -> None:
    """No trainer, no census and a HEAD that could not be told: 1.5 sweeps of 600 s and 300 s for a step are the most."""
    given = replace(RULES.evaluation, part_timeout_seconds=600.0)
    rules = replace(RULES, groups_per_step=8, stop=StopConditions(), evaluation=given, starved_seconds=300.0)
    state = replace(at(8), token=0, bounded_drain=True, groups_running=5)
    state = apply(Asked("drain", "enough"), state, rules, 10_000.0)
    told = plan.status_of(state, rules, 10_200.0, command=plan.Acquire(2), since=10_150.0)
    assert told.waiting_for == (
        "draining (enough): groups on the way are being counted; ends by 03:06:40 UTC, in 1000 s, at the latest; "
        "waiting for a trainer on queue gpu-demo since 50 s"
    )
    assert told.drain_until == 11_200.0
    assert plan.next_deadline(state, rules, 10_200.0) == 11_200.0
    assert plan.end_reason(state, rules, 11_199.0) == ""
    assert not plan.interrupts(plan.Acquire(2), state, rules, 11_199.0)
    assert plan.interrupts(plan.Acquire(2), state, rules, 11_200.0)
    assert plan.end_reason(state, rules, 11_200.0) == "its time to drain is over"
    counted = apply(CensusTaken("", 10_300.0, Census((), 1, "", 6, 3)), state, rules, 10_300.0)
    assert (
        "6 groups are being played, 3 wait for the trainer; ends by"
        in plan.status_of(counted, rules, 10_300.0, command=None, since=0.0).waiting_for
    )
    assert plan.end_reason(counted, rules, 11_200.0) == "drained as far as its time allowed: 9 groups were left"
    assert plan.end_reason(replace(counted, bounded_drain=False), rules, 99_999.0) == ""
