"""Families beside LFM2's that the engine computes, for examinations: llama and its like, brought into the engine's own names.

A run's policy is of the LFM2 families, which `model_config.py` and `stoa.weights.layout` read; a checkpoint that is only
examined may also be one of these. Each layer of theirs is attention and a gated block, dense or of experts; what they
differ in stands in `ModelConfig`. Tensors are named here as the engine names an LFM2 model's, and by `hub_name` as mlx_lm does.
"""

from collections.abc import Mapping
from typing import Final, cast

from stoa.contracts.errors import CheckpointError
from stoa.weights.layout import Layout, RawType, TensorSpec, layout_of, make_layout
from worker_mac.model_config import HeadNorms, ModelConfig, Stretching, number, read_model_config, whole

OWN: Final = ("lfm2", "lfm2_moe")
HEAD_NORMS: Final[Mapping[str, HeadNorms]] = {
    "llama": "none",
    "mistral": "none",
    "olmoe": "all",
    "qwen2": "none",
    "qwen3": "each",
    "qwen3_moe": "each",
}
"""The families, and what their queries and keys are normalised over."""
_KERNEL: Final = 3
"""Of convolutions, of which there are none: kernels are compiled for some."""
_OF_EXPERTS: Final = ("olmoe", "qwen3_moe")
_DEFAULT_THETA: Final = {"qwen2": 1e6}
_USUAL_THETA: Final = 1e4
_TIED_UNLESS_SAID: Final = ("llama", "mistral", "olmoe", "qwen2")
"""As mlx_lm takes a config.json that does not say."""
_WINDOW_IF_SAID: Final = ("qwen2", "qwen3", "qwen3_moe")
_USUAL_FIRST_WINDOW: Final = 28
_LLAMA3: Final[Mapping[str, object]] = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""What a config.json may leave out of Llama 3.1's way."""
_PARTS: Final = (
    ("self_attn.out_proj", "self_attn.o_proj"),
    ("self_attn.q_layernorm", "self_attn.q_norm"),
    ("self_attn.k_layernorm", "self_attn.k_norm"),
    ("operator_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.", "mlp."),
    ("model.embedding_norm", "model.norm"),
    ("model.head", "lm_head"),
)


def engine_config(config: Mapping[str, object]) -> ModelConfig:
    """What the engine's forward pass needs of a config.json of any family that it computes.

    Raises CheckpointError for another family, for something of a family that is not computed here, and for a field that is
    missing or unusable.
    """
    family = config.get("model_type")
    if family in OWN:
        return read_model_config(config)
    if not isinstance(family, str) or family not in HEAD_NORMS:
        known = ", ".join((*OWN, *HEAD_NORMS))
        what = ": its state-space layers are not computed here" if family in ("nemotron_h", "mamba", "mamba2") else ""
        raise CheckpointError(f"config.json: model_type is {family!r}{what}", hint=f"families that can be examined: {known}")
    _refuse_what_is_not_computed(config)
    hidden, heads, num_layers = (whole(config, name, least=1) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = whole(config, "num_key_value_heads", least=1) if config.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} query heads cannot be dealt out to {kv_heads} key heads")
    experts = family in _OF_EXPERTS
    return ModelConfig(
        family=family,
        vocab_size=whole(config, "vocab_size", least=1),
        hidden_size=hidden,
        num_layers=num_layers,
        attention_layers=tuple(range(num_layers)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        conv_kernel=_KERNEL,
        num_dense_layers=0 if experts else num_layers,
        num_experts=whole(config, "num_experts", least=1) if experts else 0,
        experts_per_token=whole(config, "num_experts_per_tok", least=1) if experts else 0,
        normalise_weights=bool(config.get("norm_topk_prob", False)),
        routed_scale=1.0,
        rope_theta=_theta(config, family),
        norm_eps=number(config, "rms_norm_eps"),
        head_width=whole(config, "head_dim", least=1) if config.get("head_dim") is not None and family != "qwen2" else hidden // heads,
        head_norms=HEAD_NORMS[family],
        qkv_bias=family == "qwen2",
        has_head=not config.get("tie_word_embeddings", family in _TIED_UNLESS_SAID),
        softmax_router=experts,
        stretching=_stretching(config),
    )


def engine_layout(config: Mapping[str, object], raw_dtype: RawType) -> Layout:
    """The tensors of a checkpoint of any family that the engine computes. Raises CheckpointError, LayoutError."""
    if config.get("model_type") in OWN:
        return layout_of(config, raw_dtype)
    model = engine_config(config)
    hidden, size = model.hidden_size, model.head_size
    num_q, num_kv = model.num_heads * size, model.num_kv_heads * size
    int8s: dict[str, tuple[int, ...]] = {"model.embed_tokens": (model.vocab_size, hidden)}
    raws: dict[str, tuple[int, ...]] = {"model.embedding_norm": (hidden,)}
    if model.has_head:
        int8s["model.head"] = (model.vocab_size, hidden)
    for layer in range(model.num_layers):
        path = f"model.layers.{layer}"
        raws |= {f"{path}.operator_norm": (hidden,), f"{path}.ffn_norm": (hidden,)}
        attention = f"{path}.self_attn"
        int8s |= {f"{attention}.q_proj": (num_q, hidden), f"{attention}.out_proj": (hidden, num_q)}
        int8s |= {f"{attention}.{name}_proj": (num_kv, hidden) for name in ("k", "v")}
        if model.head_norms != "none":
            each = model.head_norms == "each"
            raws |= {f"{attention}.q_layernorm": (size if each else num_q,), f"{attention}.k_layernorm": (size if each else num_kv,)}
        if model.qkv_bias:
            raws |= {f"{attention}.{name}_bias": (num_q if name == "q" else num_kv,) for name in ("q", "k", "v")}
        block = f"{path}.feed_forward"
        if model.num_experts:
            width = whole(config, "moe_intermediate_size" if model.family == "qwen3_moe" else "intermediate_size", least=1)
            raws[f"{block}.gate"] = (model.num_experts, hidden)
            int8s |= {f"{block}.switch_mlp.{name}": (model.num_experts, width, hidden) for name in ("gate_proj", "up_proj")}
            int8s[f"{block}.switch_mlp.down_proj"] = (model.num_experts, hidden, width)
        else:
            width = whole(config, "intermediate_size", least=1)
            int8s |= {f"{block}.w1": (width, hidden), f"{block}.w3": (width, hidden), f"{block}.w2": (hidden, width)}
    specs = [TensorSpec(f"{name}.weight", shape, "int8", "uint8") for name, shape in int8s.items()]
    return make_layout([*specs, *(TensorSpec(f"{name}.weight", shape, "raw", raw_dtype) for name, shape in raws.items())], raw_dtype)


def refuse_short_window(config: Mapping[str, object], longest_tokens: int) -> None:
    """Raises CheckpointError if attention has a window that an episode may outgrow: within it, it is the whole attention of here.

    That is a config.json without `layer_types`: a mistral's `sliding_window` holds for all layers, a qwen's, if it is in use, for
    those from `max_window_layers` on.
    """
    family, num_layers = config.get("model_type"), config.get("num_hidden_layers")
    if family not in ("mistral", *_WINDOW_IF_SAID) or config.get("sliding_window") is None or isinstance(config.get("layer_types"), list):
        return
    if family in _WINDOW_IF_SAID:
        first = whole(config, "max_window_layers", least=0) if config.get("max_window_layers") is not None else _USUAL_FIRST_WINDOW
        if not config.get("use_sliding_window") or not isinstance(num_layers, int) or num_layers <= first:
            return
    window = whole(config, "sliding_window", least=1)
    if longest_tokens > window:
        raise CheckpointError(
            f"config.json: sliding_window is {window}, and an episode of this task may have {longest_tokens} tokens: "
            "attention to the last ones alone is not computed here",
            hint="lower max_episode_tokens of environment.settings, or examine it with another program",
        )


def hub_name(family: str, name: str) -> str:
    """How mlx_lm calls one of the engine's arrays."""
    if family in OWN:
        return name
    for letter in ("q", "k", "v"):
        if name.endswith(f"self_attn.{letter}_bias.weight"):
            return name.replace(f"{letter}_bias.weight", f"{letter}_proj.bias")
    for ours, theirs in _PARTS:
        if ours in name:
            return name.replace(ours, theirs)
    return name


def _refuse_what_is_not_computed(config: Mapping[str, object]) -> None:
    family = config["model_type"]
    for name in ("attention_bias", "mlp_bias", "rope_traditional", "clip_qkv"):
        if config.get(name):
            raise CheckpointError(f"config.json: {name} of a {family} is not computed here", hint="examine it with another program")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act {config['hidden_act']!r} is not computed here", hint="silu is")
    kinds = config.get("layer_types")
    odd = sorted({str(kind) for kind in cast("list[object]", kinds)} - {"full_attention"}) if isinstance(kinds, list) else []
    if odd:
        raise CheckpointError(f"config.json: layers of {odd[0]} are not computed here", hint="examine it with another program")
    if family == "qwen3_moe" and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise CheckpointError("config.json: dense layers among those of experts are not computed here in a qwen3_moe")


def _theta(config: Mapping[str, object], family: str) -> float:
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and "rope_theta" in nested:
        return number(cast("Mapping[str, object]", nested), "rope_theta")
    return number(config, "rope_theta") if "rope_theta" in config else _DEFAULT_THETA.get(family, _USUAL_THETA)


def _stretching(config: Mapping[str, object]) -> Stretching | None:
    """How positions are stretched; None if they are not."""
    found = config.get("rope_scaling") or config.get("rope_parameters")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: rope_scaling is {found!r}, not a table")
    scaling = cast("Mapping[str, object]", found)
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return _sound(Stretching(number(scaling, "factor")))
    if kind != "llama3":
        raise CheckpointError(f"config.json: rope_type is {kind!r}", hint="default, linear and llama3 are computed here")
    said = {**_LLAMA3, **scaling}
    known, low, high = (number(said, name) for name in _LLAMA3)
    return _sound(Stretching(number(said, "factor"), known, low, high))


def _sound(how: Stretching) -> Stretching:
    if not (how.factor > 0.0 and how.known_tokens >= 0.0 and how.high > how.low):
        raise CheckpointError(f"config.json: rope_scaling has a factor of {how.factor:g}, and from {how.low:g} to {how.high:g}")
    return how
