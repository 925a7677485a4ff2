"""A warm start from settings to checkpoint in one process: resumed bit for bit, refused in time, exported as stock tools read it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_adapters, load_model
from safetensors.numpy import load_file

from stoa.contracts.errors import CheckpointError, ConfigError, FormatError, NonFiniteError, RunMismatchError, UsageError
from worker_mac.warmstart import memory, policy
from worker_mac.warmstart import run as running
from worker_mac.warmstart.adam import Adam, rate_at
from worker_mac.warmstart.export import Changes, write_checkpoint
from worker_mac.warmstart.ranks import Ranks
from worker_mac.warmstart.run import Result, warm_start
from worker_mac.warmstart.settings import FRESH, Settings

POLICY = Path(__file__).parents[3] / "environments/search/policy"
PROBE = mx.array([[1, 2, 9, 30, 31, 77, 12, 3]])


def settings(folder: Path, **changes: object) -> Settings:
    usual = Settings(model=str(POLICY), out=str(folder / "out"), state=str(folder / "state"), num_steps=4, batch_rows=4, save_every=2)
    return replace(usual, **changes)


def teach(asked: Settings, *, resume: bool = False, stop_at: int = -1) -> tuple[Result, list[tuple[str, dict[str, object]]]]:
    told: list[tuple[str, dict[str, object]]] = []

    def stop() -> bool:
        return stop_at >= 0 and sum(event == "step" for event, _ in told) > stop_at

    return warm_start(asked, Ranks(), lambda event, facts: told.append((event, facts)), resume=resume, stop=stop), told


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_stopped_and_resumed_is_bit_for_bit_what_was_never_stopped(mode: str, tmp_path: Path) -> None:
    whole, cut = (settings(tmp_path / name, mode=mode) for name in ("whole", "cut"))
    teach(whole)
    result, told = teach(cut, stop_at=2)
    assert result == Result(3, True, result.last_loss) and not cut.out_folder.exists()
    assert told[-1] == ("saved", {"step": 3})
    assert sorted(path.name for path in cut.state_folder.glob("step-*")) == ["step-00000002", "step-00000003"]
    result, told = teach(cut, resume=True)
    assert [facts["step"] for event, facts in told if event == "step"] == [3]
    assert sorted(path.name for path in cut.state_folder.glob("step-*")) == ["step-00000003", "step-00000004"], "the newest two are kept"
    for name in ("out/model.safetensors", "state/step-00000004/second.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_a_torn_state_falls_back_to_the_one_before(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    teach(asked)
    before = (asked.out_folder / "model.safetensors").read_bytes()
    shutil.rmtree(asked.out_folder)
    newest = asked.state_folder / "step-00000004" / "first.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    _, told = teach(asked, resume=True)
    assert [facts["step"] for event, facts in told if event == "step"] == [2, 3]
    assert (asked.out_folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in asked.state_folder.glob("step-*")) == ["step-00000002", "step-00000004"]
    for state in asked.state_folder.glob("step-*"):
        (state / "state.json").write_text("{")
    shutil.rmtree(asked.out_folder)
    with pytest.raises(CheckpointError, match="no saved state is whole"):
        teach(asked, resume=True)


def test_what_is_in_the_way_or_differs_is_refused(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    with pytest.raises(UsageError, match="nothing to go on from"):
        teach(asked, resume=True)
    teach(asked)
    with pytest.raises(UsageError, match="not an empty folder"):
        teach(asked)
    elsewhere = replace(asked, out=str(tmp_path / "other"))
    with pytest.raises(UsageError, match="was begun"):
        teach(elsewhere)
    with pytest.raises(RunMismatchError, match=r"learning_rate was 0\.0001, is 0\.5"):
        teach(replace(elsewhere, learning_rate=0.5), resume=True)
    with pytest.raises(UsageError, match="may be used"):
        teach(settings(tmp_path / "small", memory_bytes=1 << 20))


@pytest.mark.parametrize("bits", [0, 8])
def test_adapters_load_in_stock_mlx_lm_and_say_what_the_checkpoint_says(bits: int, tmp_path: Path) -> None:
    asked = settings(tmp_path, bits=bits, learning_rate=1e-2)
    _, told = teach(asked)
    base, _ = load_model(POLICY)
    before = base(PROBE)
    adapted = load_adapters(base, str(asked.state_folder / "adapters"))
    fused, _ = load_model(asked.out_folder)
    far = float(mx.abs(adapted(PROBE) - fused(PROBE)).max())
    moved = float(mx.abs(before - fused(PROBE)).max())
    assert far <= 1e-4 and moved > 0.1
    exported = dict(told)["exported"]
    assert (exported["max_logit_difference"] is None) == bool(bits)


def test_a_matrix_and_an_expert_change_by_the_product_of_their_halves(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    q, down = "model.layers.1.self_attn.q_proj", "model.layers.1.feed_forward.switch_mlp.down_proj"
    halves = {
        f"{q}.lora_a": numbers.normal(0, 0.1, (64, 2)).astype(np.float32),
        f"{q}.lora_b": numbers.normal(0, 0.1, (2, 64)).astype(np.float32),
        f"{down}.lora_a": numbers.normal(0, 0.1, (8, 2, 64)).astype(np.float32),
        f"{down}.lora_b": numbers.normal(0, 0.1, (8, 64, 2)).astype(np.float32),
    }
    changes = Changes("lfm2_moe", Settings(model="", out="", state="", scale=3.0), {name: mx.array(a) for name, a in halves.items()})
    write_checkpoint(POLICY, tmp_path / "out", changes)
    old, new = load_file(POLICY / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    experts = [f"model.layers.1.feed_forward.experts.{e}.w2.weight" for e in range(8)]
    assert changed == {f"{q}.weight", *experts} and set(old) == set(new)
    assert new[f"{q}.weight"] - old[f"{q}.weight"] == pytest.approx(3 * (halves[f"{q}.lora_a"] @ halves[f"{q}.lora_b"]).T, abs=1e-6)
    for e, name in enumerate(experts):
        product = 3 * halves[f"{down}.lora_b"][e] @ halves[f"{down}.lora_a"][e]
        assert new[name] - old[name] == pytest.approx(product, abs=1e-6)


def test_a_base_without_a_place_for_what_was_taught_is_not_written(tmp_path: Path) -> None:
    trained = {f"model.layers.9.self_attn.q_proj.lora_{half}": mx.zeros((2, 2)) for half in "ab"}
    with pytest.raises(CheckpointError, match=r"lacks model.layers.9.self_attn.q_proj.weight"):
        write_checkpoint(POLICY, tmp_path / "out", Changes("lfm2_moe", Settings(model="", out="", state=""), trained))
    assert not (tmp_path / "out").exists()


def test_the_checkpoint_appears_last_of_all_and_only_once_it_was_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill would find the disk before it, from where `--resume` goes on."""
    asked = settings(tmp_path, bits=0, num_steps=1)
    seen: list[list[str]] = []

    def differs(folder: Path, *_: object, **__: object) -> float:
        seen.append(sorted(path.name for path in (asked.state_folder / "adapters").iterdir()))
        assert (folder / "model.safetensors").is_file() and not asked.out_folder.exists()
        raise CheckpointError("it computes other logits")

    monkeypatch.setattr(running, "compare", differs)
    with pytest.raises(CheckpointError, match="other logits"):
        teach(asked)
    assert seen == [["adapter_config.json", "adapters.safetensors"]] and not list(tmp_path.glob("*out*"))
    monkeypatch.undo()
    result, told = teach(asked, resume=True)
    assert result.num_steps == 1 and [event for event, _ in told][-1] == "exported"
    assert (asked.out_folder / "model.safetensors").is_file() and not list(tmp_path.glob(".out*"))


def test_a_new_policy_is_the_demos_shape_and_learns(tmp_path: Path) -> None:
    asked = settings(tmp_path, model=FRESH, mode="full", num_steps=6, batch_rows=8, learning_rate=4e-3, num_warmup_steps=1)
    _, told = teach(asked)
    losses = [float(str(facts["loss"])) for event, facts in told if event == "step"]
    # Nothing known: the log of 256 words.
    assert losses[0] == pytest.approx(np.log(256), abs=0.5) and losses[-1] < losses[0] - 1.0
    ours, shipped = load_file(asked.out_folder / "model.safetensors"), load_file(POLICY / "model.safetensors")
    assert {name: array.shape for name, array in ours.items()} == {name: array.shape for name, array in shipped.items()}
    config, theirs = (json.loads((folder / "config.json").read_text()) for folder in (asked.out_folder, POLICY))
    assert {name: value for name, value in theirs.items() if config.get(name) != value} == {
        "output_router_logits": False,
        "transformers_version": theirs["transformers_version"],
        "use_cache": True,
    }


def test_dialogues_of_a_file_are_learned_and_nonsense_in_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.jsonl"
    line = {"messages": [{"role": "user", "content": "treats"}, {"role": "assistant", "content": "Answer: nothing"}]}
    path.write_text(json.dumps(line) + "\n")
    _, told = teach(settings(tmp_path, dialogues=str(path), num_steps=8, learning_rate=5e-3))
    losses = [float(str(facts["loss"])) for event, facts in told if event == "step"]
    assert losses[-1] < 0.2 * losses[0]
    path.write_text("nonsense\n")
    with pytest.raises(FormatError, match=":1: not a dialogue"):
        teach(settings(tmp_path / "again", dialogues=str(path)))


def test_longer_rows_than_asked_for_are_left_out_and_counted(tmp_path: Path) -> None:
    _, told = teach(settings(tmp_path, max_tokens=30, batch_rows=8))
    steps = [facts for event, facts in told if event == "step"]
    assert steps[-1]["rows_left_out_in_all"] == sum(int(str(facts["rows_left_out"])) for facts in steps) > 0
    assert all(int(str(facts["num_rows"])) + int(str(facts["rows_left_out"])) == 8 for facts in steps)
    with pytest.raises(UsageError, match="no demonstration has 2 tokens"):
        teach(settings(tmp_path / "none", max_tokens=2))


def test_adam_and_its_rate_are_the_papers() -> None:
    asked = Settings(model="", out="", state="", learning_rate=1.0, num_warmup_steps=2, num_steps=6)
    # A rise over two steps, then (1 + cos(pi k / 4)) / 2.
    assert [rate_at(step, asked) for step in range(6)] == pytest.approx([0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    adam, value = Adam({"x": mx.array([1.0, 1.0])}), {"x": mx.array([1.0, 1.0])}
    value = adam.step(value, {"x": mx.array([0.5, -2.0])}, 0.1)
    # Corrected for bias, the first step is the sign of the gradient.
    assert np.array(value["x"]) == pytest.approx([0.9, 1.1], abs=1e-6)
    value = adam.step(value, {"x": mx.array([0.0, -2.0])}, 0.1)
    # m = 0.9 * 0.05 / 0.19, v = 0.95 * 0.0125 / 0.0975 for the first.
    assert np.array(value["x"]) == pytest.approx([0.9 - 0.1 * 0.236842 / 0.348990, 1.2], abs=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 3},
        {"num_steps": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("inf")},
        {"scale": float("nan")},
        {"memory_bytes": -1},
        {"seed": -1},
        {"seed": 1 << 70},
        {"shares": (1.0,), "num_ranks": 2},
        {"shares": (1.0, float("nan")), "num_ranks": 2},
        {"shares": (float("inf"), 1.0), "num_ranks": 2},
        {"mode": "full", "split": "tensor"},
        {"model": FRESH},
        {"model": FRESH, "mode": "full", "environment": "copy_word"},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        settings(tmp_path, **wrong).check()


def test_macs_that_read_other_rows_or_weights_do_not_teach_together(tmp_path: Path) -> None:
    """All of one length, so that sizes tell nothing."""
    base, lines = tmp_path / "base", tmp_path / "rows.jsonl"
    shutil.copytree(POLICY, base)
    lines.write_text("one")
    asked = settings(tmp_path, model=str(base), dialogues=str(lines))
    tensors = memory.read_tensors(base)
    first = running._identity(asked, base, tensors)
    assert running._identity(replace(asked, num_ranks=2, model="elsewhere"), base, tensors) == first
    found = {first}
    for path, old, new in ((lines, b"one", b"two"), (base / "tokenizer.json", b"1", b"2")):
        path.write_bytes(path.read_bytes().replace(old, new, 1))
        found.add(running._identity(asked, base, tensors))
    for at in (-1, -(1 << 20)):  # another training changes every part of the file
        path = base / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[at - 8192 : at] = bytes(8192)
        path.write_bytes(data)
        found.add(running._identity(asked, base, tensors))
    assert len(found) == 5


def test_a_full_disk_is_told_and_the_state_before_stays(tmp_path: Path) -> None:
    """A process that may write no file beyond some size meets what a full disk gives."""
    asked = settings(tmp_path, mode="full", num_steps=1)
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    run_it = "sys.argv[0:] = ['x', *sys.argv[1:]]; runpy.run_module('worker_mac.warmstart', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", limited + run_it, asked.to_json()], capture_output=True, text=True, timeout=60, check=False
    )
    fault = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, fault["event"], fault["unmet"]) == (1, "fault", False)
    assert "write" in fault["message"] and "--resume" in fault["hint"]
    assert list(asked.state_folder.iterdir()) == [] and not asked.out_folder.exists()


def test_settings_go_through_json_and_other_builds_are_refused(tmp_path: Path) -> None:
    asked = settings(tmp_path, shares=(2.0, 1.0), num_ranks=2)
    assert Settings.from_json(asked.to_json()) == asked
    with pytest.raises(ConfigError, match="another build"):
        Settings.from_json('{"model": "x"}')


def test_matrices_that_do_not_divide_into_groups_stay_as_they_are() -> None:
    model = policy.load(POLICY, Settings(model="", out="", state=""))
    kinds = {path: type(module).__name__ for path, module in model.named_modules() if hasattr(module, "bits")}
    assert kinds["model.layers.1.self_attn.q_proj"] == "QuantizedLinear"
    assert kinds["model.layers.1.feed_forward.switch_mlp.up_proj"] == "QuantizedSwitchLinear"
    assert "model.layers.0.conv.conv" not in kinds
    adapted = policy.adapted_paths(model, experts=True)
    assert "model.layers.1.feed_forward.gate" not in adapted and "model.embed_tokens" not in adapted
    assert len(adapted) == 5 + 7 + 5 and len(policy.adapted_paths(model, experts=False)) == 5 + 4 + 2


def test_a_step_that_blows_up_says_so_and_leaves_the_last_state(tmp_path: Path) -> None:
    asked = settings(tmp_path, learning_rate=1e30, num_warmup_steps=0, mode="full", save_every=1)
    with pytest.raises(NonFiniteError, match="step 1"):
        teach(asked)
    assert [path.name for path in asked.state_folder.iterdir()] == ["step-00000001"] and not asked.out_folder.exists()


@pytest.mark.parametrize("mode, bits", [("full", 0), ("lora", 4)])  # MLX's CPU backend gathers experts in fp32 only
def test_a_checkpoint_in_bf16_stays_one(mode: str, bits: int, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(POLICY, base)
    halved = {
        name: array if "expert_bias" in name else array.astype(mx.bfloat16)
        for name, array in mx.load(str(base / "model.safetensors")).items()
    }
    # In two files, as large checkpoints are.
    names = sorted(halved)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        mx.save_safetensors(str(base / f"model-0000{number}-of-00002.safetensors"), {name: halved[name] for name in part})
    (base / "model.safetensors").unlink()
    asked = settings(tmp_path, model=str(base), mode=mode, bits=bits, learning_rate=1e-3)
    _, told = teach(asked)
    assert np.isfinite(float(str(dict(told)["step"]["loss"])))
    for path in sorted(base.glob("model-*")):
        before, after = mx.load(str(path)), mx.load(str(asked.out_folder / path.name))
        assert {name: (array.dtype, array.shape) for name, array in before.items()} == {n: (a.dtype, a.shape) for n, a in after.items()}
        assert any(not bool(mx.array_equal(before[name], after[name])) for name in before)
