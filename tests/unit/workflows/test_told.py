"""What a run tells people of itself: what it waits for, and how long it took."""

from dataclasses import replace

from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.messages import RunInput, StopConditions
from workflows import fleet, plan
from workflows.state import Member, RunProgress

RULES = RunInput("demo", StopConditions(max_steps=12), EvaluationPlan(), seconds_before=30.0)
STATE = RunProgress(1000.0, lease_number=1, token=1001, owner="box", step=8, version=3, fleet_known=True)
STARVES = replace(STATE, starving_since=1010.0, num_missing=8, oldest_version=2)


def said(state: RunProgress, command: plan.TrainerCommand | None) -> str:
    return plan.status_of(state, RULES, 1050.0, command=command, since=1043.0).waiting_for


def test_step_without_groups_says_that_no_mac_is_here() -> None:
    waits = "step 9: waiting for 8 groups of version >= 2 since 40 s"
    assert said(STARVES, plan.Train(9)) == f"{waits}; no Mac is here: start one with `python -m worker_mac.worker`"
    assert said(replace(STARVES, members=(Member("mac-1"),)), plan.Train(9)) == waits
    assert said(replace(STARVES, num_macs=3), plan.Train(9)) == waits
    assert said(replace(STARVES, fleet_known=False), plan.Train(9)) == waits, "nobody has looked yet"


def test_paused_run_tells_why_also_while_it_ends_what_it_began() -> None:
    paused = replace(STATE, paused=True, reason="asked on the command line")
    began = "step 9: box trains or waits for groups of version >= 0 since 7 s"
    assert said(paused, plan.Train(9)) == f"paused (asked on the command line) once this is done: {began}"
    assert said(paused, None) == "paused (asked on the command line): waiting for `stoa resume demo`"
    assert said(replace(paused, reason=""), None) == "paused: waiting for `stoa resume demo`"
    assert said(replace(paused, ending=True), None).startswith("ending ("), "an end undoes a pause"


def test_result_has_the_times_and_limits_of_a_run_that_is_gone() -> None:
    told = plan.result_of(replace(STATE, step=12), RULES, 1050.0)
    assert (told.step, told.version, told.end_reason) == (12, 3, "all 12 steps are done")
    assert (told.started_at, told.ended_at, told.seconds_before) == (1000.0, 1050.0, 30.0)
    assert told.stop == StopConditions(max_steps=12)
    assert plan.status_of(STATE, RULES, 1050.0, command=None, since=0.0).seconds_before == 30.0


def test_of_two_macs_there_is_no_median() -> None:
    two = (Member("a", tokens_per_second=40.0, slow_because="heat"), Member("b", tokens_per_second=60.0))
    assert fleet.slowest(replace(STATE, members=two)) == "a: 40 tokens/s, the other has 60; heat"
    three = (*two, Member("c", tokens_per_second=90.0))
    assert fleet.slowest(replace(STATE, members=three)) == "a: 40 tokens/s, the median is 60; heat"
