"""The layout against what mlx_lm builds, against the full-size model's numbers, and its refusals."""

import dataclasses
import importlib

import pytest

from stoa.contracts.errors import LayoutError
from stoa.weights.layout import TensorSpec, layout_of, make_layout
from tests.unit.weights.small_run import MODEL_CONFIG

DENSE_CONFIG = {
    "model_type": "lfm2",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 200,
    "rope_parameters": {"rope_theta": 10000.0},
    "layer_types": ["conv", "full_attention"],
}
FULL_CONFIG = {
    **MODEL_CONFIG,
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
}


@pytest.mark.parametrize("config", [MODEL_CONFIG, DENSE_CONFIG], ids=["lfm2_moe", "lfm2"])
def test_names_and_shapes_are_those_of_the_stock_mlx_model(config: dict):
    pytest.importorskip("mlx_lm")
    from mlx.utils import tree_flatten

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    theirs = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    ours = {spec.name: spec.shape for spec in layout_of(config, "float32").tensors}
    assert ours == theirs


def test_full_size_model_has_the_known_number_of_codes_and_bytes():
    layout = layout_of(FULL_CONFIG, "bfloat16")
    # 8.466e9 codes; 4 bytes of scale and bias for every 64
    assert round(layout.num_codes / 1e9, 3) == 8.466
    assert layout.num_bytes == pytest.approx(layout.num_codes * (1 + 4 / 64), rel=1e-3)
    raw_names = {spec.name for spec in layout.tensors if spec.kind == "raw"}
    assert "model.layers.5.feed_forward.gate.weight" in raw_names
    assert {spec.dtype for spec in layout.tensors if spec.name.endswith("expert_bias")} == {"float32"}
    assert {spec.dtype for spec in layout.raw} == {"bfloat16"}


def test_layout_id_tells_types_and_shapes_apart_and_is_stable():
    ids = {
        layout_of(MODEL_CONFIG, "float32").layout_id,
        layout_of(MODEL_CONFIG, "bfloat16").layout_id,
        layout_of({**MODEL_CONFIG, "vocab_size": 128}, "float32").layout_id,
    }
    assert len(ids) == 3
    assert layout_of(dict(MODEL_CONFIG), "float32").layout_id in ids


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 96, "num_attention_heads": 4}, "multiple of 64"),
        ({"moe_intermediate_size": 32}, "down_proj"),
        ({"layer_types": None}, "layer_types"),
        ({"num_experts": 0}, "num_experts"),
    ],
    ids=str,
)
def test_config_without_a_layout_is_refused_by_name(change: dict, named: str):
    with pytest.raises(LayoutError, match=named):
        layout_of({**MODEL_CONFIG, **change}, "float32")


def test_tensor_of_a_wrong_type_or_a_name_twice_is_refused():
    good = TensorSpec("a.weight", (2, 64), "int8", "uint8")
    with pytest.raises(LayoutError, match="one name"):
        make_layout([good, good], "float32")
    with pytest.raises(LayoutError, match="float32"):
        make_layout([good, TensorSpec("n.weight", (4,), "raw", "bfloat16")], "float32")
    with pytest.raises(LayoutError, match="matrix"):
        make_layout([dataclasses.replace(good, shape=(64,))], "float32")
