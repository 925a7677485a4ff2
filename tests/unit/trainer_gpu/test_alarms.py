"""Alarms: which metric crosses which bound, which way, for how long, beside which past, and what is asked for."""

import pytest

from stoa.config.run import Alarm, Alarms
from trainer_gpu.alarms import ADVICE, PAST_STEPS, AlarmBook, derived

QUIET = {
    "gate_drop_rate": 0.01,
    "mismatch_mean": 0.01,
    "ess_fraction": 0.9,
    "bad_fraction": 0.0,
    "grad_norm": 2.0,
    "entropy": 0.5,
    "logprob_positive_mean": -0.4,
    "cover": 0.3,
    "exact_match": 0.25,
    "reward_mean": 0.28,
    "answer_words_mean": 4.0,
    "learning_rate": 1e-6,
    "staleness_beyond_fraction": 0.0,
    "infra_fault_rate": 0.0,
    "quarantined_share": 0.0,
    "truncated_rate": 0.0,
    "malformed_rate": 0.0,
    "unanswered_rate": 0.0,
    "refused_wrong_state": 0.0,
    "zero_variance_fraction": 0.1,
}
NEVER = {name: Alarm(threshold=-1e9 if name == "ess_fraction" else 1e9) for name in Alarms.model_fields}


def book(past: int = 0, **alarms: Alarm) -> AlarmBook:
    """Only the alarms given; after `past` quiet steps."""
    made = AlarmBook(Alarms(**{**NEVER, **alarms}))
    for _ in range(past):
        made.ring(QUIET)
    return made


def fired(rung, kind: str = "alarm") -> set[str]:
    return {name.removeprefix(f"{kind}_") for name in rung.metrics if name.startswith(f"{kind}_")}


def test_quiet_run_rings_nothing_with_the_default_bounds() -> None:
    alarms = AlarmBook(Alarms())
    for _ in range(40):
        rung = alarms.ring(QUIET)
        assert (fired(rung), fired(rung, "warning"), rung.pause) == (set(), set(), "")


def test_equal_rewards_ring_once_when_no_step_can_be_made_of_what_came() -> None:
    alarms = book(zero_variance_fraction=Alarm(threshold=0.9, action="pause", steps=3))
    assert alarms.ring_unstepped(72, 8) == "", "72 of 80 is the bound itself"
    said = alarms.ring_unstepped(73, 8)
    assert said.startswith("zero_variance_fraction is at least 0.901, above 0.9: 73 groups came, and too few others for a step; the policy")
    assert alarms.ring_unstepped(1000, 8) == "", "a person who resumes has been told"
    alarms.ring(QUIET)
    assert alarms.ring_unstepped(1000, 8)
    assert book(zero_variance_fraction=Alarm(threshold=0.9)).ring_unstepped(1000, 8) == "", "the bound that is only logged"


def test_pausing_alarm_says_what_crossed_what_and_how_to_go_on() -> None:
    rung = book(gate_drop_rate=Alarm(threshold=0.03, action="pause")).ring({**QUIET, "gate_drop_rate": 0.05})
    assert fired(rung) == {"gate_drop_rate"}
    saw, _, rest = rung.pause.partition(": ")
    assert saw == "gate_drop_rate is 0.05, above 0.03"
    assert "stoa canary --decompose" in rest
    assert rest.endswith("See the metrics in `stoa report`; `stoa resume RUN` goes on, `stoa stop RUN` ends the run")


def test_every_alarm_says_what_to_do_about_it() -> None:
    assert set(ADVICE) == set(Alarms.model_fields)


@pytest.mark.parametrize("name", [name for name in Alarms.model_fields if name in QUIET or name in ("eval_fall", "eval_fall_twice")])
def test_alarm_on_a_metric_of_the_step_fires_beyond_its_bound(name: str) -> None:
    """Those that are worked out from the past have tests of their own below."""
    low, high = (0.9, 0.1) if name == "ess_fraction" else (0.1, 0.9)
    alarms = book(**{name: Alarm(threshold=0.5, action="pause")})
    assert alarms.ring({**QUIET, name: low}).pause == ""
    assert alarms.ring({**QUIET, name: high}).pause.startswith(f"{name} is {high}, ")


def of_versions(*fractions: float, steps: int = 4) -> list[dict[str, float]]:
    """Quiet steps, `steps` a version; the first step after a version knows what share of codes it changed."""
    return [{**QUIET, **({"changed_fraction": one} if number == 0 else {})} for one in fractions for number in range(steps)]


def test_share_of_changed_codes_is_judged_by_the_usual_one() -> None:
    alarms = book(changed_ratio=Alarm(threshold=3.0, action="pause"))
    rungs = [alarms.ring(one) for one in of_versions(0.004, 0.005, 0.006, 0.005, 0.016)]
    assert [bool(rung.pause) for rung in rungs] == [False] * 16 + [True] + [False] * 3
    assert rungs[16].metrics["changed_ratio"] == pytest.approx(3.2)
    assert "changed_ratio" not in rungs[8].metrics, "two versions are no usual share"


def test_version_that_changes_no_code_though_steps_were_taken_is_seen() -> None:
    alarms = book(changed_nothing=Alarm(threshold=0.5, action="pause"))
    assert [bool(alarms.ring(one).pause) for one in of_versions(0.004, 0.0, steps=2)] == [False, False, True, False]
    still = book(changed_nothing=Alarm(threshold=0.5, action="pause"))
    assert not still.ring({**QUIET, "changed_fraction": 0.0, "learning_rate": 0.0}).pause


def test_loose_mark_that_rises_while_the_strict_one_falls_is_seen() -> None:
    alarms = book(past=10, hacking=Alarm(threshold=0.1, action="pause"))
    both = [alarms.ring({**QUIET, "cover": 0.7, "reward_mean": 0.6}) for _ in range(10)]
    assert not any(rung.pause for rung in both), "both rise: the policy answers better"
    alarms = book(past=10, hacking=Alarm(threshold=0.1, action="pause"))
    rungs = [alarms.ring({**QUIET, "cover": 0.7, "reward_mean": 0.1}) for _ in range(10)]
    assert rungs[-1].metrics["hacking"] == pytest.approx(0.18)
    assert rungs[-1].pause.startswith("hacking is 0.18")


def test_answers_that_grow_are_judged_by_the_beginning() -> None:
    rung = book(past=PAST_STEPS, answer_words_ratio=Alarm(threshold=3.0, action="pause")).ring({**QUIET, "answer_words_mean": 14.0})
    assert rung.metrics["answer_words_ratio"] == pytest.approx(3.5)
    assert rung.pause


def test_held_out_result_is_judged_once() -> None:
    alarms = book(eval_fall=Alarm(threshold=0.0))
    assert alarms.eval_seen == -1
    first = alarms.ring({**QUIET, "eval_version": 4.0, "eval_pass_at_1": 0.2, "eval_fall": 0.05})
    assert fired(first) == {"eval_fall"}
    assert fired(alarms.ring(QUIET)) == set()
    assert alarms.eval_seen == 4
    assert AlarmBook(Alarms(**NEVER), [{**QUIET, **first.metrics}]).eval_seen == 4


def test_logged_alarm_does_not_pause() -> None:
    rung = book(mismatch_mean=Alarm(threshold=0.02, action="log")).ring({**QUIET, "mismatch_mean": 0.5})
    assert (fired(rung), rung.pause) == ({"mismatch_mean"}, "")


def test_warning_comes_before_the_alarm() -> None:
    alarms = book(bad_fraction=Alarm(threshold=0.005, action="pause", warn=0.001))
    near = alarms.ring({**QUIET, "bad_fraction": 0.002})
    assert (fired(near, "warning"), fired(near), near.pause) == ({"bad_fraction"}, set(), "")
    beyond = alarms.ring({**QUIET, "bad_fraction": 0.02})
    assert fired(beyond) == {"bad_fraction"}
    assert beyond.pause


def test_effective_sample_size_rings_below_its_bound() -> None:
    alarm = Alarm(threshold=0.2, action="pause")
    assert book(ess_fraction=alarm).ring({**QUIET, "ess_fraction": 0.1}).pause.startswith("ess_fraction is 0.1, below 0.2")
    assert book(ess_fraction=alarm).ring({**QUIET, "ess_fraction": 0.2}).pause == ""


def test_alarm_of_three_steps_waits_for_three_in_a_row() -> None:
    alarms = book(gate_drop_rate=Alarm(threshold=0.03, action="pause", steps=3))
    high = {**QUIET, "gate_drop_rate": 0.05}
    assert [bool(alarms.ring(m).pause) for m in (high, high, QUIET, high, high, high)] == [False] * 5 + [True]


def test_gradient_is_judged_by_its_running_median() -> None:
    alarms = book(past=9, grad_norm_ratio=Alarm(threshold=20.0, action="pause"))
    assert alarms.ring({**QUIET, "grad_norm": 39.0}).pause == ""
    rung = alarms.ring({**QUIET, "grad_norm": 41.0})
    assert rung.metrics["grad_norm_ratio"] == pytest.approx(20.5)
    assert rung.pause.startswith("grad_norm_ratio is 20.5, above 20")


def test_first_steps_have_no_past_to_be_judged_by() -> None:
    rung = book(past=4, grad_norm_ratio=Alarm(threshold=2.0)).ring({**QUIET, "grad_norm": 1e6})
    assert (fired(rung), rung.metrics["grad_norm_ratio"]) == (set(), 1.0)


def test_good_tokens_that_become_unlikely_are_seen() -> None:
    """-0.5 is a quarter below the running mean of -0.4."""
    rung = book(past=20, logprob_positive_fall=Alarm(threshold=0.2, action="pause")).ring({**QUIET, "logprob_positive_mean": -0.5})
    assert rung.metrics["logprob_positive_fall"] == pytest.approx(0.25)
    assert rung.pause
    assert book(past=20).ring({**QUIET, "logprob_positive_mean": -0.2}).metrics["logprob_positive_fall"] == 0.0


@pytest.mark.parametrize(("entropy", "octaves"), [(0.125, 2.0), (2.0, 2.0), (0.25, 1.0), (0.5, 0.0)])
def test_entropy_is_judged_by_the_runs_beginning_either_way(entropy: float, octaves: float) -> None:
    assert book(past=PAST_STEPS).ring({**QUIET, "entropy": entropy}).metrics["entropy_shift"] == pytest.approx(octaves)


def test_beginning_is_the_mean_of_the_first_steps_and_stays() -> None:
    alarms = book()
    starts = [alarms.ring({**QUIET, "entropy": float(step)}).metrics["entropy_start"] for step in range(1, 61)]
    assert starts[0] == 1.0
    assert starts[3] == pytest.approx(2.5)
    assert starts[19] == starts[59] == pytest.approx(10.5)


def test_mismatch_is_held_against_the_beginning_but_not_against_less_than_int8_makes() -> None:
    alarms = book(past=20, mismatch_ratio=Alarm(threshold=8.0))  # 0.01 in each of the 20 steps
    assert alarms.ring({**QUIET, "mismatch_mean": 0.05}).metrics["mismatch_ratio"] == pytest.approx(5.0)
    assert fired(alarms.ring({**QUIET, "mismatch_mean": 0.081})) == {"mismatch_ratio"}
    exact = book()
    for _ in range(20):
        exact.ring({**QUIET, "mismatch_mean": 0.0})
    assert exact.ring({**QUIET, "mismatch_mean": 0.02}).metrics["mismatch_ratio"] == pytest.approx(0.02 / 0.004)


def test_mismatch_climbs_only_while_it_rises_five_steps_in_a_row() -> None:
    alarms = book(mismatch_climb=Alarm(threshold=0.02, action="pause"))
    climb = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.055, 0.06]
    assert [alarms.ring({**QUIET, "mismatch_mean": m}).metrics["mismatch_climb"] for m in climb] == [0, 0, 0, 0, 0, 0.06, 0, 0]
    flat = book(mismatch_climb=Alarm(threshold=0.02, action="pause"))
    assert all(flat.ring({**QUIET, "mismatch_mean": 0.05}).metrics["mismatch_climb"] == 0 for _ in range(7)), "as with learning rate 0"


def test_lost_effective_sample_size_is_a_share_of_that_of_five_steps_ago() -> None:
    assert book(past=5).ring({**QUIET, "ess_fraction": 0.45}).metrics["ess_fall"] == pytest.approx(0.5)


def test_answers_that_name_gold_words_without_answering_are_seen() -> None:
    rung = book(past=20, cover_gap_rise=Alarm(threshold=0.2)).ring({**QUIET, "cover": 0.9})
    assert rung.metrics["cover_gap_rise"] == pytest.approx(0.6)
    assert fired(rung) == {"cover_gap_rise"}


def test_resumed_trainer_judges_as_one_that_never_stopped() -> None:
    steps = [{**QUIET, "entropy": 0.5 + 0.01 * n, "grad_norm": 1.0 + n % 3, "mismatch_mean": 0.01 + 0.001 * n} for n in range(30)]
    for n in range(0, 30, 3):
        steps[n] |= {"changed_fraction": 0.001 * n, "cover": 0.3 + 0.01 * n, "eval_version": float(n)}
    alarms = AlarmBook(Alarms(**NEVER))
    manifests = [{**step, **alarms.ring(step).metrics} for step in steps]
    for cut in (1, 4, 13, 27):
        resumed = AlarmBook(Alarms(**NEVER), manifests[max(0, cut - PAST_STEPS) : cut])
        assert [resumed.ring(step).metrics for step in steps[cut:]] == [
            {name: value for name, value in done.items() if name not in step}
            for step, done in zip(steps[cut:], manifests[cut:], strict=True)
        ]


def test_derived_metrics_are_all_declared() -> None:
    from stoa.telemetry.metrics import CATALOGUE, find

    past = [{**QUIET, "num_versions_seen": 4.0, "changed_usual": 0.004}]
    assert all(find(name) in CATALOGUE for name in derived({**QUIET, "changed_fraction": 0.005}, past))
