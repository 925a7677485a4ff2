"""A hub checkpoint's config.json, read for the two families we can train: lfm2_moe and dense lfm2.

Every field is either used, or known not to change the function, or required to have the one value we implement;
anything else is refused by name, because a field that is passed over silently is a model that trains wrongly.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoa.contracts.errors import ConfigError

FAMILIES = ("lfm2_moe", "lfm2")

# Fields that are read below.
_READ = frozenset(
    (  # noqa: SIM905 (a list would fill a page)
        "model_type vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers "
        "num_attention_heads num_key_value_heads conv_L_cache layer_types full_attn_idxs num_dense_layers num_experts "
        "num_experts_per_tok use_expert_bias norm_topk_prob routed_scaling_factor rope_parameters rope_theta theta norm_eps "
        "max_position_embeddings block_ff_dim block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of "
        "head_dim"
    ).split(" ")
)
# Fields that say how a model was made, how text is handled, or how another library runs it.
_IGNORED = frozenset(
    (  # noqa: SIM905
        "architectures _name_or_path transformers_version torch_dtype dtype initializer_range use_cache bos_token_id "
        "eos_token_id pad_token_id sep_token_id decoder_start_token_id output_router_logits output_attentions "
        "output_hidden_states return_dict id2label label2id problem_type chunk_size_feed_forward is_encoder_decoder "
        "auto_map block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init "
        "router_aux_loss_coef"
    ).split(" ")
)
# Fields we implement for one value only.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "conv_bias": (False,),
    "tie_word_embeddings": (True,),
    "tie_embedding": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "hidden_act": ("silu",),
    "block_use_swiglu": (True,),
    "use_pos_enc": (True,),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
}
# Older names that published files repeat beside the new one.
_TWINS: Mapping[str, str] = {
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "block_norm_eps": "norm_eps",
    "num_heads": "num_attention_heads",
}


@dataclass(frozen=True)
class Lfm2Config:
    """The architecture. For the dense family `num_experts` is 0 and every layer is a dense layer."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    attention_layers: tuple[int, ...]  # 0-based; the others are short convolutions
    num_heads: int
    num_kv_heads: int
    conv_kernel: int
    dense_ffn_size: int
    num_dense_layers: int
    num_experts: int
    experts_per_token: int
    moe_ffn_size: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float
    rope_theta: float
    norm_eps: float
    max_position_embeddings: int
    source: str  # the text of config.json, so that an exported folder carries the same one

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based numbers of the layers with experts, in order."""
        return tuple(range(self.num_dense_layers, self.num_layers)) if self.num_experts else ()


class _Fields:
    """config.json with typed reads; each error names the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self.values = values

    def error(self, field: str, problem: str) -> ConfigError:
        """What is wrong with a field, for the caller to raise."""
        return ConfigError(f"{self.path}: {field} {problem}", hint=f"supported families: {', '.join(FAMILIES)}")

    def number(self, field: str, kind: type[int] | type[float] = int, least: float = 0) -> float:
        """A number of at least `least`. Raises ConfigError."""
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            raise self.error(field, "is missing" if value is None else f"is {value!r}, not {kind.__name__}")
        if not math.isfinite(value) or value < least:
            raise self.error(field, f"is {value}, below {least}" if value < least else f"is {value}, not a finite number")
        return value

    def count(self, field: str, least: int = 1) -> int:
        """A whole number of at least `least`. Raises ConfigError."""
        return int(self.number(field, int, least))

    def flag(self, field: str, default: bool) -> bool:
        """A boolean. Raises ConfigError."""
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"is {value!r}, not true or false")
        return value


def read_model_config(folder: Path) -> Lfm2Config:
    """Read and check `folder/config.json`.

    Raises:
        ConfigError: no such file, not JSON, an unknown architecture, an unknown or unsupported field, or fields that
            contradict each other. The message names the file and the field.
    """
    path = folder / "config.json"
    try:
        source = path.read_text(encoding="utf-8")
        values = json.loads(source)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read", hint="a checkpoint folder holds config.json") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}", hint="fetch the checkpoint again") from error
    fields = _Fields(path, values if isinstance(values, dict) else {})
    _check_known(fields)
    moe = fields.values["model_type"] == "lfm2_moe"
    num_layers = fields.count("num_hidden_layers")
    config = Lfm2Config(
        family="lfm2_moe" if moe else "lfm2",
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        num_layers=num_layers,
        attention_layers=_attention_layers(fields, num_layers),
        num_heads=fields.count("num_attention_heads"),
        num_kv_heads=fields.count("num_key_value_heads"),
        conv_kernel=fields.count("conv_L_cache", 2),
        dense_ffn_size=fields.count("intermediate_size") if moe else _adjusted_ffn_size(fields),
        num_dense_layers=fields.count("num_dense_layers", 0) if moe else num_layers,
        num_experts=fields.count("num_experts") if moe else 0,
        experts_per_token=fields.count("num_experts_per_tok") if moe else 0,
        moe_ffn_size=fields.count("moe_intermediate_size") if moe else 0,
        use_expert_bias=moe and fields.flag("use_expert_bias", True),
        norm_topk_prob=moe and fields.flag("norm_topk_prob", True),
        routed_scaling_factor=float(fields.number("routed_scaling_factor", float)) if moe else 1.0,
        rope_theta=_rope_theta(fields),
        norm_eps=float(fields.number("norm_eps", float)),
        max_position_embeddings=fields.count("max_position_embeddings"),
        source=source,
    )
    _check_agreement(fields, config)
    return config


def _check_known(fields: _Fields) -> None:
    """Refuse an architecture or a field nobody here has read about."""
    family = fields.values.get("model_type")
    if family not in FAMILIES:
        raise fields.error("model_type", f"is {family!r}, which this trainer cannot run")
    for field, value in fields.values.items():
        if field in _FIXED:
            if value not in _FIXED[field]:
                raise fields.error(field, f"is {value!r}; only {_FIXED[field][0]!r} is supported")
        elif field in _TWINS:
            if value != fields.values.get(_TWINS[field]):
                raise fields.error(field, f"is {value!r}; only the value of {_TWINS[field]} is supported")
        elif field not in _READ and field not in _IGNORED:
            raise fields.error(field, "is not a field this trainer knows")


def _check_agreement(fields: _Fields, config: Lfm2Config) -> None:
    """Refuse sizes that do not fit each other."""
    if config.hidden_size % config.num_heads:
        raise fields.error("num_attention_heads", f"{config.num_heads} does not divide {config.hidden_size}")
    if config.num_heads % config.num_kv_heads:
        raise fields.error("num_key_value_heads", f"{config.num_kv_heads} does not divide {config.num_heads}")
    if fields.values.get("head_dim", config.head_size) not in (None, config.head_size):
        raise fields.error("head_dim", f"is {fields.values['head_dim']!r}; only {config.head_size} is supported")
    if config.num_dense_layers > config.num_layers:
        raise fields.error("num_dense_layers", f"is above the {config.num_layers} layers there are")
    if config.experts_per_token > config.num_experts:
        raise fields.error("num_experts_per_tok", f"is above the {config.num_experts} experts there are")


def _attention_layers(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    """From `layer_types`, or from `full_attn_idxs` in older files; both must agree if both are there."""
    kinds, indices = fields.values.get("layer_types"), fields.values.get("full_attn_idxs")
    from_kinds = from_indices = None
    if isinstance(kinds, list):
        strange = [kind for kind in kinds if kind not in ("full_attention", "conv")]
        if strange or len(kinds) != num_layers:
            raise fields.error("layer_types", f"must hold {num_layers} of 'full_attention' and 'conv': {strange[:1]}")
        from_kinds = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if isinstance(indices, list):
        if not all(type(i) is int for i in indices):
            raise fields.error("full_attn_idxs", f"is {indices!r:.80}, not numbers of layers")
        from_indices = tuple(sorted(set(indices)))
        if from_indices and not 0 <= from_indices[0] <= from_indices[-1] < num_layers:
            raise fields.error("full_attn_idxs", f"names layers outside 0..{num_layers - 1}")
    if from_kinds is not None and from_indices is not None and from_kinds != from_indices:
        raise fields.error("full_attn_idxs", "contradicts layer_types")
    layers = from_kinds if from_kinds is not None else from_indices
    if not layers:
        raise fields.error("layer_types", "is missing, or has no attention layer")
    return layers


def _rope_theta(fields: _Fields) -> float:
    """`rope_parameters.rope_theta`, or `rope_theta` in older files; all that a file names must be one number.

    No default, and none before another: libraries disagree about both, and a wrong one trains a wrong model without a word.
    """
    rope = fields.values.get("rope_parameters")
    if rope is None:
        place, theta = "rope_theta", float(fields.number("rope_theta", float, 1.0))
    else:
        place, theta = "rope_parameters.rope_theta", _nested_theta(fields, rope)
    for name in ("rope_theta", "theta"):
        value = fields.values.get(name)
        if value is not None and value != theta:
            said = float(value) if type(value) is int else value
            raise ConfigError(
                f"{fields.path}: {name} is {said!r}, {place} is {theta!r}",
                hint="the model was trained with one of them: correct the file (LFM2 has 1000000.0, LFM2.5-8B-A1B 5000000.0)",
            )
    return theta


def _nested_theta(fields: _Fields, rope: object) -> float:
    inner = _Fields(fields.path, rope if isinstance(rope, dict) else {})
    for field, value in inner.values.items():
        allowed = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0, "rope_theta": value}
        if value != allowed.get(field):
            raise fields.error(f"rope_parameters.{field}", f"is {value!r}, which is not supported")
    return float(inner.number("rope_theta", float, 1.0))


def _adjusted_ffn_size(fields: _Fields) -> int:
    """Width of the dense family's MLP: two thirds, times a factor, rounded up, as its reference model does."""
    size = fields.count("block_ff_dim" if "block_ff_dim" in fields.values else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in fields.values:
        size = int(size * fields.number("block_ffn_dim_multiplier", float))
    multiple = fields.count("block_multiple_of")
    return multiple * ((size + multiple - 1) // multiple)
