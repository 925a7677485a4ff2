"""What is read from config.json, and what is refused by name."""

import json
from pathlib import Path

import pytest

from stoa.contracts.errors import ConfigError
from trainer_gpu.model import read_model_config

MOE: dict[str, object] = {
    "model_type": "lfm2_moe",
    "architectures": ["Lfm2MoeForCausalLM"],
    "vocab_size": 128000,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "conv_bias": False,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rope_parameters": {"rope_theta": 5000000.0, "rope_type": "default"},
    "norm_eps": 1e-5,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
DENSE: dict[str, object] = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "norm_eps": 1e-5,
    "max_position_embeddings": 128000,
    "tie_embedding": True,
}


def write(folder: Path, values: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_the_first_model_is_read_as_published(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, MOE))
    assert config.attention_layers == (2, 6, 10, 14, 18, 21)
    assert config.moe_layers == tuple(range(2, 24))
    assert (config.head_size, config.rope_theta, config.num_experts, config.experts_per_token) == (64, 5e6, 32, 4)


def test_the_dense_family_rounds_its_width_as_the_reference_does(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, DENSE))
    assert config.dense_ffn_size == 8192  # 12288 * 2 / 3, a multiple of 256 already
    assert config.moe_layers == ()
    assert config.attention_layers == (2, 5, 8, 10, 12, 14)
    other = read_model_config(write(tmp_path, DENSE | {"block_ff_dim": 10000}))
    assert other.dense_ffn_size == 6912  # 6666 up to a multiple of 256


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', which this trainer cannot run"),
        ({"num_shared_experts": 1}, "num_shared_experts is not a field this trainer knows"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not a field"),
        ({"conv_bias": True}, "conv_bias is True; only False is supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e6, "factor": 4.0}}, "rope_parameters.factor is 4.0"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"head_dim": 128}, "head_dim is 128; only 64 is supported"),
        ({"layer_types": ["conv"] * 24}, "layer_types is missing, or has no attention layer"),
        ({"layer_types": ["conv"] * 23 + ["sliding_attention"]}, "layer_types must hold 24 .*sliding_attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must hold 24"),
        ({"full_attn_idxs": [1]}, "full_attn_idxs contradicts layer_types"),
        ({"num_experts": 2}, "num_experts_per_tok is above the 2 experts"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide 32"),
        ({"hidden_size": "2048"}, "hidden_size is '2048', not int"),
        ({"num_dense_layers": 30}, "num_dense_layers is above the 24 layers"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0, below 1"),
        ({"use_expert_bias": 1}, "use_expert_bias is 1, not true or false"),
        ({"norm_eps": float("nan")}, "norm_eps is nan, not a finite number"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor is inf, not a finite number"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf, not a finite number"),
        ({"rope_theta": 1000000}, r"rope_theta is 1000000\.0, rope_parameters\.rope_theta is 5000000\.0"),
        ({"rope_theta": "5e6"}, r"rope_theta is '5e6', rope_parameters\.rope_theta is 5000000\.0"),
        ({"theta": 1e6}, r": theta is 1000000\.0, rope_parameters\.rope_theta is 5000000\.0"),
        ({"use_pos_enc": False}, "use_pos_enc is False; only True is supported"),
        ({"layer_types": None, "full_attn_idxs": ["2"]}, "full_attn_idxs is .*, not numbers of layers"),
        ({"layer_types": None, "full_attn_idxs": [2.5]}, "full_attn_idxs is .*, not numbers of layers"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(change: dict[str, object], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        read_model_config(write(tmp_path, MOE | change))
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    values = {name: value for name, value in MOE.items() if name != "num_experts"}
    with pytest.raises(ConfigError, match="num_experts is missing"):
        read_model_config(write(tmp_path, values))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        read_model_config(tmp_path)
    for broken in (b"{", b"", b'{"model_type": "\xff"}', b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"config\.json: is not JSON"):
            read_model_config(tmp_path)


def test_theta_may_be_said_under_every_name_as_long_as_it_is_one(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, MOE | {"rope_theta": 5000000, "theta": 5e6})).rope_theta == 5e6
    assert read_model_config(write(tmp_path, MOE | {"rope_theta": None})).rope_theta == 5e6
    old = {name: value for name, value in DENSE.items() if name not in ("rope_theta", "theta")}
    new = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "full_attn_idxs": None, "use_pos_enc": True}
    layers = ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]
    newer = read_model_config(write(tmp_path, old | new | {"layer_types": layers}))
    assert newer.rope_theta == 1e6, "as the dense LFM2.5 models are published"
    assert newer.attention_layers == (2, 5, 8, 10, 12, 14)


def test_an_older_name_that_contradicts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"theta is 10000\.0, rope_theta is 1000000\.0") as error:
        read_model_config(write(tmp_path, DENSE | {"theta": 1e4}))
    assert "LFM2.5-8B-A1B 5000000.0" in error.value.hint
    with pytest.raises(ConfigError, match=r"num_heads is 8; only the value of num_attention_heads is supported"):
        read_model_config(write(tmp_path, DENSE | {"num_heads": 8}))
