"""Macs on trial: honest ones are trusted again after enough clean sweeps, whoever cheats is out, and nobody else decides it."""

from collections.abc import Iterator

import numpy as np
import pytest

from stoa.bucket import keys
from stoa.bucket.steps import Canary, HostCounts, Refused, StepManifest
from stoa.learning.fleet import MIN_GROUPS, Sample
from stoa.learning.trials import Standing, Trials
from tests.unit.learning.test_fleet import HOSTS, manifest, mismatch


def fleet(chance: np.random.Generator, num: int = 56) -> list[Sample]:
    """The newest groups of seven Macs that are trusted, at lags 0 and 1."""
    return [Sample(HOSTS[i % 7], 9, lag := i // 7 % 2, 4 * lag + i % 4, mismatch(chance, 0.01 * (1 + lag))) for i in range(num)]


def key(host: str, sweep: int, slot: int) -> str:
    return keys.group("toy", 8, host, sweep, slot)


def played(trials: Trials, host: str, sweep: int, chance: np.random.Generator, num: int = 4, **changes: float) -> None:
    for slot in range(num):
        trials.saw(
            key(host, sweep, slot), Sample(host, 9, slot % 2, 4 * (slot % 2) + 1, mismatch(chance, 0.01 * (1 + slot % 2), **changes))
        )


def test_an_honest_mac_is_trusted_again_after_its_clean_sweeps_and_not_before() -> None:
    chance = np.random.default_rng(1)
    trials, others = Trials(3, {"wrong_reward"}), fleet(chance)
    trials.hold(["framed"])
    assert trials.news(others) == ()
    for sweep in (5, 6):
        played(trials, "framed", sweep, chance)
        assert trials.news(others) == (Standing("framed", sweep - 4),)
        assert trials.news(others) == (), "told once"
    played(trials, "framed", 7, chance)
    assert trials.news(others) == (Standing("framed", 3, "clean"),)
    assert trials.news(others) == (Standing("framed", 3, "clean"),), "a verdict is told until the run has heard it"
    trials.hold([])
    assert trials.news(others) == ()


@pytest.mark.parametrize("changes", [{"factor": 6.0}, {"ratio": 0.85}])
def test_a_mac_that_edits_its_logprobs_fails_however_many_sweeps_it_plays(changes: dict[str, float]) -> None:
    chance = np.random.default_rng(2)
    trials, others = Trials(3, set()), fleet(chance)
    trials.hold(["cheat"])
    for sweep in range(6):
        played(trials, "cheat", sweep, chance, **changes)
        news = trials.news(others)
        assert all(one.verdict != "clean" for one in news)
    (last,) = news
    assert last.verdict == "failed"
    assert "sigma off" in last.reason


def test_two_that_cheat_alike_do_not_vouch_for_each_other() -> None:
    chance = np.random.default_rng(3)
    trials, others = Trials(2, set()), fleet(chance, 28)
    trials.hold(["one", "two"])
    for sweep in range(8):
        for host in ("one", "two"):
            played(trials, host, sweep, chance, factor=6.0)
    assert [(one.host, one.verdict) for one in trials.news(others)] == [("one", "failed"), ("two", "failed")]


def test_groups_refused_for_what_no_honest_mac_sends_damn_and_other_refusals_do_not() -> None:
    chance = np.random.default_rng(4)
    trials = Trials(2, {"wrong_reward"})
    trials.hold(["cheat", "late"])
    late = [Refused(key("late", 0, slot), "late", "slot_taken") for slot in range(5)]
    lies = [Refused(key("cheat", sweep, 0), "cheat", "wrong_reward") for sweep in range(3)]
    for sweep in range(3):
        played(trials, "late", sweep, chance)
        played(trials, "cheat", sweep, chance)
        trials.charge([*late, *lies[: sweep + 1]])
        trials.charge(lies[: sweep + 1])  # told again while no step is made
        if sweep < 2:
            assert [(one.num_clean, one.verdict) for one in trials.news([]) if one.host == "cheat"] == []
    cheat, honest = trials.news([])
    assert (cheat.host, cheat.num_clean, cheat.verdict) == ("cheat", 0, "failed")
    assert "3 canary groups refused, one as wrong_reward" in cheat.reason
    assert (honest.host, honest.verdict) == ("late", "clean")


def test_what_a_mac_did_before_its_trial_is_not_held_against_it() -> None:
    chance = np.random.default_rng(7)
    trials = Trials(2, {"wrong_reward"})
    before = [Refused(key("tried", 0, slot), "tried", "wrong_reward") for slot in range(5)]
    cheated = [Sample("tried", 9, slot % 2, 2, mismatch(chance, 0.01, factor=6.0)) for slot in range(8)]
    for sweep in (1, 2):
        trials.hold(["tried"], before)
        trials.charge(before)
        played(trials, "tried", sweep, chance)
        (news,) = trials.news([*fleet(chance), *cheated])
    assert news == Standing("tried", 2, "clean")


def test_sweeps_without_groups_that_can_be_compared_release_nobody_and_those_not_on_trial_are_not_watched() -> None:
    chance = np.random.default_rng(5)
    trials = Trials(1, {"wrong_reward"})
    trials.hold(["framed"])
    for sweep in range(4):
        trials.saw(key("framed", sweep, 0), None)
    assert trials.news([]) == (Standing("framed", 4),)
    played(trials, "framed", 4, chance, num=MIN_GROUPS)
    played(trials, "somebody", 4, chance)
    trials.charge([Refused(key("somebody", 4, slot), "somebody", "wrong_reward") for slot in range(9)])
    assert trials.news([]) == (Standing("framed", 5, "clean"),)
    trials.hold(["somebody"])
    trials.hold(["framed", "somebody"])
    assert trials.news([]) == (), "who comes again begins anew"


def test_groups_of_macs_on_trial_that_were_trained_on_before_are_nothing_to_compare_with() -> None:
    """Where all that is left of a fleet is on trial nobody is trusted, and what was admitted has to do."""
    chance = np.random.default_rng(12)
    trials = Trials(1, set())
    trials.hold(["one", "two"])
    for host in ("one", "two"):
        played(trials, host, 0, chance, num=MIN_GROUPS)
    before = [Sample("one", 3, 0, 0, mismatch(chance)) for _ in range(9)]
    assert trials.news(before) == (Standing("one", 1, "clean"), Standing("two", 1, "clean"))


def test_more_news_than_fit_come_later_with_verdicts_first() -> None:
    chance = np.random.default_rng(6)
    trials = Trials(1, set())
    hosts = [f"mac-{number}" for number in range(5)]
    trials.hold(hosts)
    for host in hosts[:4]:
        trials.saw(key(host, 0, 0), None)
    played(trials, hosts[4], 0, chance, num=MIN_GROUPS)
    assert [one.host for one in trials.news([], 3)] == ["mac-4", "mac-0", "mac-1"]
    trials.hold(hosts[:4])
    assert [one.host for one in trials.news([], 3)] == ["mac-2", "mac-3"]


def on_trial(step: int, sweep: int, chance: np.random.Generator, *, lies: int = 0, **changes: float) -> StepManifest:
    """A step that tells of four canary groups of "tried", the first two compared, and `lies` refused ones."""
    own = [key("tried", sweep, slot) for slot in range(4)]
    refused = [
        *(Refused(one, "tried", "canary") for one in own),
        *(Refused(key("tried", sweep, 9 + n), "tried", "wrong_reward") for n in range(lies)),
    ]
    seen = tuple(Canary(one, 9, 5, mismatch(chance, 0.02, **changes)) for one in own[:2])
    return manifest(step, [], refused=refused, canaries=seen, hosts={"tried": HostCounts(quarantined=True)})


def recalled(manifests: list[StepManifest], num_sweeps: int = 3) -> Trials:
    trials = Trials(num_sweeps, {"wrong_reward"})
    trials.hold(["tried"])
    trials.recall(reversed(manifests))
    return trials


def test_trainer_that_takes_over_goes_on_with_a_trial_where_it_was() -> None:
    chance = np.random.default_rng(8)
    before = [manifest(0, []), *(on_trial(1 + sweep, sweep, chance) for sweep in range(2))]
    trials, others = recalled(before), fleet(chance)
    assert trials.news(others) == (Standing("tried", 2),)
    for slot in range(4):
        trials.saw(key("tried", 1, slot), None)  # what no step told of yet is read again
    assert trials.news(others) == (), "and counts once"
    played(trials, "tried", 2, chance)
    assert trials.news(others) == (Standing("tried", 3, "clean"),), "the groups that were compared before count, too"


def test_only_the_trial_that_goes_on_is_recalled() -> None:
    chance = np.random.default_rng(9)
    ended = [on_trial(0, 0, chance, factor=9.0), on_trial(1, 1, chance, lies=3), manifest(2, [], hosts={"tried": HostCounts(accepted=4)})]
    trials = recalled([*ended, on_trial(3, 5, chance, lies=3), on_trial(4, 6, chance, lies=2)])
    assert trials.news(fleet(chance)) == (Standing("tried", 1),), "what its first step tells of as refused is from before it"


def test_a_cheat_does_not_outlive_its_trial_by_a_takeover() -> None:
    chance = np.random.default_rng(10)
    steps = [on_trial(step, step, chance, lies=int(step in (1, 2))) for step in range(3)]
    assert recalled(steps).news([]) == (Standing("tried", 1),)
    trials = recalled(steps)
    trials.charge([Refused(key("tried", 3, 0), "tried", "wrong_reward")])
    (news,) = trials.news([])
    assert (news.verdict, news.num_clean) == ("failed", 1)
    far = recalled([on_trial(step, step, chance, factor=9.0) for step in range(4)])
    (news,) = far.news(fleet(chance))
    assert news.verdict == "failed"


def test_recalling_ends_where_no_trial_goes_on_further_back() -> None:
    read: list[int] = []

    def steps() -> Iterator[StepManifest]:
        for step in (9, 8, 7, 6, 5):
            read.append(step)
            yield on_trial(step, step, np.random.default_rng(step)) if step > 7 else manifest(step, [])

    trials = Trials(3, set())
    trials.hold(["tried"])
    trials.recall(steps())
    assert read == [9, 8, 7]
