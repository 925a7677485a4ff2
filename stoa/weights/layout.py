"""What a policy's weights are on the wire: names, shapes and types of all tensors, in MLX's naming and packing.

The layout is derived from a checkpoint's config.json alone, so that trainer and Macs agree without asking each other.
Values live in `state.py`; how int8 codes are made is `grid.py`'s.

An int8 tensor `X.weight` of shape [.., rows, cols] is three arrays: `X.weight` codes uint8 of the same shape (packed
four to a little-endian uint32 in files), `X.scales` and `X.biases` bf16 [.., rows, cols / 64]. bf16 arrays are held as
uint16 bit patterns, because numpy has no bf16. Canonical order is sorted order of tensor names.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from stoa.contracts.errors import LayoutError

GROUP_SIZE: Final = 64
"""Consecutive elements of the last axis that share a scale and a bias."""
BITS: Final = 8

RawType = Literal["bfloat16", "float32"]
Kind = Literal["int8", "raw"]
ArrayType = Literal["uint8", "bfloat16", "float32"]

_FROZEN_SUFFIX: Final = ".expert_bias"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One stored array. `dtype` bfloat16 is held in numpy as uint16 bits."""

    name: str
    shape: tuple[int, ...]
    dtype: ArrayType

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in memory and in files."""
        return self.num_elements * {"uint8": 1, "bfloat16": 2, "float32": 4}[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the policy. int8: `shape` is [.., rows, cols], cols a multiple of 64. raw: stored as `dtype`."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    dtype: ArrayType

    @property
    def num_elements(self) -> int:
        """Product of the shape: codes of an int8 tensor."""
        return math.prod(self.shape)

    @property
    def frozen(self) -> bool:
        """True for buffers that no delta changes (expert_bias)."""
        return self.name.endswith(_FROZEN_SUFFIX)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Shape of scales and biases of an int8 tensor."""
        return (*self.shape[:-1], self.shape[-1] // GROUP_SIZE)

    @property
    def module(self) -> str:
        """Path of the module that holds the tensor: the name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def scales(self) -> str:
        """Name of the scales of an int8 tensor."""
        return f"{self.module}.scales"

    @property
    def biases(self) -> str:
        """Name of the biases of an int8 tensor."""
        return f"{self.module}.biases"

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The stored arrays: codes, scales and biases of an int8 tensor; the tensor itself if raw."""
        if self.kind == "raw":
            return (ArraySpec(self.name, self.shape, self.dtype),)
        return (
            ArraySpec(self.name, self.shape, "uint8"),
            ArraySpec(self.scales, self.grid_shape, "bfloat16"),
            ArraySpec(self.biases, self.grid_shape, "bfloat16"),
        )


@dataclass(frozen=True)
class Layout:
    """All tensors in canonical order. Code, group and raw positions count through the concatenation in that order."""

    layout_id: str
    tensors: tuple[TensorSpec, ...]
    raw_dtype: RawType

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """Tensors by name."""
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def quantised(self) -> tuple[TensorSpec, ...]:
        """The int8 tensors."""
        return tuple(spec for spec in self.tensors if spec.kind == "int8")

    @cached_property
    def raw(self) -> tuple[TensorSpec, ...]:
        """The raw tensors that a delta may change, all of `raw_dtype`."""
        return tuple(spec for spec in self.tensors if spec.kind == "raw" and not spec.frozen)

    @cached_property
    def num_codes(self) -> int:
        """Elements of all int8 tensors."""
        return sum(spec.num_elements for spec in self.quantised)

    @cached_property
    def num_raw(self) -> int:
        """Elements of all raw tensors that a delta may change."""
        return sum(spec.num_elements for spec in self.raw)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all arrays: what a Mac holds and what an anchor carries."""
        return sum(array.num_bytes for spec in self.tensors for array in spec.arrays)

    @cached_property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All stored arrays, tensor by tensor in canonical order."""
        return tuple(array for spec in self.tensors for array in spec.arrays)

    @cached_property
    def arrays_by_name(self) -> Mapping[str, ArraySpec]:
        """Stored arrays by name."""
        return {array.name: array for array in self.arrays}


def layout_of(model_config: Mapping[str, object], raw_dtype: RawType) -> Layout:
    """The layout of a checkpoint of family lfm2_moe or lfm2.

    Args:
        model_config: the parsed config.json of the checkpoint.
        raw_dtype: type of norms, conv kernels and router gates on the wire; expert_bias is always float32.

    Raises:
        LayoutError: another family, a missing or wrong field, or a quantised input dimension that is no multiple of 64.
    """
    family = model_config.get("model_type")
    hidden, vocabulary = _count(model_config, "hidden_size"), _count(model_config, "vocab_size")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    raws: dict[str, tuple[int, ...]] = {"model.embedding_norm.weight": (hidden,)}
    attention = _attention_layers(model_config)
    for layer in range(_count(model_config, "num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        raws[f"{prefix}.operator_norm.weight"] = (hidden,)
        raws[f"{prefix}.ffn_norm.weight"] = (hidden,)
        if layer in attention:
            _add_attention(prefix, model_config, shapes, raws)
        else:
            _add_conv(prefix, model_config, shapes, raws)
        if family == "lfm2_moe" and layer >= _count(model_config, "num_dense_layers", least=0):
            _add_experts(prefix, model_config, shapes, raws)
        elif family == "lfm2_moe":
            width = _count(model_config, "intermediate_size")
            _add_mlp(f"{prefix}.feed_forward", ("gate_proj", "up_proj", "down_proj"), hidden, width, shapes)
        elif family == "lfm2":
            _add_mlp(f"{prefix}.feed_forward", ("w1", "w3", "w2"), hidden, _dense_width(model_config), shapes)
        else:
            raise LayoutError(f"config.json: model_type is {family!r}", hint="known families: lfm2_moe, lfm2")
    specs = [TensorSpec(name, shape, "int8", "uint8") for name, shape in shapes.items()]
    for name, shape in raws.items():
        specs.append(TensorSpec(name, shape, "raw", "float32" if name.endswith(_FROZEN_SUFFIX) else raw_dtype))
    return make_layout(specs, raw_dtype)


def make_layout(specs: list[TensorSpec], raw_dtype: RawType) -> Layout:
    """A layout of these tensors in canonical order. Raises LayoutError for a name twice, a wrong type or a ragged group."""
    tensors = tuple(sorted(specs, key=lambda spec: spec.name))
    names = [array.name for spec in tensors for array in spec.arrays]
    if len(set(names)) != len(names):
        raise LayoutError("two tensors of the layout have one name")
    for spec in tensors:
        if spec.num_elements < 1:
            raise LayoutError(f"{spec.name}: shape {spec.shape} holds nothing")
        if spec.kind == "int8" and (len(spec.shape) < 2 or spec.shape[-1] % GROUP_SIZE or not spec.name.endswith(".weight")):
            raise LayoutError(f"{spec.name}: int8 needs a matrix whose input dimension is a multiple of {GROUP_SIZE}, not {spec.shape}")
        if spec.kind == "raw" and spec.dtype != ("float32" if spec.frozen else raw_dtype):
            raise LayoutError(f"{spec.name}: a raw tensor of this layout is {raw_dtype}, not {spec.dtype}")
    table = [[spec.name, list(spec.shape), spec.kind, spec.dtype] for spec in tensors]
    facts = {"packing": "mlx-affine", "bits": BITS, "group_size": GROUP_SIZE, "raw_dtype": raw_dtype, "tensors": table}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return Layout(hashlib.sha256(text.encode("ascii")).hexdigest(), tensors, raw_dtype)


def _count(config: Mapping[str, object], field: str, *, least: int = 1) -> int:
    """A whole number of config.json."""
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LayoutError(f"config.json: {field} is {value!r}, not a whole number of at least {least}")
    return value


def _attention_layers(config: Mapping[str, object]) -> frozenset[int]:
    """Numbers of the attention layers; the others are short convolutions."""
    kinds, indices = config.get("layer_types"), config.get("full_attn_idxs")
    if isinstance(kinds, list):
        return frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(indices, list):
        return frozenset(i for i in indices if isinstance(i, int))
    raise LayoutError("config.json: layer_types is missing")


def _add_attention(prefix: str, config: Mapping[str, object], shapes: dict[str, tuple[int, ...]], raws: dict[str, tuple[int, ...]]) -> None:
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    head_size, kv_heads = hidden // heads, _count(config, "num_key_value_heads")
    shapes[f"{prefix}.self_attn.q_proj.weight"] = (heads * head_size, hidden)
    shapes[f"{prefix}.self_attn.k_proj.weight"] = (kv_heads * head_size, hidden)
    shapes[f"{prefix}.self_attn.v_proj.weight"] = (kv_heads * head_size, hidden)
    shapes[f"{prefix}.self_attn.out_proj.weight"] = (hidden, heads * head_size)
    raws[f"{prefix}.self_attn.q_layernorm.weight"] = (head_size,)
    raws[f"{prefix}.self_attn.k_layernorm.weight"] = (head_size,)


def _add_conv(prefix: str, config: Mapping[str, object], shapes: dict[str, tuple[int, ...]], raws: dict[str, tuple[int, ...]]) -> None:
    hidden = _count(config, "hidden_size")
    shapes[f"{prefix}.conv.in_proj.weight"] = (3 * hidden, hidden)
    shapes[f"{prefix}.conv.out_proj.weight"] = (hidden, hidden)
    raws[f"{prefix}.conv.conv.weight"] = (hidden, _count(config, "conv_L_cache"), 1)


def _add_experts(prefix: str, config: Mapping[str, object], shapes: dict[str, tuple[int, ...]], raws: dict[str, tuple[int, ...]]) -> None:
    hidden, width, experts = _count(config, "hidden_size"), _count(config, "moe_intermediate_size"), _count(config, "num_experts")
    block = f"{prefix}.feed_forward"
    for name, shape in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
        shapes[f"{block}.switch_mlp.{name}.weight"] = (experts, *shape)
    raws[f"{block}.gate.weight"] = (experts, hidden)
    if config.get("use_expert_bias", True):
        raws[f"{block}{_FROZEN_SUFFIX}"] = (experts,)


def _add_mlp(prefix: str, names: tuple[str, str, str], hidden: int, width: int, shapes: dict[str, tuple[int, ...]]) -> None:
    """Gate, up and down projection of a dense block."""
    gate, up, down = names
    shapes[f"{prefix}.{gate}.weight"] = (width, hidden)
    shapes[f"{prefix}.{up}.weight"] = (width, hidden)
    shapes[f"{prefix}.{down}.weight"] = (hidden, width)


def _dense_width(config: Mapping[str, object]) -> int:
    """Width of the dense family's MLP: two thirds, times a factor, rounded up to a multiple, as its model file does."""
    width = _count(config, "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor = config.get("block_ffn_dim_multiplier")
    if isinstance(factor, int | float):
        width = int(factor * width)
    multiple = _count(config, "block_multiple_of")
    return multiple * ((width + multiple - 1) // multiple)
