"""What the rollout benchmark plays: the demo's policy and a random LFM2-MoE of 100 million weights, each with its script.

Both engines read the same int8 weights; activations, keys and values are fp32.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import lfm2_moe
from mlx_lm.utils import load_model

from benchmarks.scripted import Script, Shape
from benchmarks.sweeps import POLICY, first_state
from stoa.weights.layout import layout_of
from stoa.weights.state import WeightState
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.versions import Served
from worker_mac.weights import LiveWeights

GROUPS: Final = 8
GROUP_SIZE: Final = 8
DEMO_SHAPE: Final = Shape(prompt=(12, 15), turn=(4, 10), reply=(6, 16), turns=(1, 4))
"""Numbers of tokens as in the demo's search task."""
LARGE_SHAPE: Final = Shape(prompt=(48, 80), turn=(4, 8), reply=(6, 12), turns=(1, 3))
LARGE: Final[dict[str, Any]] = {
    "model_type": "lfm2_moe",
    "vocab_size": 16_384,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 320,
    "num_hidden_layers": 8,
    "num_dense_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model in both engines, and what they play."""

    name: str
    config: Mapping[str, Any]
    state: WeightState
    served: Served
    stock: Any
    script: Script

    @property
    def num_weights(self) -> int:
        """Weights of the model."""
        return self.state.layout.num_codes + self.state.layout.num_raw


def demo_case() -> Case:
    """The demo's policy as it is before training."""
    config = json.loads((POLICY / "config.json").read_text("utf-8"))
    module, _ = load_model(POLICY)
    flat: list[tuple[str, mx.array]] = tree_flatten(module.parameters())  # pyright: ignore[reportAssignmentType]
    tensors = ((name, np.array(values.astype(mx.float32))) for name, values in flat)
    return _case("demo", config, first_state(layout_of(config, "float32"), tensors), DEMO_SHAPE)


def large_case() -> Case:
    """Random weights."""
    layout, numbers = layout_of(LARGE, "float32"), np.random.default_rng(0)
    spread = {spec.name: 1.0 / np.sqrt(spec.shape[-1]) for spec in layout.tensors}

    def tensors() -> Any:
        for spec in layout.tensors:
            values = numbers.standard_normal(spec.shape, np.float32) * np.float32(spread[spec.name])
            yield spec.name, values + np.float32("norm" in spec.name)

    return _case("large", LARGE, first_state(layout, tensors()), LARGE_SHAPE)


def _case(name: str, config: Mapping[str, Any], state: WeightState, shape: Shape) -> Case:
    live = LiveWeights.of(state)
    served = Served(0, name, Model(read_model_config(config), live.arrays), live)
    script = Script(shape, int(config["vocab_size"]), GROUPS, GROUP_SIZE)
    return Case(name, config, state, served, stock_model(config, live.arrays), script)


def stock_model(config: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
    """mlx_lm's model on the same int8 codes. Its scales are fp32, the same values: with bf16 ones it computes in bf16."""
    model = lfm2_moe.Model(lfm2_moe.ModelArgs.from_dict(dict(config)))
    weights = {name: array.astype(mx.float32) if array.dtype == mx.bfloat16 else array for name, array in arrays.items()}
    nn.quantize(
        model, group_size=64, bits=8, class_predicate=lambda path, part: hasattr(part, "to_quantized") and f"{path}.scales" in weights
    )
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model
