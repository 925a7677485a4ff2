"""What is refused before a run is started: a checkpoint folder whose parts are of two models, or torn."""

import json
import shutil
from pathlib import Path

import pytest

from cli.launch import check, environment_faults, refuse_spent_limits, run_input
from stoa.config.load import PROJECT_ROOT, load_run
from stoa.config.run import Stop
from stoa.contracts.errors import CheckpointError, ConfigError, UsageError
from stoa.contracts.messages import StopConditions
from tests.unit.weights.small_run import SmallRun


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROJECT_ROOT / "environments/search/policy", tmp_path / "model"))


def refused(model: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(load_run(None, (f'model="{model}"',), environ={}))
    return caught.value.message


def test_shipped_policy_is_taken(model: Path) -> None:
    assert check(load_run(None, (f'model="{model}"',), environ={})).tensors


def test_config_of_another_size_than_the_weights_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    assert "holds 284,528 numbers, its config.json describes" in refused(model)


@pytest.mark.parametrize("data", [b"", b"xx", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (7).to_bytes(8, "little") + b'{"a":1}'])
def test_torn_weights_are_refused(model: Path, data: bytes) -> None:
    (model / "model.safetensors").write_bytes(data)
    assert "model.safetensors: not a file of weights" in refused(model)


def test_workflow_is_told_all_that_ends_a_run_and_how_anchors_come() -> None:
    sets = (
        "stop.max_steps=7", "stop.max_versions=3", "stop.max_minutes=2", "stop.target_pass_at_1=0.5", "stop.max_gpu_hours=12.5",
        "stop.max_dollars=40", "stop.dollars_per_gpu_hour=2.5", "stop.on_alarm=true", "publish.anchor_by_join_cost=true",
        "learning.groups_per_step=6", "learning.starved_seconds=77",
    )  # fmt: skip
    told = run_input(load_run(None, sets, environ={}))
    assert told.stop == StopConditions(7, 3, 120.0, 0.5, 12.5, 40.0, 2.5, on_alarm=True)
    assert (told.anchor_by_join_cost, told.groups_per_step, told.starved_seconds) == (True, 6, 77.0)


def test_stopped_run_at_its_limit_is_not_resumed_to_end_at_once(store, tmp_path: Path) -> None:
    run = SmallRun(store, tmp_path)
    run.head = run.writer.swap(1000, step=106, version=26, state="stopped")
    with pytest.raises(UsageError) as caught:
        refuse_spent_limits(Stop(max_steps=96), run.head)
    assert caught.value.message == "run small has done 106 steps and would end at once: stop.max_steps is 96"
    assert "`--set stop.max_steps=202`" in caught.value.hint
    with pytest.raises(UsageError, match=r"has done 106 steps"):
        refuse_spent_limits(Stop(max_steps=106), run.head)
    with pytest.raises(UsageError, match=r"has done 26 versions .*: stop\.max_versions is 24"):
        refuse_spent_limits(Stop(max_steps=0, max_versions=24), run.head)
    refuse_spent_limits(Stop(max_steps=107, max_versions=27), run.head)
    refuse_spent_limits(Stop(max_steps=0, max_versions=0, max_minutes=1), run.head)


def test_run_that_was_cut_off_while_it_ended_may_be_ended(store, tmp_path: Path) -> None:
    run = SmallRun(store, tmp_path)
    run.head = run.writer.swap(1000, step=96, state="draining")
    refuse_spent_limits(Stop(max_steps=96), run.head)


def test_every_fault_of_a_file_is_told_at_once_contradictions_and_the_environments_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[environment.settings]\nnum_entitis = 5\n"
        "[learning]\nmax_staleness = 9\nmax_staleness_hard = 4\nlr = 1\n"
        '[stop]\nmax_dollars = "x"\n'
        "[rollout]\nmin_group_size = 9\ngroup_sze = 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_run(path, environ={}, look=environment_faults)
    _, *lines = caught.value.message.splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["2", "3", "6", "8", "10", "11"]
    assert "num_entitis is not a setting (did you mean num_entities?)" in lines[0]
    assert "max_staleness = 9 is above max_staleness_hard = 4" in lines[1]
    path.write_text('[environment]\nname = "serch"\n')
    with pytest.raises(ConfigError, match=r"run\.toml:2: no environment is called 'serch'"):
        load_run(path, environ={}, look=environment_faults)


def test_faults_of_an_environments_settings_are_all_told_and_only_like_keys_are_offered(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[environment.settings]\nflavour = 1\nmax_cals = 2\ntop_k = 99\nworld_seed = 'x'\nnum_entities = 1\nnum_held_out = 300\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_run(path, environ={}, look=environment_faults)
    _, *lines = caught.value.message.splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["2", "3", "4", "5", "6"]
    assert "flavour is not a setting (environment.settings has: world_seed, num_entities," in lines[0]
    assert "(did you mean max_calls?)" in lines[1]


def test_a_default_in_a_wrong_settings_place_contradicts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[learning]\nmax_staleness = 9999\nmax_staleness_hard = -1\n")
    with pytest.raises(ConfigError) as caught:
        load_run(path, environ={}, look=environment_faults)
    assert "is above" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["environment = 3", "environment = [1]", "[environment]\nname = {a = 1}", "[environment.settings]\na = {b = [1]}",
     "learning = {}\nx = [[]]",
     "model = {a = 1}", "[alarms]\nx = 1", "[alarms.x]\naction = 'log'", "[[learning]]\na = 1"],
)  # fmt: skip
def test_nonsense_is_a_fault_of_the_file_and_nothing_else(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_run(path, environ={}, look=environment_faults)
