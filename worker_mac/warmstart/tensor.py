"""A policy whose matrices are split over ranks: attention by heads, dense blocks and experts by their inner size.

Convolutions, norms, routers, embedding and logits are whole on every rank. Families for which mlx_lm knows how to split
itself do so; for LFM2 and LFM2-MoE, for which it does not, this file says how. Adapters stand on the split matrices of
attention, dense blocks and experts, and on whole convolution projections.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from stoa.contracts.errors import UsageError
from worker_mac.sharded_lora import (
    BY_INPUTS,
    BY_OUTPUTS,
    STACKS,
    AllToShardedLoRALinear,
    ShardedToAllLoRALinear,
    stack_adapter,
    take_slice,
    total_gradient,
)
from worker_mac.warmstart.policy import GROUP_SIZE, Fresh
from worker_mac.warmstart.settings import Settings

_LFM2 = ("lfm2", "lfm2_moe")


def shard(model: Any, group: mx.distributed.Group) -> None:
    """Split the model in place, nothing evaluated. Raises UsageError where heads or sizes cannot be shared evenly."""
    if model.model_type in _LFM2:
        for index, layer in enumerate(model.layers):
            _shard_layer(layer, index, group)
    elif hasattr(model, "shard"):
        try:
            model.shard(group)
        except ValueError as error:
            raise UsageError(f"{model.model_type} cannot be shared by {group.size()} ranks: {error}") from error
    else:
        raise UsageError(f"mlx_lm cannot split {model.model_type} over ranks", hint="share out the rows: --split data")


def add_adapters(model: Any, fresh: Sequence[Fresh], settings: Settings, group: mx.distributed.Group) -> dict[str, int]:
    """Put adapters on a split model; returns the axis of each split half by the parameter's name.

    `fresh`: those of the model before it was split, so that they start as one Mac's would.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    axes: dict[str, int] = {}
    made: list[tuple[str, nn.Module]] = []
    for path, (lora_a, lora_b) in fresh:
        base = modules[path]
        if isinstance(base, BY_OUTPUTS):
            adapter = AllToShardedLoRALinear(base, rank=settings.rank, scale=settings.scale, group=group)
            adapter.lora_a, adapter.lora_b = lora_a, take_slice(lora_b, 1, group)
            axes[f"{path}.lora_b"] = 1
        elif isinstance(base, BY_INPUTS):
            adapter = ShardedToAllLoRALinear(base, rank=settings.rank, scale=settings.scale, group=group)
            adapter.lora_a, adapter.lora_b = take_slice(lora_a, 0, group), lora_b
            axes[f"{path}.lora_a"] = 0
        elif isinstance(base, STACKS):
            adapter = stack_adapter(path)(base, rank=settings.rank, scale=settings.scale, group=group)
            halves = {"lora_a": lora_a, "lora_b": lora_b}
            halves[adapter.split_half] = take_slice(halves[adapter.split_half], adapter.split_axis, group)
            adapter.update(halves)
            axes[f"{path}.{adapter.split_half}"] = adapter.split_axis
        elif isinstance(base, nn.Linear | nn.QuantizedLinear):
            adapter = LoRALinear.from_base(cast(nn.Linear, base), r=settings.rank, scale=settings.scale)
            adapter.lora_a, adapter.lora_b = lora_a, lora_b
        else:
            continue
        made.append((path, adapter))
    model.update_modules(tree_unflatten(made))
    return axes


def _shard_layer(layer: Any, index: int, group: mx.distributed.Group) -> None:
    num = group.size()
    if layer.is_attention_layer:
        attention = layer.self_attn
        if attention.n_kv_heads % num:
            raise UsageError(
                f"{attention.n_kv_heads} key/value heads cannot be shared by {num} ranks", hint="use as many ranks as divide them"
            )
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, _split(getattr(attention, name), "all-to-sharded", f"layer {index} {name}", group))
        attention.out_proj = _split(attention.out_proj, "sharded-to-all", f"layer {index} out_proj", group)
        attention.n_heads //= num
        attention.n_kv_heads //= num
    block = layer.feed_forward
    if hasattr(block, "switch_mlp"):
        for name, how in (("gate_proj", "all-to-sharded"), ("up_proj", "all-to-sharded"), ("down_proj", "sharded-to-all")):
            expert = getattr(block.switch_mlp, name)
            _check(expert, how, f"layer {index} experts {name}", num)
            shard_inplace(expert, how, group=group)
        block.__class__ = _summing(type(block), group)
        return
    into, out = (("gate_proj", "up_proj"), "down_proj") if hasattr(block, "gate_proj") else (("w1", "w3"), "w2")
    for name in into:
        setattr(block, name, _split(getattr(block, name), "all-to-sharded", f"layer {index} {name}", group))
    setattr(block, out, _split(getattr(block, out), "sharded-to-all", f"layer {index} {out}", group))


def _split(linear: Any, how: str, what: str, group: mx.distributed.Group) -> nn.Module:
    _check(linear, how, what, group.size())
    return shard_linear(linear, how, group=group)


def _check(linear: Any, how: str, what: str, num: int) -> None:
    """Raise UsageError unless the axis divides, in whole groups if packed."""
    packed = hasattr(linear, "bits")
    if how == "all-to-sharded":
        size, unit = linear.weight.shape[-2], 1
    else:
        size, unit = (linear.scales.shape[-1] * GROUP_SIZE, GROUP_SIZE) if packed else (linear.weight.shape[-1], 1)
    if size % (num * unit):
        words = f" in whole groups of {unit}" if unit > 1 else ""
        raise UsageError(f"{what}: {size} cannot be shared by {num} ranks{words}", hint="use fewer ranks, or --bits 0")


def _summing(kind: type[nn.Module], group: mx.distributed.Group) -> type[nn.Module]:
    """A block of experts of which each rank computes a slice. The gradient of its input, the router's part too, is a sum."""

    def summed(block: nn.Module, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(kind.__call__(block, total_gradient(x, group)), group=group)

    return type(kind.__name__, (kind,), {"__call__": summed})
