"""Hub checkpoints in and out, and the names and shapes MLX serves, against mlx_lm's own conversion."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm.models import lfm2_moe
from safetensors.torch import load_file, save_file
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from stoa.contracts.errors import CheckpointError
from stoa.weights.layout import layout_of
from tests.unit.trainer_gpu.checkpoints import load
from trainer_gpu.convert import hub_shapes, load_hub, mlx_tensors, save_hub, weight_map
from trainer_gpu.hub_files import HubFiles
from trainer_gpu.model import build_model, read_model_config
from trainer_gpu.weights import local_weights


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_a_hub_checkpoint_goes_in_and_out_bit_for_bit(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    config, model = load(folder)
    save_hub(model, config, tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_a_bf16_checkpoint_goes_in_and_out_bit_for_bit(moe_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "bf16"
    source.mkdir()
    shutil.copy(moe_folder / "config.json", source)
    tensors = {name: t if name.endswith("expert_bias") else t.bfloat16() for name, t in load_file(moe_folder / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors")
    config, model = load(source, torch.bfloat16)
    save_hub(model, config, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[name], t) and after[name].dtype == t.dtype for name, t in tensors.items())
    assert len(after) == len(tensors)


def test_every_parameter_and_buffer_is_in_the_map_once(moe_folder: Path) -> None:
    config, model = load(moe_folder)
    mapped = [weight.megatron for weight in weight_map(config)]
    assert len(mapped) == len(set(mapped))
    assert set(mapped) == set(local_weights(model))
    assert {name for name, _ in model.named_buffers()} <= set(mapped) | {"decoder.rotary_pos_emb.inv_freq"}
    hub_names = [name for weight in weight_map(config) for name in weight.hub]
    assert sorted(hub_names) == sorted(load_file(moe_folder / "model.safetensors"))


def test_mlx_tensors_equal_what_mlx_lm_makes_of_the_checkpoint(moe_folder: Path) -> None:
    config, model = load(moe_folder)
    ours = dict(mlx_tensors(model, config))
    args = lfm2_moe.ModelArgs.from_dict(json.loads((moe_folder / "config.json").read_text()))
    served = lfm2_moe.Model(args)
    theirs = served.sanitize(mx.load(str(moe_folder / "model.safetensors")))
    assert {name: t.shape for name, t in tree_flatten(served.parameters())} == {name: tuple(t.shape) for name, t in ours.items()}
    assert all(np.array_equal(np.array(theirs[name]), t.numpy()) for name, t in ours.items())
    assert len(list(mlx_tensors(model, config))) == len(ours), "no tensor is yielded twice"


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_mlx_tensors_have_the_names_and_shapes_of_the_wire(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    config, model = load(folder)
    layout = layout_of(json.loads((folder / "config.json").read_text()), "float32")
    assert {name: tuple(t.shape) for name, t in mlx_tensors(model, config)} == {spec.name: spec.shape for spec in layout.tensors}


def test_mlx_tensors_of_masters_are_the_masters(moe_folder: Path) -> None:
    config, model = load(moe_folder, torch.bfloat16)
    _, exact = load(moe_folder)
    masters = local_weights(exact)
    expected = dict(mlx_tensors(exact, config))
    ours = dict(mlx_tensors(model, config, masters))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in ours.items())


def test_a_checkpoint_in_several_files_is_read_by_its_index(moe_folder: Path, tmp_path: Path) -> None:
    shutil.copy(moe_folder / "config.json", tmp_path)
    tensors = load_file(moe_folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / part)
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, tmp_path / "stray.safetensors")
    weight_files = {name: part for part, held in parts.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_files}))
    _, model = load(tmp_path)
    _, whole = load(moe_folder)
    assert all(torch.equal(t, local_weights(whole)[name]) for name, t in local_weights(model).items())


def broken(moe_folder: Path, tmp_path: Path, change) -> Path:
    shutil.copy(moe_folder / "config.json", tmp_path)
    tensors = load_file(moe_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def lacking(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.feed_forward.expert_bias"]


def with_extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.feed_forward.gate.bias"] = torch.zeros(8)


def misshapen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.conv.conv.weight"] = torch.zeros(64, 1, 4)


def untied(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lacking, "lacks the tensor model.layers.1.feed_forward.expert_bias"),
        (with_extra, "no place for: model.layers.1.feed_forward.gate.bias"),
        (misshapen, r"conv.conv.weight has shape \(64, 1, 4\); config.json makes it \(64, 1, 3\)"),
        (untied, "an lm_head that differs"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change, problem: str, moe_folder: Path, tmp_path: Path) -> None:
    folder = broken(moe_folder, tmp_path, change)
    with pytest.raises(CheckpointError, match=problem):
        load(folder)


def test_an_lm_head_equal_to_the_embedding_is_accepted(moe_folder: Path, tmp_path: Path) -> None:
    def tied_twice(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load(broken(moe_folder, tmp_path, tied_twice))


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"[" * 100_000])
def test_a_broken_index_is_refused(broken: bytes, moe_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(moe_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").write_bytes(broken)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"), HubFiles(tmp_path):
        pass


def test_a_tensor_in_two_files_is_refused(moe_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(moe_folder, tmp_path, dirs_exist_ok=True)
    shutil.copyfile(tmp_path / "model.safetensors", tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match="twice"), HubFiles(tmp_path):
        pass


def test_a_torn_file_is_refused(moe_folder: Path, tmp_path: Path) -> None:
    shutil.copy(moe_folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((moe_folder / "model.safetensors").read_bytes()[:-1])
    config = read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read: model\.safetensors"):
        load_hub(build_model(config, torch.float32), config, tmp_path)


def test_weights_are_not_written_over_weights(moe_folder: Path, tmp_path: Path) -> None:
    config, model = load(moe_folder)
    save_hub(model, config, tmp_path)
    with pytest.raises(CheckpointError, match="holds weights already"):
        save_hub(model, config, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory is read from /proc")
@pytest.mark.loop
@pytest.mark.timeout(200)
def test_loading_takes_little_more_than_the_largest_tensor_beside_the_model(tmp_path: Path) -> None:
    """A sharded checkpoint of over 400 MB, shaped like the large one: of 16.9 GB there the largest tensor is 524 MB."""
    config = Lfm2MoeConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=448,
        num_hidden_layers=6,
        layer_types=["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
        num_attention_heads=8,
        num_key_value_heads=2,
        num_dense_layers=1,
        num_experts=56,
        num_experts_per_tok=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 5e6, "rope_type": "default"},
    )
    Lfm2MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="64MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    command = [sys.executable, "-m", "tests.unit.trainer_gpu.load_memory", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    print(measured)
    assert measured["model_bytes"] > 400e6
    largest_bytes = 2 * 32_000 * 512
    assert measured["beside_bytes"] < 2 * largest_bytes + 32e6
    assert measured["mapped_bytes"] > 400e6, "the measure must see a whole checkpoint in memory"


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_shapes_foretold_are_those_of_the_reference_library(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    found = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert dict(hub_shapes(read_model_config(folder))) == found
