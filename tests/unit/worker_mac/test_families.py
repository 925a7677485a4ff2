"""The engine on families that only examinations know, against mlx_lm's own models of them on the same int8 weights."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from benchmarks.wired_cases import STOCK
from stoa.contracts.errors import CheckpointError, WiredError
from stoa.weights.state import WeightState
from worker_mac.checkpoint import open_arrays, state_of
from worker_mac.cluster.split import tensors_of
from worker_mac.cluster.tensor import check_shares
from worker_mac.families import engine_config, engine_layout, hub_name, refuse_short_window
from worker_mac.forced import Forced
from worker_mac.model import Model
from worker_mac.weights import LiveWeights

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
QWEN3 = STOCK["qwen3"]
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": STOCK["llama"],
    "llama3": STOCK["llama"] | {"rope_scaling": LLAMA3, "rope_theta": 100.0, "head_dim": 32},
    "linear": STOCK["llama"] | {"rope_scaling": {"type": "linear", "factor": 4.0}, "tie_word_embeddings": True},
    "qwen2": STOCK["llama"] | {"model_type": "qwen2"},
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3 | {"model_type": "qwen3_moe", "tie_word_embeddings": False} | EXPERTS,
    "olmoe": STOCK["olmoe"],
}


def stock_model(config: dict[str, Any]) -> nn.Module:
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Biases and norms of a new model are zeros and ones, which would hide what becomes of them.
    random = [(name, value + mx.random.normal(value.shape) * 0.1) for name, value in tree_flatten(model.parameters())]
    model.update(tree_unflatten(random))
    mx.eval(model.parameters())
    return model


def write(folder: Path, config: dict[str, Any], model: nn.Module) -> Path:
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def put_back(model: nn.Module, state: WeightState, family: str) -> None:
    """Give the stock model the values that the codes stand for."""
    values = [(hub_name(family, spec.name), mx.array(state.dequantise(spec.name))) for spec in state.layout.tensors]
    model.update(tree_unflatten(values))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_stock_model(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    stock = stock_model(config)
    family = config["model_type"]
    layout = engine_layout(config, "float32")
    assert {hub_name(family, spec.name) for spec in layout.tensors} == {name for name, _ in tree_flatten(stock.parameters())}
    state = state_of(write(tmp_path / "hub", config, stock), layout)
    put_back(stock, state, family)
    ids = np.random.default_rng(2).integers(0, 96, (3, 40)).astype(np.int32)
    found = Forced(Model(engine_config(config), LiveWeights.of(state).arrays), 3, 64)
    first = found.feed([row[:33] for row in ids])
    rest = found.walk(ids[:, 33:])
    expected = np.array(stock(mx.array(ids)).astype(mx.float32))
    np.testing.assert_allclose(first, expected[:, 32], atol=2e-4)
    np.testing.assert_allclose(rest, expected[:, 33:].swapaxes(0, 1), atol=2e-4)


def test_a_checkpoint_on_our_grid_by_mlx_lm_is_taken_as_it_is_with_its_router(tmp_path: Path) -> None:
    config = CASES["olmoe"]
    model = stock_model(config)
    nn.quantize(model, group_size=64, bits=8)
    folder = write(tmp_path / "hub", config | {"quantization": {"group_size": 64, "bits": 8}}, model)
    state = state_of(folder, engine_layout(config, "float32"))
    arrays = dict(tree_flatten(model.parameters()))
    np.testing.assert_array_equal(
        state.arrays["model.layers.1.self_attn.out_proj.weight"], np.array(arrays["model.layers.1.self_attn.o_proj.weight"]).view(np.uint8)
    )
    gate = mx.dequantize(*(arrays[f"model.layers.1.mlp.gate.{part}"] for part in ("weight", "scales", "biases")), group_size=64, bits=8)
    np.testing.assert_array_equal(state.dequantise("model.layers.1.feed_forward.gate.weight"), np.array(gate.astype(mx.float32)))


def test_a_layer_that_was_left_off_the_grid_is_put_on_it(tmp_path: Path) -> None:
    config = CASES["llama"]
    model = stock_model(config)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    plain = state_of(write(tmp_path / "plain", config, model), engine_layout(config, "float32"))
    nn.quantize(model, group_size=64, bits=8, class_predicate=lambda path, one: hasattr(one, "to_quantized") and "layers.0." not in path)
    partly = state_of(write(tmp_path / "partly", config | {"quantization": {"group_size": 64, "bits": 8}}, model), plain.layout)
    for name in (f"model.layers.0.{part}.weight" for part in ("self_attn.q_proj", "feed_forward.w2")):
        np.testing.assert_array_equal(partly.arrays[name], plain.arrays[name])


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.k_proj.weight"])
def test_a_weight_that_is_no_number_is_told_with_its_tensor(name: str, tmp_path: Path) -> None:
    config = CASES["llama"]
    model = stock_model(config)
    damaged = [(one, value * float("nan") if one == name else value) for one, value in tree_flatten(model.parameters())]
    model.update(tree_unflatten(damaged))
    with pytest.raises(CheckpointError, match=rf"{name.replace('norm', '.*norm')}: .* NaN"):
        state_of(write(tmp_path / "hub", config, model), engine_layout(config, "float32"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "is not a table"),
        ("{", "cannot be read"),
        ('{"model_type": "llama", "quantization": "8bit"}', "quantised to None bits"),
        ('{"model_type": "llama", "quantization": true}', "quantised to None bits"),
        (json.dumps(STOCK["llama"] | {"rope_scaling": "linear"}), "cannot be opened by mlx_lm"),
    ],
)
def test_a_config_that_is_none_is_told(text: str, words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "hub", STOCK["llama"], stock_model(STOCK["llama"]))
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        open_arrays(folder)


def test_a_head_of_its_own_stands_on_the_last_mac_and_the_embedding_on_the_first() -> None:
    layout = engine_layout(CASES["llama"], "float32")
    first, last = ({spec.name for spec in tensors_of(layout, layers, 4)} for layers in (range(2), range(2, 4)))
    ends = {"model.embed_tokens.weight", "model.head.weight", "model.embedding_norm.weight"}
    assert first & ends == {"model.embed_tokens.weight"}
    assert last & ends == {"model.head.weight", "model.embedding_norm.weight"}


@pytest.mark.parametrize("name", ["qwen2", "olmoe"])
def test_attention_that_cannot_be_dealt_out_is_refused(name: str) -> None:
    with pytest.raises(WiredError, match="cannot be dealt out"):
        check_shares(engine_layout(CASES[name], "float32"), engine_config(CASES[name]), 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "nemotron_h"}, "state-space layers are not computed here"),
        ({"model_type": "gpt_bigcode"}, "model_type is 'gpt_bigcode'"),
        ({"attention_bias": True}, "attention_bias of a llama"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layers of sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"num_key_value_heads": 3}, "4 query heads cannot be dealt out to 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"clip_qkv": 8.0}, "clip_qkv of a llama"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not a table"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "a factor of 0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "from 1 to 1"),
    ],
)
def test_what_is_not_computed_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        engine_config(STOCK["llama"] | changes)


WINDOW = {"model_type": "mistral", "num_hidden_layers": 4, "sliding_window": 64}
QWEN_WINDOW = WINDOW | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}


@pytest.mark.parametrize("config", [WINDOW, QWEN_WINDOW, WINDOW | {"layer_types": None}])
def test_a_window_that_an_episode_may_outgrow_is_refused_by_its_field(config: dict[str, Any]) -> None:
    refuse_short_window(config, 64)
    with pytest.raises(CheckpointError, match=r"config\.json: sliding_window is 64, and an episode of this task may have 65 tokens"):
        refuse_short_window(config, 65)


@pytest.mark.parametrize(
    "config",
    [
        WINDOW | {"sliding_window": None},
        WINDOW | {"layer_types": ["full_attention"] * 4},
        WINDOW | {"model_type": "llama"},
        QWEN_WINDOW | {"use_sliding_window": False},
        QWEN_WINDOW | {"max_window_layers": 4},
        QWEN_WINDOW | {"max_window_layers": None},
    ],
)
def test_a_window_that_no_layer_has_is_none(config: dict[str, Any]) -> None:
    refuse_short_window(config, 100_000)
