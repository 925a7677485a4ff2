"""Small random policies for the Mac worker's tests: config.json contents, weights on the int8 grid, oracles in mlx_lm.

Nothing here is the demo's policy; dimensions are chosen so that every branch of the forward pass is taken.
"""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import lfm2, lfm2_moe

from stoa.weights import grid
from stoa.weights.layout import layout_of
from stoa.weights.state import WeightState
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.weights import LiveWeights

TINY: dict[str, object] = {
    "model_type": "lfm2_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_dense_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}
# Four taps, head size 64, scaled and unnormalised routing, top 4 of 32, attention in the last layer.
WIDE: dict[str, object] = TINY | {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "conv", "conv", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "conv_L_cache": 4,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
}
DENSE: dict[str, object] = {
    "model_type": "lfm2",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 192,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "rope_theta": 1000000.0,
    "full_attn_idxs": [2],
}


def random_state(config: Mapping[str, object], seed: int = 0, raw_dtype: str = "float32", spread: float = 0.15) -> WeightState:
    """Weights of a layout, drawn at random and put on the grid."""
    layout = layout_of(config, raw_dtype)
    numbers = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for spec in layout.tensors:
        values = numbers.normal(0, spread, spec.shape).astype(np.float32)
        if "norm" in spec.name:
            values += 1.0
        if spec.kind == "int8":
            arrays[spec.name], arrays[spec.scales], arrays[spec.biases] = grid.quantise(values)
        else:
            arrays[spec.name] = values if spec.dtype == "float32" else grid.bf16_bits(values)
    return WeightState(layout, arrays)


def model_of(config: Mapping[str, object], state: WeightState, **options: bool) -> Model:
    """The engine's model on a copy of these weights in MLX's memory."""
    return Model(read_model_config(config), LiveWeights.of(state).arrays, **options)


def oracle_of(config: Mapping[str, object], state: WeightState, *, quantised: bool) -> nn.Module:
    """mlx_lm's model: on dequantised fp32 weights, or loaded quantised as `mlx_lm.load` does."""
    module = lfm2_moe if config["model_type"] == "lfm2_moe" else lfm2
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    if not quantised:
        dense = {spec.name: mx.array(state.dequantise(spec.name)) for spec in state.layout.tensors}
        model.load_weights(list(dense.items()))
    else:
        # Scales in fp32, the same values: with bf16 ones the stock model computes in bf16 from the embedding on.
        weights = {
            name: array.astype(mx.float32) if array.dtype == mx.bfloat16 else array for name, array in LiveWeights.of(state).arrays.items()
        }
        nn.quantize(
            model,
            group_size=64,
            bits=8,
            class_predicate=lambda path, part: hasattr(part, "to_quantized") and f"{path}.scales" in weights,
        )
        model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model
