"""An alarm holds the trainer, not the Macs."""

from stoa.contracts.messages import StepResult
from tests.unit.workflows.test_run_plan import RULES, at
from workflows import plan
from workflows.apply import apply
from workflows.events import Asked


def test_alarm_holds_the_trainer_and_lets_macs_play_on_until_a_person_pauses_them() -> None:
    alarmed = apply(StepResult("done", 9, alarm="ess_fraction 0.1 < 0.2"), at(8, strict_leases=True), RULES, 0.0)
    assert plan.next_for_trainer(alarmed, RULES, 0.0) is None
    assert plan.wanted_head(alarmed, RULES, 0.0) == "running"
    both = apply(Asked("pause", "to look"), alarmed, RULES, 0.0)
    assert plan.wanted_head(both, RULES, 0.0) == "paused"
    for state in (alarmed, both):
        again = apply(Asked("resume", ""), state, RULES, 0.0)
        assert (again.paused, again.macs_go_on, plan.wanted_head(again, RULES, 0.0)) == (False, False, "running")
        assert plan.next_for_trainer(again, RULES, 0.0) is not None
