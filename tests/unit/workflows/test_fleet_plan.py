"""A run's fleet: who is in it, how it is paged and carried, who may not play, and what a resumed run knows of before."""

import json
from dataclasses import replace

from activities.connection import DATA_CONVERTER
from stoa.contracts.fleet_messages import Census, FleetEvent, FleetQuery, MacFacts, Standing
from stoa.contracts.messages import Acquired, CanaryNews, Published, StepResult, StopConditions, Suspect
from tests.unit.workflows.test_run_plan import RULES, at
from workflows import fleet, plan
from workflows.apply import apply
from workflows.events import CensusTaken, Decided, Told, VersionPublished
from workflows.state import dump, first_run_progress


def test_carried_state_of_a_large_fleet_stays_under_its_limit() -> None:
    state = at(8)
    facts = [
        MacFacts(
            f"mac-of-a-person-with-a-very-long-name-{index:05d}-00", "resting", 99_999_999, 99_999_999, 12345.6, "\u00e4" * 48, "y" * 64
        )
        for index in range(1100)
    ]
    state = apply(CensusTaken("", 0.0, Census(tuple(facts), 10_000)), state, RULES, 2e9)
    for index in range(250):
        state = apply(Decided(f"mac-of-a-person-with-a-very-long-name-{index:05d}-00", "quarantined", "z" * 300), state, RULES, 2e9)
    for version in range(400):
        state = apply(VersionPublished(Published(version, 4 * version, "m", anchor_bytes=10**10), False), state, RULES, 2e9)
    assert len(state.members) == 1000
    assert (len(state.banned), len(state.versions)) == (200, 200)
    carried = replace(RULES, carried=dump(state))
    (payload,) = DATA_CONVERTER.payload_converter.to_payloads([carried])  # raises above 256 KiB
    assert first_run_progress(carried, 0.0) == state
    assert len(payload.data) > 100_000


def test_every_page_of_the_fleet_fits_a_message() -> None:
    state, seen, after = at(8), list[str](), ""
    facts = tuple(MacFacts("h" * 40 + f"{index:04d}", "live", 9, 9, 1.5, "x" * 48, "y" * 64) for index in range(200))
    state = apply(CensusTaken("", 0.0, Census(facts, 200)), state, RULES, 1.0)
    state = apply(Decided("a-mac-that-is-gone", "quarantined", "r" * 300), state, RULES, 2.0)
    while True:
        page = fleet.page(state, RULES, FleetQuery(after, 1000))
        DATA_CONVERTER.payload_converter.to_payloads([page])  # raises above 16 KiB
        seen += [member.host for member in page.members]
        after = page.next_host
        if not after:
            break
    assert seen == ["a-mac-that-is-gone", *(one.host for one in facts)]
    assert page.num_macs == 200


def test_memory_carried_by_an_older_build_is_read() -> None:
    """Rows under names, and without what is new: a run that was begun before goes on."""
    old = {"started_at": 5.0, "step": 7, "members": [{"host": "mac-1", "sweep": 3, "place": "attic"}]}
    state = first_run_progress(replace(RULES, carried=json.dumps(old)), 0.0)
    assert (state.step, state.members[0].host, state.members[0].place) == (7, "mac-1", "attic")
    assert fleet.count(state) == 1


def facts_named(*hosts: str) -> Census:
    return Census(tuple(MacFacts(host) for host in hosts), len(hosts))


def test_census_puts_membership_right_but_not_what_is_newer_than_it() -> None:
    state = at(8)
    for host, when in (("mac-a", 0.0), ("mac-b", 0.0), ("mac-c", 95.0)):
        state = apply(FleetEvent("demo", host, "s", "joined", 3), state, RULES, when)
    state = apply(CensusTaken("", 100.0, facts_named("mac-b", "mac-d")), state, RULES, 101.0)
    assert [member.host for member in state.members] == ["mac-b", "mac-c", "mac-d"]
    assert fleet.count(state) == 2  # what the census counted; mac-c is in the next one
    later = apply(CensusTaken("mac-c", 200.0, facts_named()), state, RULES, 201.0)
    assert [member.host for member in later.members] == ["mac-b", "mac-c"]


def test_page_of_a_census_leaves_other_stretches_of_names_alone() -> None:
    state = apply(CensusTaken("", 0.0, Census((MacFacts("a"), MacFacts("c"), MacFacts("e")), 3)), at(8), RULES, 0.0)
    state = apply(CensusTaken("a", 100.0, Census((MacFacts("b"),), 3, "d")), state, RULES, 100.0)
    assert [member.host for member in state.members] == ["a", "b", "e"]
    assert state.census_cursor == "d"
    assert plan.next_for_desk(state, RULES, 170.0, trainer_idle=False) == plan.TakeCensus("d")
    assert plan.next_for_desk(state, RULES, 159.0, trainer_idle=False) is None
    assert plan.next_for_desk(state, RULES, 170.0, trainer_idle=False, takes_census=False) is None


def test_slowest_mac_is_named_with_what_makes_it_slow() -> None:
    macs = (
        MacFacts("mac-a", tokens_per_second=100.0),
        MacFacts("mac-b", tokens_per_second=40.0, place="attic", slow_because="60% of its time waiting"),
        MacFacts("mac-c", tokens_per_second=120.0),
        MacFacts("mac-d", "resting", tokens_per_second=1.0),
    )
    state = apply(CensusTaken("", 0.0, Census(macs, 3)), at(8), RULES, 0.0)
    assert fleet.slowest(state) == "mac-b (attic): 40 tokens/s, the median is 100; 60% of its time waiting"


def test_quarantine_reaches_the_session_and_every_step_until_release() -> None:
    state = apply(Decided("mac-1", "quarantined", "edited rewards"), at(8), RULES, 0.0)
    state = apply(Decided("mac-2", "drained", "thank you"), state, RULES, 0.0)
    told = plan.next_for_desk(state, RULES, 0.0, trainer_idle=False)
    assert told == plan.TellMac(Standing("demo", "mac-1", "quarantined", "edited rewards"))
    assert fleet.quarantined(state) == ("mac-1",)
    state = apply(Told("mac-1"), state, RULES, 0.0)
    assert plan.next_for_desk(state, RULES, 0.0, trainer_idle=False) == plan.TellMac(Standing("demo", "mac-2", "drained", "thank you"))
    free = apply(Decided("mac-1", "free", ""), apply(Told("mac-2"), state, RULES, 0.0), RULES, 0.0)
    assert plan.next_for_desk(free, RULES, 0.0, trainer_idle=False) == plan.TellMac(Standing("demo", "mac-1", "free"))
    assert fleet.quarantined(free) == ()


def test_mac_that_the_run_has_not_met_is_told_from_those_it_has() -> None:
    state = replace(at(8), fleet_known=True)
    assert fleet.stranger_reason(state, "demo", "mac-1") == "run demo has met no Mac mac-1, and no other yet"
    for host in ("anna-mini", "mac-1", "mac-2"):
        state = apply(FleetEvent("demo", host, "s", "joined", 0), state, RULES, 1.0)
    state = apply(FleetEvent("demo", "mac-2", "s", "left", 0), state, RULES, 2.0)
    assert fleet.count(state) == 2
    assert [fleet.stranger_reason(state, "demo", host) for host in ("anna-mini", "mac-2")] == ["", ""]
    told = fleet.stranger_reason(state, "demo", "ana-mini")
    assert told == "run demo has met no Mac ana-mini, did you mean anna-mini? it knows anna-mini, mac-1, mac-2"
    assert fleet.stranger_reason(state, "demo", "xyz") == "run demo has met no Mac xyz; it knows anna-mini, mac-1, mac-2"
    # Nobody is refused while the run cannot know: it has not looked yet, or more Macs play than it lists.
    assert fleet.stranger_reason(replace(state, fleet_known=False), "demo", "xyz") == ""
    assert fleet.stranger_reason(replace(state, num_macs=5000), "demo", "xyz") == ""
    again = apply(FleetEvent("demo", "mac-2", "s", "joined", 3), state, RULES, 3.0)
    assert again.left == ()
    dropped = apply(CensusTaken("", 1000.0, facts_named("mac-1")), state, RULES, 1000.0)
    assert set(dropped.left) == {"mac-2", "anna-mini"}
    many = tuple(MacFacts(f"mac-{index:03d}") for index in range(30))
    crowd = apply(CensusTaken("", 2000.0, Census(many, 30)), at(8), RULES, 2000.0)
    assert fleet.stranger_reason(replace(crowd, fleet_known=True), "demo", "xyz").endswith("mac-011 and 18 more")
    assert first_run_progress(replace(RULES, carried=dump(dropped)), 0.0) == dropped


def test_trainers_suspects_are_quarantined() -> None:
    state = apply(StepResult("done", 9, suspects=(Suspect("mac-1", "mismatch"),)), at(8), RULES, 0.0)
    assert fleet.standing_of(state, "demo", "mac-1") == Standing("demo", "mac-1", "quarantined", "by the trainer: mismatch")


CANARIES = replace(RULES, canary_sweeps=3)


def test_suspect_plays_on_unknowing_until_its_canaries_are_clean() -> None:
    state = apply(StepResult("done", 9, suspects=(Suspect("mac-1", "k3 is 7.1 sigma off"),)), at(8), CANARIES, 0.0)
    assert (fleet.quarantined(state), fleet.on_trial(state), state.untold) == (("mac-1",), ("mac-1",), ())
    assert fleet.standing_of(state, "demo", "mac-1").state == "free", "the Mac is not told, nor when it says hello again"
    state = apply(StepResult("done", 10, canaries=(CanaryNews("mac-1", 2), CanaryNews("mac-9", 2))), state, CANARIES, 0.0)
    (row,) = fleet.page(state, CANARIES, FleetQuery()).members
    assert (row.state, row.slow_because) == ("quarantined", "by the trainer: k3 is 7.1 sigma off; 2 of 3 canary sweeps clean")
    assert first_run_progress(replace(CANARIES, carried=dump(state)), 0.0) == state
    state = apply(StepResult("starved", 11, canaries=(CanaryNews("mac-1", 3, "clean"),)), state, CANARIES, 0.0)
    assert (fleet.quarantined(state), fleet.on_trial(state), state.banned, state.untold) == ((), (), (), ())


def test_drained_mac_stays_out_when_the_run_is_resumed() -> None:
    ended = plan.result_of(apply(Decided("mac-2", "drained", "thank you"), at(8), RULES, 0.0), RULES, 1.0)
    assert (ended.drained, ended.quarantined) == (("mac-2",), ())
    state = first_run_progress(replace(RULES, drained=ended.drained), 0.0)
    assert fleet.standing_of(state, "demo", "mac-2").state == "drained"
    assert fleet.quarantined(state) == ()


def test_suspect_plays_on_unknowing_when_the_run_is_resumed() -> None:
    rules = replace(CANARIES, quarantined=("mac-1", "mac-2"), on_trial=("mac-1",))
    state = first_run_progress(rules, 0.0)
    assert (fleet.quarantined(state), fleet.on_trial(state), state.untold) == (("mac-1", "mac-2"), ("mac-1",), ())
    assert [fleet.standing_of(state, "demo", host).state for host in ("mac-1", "mac-2")] == ["free", "quarantined"]
    told = first_run_progress(replace(rules, canary_sweeps=0), 0.0)
    assert (fleet.quarantined(told), fleet.on_trial(told)) == (("mac-1", "mac-2"), ())


def test_suspect_whose_canaries_show_a_fault_is_told_and_stays_out() -> None:
    state = apply(StepResult("done", 9, suspects=(Suspect("mac-1", "mismatch"),)), at(8), CANARIES, 0.0)
    failed = StepResult("done", 10, canaries=(CanaryNews("mac-1", 0, "failed", "3 canary groups refused"),))
    state = apply(failed, state, CANARIES, 0.0)
    assert (fleet.quarantined(state), fleet.on_trial(state), state.untold) == (("mac-1",), (), ("mac-1",))
    assert fleet.standing_of(state, "demo", "mac-1").reason == "by the trainer: 3 canary groups refused"
    late = apply(StepResult("done", 11, canaries=(CanaryNews("mac-1", 3, "clean"),)), state, CANARIES, 0.0)
    assert fleet.quarantined(late) == ("mac-1",), "only a person lets it back"


def test_person_decides_over_a_trial() -> None:
    tried = apply(StepResult("done", 9, suspects=(Suspect("mac-1", "mismatch"),)), at(8), CANARIES, 0.0)
    shut = apply(Decided("mac-1", "quarantined", "I know it"), tried, CANARIES, 0.0)
    assert (fleet.on_trial(shut), shut.untold) == ((), ("mac-1",))
    after = apply(StepResult("done", 10, canaries=(CanaryNews("mac-1", 3, "clean"),)), shut, CANARIES, 0.0)
    assert fleet.quarantined(after) == ("mac-1",)
    freed = apply(Decided("mac-1", "free", ""), tried, CANARIES, 0.0)
    after = apply(StepResult("done", 10, canaries=(CanaryNews("mac-1", 0, "failed", "x"),)), freed, CANARIES, 0.0)
    assert fleet.quarantined(after) == ()


def test_resumed_run_goes_on_with_its_budget_and_its_quarantine() -> None:
    rules = replace(RULES, gpu_hours=1.5, quarantined=("mac-1",), stop=StopConditions(max_gpu_hours=2.0))
    state = first_run_progress(rules, 1000.0)
    assert fleet.quarantined(state) == ("mac-1",)
    state = apply(Acquired(1001, "box", "q", 0, 0, num_gpus=2), state, rules, 1000.0)
    assert plan.end_reason(state, rules, 1899.0) == ""
    assert plan.end_reason(state, rules, 1900.0) == "2 GPU hours are used"


def test_a_text_is_cut_to_bytes_whatever_is_in_it() -> None:
    assert [fleet.cut(text, 3) for text in ("abcd", "\u00e9\u00e9", "\ud800b")] == ["abc", "\u00e9", "?b"]
