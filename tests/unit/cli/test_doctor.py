"""The checks of this machine: what each calls good, poor and broken, and that nothing takes longer than its limit."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from cli.doctor import checks, machine, model, packages, servers
from cli.doctor.finding import Finding, bad, examine, good
from cli.doctor.open import installed_role, scene_of
from cli.doctor.scene import Scene
from stoa.config.host import MacHost
from stoa.config.load import PROJECT_ROOT, load_run
from stoa.contracts.errors import ConfigError, LayoutError, ServiceUnavailableError
from tests.unit.chat.conftest import character_tokenizer
from worker_mac.identity import Identity
from worker_mac.power import Senses
from worker_mac.service import Said, Service


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return scene_of(load_run(None, environ={}), "mac", tmp_path / "state")


# -- many at once


def test_checks_run_together_in_order_and_one_that_hangs_fails_at_the_limit(scene: Scene) -> None:
    ended = threading.Event()

    def hangs(_: Scene) -> Finding:
        ended.wait(30)
        return good("hangs", "late")

    def refuses(_: Scene) -> Finding:
        raise ServiceUnavailableError("it is away", hint="start it")

    def no_right(_: Scene) -> Finding:
        raise PermissionError(13, "Permission denied", "/somewhere")

    began = time.monotonic()
    many = (("a", hangs), ("advice", hangs), ("b", lambda _: None), ("c", refuses), ("d", no_right), ("e", lambda _: good("e", "fine")))
    found = examine(many, scene, 0.5, {"advice"})
    assert time.monotonic() - began < 5.0
    ended.set()
    assert [(one.name, one.verdict) for one in found] == [("a", "fail"), ("advice", "warn"), ("c", "fail"), ("d", "fail"), ("e", "pass")]
    assert found[0].found == "no answer in 0.5 s"
    assert (found[2].found, found[2].fix) == ("it is away", "start it")
    assert found[3].found == "/somewhere: Permission denied"


def test_json_carries_the_worst_verdict(scene: Scene) -> None:
    tree = json.loads(checks.as_json([good("a", "x"), bad("b", "y", "z")], 1.234))
    assert (tree["verdict"], tree["seconds"]) == ("fail", 1.23)
    assert tree["checks"][1] == {"name": "b", "verdict": "fail", "found": "y", "fix": "z", "seconds": 0.0}
    assert json.loads(checks.as_json([good("a", "x"), Finding("w", "warn", "y", "z")], 0.0))["verdict"] == "warn"


def test_names_are_told_once_and_the_short_forms_name_checks_there_are() -> None:
    names = [name for name, _ in checks.ALL]
    assert len(names) == len(set(names))
    assert {*checks.BEFORE_RUN, *checks.BEFORE_JOIN} <= set(names)
    assert [name for name, _ in checks.chosen(checks.BEFORE_JOIN)] == [name for name in names if name in checks.BEFORE_JOIN]


# -- packages

NUMPY, PYTEST = (metadata.version(name) for name in ("numpy", "pytest"))


@pytest.mark.parametrize(
    ("asked", "lock", "verdict", "words"),
    [
        (["numpy>=1"], {}, "pass", "1 packages"),
        (["numpy>=1"], {"numpy": NUMPY}, "pass", ""),
        (["numpy>=1"], {"numpy": "0.1"}, "warn", f"numpy is {NUMPY}, tested with 0.1"),
        (["numpy>=99"], {}, "fail", f"numpy is {NUMPY}, not >=99"),
        (["No_Such-Thing~=1.0"], {}, "fail", "No_Such-Thing is missing"),
        (["numpy>=99; extra == 'gpu'"], {}, "pass", "0 packages"),
        (["numpy>=99; extra == 'mac'"], {}, "fail", "numpy"),
        (["numpy>=99; sys_platform == 'plan9'"], {}, "pass", "0 packages"),
        (["numpy>=1", "pytest>=99"], {"numpy": "0.1"}, "fail", "pytest"),
    ],
)
def test_packages_are_compared_with_what_is_asked_and_what_was_tested(asked: list, lock: dict, verdict: str, words: str) -> None:
    found = packages.compare(asked, ("", "mac"), lock, "stoa")
    assert (found.verdict, words in found.found) == (verdict, True)
    assert bool(found.fix) == (verdict != "pass")


def test_a_build_for_other_hardware_is_the_same_version() -> None:
    assert packages.compare(["numpy"], ("",), {"numpy": f"{NUMPY}+cu130"}, "stoa").verdict == "pass"


def test_the_lock_is_read_with_its_markers_and_names(tmp_path: Path) -> None:
    path = tmp_path / "constraints.txt"
    path.write_text("# a lock\nMarkup_Safe==3.0.4\nmlx==0.32.4; sys_platform == 'darwin'\n\n")
    assert packages.read_lock(path) == {"markup-safe": "3.0.4", "mlx": "0.32.4"}
    assert packages.read_lock(tmp_path / "none") == {}


def test_what_is_installed_here_passes(scene: Scene) -> None:
    found = packages.check_versions(replace(scene, role="all"))
    assert found is not None and found.verdict == "pass", found


# -- disk, memory, worker

Usage, Memory = namedtuple("Usage", "free"), namedtuple("Memory", "total available")
GB = 10**9
LFM: dict[str, object] = {
    "model_type": "lfm2_moe", "vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_hidden_layers": 24, "num_dense_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 32,
    "num_experts_per_tok": 4, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "norm_topk_prob": True, "use_expert_bias": True,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 128000, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"},
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)], "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def large(tmp_path: Path) -> Scene:
    """A Mac that would join a run of the model this project is for, by what an earlier visit fetched."""
    folder = tmp_path / "state" / "runs" / "big" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LFM))
    sets = ("run=big", 'model="nowhere"', "learning.dtype=bfloat16", "environment.settings.max_episode_tokens=4096")
    return scene_of(load_run(None, sets, environ={}), "mac", tmp_path / "state")


@pytest.mark.parametrize(
    ("free_gb", "verdict", "words"),
    [
        (60, "pass", "weights take 9.0 GB"),
        (25, "warn", "until nothing new is played"),
        (13, "fail", "would leave less than 5.0 GB"),
    ],
)
def test_disk_has_room_for_weights_cache_and_spool(
    large: Scene, free_gb: int, verdict: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.disk_usage", lambda path: Usage(free_gb * GB))
    found = machine.check_disk(large)
    assert found.verdict == verdict, found
    assert words in found.found


def test_what_is_cached_already_counts_as_room(large: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.disk_usage", lambda path: Usage(13 * GB))
    monkeypatch.setattr(machine, "_size", lambda folder: 9 * GB)
    assert machine.check_disk(large).verdict == "warn"


@pytest.mark.parametrize(
    ("total_gib", "available_gib", "verdict", "words"),
    [
        (8, 6, "fail", "it does not fit"),
        (16, 12, "pass", "for 2 groups"),  # 9.65 GiB for us, less 8.38 of weights and about 0.4 of a step; a group is 0.375
        (24, 16, "pass", "for 8 groups"),
        (24, 4, "warn", "are free now"),
        (128, 90, "pass", "for 8 groups"),
    ],
)
def test_memory_has_room_for_weights_and_groups(
    large: Scene, total_gib: int, available_gib: int, verdict: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory(total_gib << 30, available_gib << 30))
    monkeypatch.setattr(machine, "gpu_bytes", lambda total: int(total * (0.67 if total <= 36 << 30 else 0.75)))
    found = machine.check_memory(large)
    assert found is not None and found.verdict == verdict, found
    assert words in found.found


@pytest.mark.parametrize(
    ("said", "platform", "gib"),
    [("0\n", "darwin", 16 * 0.67), ("", "darwin", 16 * 0.67), ("13000\n", "darwin", 13000 / 1024), ("13000", "linux", 16)],
)
def test_memory_of_the_gpu_is_what_the_owner_set_or_macos_recommends(said: str, platform: str, gib: float) -> None:
    assert machine.gpu_bytes(16 << 30, lambda command: said, platform) / (1 << 30) == pytest.approx(gib, rel=1e-6)


def test_a_worker_at_work_is_named_and_one_that_parked_itself_is_a_failure(scene: Scene) -> None:
    assert machine.check_worker(scene) == good("worker", f"none runs with {scene.folder}")
    identity = Identity(scene.folder)
    assert machine.check_worker(scene) == good("worker", f"process {os.getpid()} works with {scene.folder}")
    identity.close()
    panics = {"began": 0.0, "panics": [time.time() - 60.0]}
    (scene.folder / "panics.json").write_text(json.dumps(panics))
    lately = machine.check_worker(scene)
    assert lately is not None and (lately.verdict, "crashed lately" in lately.found) == ("warn", True)
    panics["panics"].append(time.time() - 50.0)
    (scene.folder / "panics.json").write_text(json.dumps(panics))
    parked = machine.check_worker(scene)
    assert parked is not None and (parked.verdict, "crashed 2 times" in parked.found, "stoa leave" in parked.fix) == ("fail", True, True)


LSOF = """p501
cWindowServer
n/System/Library/CoreServices/WindowServer
p911
cpython3.12
n/opt/homebrew/bin/python3.12
n/Users/ada/venv/lib/python3.12/site-packages/mlx/lib/libmlx.dylib
p912
cLM Studio Helper
n/Applications/LM Studio.app/Contents/MacOS/LM Studio
"""


def test_programs_with_mlx_in_memory_are_found_in_what_lsof_prints() -> None:
    assert machine.mapped_on_mac(LSOF) == {911: "python3.12"}
    assert machine.mapped_on_mac("") == {}


def test_a_second_program_with_mlx_is_found_here_and_ones_own_is_not(scene: Scene) -> None:
    if sys.platform != "linux":
        pytest.skip("what is mapped is read from /proc")
    holding = "import mlx.core, sys, time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE, start_new_session=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            own = [pid for pid in machine.other_programs(ignore=0) if pid == other.pid]
            assert own == []  # a child of this process
            starts = (
                f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {holding!r}], stdout=subprocess.PIPE, "
                "stderr=subprocess.DEVNULL, start_new_session=True); p.stdout.readline(); print(p.pid, flush=True)"
            )
            orphan = subprocess.run([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True, timeout=50)
            pid = int(orphan.stdout)
            try:
                assert pid in machine.other_programs(ignore=0)
                assert pid not in machine.other_programs(ignore=pid)
            finally:
                os.kill(pid, 9)
        finally:
            other.kill()


def test_other_programs_are_said_to_be_where_they_are() -> None:
    many = dict.fromkeys(range(11, 17), "python")
    assert "GPU" in machine.programs_finding(many, "darwin").found
    here = machine.programs_finding(many, "linux")
    assert (here.verdict, here.found) == (
        "warn",
        "on this processor besides us, with MLX or a model: "
        "python (process 11), python (process 12), python (process 13), python (process 14) and 2 more",
    )
    assert "GPU" not in here.fix and "Mac" not in here.fix
    assert machine.programs_finding({}, "linux").verdict == "pass"


@pytest.mark.parametrize(("version", "old"), [("14.6.1", True), ("15.0", False), ("26.1", False), ("", False)])
def test_memory_is_wired_from_macos_15_on(version: str, old: bool) -> None:
    assert machine.old_system(version) is old


QUIET = Senses(1e6, 600, True, 100.0, False, 4000.0, False, "nominal", "normal", False, 9000.0)


@pytest.mark.parametrize(
    ("change", "version", "settings", "verdict", "words"),
    [
        ({}, "26.1", " SleepDisabled\t0\n sleep 1", "pass", "would be played now; on mains"),
        ({"idle_seconds": 2.0}, "15.0", "", "pass", "half of the time: somebody uses the Mac"),
        ({"on_mains": False}, "15.0", "", "warn", "nothing would be played now: the Mac is on battery"),
        ({"low_power_mode": True}, "15.0", "", "warn", "Low Power Mode is on"),
        ({}, "14.7.1", "", "warn", "macOS 14.7.1 cannot wire memory"),
        ({}, "26.1", "System-wide power settings:\n SleepDisabled\t\t1\n", "warn", "sleep is switched off"),
    ],
)
def test_power_is_judged_by_the_owners_settings_and_the_system(change: dict, version: str, settings: str, verdict: str, words: str) -> None:
    found = machine.power_finding(replace(QUIET, **change), MacHost(), version, settings)
    assert (found.verdict, words in found.found, bool(found.fix)) == (verdict, True, verdict != "pass"), found


def test_an_agent_at_log_in_is_told_with_how_it_ended(scene: Scene, tmp_path: Path) -> None:
    said = {"print": Said(0, "\tpid = 4711\n")}
    service = Service(tmp_path / "agents", scene.folder, lambda asked: said.get(asked[0], Said(0, "")), user_id=501)
    service.install()
    running = machine.check_worker(scene, service)
    assert running == good("worker", f"none runs with {scene.folder}; it starts at log-in")
    said["print"] = Said(0, "\tlast exit code = 139\n")
    crashed = machine.check_worker(scene, service)
    assert crashed is not None and crashed.verdict == "warn" and "ended with 139" in crashed.found and "worker.log" in crashed.fix
    (scene.folder / "attempts.json").write_text('["no MLX", "no MLX", "no MLX"]')
    parked = machine.check_worker(scene, service)
    assert parked is not None and (parked.verdict, "failed soon: no MLX" in parked.found) == ("fail", True)


def test_off_a_mac_power_is_not_known(scene: Scene) -> None:
    found = machine.check_power(scene)
    assert sys.platform == "darwin" or (found is not None and found.verdict == "pass" and "not a Mac" in found.found)


# -- the model

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {"bos_token": "<|startoftext|>"}
TOKENIZER = character_tokenizer().to_str().encode()


def test_the_familys_template_gives_our_prompts() -> None:
    assert model.compare(model.Template(TEMPLATE, NAMES), TOKENIZER) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("<|im_start|>assistant\n", "<|im_start|>model\n"), "ours goes on with 'assist"),
        (("{{ bos_token }}", ""), "token 0 of a prompt"),
        (("{{ message['content'] }}", "{{ message['content'] | trim }}"), "ours goes on with '  Croh'"),
        (("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}"), "the checkpoint's template with"),
        (("{{ message['role'] }}", "{{ message['role'] | upper }}"), "ours goes on with 'user"),
        (("{{ bos_token }}", "{{ bos_token }}{{ missing.name }}"), "refuses a dialogue"),
    ],
)
def test_another_template_is_told_apart_by_its_first_other_token(change: tuple[str, str], words: str) -> None:
    assert change[0] in TEMPLATE
    assert words in model.compare(model.Template(TEMPLATE.replace(*change), NAMES), TOKENIZER)


def test_a_template_that_refuses_is_said_so() -> None:
    refuses = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}")
    assert "refuses a dialogue of 3 messages: too long" in model.compare(model.Template(refuses, NAMES), TOKENIZER)


def test_a_template_from_a_stranger_reaches_nothing_of_ours() -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}" + TEMPLATE
    assert "refuses a dialogue" in model.compare(model.Template(evil, NAMES), TOKENIZER)


def test_the_template_is_found_in_either_file(tmp_path: Path) -> None:
    assert model.template_of(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x", "bos_token": {"content": "<s>"}, "pad_token": None}))
    assert model.template_of(tmp_path) == model.Template("x", {"bos_token": "<s>", "pad_token": ""})
    (tmp_path / "chat_template.jinja").write_text("y")
    found = model.template_of(tmp_path)
    assert found is not None and found.source == "y"


def test_a_model_is_named_by_its_size_or_by_what_is_wrong_with_it(scene: Scene, large: Scene, tmp_path: Path) -> None:
    assert model.check_model(scene).found.endswith("parameters, 307.9 kB in int8")
    # 7751.1 M in experts, 302.0 in convolutions, 262.1 embedding, 88.1 dense, 62.9 attention, 1.6 the rest
    assert model.check_model(large).found.startswith("8,467,8") and "9.0 GB" in model.check_model(large).found
    other = tmp_path / "state" / "runs" / "big" / "model" / "config.json"
    other.write_text(json.dumps(LFM | {"model_type": "llama"}))
    again = scene_of(large.config, "mac", tmp_path / "state")
    with pytest.raises(LayoutError):
        model.check_model(again)
    assert again.layout is None and machine.check_disk(again).verdict == "pass"
    other.write_text("{")
    assert model.check_model(scene_of(large.config, "mac", tmp_path / "state")).verdict == "warn"


def test_the_demos_checkpoint_passes_its_template_and_its_self_test(scene: Scene) -> None:
    found = model.check_template(scene)
    assert found is not None and found.verdict == "pass", found
    tested = model.check_self_test(scene)
    assert tested is not None and tested.verdict == "pass", tested
    kernels = model.check_kernels(scene)
    assert kernels is not None and kernels.verdict == "pass", kernels
    assert kernels.found == "no Metal back end: MLX's own operations compute everything" or sys.platform == "darwin"
    identity = Identity(scene.folder)
    beside = model.check_self_test(scene)
    assert model.check_kernels(scene) is None
    identity.close()
    assert beside is not None and "not repeated beside process" in beside.found


def test_the_row_of_kernels_names_what_is_used_and_why_another_is_not() -> None:
    found = model.kernels_finding({"experts": "", "head": "", "conv": ""}, ())
    assert (found.verdict, found.found) == ("pass", "experts, head, conv: as MLX's own operations")
    found = model.kernels_finding({"experts": "", "head": "logprobs differ by 0.3", "conv": ""}, ("conv",))
    assert found.verdict == "warn"
    assert found.found == ("experts: as MLX's own operations; conv is switched off in mac.toml; not used are head: logprobs differ by 0.3")
    found = model.kernels_finding({"experts": "no Metal back end", "conv": "no Metal back end"}, ("conv",))
    assert found.verdict == "pass"


# -- the network without servers


def test_a_worker_that_listens_to_the_world_is_named(scene: Scene) -> None:
    listen = (
        "import socket, sys, time; s = socket.socket(); s.bind((sys.argv[1], 0)); s.listen(); print(s.getsockname()[1], flush=True); "
        "time.sleep(60)"
    )

    def found(address: str) -> Finding:
        command = [sys.executable, "-c", listen, address, "worker_mac.worker"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            try:
                assert worker.stdout is not None and worker.stdout.readline()
                return servers.check_outbound(scene)
            finally:
                worker.kill()

    open_to_all, at_home = found("0.0.0.0"), found("127.0.0.1")
    assert open_to_all.verdict == "fail"
    assert "worker_mac.worker) on 0.0.0.0:" in open_to_all.found
    assert "0.0.0.0" not in at_home.found


def test_a_silent_server_costs_no_more_than_its_limit(scene: Scene) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(10)
        port = silent.getsockname()[1]
        sets = (f'temporal.address="127.0.0.1:{port}"', f'bucket.endpoint="http://127.0.0.1:{port}"')
        config = load_run(None, sets, environ={})
        began = time.monotonic()
        many = checks.chosen((servers.TEMPORAL, servers.CLOCK, "bucket"))
        found = {one.name: one for one in examine(many, scene_of(config, "gpu", scene.folder), 6.0)}
        assert time.monotonic() - began < 9.0
    assert found["temporal"].verdict == found["bucket"].verdict == "fail"
    assert "clock" not in found


# -- the command


def test_a_wrong_file_is_one_finding_and_exit_code_4(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[rollout]\ngroup_sze = 8\n")
    command = [sys.executable, "-m", "cli.main", "doctor", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=PROJECT_ROOT)
    assert done.returncode == 4, done.stderr
    assert json.loads(done.stdout)["checks"] == [
        {"name": "config", "verdict": "fail", "found": f"{path}:2: rollout.group_sze is not a setting",
         "fix": "did you mean rollout.group_size?", "seconds": 0.0}
    ]  # fmt: skip


def test_what_the_owner_wrote_wrongly_is_told_before_anything_is_looked_at(scene: Scene) -> None:
    scene.folder.mkdir()
    (scene.folder / "mac.toml").write_text("idle_minuts = 3.0\n")
    with pytest.raises(ConfigError, match="idle_minuts"):
        _ = scene.allowed


@pytest.mark.parametrize(("installed", "role"), [((), "home"), (("mlx",), "mac"), (("megatron",), "gpu"), (("mlx", "megatron"), "all")])
def test_a_machine_is_looked_at_as_what_is_installed(installed: tuple[str, ...], role: str) -> None:
    assert installed_role(lambda name: name if name in installed else None) == role
