"""What a resumed run is given of the one before."""

from types import SimpleNamespace
from typing import cast

from cli.temporal import Control
from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.messages import RunInput, RunResult, StopConditions


def test_resumed_run_brings_the_time_of_every_leg_before() -> None:
    """The second leg took 90 s after the 30 s of the first; nobody counts what lay between."""
    before = RunResult("demo", "done", 8, 2, gpu_hours=0.5, started_at=1000.0, ended_at=1090.0, seconds_before=30.0, drained=("mac-2",))
    control = cast(Control, SimpleNamespace(result=lambda _: before))
    start = RunInput("demo", StopConditions(max_steps=12), EvaluationPlan())
    given = Control.carried_over(control, start)
    assert (given.seconds_before, given.gpu_hours, given.drained) == (120.0, 0.5, ("mac-2",))
    before = RunResult("demo", "done", 8, 2)
    assert Control.carried_over(control, start).seconds_before == 0.0, "a result that tells no times"
