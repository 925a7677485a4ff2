"""The fields of a checkpoint's config.json that the Mac's forward pass needs.

Shapes of tensors are `stoa.weights.layout`'s; this file reads what shapes do not tell. Nothing is assumed: a missing
field is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stoa.contracts.errors import CheckpointError

HeadNorms = Literal["each", "all", "none"]
"""Queries and keys are normalised head by head, over all heads of a token at once, or not."""


@dataclass(frozen=True, slots=True)
class Stretching:
    """Rotary angles of longer texts than a model was made for: all `factor` times slower, or as Llama 3.1 does it.

    Then those whose wave is longer than `known_tokens / low` are slower by `factor`, shorter than `known_tokens / high` as they
    were, and between the two in between. `known_tokens` 0: all.
    """

    factor: float
    known_tokens: float = 0.0
    low: float = 1.0
    high: float = 4.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture. For the dense family `num_experts` is 0. What has a value here is what an LFM2 has; see `families.py`."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    attention_layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    conv_kernel: int
    num_dense_layers: int
    num_experts: int
    experts_per_token: int
    normalise_weights: bool
    routed_scale: float
    rope_theta: float
    norm_eps: float
    head_width: int = 0
    """0: the hidden size is dealt out to the heads."""
    head_norms: HeadNorms = "each"
    qkv_bias: bool = False
    has_head: bool = False
    """False: logits go through the embedding."""
    softmax_router: bool = False
    """Experts are weighed by a softmax over all of them, not by sigmoids with a bias for the choice."""
    stretching: Stretching | None = None

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.hidden_size // self.num_heads


def read_model_config(config: Mapping[str, object]) -> ModelConfig:
    """Read a parsed config.json. Raises CheckpointError for another family or a field that is missing or unusable."""
    family = config.get("model_type")
    if family not in ("lfm2_moe", "lfm2"):
        raise CheckpointError(f"config.json: model_type is {family!r}", hint="known families: lfm2_moe, lfm2")
    if config.get("conv_bias"):
        raise CheckpointError("config.json: conv_bias is true, which this forward pass does not have")
    moe = family == "lfm2_moe"
    num_layers = whole(config, "num_hidden_layers")
    return ModelConfig(
        family=str(family),
        vocab_size=whole(config, "vocab_size"),
        hidden_size=whole(config, "hidden_size"),
        num_layers=num_layers,
        attention_layers=_attention_layers(config, num_layers),
        num_heads=whole(config, "num_attention_heads"),
        num_kv_heads=whole(config, "num_key_value_heads"),
        conv_kernel=whole(config, "conv_L_cache"),
        num_dense_layers=whole(config, "num_dense_layers") if moe else num_layers,
        num_experts=whole(config, "num_experts") if moe else 0,
        experts_per_token=whole(config, "num_experts_per_tok") if moe else 0,
        normalise_weights=bool(config.get("norm_topk_prob", True)),
        routed_scale=number(config, "routed_scaling_factor") if "routed_scaling_factor" in config else 1.0,
        rope_theta=_rope_theta(config),
        norm_eps=number(config, "norm_eps"),
    )


def whole(config: Mapping[str, object], field: str, *, least: int = 0) -> int:
    """A whole number of the config. Raises CheckpointError."""
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json: {field} is {value!r}, not a whole number of at least {least}")
    return value


def number(config: Mapping[str, object], field: str) -> float:
    """A number of the config. Raises CheckpointError."""
    value = config.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"config.json: {field} is {value!r}, not a number")
    return float(value)


def _rope_theta(config: Mapping[str, object]) -> float:
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and "rope_theta" in nested:
        kind = nested.get("rope_type", "default")
        if kind != "default":
            raise CheckpointError(f"config.json: rope_type is {kind!r}; only default is implemented")
        return number(nested, "rope_theta")
    return number(config, "rope_theta")


def _attention_layers(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    kinds, indices = config.get("layer_types"), config.get("full_attn_idxs")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if isinstance(indices, list):
        return tuple(sorted(int(i) for i in indices))
    raise CheckpointError("config.json: layer_types does not name every layer")
