"""What `benchmarks.wired` measures on: small random models of every family, and a task of several turns on bare ids."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from environments.base import Limits, Outcome, Question, Reply, Split
from stoa.weights import grid
from stoa.weights.layout import layout_of
from stoa.weights.state import WeightState
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting

TEN_LAYERS: Final[dict[str, object]] = {
    "model_type": "lfm2_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 10,
    "num_dense_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["conv", "full_attention"] * 5,
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
EIGHT_WAYS: Final[dict[str, object]] = TEN_LAYERS | {
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 4,
    "layer_types": ["conv", "full_attention"],
}
DENSE: Final[dict[str, object]] = {
    "model_type": "lfm2",
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 384,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "rope_theta": 1000000.0,
    "full_attn_idxs": [1, 4],
}
_LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
STOCK: Final[dict[str, dict[str, Any]]] = {
    "llama": _LLAMA,
    "qwen3": _LLAMA
    | {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6, "max_position_embeddings": 512, "tie_word_embeddings": True},
    "olmoe": _LLAMA | {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "nemotron_h": _LLAMA
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}
NUM_GROUPS: Final = 4
GROUP_SIZE: Final = 3


class Talk:
    """Three turns; a turn ends with one of the lowest ids, and the environment answers with three ids made from it."""

    name = "talk"
    limits = Limits(3, 7, 128)
    stop_ids = frozenset(range(16))

    def question_ids(self, split: Split) -> Sequence[str]:
        """Forty of each."""
        return [f"{split}-{number}" for number in range(40)]

    def question(self, question_id: str) -> Question:
        """Nothing but its id."""
        return Question(question_id, question_id, (), "train", "")

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """Forty ids and more, others for each question."""
        number = int(question_id.rpartition("-")[2])
        return tuple(20 + (7 * number + place) % 100 for place in range(40 + 3 * number))

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """Three ids, or the end."""
        if len(turns) < self.limits.max_turns:
            return Reply((100, 30 + turns[-1][0] % 50, 101), False, "")
        return Reply((), True, "answered")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """By the last turn's first id."""
        return Outcome(float(turns[-1][0] % 2 == 0), {"turns": float(len(turns))})


def castings() -> list[Casting]:
    """Four groups of three."""
    return [Casting(group, f"train-{group}", seed_of(0, group, episode)) for group in range(NUM_GROUPS) for episode in range(GROUP_SIZE)]


def random_state(config: Mapping[str, object], seed: int = 0) -> WeightState:
    """Weights on the grid, fp32 where they are raw."""
    layout = layout_of(config, "float32")
    numbers, arrays = np.random.default_rng(seed), dict[str, Any]()
    for spec in layout.tensors:
        values = numbers.normal(0, 0.08, spec.shape).astype(np.float32) + np.float32("norm" in spec.name)
        if spec.kind == "int8":
            arrays[spec.name], arrays[spec.scales], arrays[spec.biases] = grid.quantise(values)
        else:
            arrays[spec.name] = values
    return WeightState(layout, arrays)


def write_into(target: WeightState, state: WeightState) -> None:
    """Write whole weights array by array, as an anchor is read; they are verified where they stand."""
    digests: dict[str, str] = {}
    for spec in state.layout.arrays:
        data, at = np.ascontiguousarray(state.arrays[spec.name]).reshape(-1).view(np.uint8).data, 0

        def read(buffer: memoryview, data: memoryview = data) -> int:
            nonlocal at
            count = min(len(buffer), len(data) - at)
            buffer[:count] = data[at : at + count]
            at += count
            return count

        digests[spec.name] = target.fill(spec.name, read, spec.name)
    target.accept(digests, state.state_id(), "the benchmark's weights")
