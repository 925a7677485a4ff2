"""Reading settings: what is refused, and that the refusal says where and what was meant."""

import base64
import stat
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoa.config.faults import dotted_names, find_lines, nearest_name
from stoa.config.load import (
    DEFAULT_CONFIG,
    bucket_credentials,
    is_loopback,
    load_run,
    resolve_model_folder,
    signing_seed,
)
from stoa.config.run import Bucket, RunConfig
from stoa.contracts.errors import AccessDeniedError, ConfigError


def write(folder: Path, text: str, name: str = "x.toml") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def refused(path: Path, *sets: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run(path, sets, environ={})
    return caught.value


def test_default_configuration_is_the_demo() -> None:
    config = load_run(environ={})
    assert config.run == "demo"
    assert config.stop.max_steps == 96
    assert config.groups_per_version == 32
    assert config.publish.anchor_every_versions == 8


def test_unknown_key_names_file_line_key_and_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, 'run = "a"\n\n[rollout]\n# eight\ngroup_sze = 8\n')
    error = refused(path)
    assert error.message == f"{path}:5: rollout.group_sze is not a setting"
    assert error.hint == "did you mean rollout.group_size?"


def test_prices_are_the_buckets_own(tmp_path: Path) -> None:
    path = write(tmp_path, "[prices]\nwrites_usd_a_million = 5.0\nreads_usd_a_million = 0.4\negress_usd_a_gb = 0.09\n")
    found = load_run(path, environ={}).prices
    assert (found.writes_usd_a_million, found.reads_usd_a_million, found.egress_usd_a_gb) == (5.0, 0.4, 0.09)
    assert "prices.egress_usd_a_gb = -1.0" in refused(write(tmp_path, ""), "prices.egress_usd_a_gb=-1.0").message


def test_value_out_of_range_names_key_value_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout.groups = 99\n")
    error = refused(path)
    assert error.message.startswith(f"{path}:1: rollout.groups = 99: ")
    assert 'should be "auto" or a number from 1 to 64' in error.message


def test_groups_are_a_number_or_left_to_each_mac(tmp_path: Path) -> None:
    assert load_run(write(tmp_path, ""), environ={}).rollout.groups == "auto"
    assert load_run(write(tmp_path, 'rollout.groups = "auto"\n'), environ={}).rollout.usual_groups == 8
    found = load_run(write(tmp_path, "rollout.groups = 3\n"), environ={}).rollout
    assert (found.groups, found.usual_groups) == (3, 3)
    assert type(found).model_validate_json(found.model_dump_json()) == found
    for wrong, said in (("0", "0"), ("65", "65"), ("true", "True"), ('"many"', "'many'"), ("2.5", "2.5")):
        assert f"rollout.groups = {said}" in refused(write(tmp_path, f"rollout.groups = {wrong}\n")).message


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, '[stop]\nmax_step = 3\n[learning]\nbeta1 = 2.0\n[learning.gate]\nmode = "tvv"\n')
    error = refused(path)
    assert error.message.splitlines()[0] == f"{path}: 3 settings are wrong"
    assert f"{path}:2: stop.max_step is not a setting (did you mean stop.max_steps?)" in error.message
    assert f"{path}:4: learning.beta1 = 2.0" in error.message
    assert f"{path}:6: learning.gate.mode = 'tvv'" in error.message
    assert "did you mean tv?" in error.message


def test_faults_come_in_the_order_of_the_files_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '[stop]\nmax_step = 3\n[learning]\nbeta1 = 2.0\n[bucket]\nnam = "x"\n')
    told = refused(path, "run.x=1").message.splitlines()[1:]
    assert [line.split(": ")[0].strip() for line in told][:3] == [f"{path}:2", f"{path}:4", f"{path}:6"]


def test_key_that_is_like_no_setting_is_told_what_there_is(tmp_path: Path) -> None:
    assert refused(write(tmp_path, "[retention]\nzzzz = 1\n")).hint == "[retention] has: grace_hours, anchors, group_versions"
    assert refused(write(tmp_path, "qqqq = 1\n")).hint.startswith("the file has: run, seed, model, ")


FLOATS = [
    name
    for name in dotted_names(RunConfig)
    if isinstance(reduce(lambda tree, part: getattr(tree, part), name.split("."), RunConfig()), float)
]
INTEGERS = [
    name for name in dotted_names(RunConfig) if type(reduce(lambda tree, part: getattr(tree, part), name.split("."), RunConfig())) is int
]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_number_that_json_cannot_carry_is_refused(tmp_path: Path, name: str, value: str) -> None:
    assert f"{name} = {value}" in refused(write(tmp_path, ""), f"{name}={value}").message


@pytest.mark.parametrize("name", [name for name in FLOATS if name.startswith(("timeouts.", "stop."))] + INTEGERS)
def test_number_that_no_clock_or_counter_holds_is_refused(tmp_path: Path, name: str) -> None:
    assert f"{name} = " in refused(write(tmp_path, ""), f"{name}={10**30}").message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket.endpoint", "127.0.0.1:8333"),
        ("bucket.endpoint", "ftp://127.0.0.1"),
        ("bucket.endpoint", "http://127.0.0.1:99999"),
        ("bucket.name", "a b"),
        ("bucket.name", ".."),
        ("temporal.address", "127.0.0.1"),
        ("temporal.address", "http://127.0.0.1:7233"),
        ("temporal.address", "127.0.0.1:99999"),
        ("temporal.namespace_mac", ""),
        ("run", "\u00fcber"),
        ("run", "../other"),
    ],
)
def test_name_or_place_that_cannot_be_is_refused_before_anything_is_tried(tmp_path: Path, name: str, value: str) -> None:
    assert f"{name} = '{value}'" in refused(write(tmp_path, ""), f'{name}="{value}"').message


def test_two_settings_that_contradict_each_other_are_both_named(tmp_path: Path) -> None:
    path = write(tmp_path, "[learning]\nmax_staleness = 9\n")
    assert refused(path).message == f"{path}:1: learning: max_staleness = 9 is above max_staleness_hard = 8"
    path = write(tmp_path, "[rollout]\ngroup_size = 4\nmin_group_size = 5\n")
    assert "min_group_size = 5 is above group_size = 4" in refused(path).message


def test_budget_in_dollars_without_a_price_is_refused(tmp_path: Path) -> None:
    assert "max_dollars needs dollars_per_gpu_hour" in refused(write(tmp_path, "[stop]\nmax_dollars = 10\n")).message


def test_text_in_place_of_a_number_is_refused(tmp_path: Path) -> None:
    assert "rollout.groups = '8'" in refused(write(tmp_path, '[rollout]\ngroups = "8"\n')).message


def test_a_list_of_names_is_read_and_travels_with_the_run(tmp_path: Path) -> None:
    config = load_run(write(tmp_path, '[rollout]\nfingerprints = ["0.32.4-0123456789ab"]\n'), environ={})
    assert config.rollout.fingerprints == ["0.32.4-0123456789ab"]
    again = load_run(write(tmp_path, config.model_dump_json(), "resolved.json"), environ={})
    assert again == config
    assert "rollout.fingerprints" in refused(write(tmp_path, "[rollout]\nfingerprints = [3]\n")).message


def test_environment_setting_that_is_no_scalar_is_one_fault(tmp_path: Path) -> None:
    path = write(tmp_path, "[environment.settings]\nworld_seed = [1]\n")
    assert refused(path).message == f"{path}:2: environment.settings.world_seed = [1]: should be text, a number, true or false"


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, 'run = "a"\nseed = \n')
    assert refused(path).message.startswith(f"{path}:2: not TOML")


def test_missing_file_is_refused_with_an_example(tmp_path: Path) -> None:
    error = refused(tmp_path / "none.toml")
    assert error.message == f"{tmp_path / 'none.toml'}: no such file"
    assert str(DEFAULT_CONFIG) in error.hint


def test_set_overrides_the_file_with_the_type_of_toml(tmp_path: Path) -> None:
    path = write(tmp_path, 'run = "a"\n[rollout]\ngroups = 2\n')
    config = load_run(path, ("rollout.groups=3", "run=b", "publish.hysteresis=0", "rollout.record_routing=true"), environ={})
    assert (config.rollout.groups, config.run, config.publish.hysteresis) == (3, "b", 0.0)
    assert config.rollout.record_routing is True


def test_fault_of_a_set_names_the_set_not_the_file(tmp_path: Path) -> None:
    assert refused(write(tmp_path, ""), "rollout.grups=3").message == "--set rollout.grups=3: rollout.grups is not a setting"


@pytest.mark.parametrize("item", ["rollout.groups", "=3", "run.x=3"])
def test_set_that_is_no_assignment_is_refused(tmp_path: Path, item: str) -> None:
    assert item in refused(write(tmp_path, 'run = "a"\n'), item).message


def test_endpoints_of_the_environment_win(tmp_path: Path) -> None:
    path = write(tmp_path, '[temporal]\naddress = "a:1"\n')
    environ = {"STOA_TEMPORAL_ADDRESS": "b:2", "STOA_BUCKET_ENDPOINT": "http://c:3", "STOA_BUCKET_NAME": "mine"}
    config = load_run(path, environ=environ)
    assert (config.temporal.address, config.bucket.endpoint, config.bucket.name) == ("b:2", "http://c:3", "mine")


def test_fault_of_a_variable_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^STOA_BUCKET_NAME: bucket\.name = 'x'"):
        load_run(write(tmp_path, ""), environ={"STOA_BUCKET_NAME": "x"})


def test_resolved_json_is_read_back_as_the_same_run(tmp_path: Path) -> None:
    config = load_run(environ={})
    assert load_run(write(tmp_path, config.model_dump_json(), "x.json"), environ={}) == config


def test_credentials_of_loopback_are_the_well_known_pair_and_never_a_clouds() -> None:
    cloud = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "s3cret"}
    local = bucket_credentials(Bucket(endpoint="http://127.0.0.1:9"), environ=cloud)
    assert (local.key, local.secret) == ("stoa", "stoa-on-loopback")
    far = bucket_credentials(Bucket(endpoint="https://acc.r2.example"), environ=cloud)
    assert (far.key, far.secret) == ("AKIA", "s3cret")
    own = bucket_credentials(
        Bucket(endpoint="https://acc.r2.example"), environ={**cloud, "STOA_BUCKET_KEY": "k", "STOA_BUCKET_SECRET": "t"}
    )
    assert (own.key, own.secret) == ("k", "t")


def test_credentials_do_not_print_themselves() -> None:
    credentials = bucket_credentials(
        Bucket(endpoint="https://x.example"), environ={"STOA_BUCKET_KEY": "kk", "STOA_BUCKET_SECRET": "s3cret"}
    )
    assert "s3cret" not in repr(credentials)
    assert "kk" not in str(credentials)


@pytest.mark.parametrize("environ", [{}, {"STOA_BUCKET_KEY": "k"}])
def test_missing_credentials_say_which_variable(environ: dict[str, str]) -> None:
    with pytest.raises(AccessDeniedError) as caught:
        bucket_credentials(Bucket(endpoint="https://x.example"), environ=environ)
    assert "STOA_BUCKET_SECRET" in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("http://127.0.0.1:8333", True),
        ("localhost:7233", True),
        ("http://[::1]:1", True),
        ("https://127.example.com", False),
        ("https://r2.dev", False),
    ],
)
def test_loopback_is_told_from_the_network(endpoint: str, local: bool) -> None:
    assert is_loopback(endpoint) is local


def test_signing_seed_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    first = signing_seed(create=True, base=tmp_path)
    assert len(first) == 32
    assert signing_seed(create=True, base=tmp_path) == first == signing_seed(base=tmp_path)
    path = tmp_path / "signing.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others than its owner"):
        signing_seed(base=tmp_path)


@pytest.mark.parametrize("text", ["", "not base64!", base64.b64encode(b"short").decode()])
def test_signing_seed_that_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text, "signing.key")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="base64 of 32 bytes"):
        signing_seed(base=tmp_path)


def test_missing_signing_seed_says_who_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        signing_seed(base=tmp_path)
    assert "`stoa run` makes it" in caught.value.hint


def test_model_folder_is_found_from_any_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (resolve_model_folder(load_run(environ={})) / "config.json").is_file()
    with pytest.raises(ConfigError, match="model = 'nowhere'"):
        resolve_model_folder(load_run(None, ("model=nowhere",), environ={}))


def test_lines_of_tables_keys_and_dotted_keys() -> None:
    text = 'run = "x"\n[a . b]\n"c d" = 1 # [no]\n[[e]]\nf.g = "h = 1"\n'
    assert find_lines(text) == {"run": 1, "a.b": 2, "a.b.c d": 3, "e": 4, "e.f.g": 5}


@given(st.sampled_from(sorted(dotted_names(RunConfig))), st.integers(0, 40))
def test_dropping_a_letter_of_a_setting_still_finds_its_table_and_name(name: str, where: int) -> None:
    table, _, last = name.rpartition(".")
    if len(last) < 5:
        return
    wrong = last[: where % len(last)] + last[where % len(last) + 1 :]
    found = nearest_name(f"{table}.{wrong}" if table else wrong, RunConfig)
    assert found.rpartition(".")[0] == table
    assert abs(len(found.rpartition(".")[2]) - len(last)) <= 3


def test_initials_find_the_setting() -> None:
    assert nearest_name("learning.lr", RunConfig) == "learning.learning_rate"
