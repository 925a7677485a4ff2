"""Alarms: which metric crosses which bound, which way, and what is asked for."""

from stoa.config.run import Alarm, Alarms
from trainer_gpu.alarms import ring

QUIET = {"gate_drop_rate": 0.01, "mismatch_mean": 0.01, "ess_fraction": 0.9}
ALARMS = Alarms(
    gate_drop_rate=Alarm(threshold=0.03, action="pause"),
    mismatch_mean=Alarm(threshold=0.02, action="log"),
    ess_fraction=Alarm(threshold=0.2, action="pause"),
)


def test_quiet_step_rings_nothing() -> None:
    rung = ring(ALARMS, QUIET)
    assert (rung.metrics, rung.pause) == ({}, "")


def test_pausing_alarm_says_what_crossed_what() -> None:
    rung = ring(ALARMS, {**QUIET, "gate_drop_rate": 0.05})
    assert rung.metrics == {"alarm_gate_drop_rate": 1.0}
    assert rung.pause == "gate_drop_rate is 0.05, above 0.03"


def test_logged_alarm_does_not_pause() -> None:
    rung = ring(ALARMS, {**QUIET, "mismatch_mean": 0.5})
    assert (rung.metrics, rung.pause) == ({"alarm_mismatch_mean": 1.0}, "")


def test_effective_sample_size_rings_below_its_bound() -> None:
    assert ring(ALARMS, {**QUIET, "ess_fraction": 0.1}).pause == "ess_fraction is 0.1, below 0.2"
    assert ring(ALARMS, {**QUIET, "ess_fraction": 0.2}).pause == ""
