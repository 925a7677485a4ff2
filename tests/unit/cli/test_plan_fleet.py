"""The simulated fleet against what can be worked out by hand, and the plan's file, setting by setting."""

import json
from dataclasses import replace

import pytest
from pydantic import BaseModel

from cli.commands.plan import plan as command
from cli.plan.fleet import Simulation, simulate
from cli.plan.fleet_answers import answer, bill_of, box_way, saturating
from cli.plan.fleet_model import Absences, Fleet, Mac, Outcome, Rules, Sizes, Trainer
from cli.plan.fleet_spec import DEFAULT_FLEET, FleetPlan, draw_macs, fleet_of
from stoa.config.faults import dotted_names
from stoa.config.load import load_section
from stoa.config.run import RunConfig
from stoa.contracts.errors import ConfigError, UsageError

HOUR = 3600.0
RULES = Rules(flat_fraction=0.0, heartbeat_seconds=30.0, head_poll_seconds=2.0)
TRAINER = Trainer(step_seconds=10.0, step_jitter=0.0, step_overhead_seconds=0.0, hold_seconds=0.0, publish_seconds=0.0, intake_seconds=0.0)


def fleet(num: int, **changes: object) -> Fleet:
    """Macs all alike: a sweep of 8 groups takes 100 s, and nothing else takes any time."""
    base = Fleet(RULES, TRAINER, (Mac(100.0),) * num, sweep_jitter=0.0, turn_seconds=0.0, apply_seconds=0.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def outcome(of: Fleet, hours: float = 8.0) -> Outcome:
    return simulate(of, hours * HOUR)[0]


def test_one_mac_feeds_one_step_a_sweep_and_the_trainer_waits_the_rest() -> None:
    found = outcome(fleet(1))
    assert found.per_hour(found.steps) == pytest.approx(36.0, rel=0.01)  # a sweep of 100 s holds the groups of one step
    assert found.trainer_idle_share == pytest.approx(0.9, abs=0.01)  # 10 s of every 100 s are a step
    assert found.mac_wait_share < 0.01


def test_fleet_beyond_the_trainers_appetite_keeps_it_busy_and_waits_itself() -> None:
    found = outcome(fleet(20))
    assert found.trainer_idle_share < 0.001
    assert found.per_hour(found.steps) == pytest.approx(360.0, rel=0.01)
    # 20 Macs could play 20 x 8 groups in 100 s; 80 are used: half of their time goes into waiting.
    assert found.mac_wait_share == pytest.approx(0.5, abs=0.02)


def test_publishing_holds_the_trainer_for_its_share() -> None:
    found = outcome(fleet(20, trainer=replace(TRAINER, hold_seconds=10.0)))
    assert found.per_hour(found.steps) == pytest.approx(3600.0 / 12.5, rel=0.01)  # four steps and a hold take 50 s
    assert found.versions == pytest.approx(found.steps / 4, abs=1)


def test_flat_groups_are_played_and_not_trained_on() -> None:
    found = outcome(fleet(1, rules=replace(RULES, flat_fraction=0.5)), 40)
    assert found.groups_flat / found.groups_arrived == pytest.approx(0.5, abs=0.05)
    assert found.per_hour(found.steps) == pytest.approx(18.0, rel=0.1)


def test_every_group_that_came_is_trained_on_dropped_or_waits() -> None:
    found = outcome(fleet(9, rules=replace(RULES, flat_fraction=0.2), absences=Absences(1.0, 600.0, 1.0, 60.0, 1.0, 600.0)))
    waiting = found.groups_arrived - found.groups_trained - found.groups_flat - found.groups_stale
    assert abs(waiting) <= (RULES.max_staleness + 1) * RULES.groups_per_version + RULES.groups


def test_room_is_never_passed_by_more_than_a_sweep() -> None:
    simulation = Simulation(fleet(50, rules=replace(RULES, flat_fraction=0.3)))
    lowest: list[int] = []
    grant = simulation._grant

    def watched() -> None:
        grant()
        lowest.append(simulation._room())

    simulation._grant = watched  # type: ignore[method-assign]
    simulation.run(4 * HOUR)
    assert min(lowest) > -RULES.groups


def test_group_of_a_lone_fast_fleet_is_as_old_as_the_bound_lets_it_wait() -> None:
    # Room for 4 versions of groups is always full: a group waits until 3 to 4 versions have been used up before it.
    assert set(outcome(fleet(20)).staleness) <= {2, 3, 4}


def test_groups_beyond_the_hard_bound_are_dropped() -> None:
    slow, fast = Mac(8000.0), (Mac(100.0),) * 20
    found = outcome(fleet(0, macs=(slow, *fast)), 40)
    assert found.groups_stale > 0
    assert max(found.staleness) <= RULES.max_staleness_hard


def test_delta_that_comes_while_a_mac_plays_costs_it_nothing() -> None:
    sizes = Sizes(full_bytes=100e6, delta_bytes=50e6, group_bytes=0.0)
    # Versions come every 40 s; one takes 50 s at 1 MB/s and 5 s at 10 MB/s.
    quick = outcome(fleet(20, macs=(Mac(100.0, down_rate=10e6),) * 20, sizes=sizes))
    slow = outcome(fleet(20, macs=(Mac(100.0, down_rate=1e6),) * 20, sizes=sizes))
    assert quick.mac_pull_share < 0.05 < slow.mac_pull_share


def test_whole_weights_in_place_of_deltas_cost_what_they_weigh() -> None:
    sizes = Sizes(full_bytes=1000e6, delta_bytes=10e6, group_bytes=0.0)
    of = fleet(10, macs=(Mac(100.0, down_rate=10e6),) * 10, sizes=sizes)
    deltas, whole = outcome(of), outcome(replace(of, full_sync=True))
    assert whole.per_hour(whole.groups_trained) < 0.6 * deltas.per_hour(deltas.groups_trained)
    assert whole.bytes_down > 10 * deltas.bytes_down


def test_upload_at_the_end_of_a_sweep_is_waited_for() -> None:
    sizes = Sizes(0.0, 0.0, group_bytes=10e6)  # 10 s for each of 8 groups, the last at the end of the sweep
    found = outcome(fleet(1, macs=(Mac(100.0, up_rate=1e6),), sizes=sizes))
    assert found.per_hour(found.sweeps) == pytest.approx(3600.0 / 120.0, rel=0.02)  # first group at 40 s, then 8 x 10 s on the line


def test_mac_is_away_for_its_share() -> None:
    found = outcome(fleet(30, absences=Absences(sleeps_per_hour=1.0, sleep_seconds=1800.0)), 30)
    assert found.mac_away_share == pytest.approx(0.5 / 1.5, abs=0.03)  # an hour awake, half an hour asleep


def test_same_seed_same_days() -> None:
    assert outcome(fleet(5, absences=Absences(1.0))) == outcome(fleet(5, absences=Absences(1.0)))


PLAN = FleetPlan.model_validate(
    {
        "macs": {"mac": {"count": 3, "sweep_seconds": 100.0}},
        "line": {"down_mbit": 0.0, "up_mbit": 0.0, "round_trip_ms": 0.0},
        "spread": {"speed": 0.0, "line": 0.0, "sweep": 0.0},
        "absences": {"sleeps_a_day": 0.0, "crashes_a_day": 0.0, "leaves_a_day": 0.0},
        "trainer": {"step_seconds": 25.0, "hold_seconds": 0.0, "publish_seconds": 0.0},
        "flat_fraction": 0.0,
        "turn_seconds": 0.0,
    }
)


def test_number_of_macs_that_saturates_is_the_trainers_appetite_over_a_macs_rate() -> None:
    # A Mac brings 0.08 groups a second, the trainer takes 0.316 (8 in 25.3 s with the turn between two steps): 3.95 Macs.
    assert saturating(PLAN, RunConfig(), 8.0, (0,)) == 4


def test_answers_of_a_small_plan() -> None:
    found = answer(PLAN, RunConfig(), 8.0, (0,))
    assert found.trainer_idle_share == pytest.approx(1 - 3 * 0.08 / (8 / 25.0), abs=0.03)
    assert found.one_more_mac == pytest.approx(1 / 3, abs=0.05)
    assert found.internet_costs_share == pytest.approx(0.0, abs=0.02)
    assert found.bill.trainer == 3.5
    # 4,000 groups an hour are more than the trainer takes: 100 versions are 400 steps of 25.3 s.
    assert found.gpu_box.hours == pytest.approx(400 * 25.3 / 3600, rel=0.02)
    assert found.gpu_box.usd == pytest.approx(found.gpu_box.hours * 28.5)
    assert sum(found.staleness.values()) == pytest.approx(1.0)


def test_default_file_is_a_plan_and_its_settings_are_known() -> None:
    plan = load_section(DEFAULT_FLEET, FleetPlan, example=DEFAULT_FLEET)
    assert plan.num_macs == 14


def test_wrong_setting_is_told_with_its_line(tmp_path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text("[line]\ndown_mbits = 3.0\n")
    with pytest.raises(ConfigError, match=r"fleet\.toml:2: line\.down_mbits is not a setting") as error:
        load_section(path, FleetPlan, example=DEFAULT_FLEET)
    assert error.value.hint == "did you mean line.down_mbit?"


def changed(plan: FleetPlan, name: str) -> FleetPlan:
    tree = plan.model_dump()
    table, _, key = name.rpartition(".")
    inner = tree
    for part in table.split(".") if table else ():
        inner = inner[part]
    inner[key] = inner[key] * 2 + 1
    if key == "flat_fraction":
        inner[key] = 0.75
    return FleetPlan.model_validate(tree)


TABLES = {name for name in FleetPlan.model_fields if isinstance(getattr(FleetPlan(), name), BaseModel)}
LEAVES = [name for name in dotted_names(FleetPlan) if name not in {*TABLES, "macs"}]


@pytest.mark.parametrize("name", [*LEAVES, "macs.mac.count", "macs.mac.sweep_seconds"])
def test_every_setting_of_a_plan_changes_what_is_simulated_or_billed(name: str) -> None:
    base = FleetPlan.model_validate({"bucket": {"egress_usd_a_gb": 0.01}, "gpu_box": {"groups_an_hour": 100.0}})
    other = changed(base, name)

    def told(plan: FleetPlan) -> tuple[object, ...]:
        fleet = fleet_of(plan, RunConfig(), draw_macs(plan, plan.num_macs, 0))
        return fleet, bill_of(plan, RunConfig(), simulate(fleet, HOUR)), box_way(plan, RunConfig(), 4.0, (0,))

    assert told(base) != told(other)


def test_larger_fleet_contains_the_smaller() -> None:
    plan = load_section(DEFAULT_FLEET, FleetPlan, example=DEFAULT_FLEET)
    assert draw_macs(plan, 30, 3)[:14] == draw_macs(plan, 14, 3)
    assert len(draw_macs(plan, 30, 3)) == 30
    assert draw_macs(plan, 5, 3) == draw_macs(plan, 14, 3)[:5]


def test_command_prints_json_and_refuses_a_fleet_of_none(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text("[macs.m]\ncount = 2\nsweep_seconds = 60.0\n")
    command(["fleet", str(path), "--hours", "0.5", "--json"], result_action="return_value")
    found = json.loads(capsys.readouterr().out)
    assert {"trainer_idle_share", "staleness", "macs_to_saturate", "one_more_mac", "internet", "lan", "gpu_box", "bill"} <= set(found)
    path.write_text("[macs.m]\ncount = 0\n")
    with pytest.raises(UsageError, match="no Macs"):
        command(["fleet", str(path)], result_action="return_value")
