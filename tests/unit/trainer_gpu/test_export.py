"""A run's checkpoint as a folder for transformers, and a version of it for mlx_lm: reloaded, compared, refused when wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.export import export_hf, export_mlx
from stoa.bucket.store import Store
from stoa.contracts.errors import CheckpointError, UsageError, WeightsError
from stoa.contracts.messages import AcquireRequest, CheckpointRequest, StepRequest
from stoa.weights.state import WeightState
from stoa.weights.sync import Puller
from tests.unit.trainer_gpu.player import POLICY
from tests.unit.trainer_gpu.runs import Reports, config_of, head_of, ship_sweep, start_run
from trainer_gpu.checkpoint import save_parts
from trainer_gpu.convert import load_hub
from trainer_gpu.engine import TrainerEngine
from trainer_gpu.export import compare, fill
from trainer_gpu.model import build_model, read_model_config
from trainer_gpu.state import BUFFER, MASTER
from trainer_gpu.weights import saved_buffers

PROMPTS = [[1, 2, 9, 30, 31, 77, 12, 3], list(range(5, 64))]


@pytest.mark.loop
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_and_version_open_elsewhere_with_the_same_logits(
    dtype: str, store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handle = start_run(store, config_of(store, groups_per_step=2, dtype=dtype, learning_rate=1e-3))
    engine = TrainerEngine(handle)
    token = engine.acquire(AcquireRequest("test", 1), 1, Reports()).token
    policy = engine._policy
    assert policy is not None
    ship_sweep(handle, policy, list(handle.environment.question_ids("train"))[:12], host="mac", sweep=0, seed=1)
    assert engine.train_step(StepRequest("test", token, 1), Reports()).status == "done"
    engine.checkpoint(CheckpointRequest("test", token, 1), Reports())

    capfd.readouterr()
    done = export_hf(handle.document, store, tmp_path / "hf", quiet=False)
    said = capfd.readouterr()
    lines = said.err.splitlines()
    assert said.out == "" and all(line.startswith("weights: ") for line in lines), "what libraries say while they load is nobody's business"
    assert lines[0].startswith("weights: 0 %, 0 B of ") and lines[-1].startswith("weights: 100 %, ")
    assert done.what == "step 1"
    assert done.max_logit_difference is not None and done.max_logit_difference < 1e-4
    assert (done.num_prompts, done.prompts_of, done.greedy_agreement) == (10, "search", 1.0)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    base = load_file(POLICY / "model.safetensors")
    assert tensors[name].dtype == getattr(torch, dtype)
    assert not torch.equal(tensors[name], base[name].to(tensors[name].dtype)), "the export is of the step, not of the base"
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (POLICY / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match="not an empty folder"):
        export_hf(handle.document, store, tmp_path / "hf")

    served = export_mlx(handle.document, store, tmp_path / "mlx")
    assert served.what == "version 0"
    assert served.max_logit_difference is not None and served.greedy_agreement is not None
    assert (served.num_prompts, served.prompts_of) == (10, "search")
    assert served.greedy_agreement == 1.0 if dtype == "float32" else served.greedy_agreement > 0.9
    assert dtype == "bfloat16" or served.max_logit_difference < 1e-4
    engine.close()


def test_folder_with_one_wrong_tensor_is_not_called_done(tmp_path: Path) -> None:
    config = read_model_config(POLICY)
    model = build_model(config, torch.float32)
    load_hub(model, config, POLICY)
    for path in POLICY.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert compare(model, config, tmp_path, PROMPTS).max_logit_difference < 1e-4
    tensors = load_file(tmp_path / "model.safetensors")
    one, two = (f"model.layers.1.feed_forward.experts.0.{name}.weight" for name in ("w1", "w3"))
    for expert in range(8):
        one, two = (f"model.layers.1.feed_forward.experts.{expert}.{name}.weight" for name in ("w1", "w3"))
        tensors[one], tensors[two] = tensors[two].clone(), tensors[one].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="transformers computes other logits"):
        compare(model, config, tmp_path, PROMPTS)


def test_checkpoint_without_one_weight_is_not_exported(store: Store) -> None:
    model = build_model(read_model_config(POLICY), torch.float32)
    tensors = {f"{MASTER}.{name}": parameter for name, parameter in model.named_parameters()}
    tensors |= {f"{BUFFER}.{name}": buffer for name, buffer in saved_buffers(model).items()}
    fill(model, store, save_parts(store, "test", 1, 1, tensors, part_bytes=1 << 20))
    del tensors[f"{MASTER}.decoder.final_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 1 weights: decoder\.final_layernorm"):
        fill(model, store, save_parts(store, "test", 1, 2, tensors, part_bytes=1 << 20))


@pytest.mark.loop
def test_mlx_folder_with_one_wrong_tensor_is_not_called_done(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker_mac import export as mac_export
    from worker_mac.export import compare as compare_mlx

    def unreadable(folder: Path) -> None:
        raise WeightsError(f"mlx_lm cannot load {folder}")

    handle = start_run(store, config_of(store))
    engine = TrainerEngine(handle)
    engine.acquire(AcquireRequest("test", 1), 1, Reports())
    engine.close()
    (tmp_path / "there").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(mac_export, "load_model", unreadable)
        for name in ("mlx", "there"):
            with pytest.raises(WeightsError, match="cannot load"):
                export_mlx(handle.document, store, tmp_path / name)
    assert not (tmp_path / "mlx").exists()
    export_mlx(handle.document, store, tmp_path / "there", quiet=False)
    export_mlx(handle.document, store, tmp_path / "mlx")
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == sorted(p.name for p in (tmp_path / "mlx").iterdir())
    state: WeightState = Puller(store, handle.document, tmp_path / "weights").join(head_of(handle))
    compare_mlx(state, tmp_path / "mlx", PROMPTS)
    index = json.loads((tmp_path / "mlx" / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.q_layernorm.weight"
    path = tmp_path / "mlx" / index["weight_map"][name]
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name] * 2}, path, metadata={"format": "mlx"})
    with pytest.raises(WeightsError, match="mlx_lm computes other logits"):
        compare_mlx(state, tmp_path / "mlx", PROMPTS)


@pytest.mark.loop
def test_export_that_cannot_be_compared_here_says_so_and_fails(store: Store, tmp_path: Path) -> None:
    """On a host without the extra mac the folder is written, and is not called done."""
    handle = start_run(store, config_of(store))
    engine = TrainerEngine(handle)
    engine.acquire(AcquireRequest("test", 1), 1, Reports())
    engine.close()
    without = "import sys; sys.modules['mlx_lm'] = None; from cli.main import main; main(['export', 'test', sys.argv[1]])"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STOA_", "AWS_"))}
    where = {"STOA_BUCKET_ENDPOINT": store.settings.endpoint, "STOA_BUCKET_NAME": store.settings.name, "STOA_STATE": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", without, str(tmp_path / "mlx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env={**clean, **where})
    assert done.returncode == 1, done.stderr
    assert "not compared: mlx_lm is not installed here" in done.stderr
    assert "pip install 'stoa[mac]'" in done.stderr
    assert (tmp_path / "mlx" / "config.json").is_file()


def test_transformers_can_still_be_imported_in_a_trainers_process() -> None:
    """Its import comes last in an export, after the process was prepared for a machine without CUDA."""
    lines = "from trainer_gpu import host; host.setup_process(); import transformers; transformers.Lfm2MoeForCausalLM"
    subprocess.run([sys.executable, "-c", lines], check=True, cwd=Path(__file__).parents[3])
