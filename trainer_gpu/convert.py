"""Weights between the three spellings: a hub checkpoint, Megatron's parameters, and the names MLX serves.

One table (`weight_map`) says which hub tensors make up each Megatron parameter; everything here follows from it.
Quantising is elsewhere (`stoa.weights.grid`), and so is optimizer state. Nothing here does arithmetic: tensors are
cut, joined and transposed, so a round trip is bit-exact.

    hub                                     Megatron
    embed_tokens (tied)                     embedding.word_embeddings
    operator_norm / ffn_norm                input_layernorm / pre_mlp_layernorm
    q_proj, k_proj, v_proj                  linear_qkv, rows by KV group: its queries, its key, its value
    conv.in_proj [3, D] rows                self_attention.in_proj [D, 3] rows
    conv.conv [D, 1, kernel]                self_attention.conv_weight [D, kernel]
    w1 (gate), w3 (up) / w2 (down)          linear_fc1 = w1 over w3 / linear_fc2
    feed_forward.gate / expert_bias         mlp.router.weight / mlp.router.expert_bias (fp32 buffer)
    feed_forward.experts.E.w1, w3 / w2      mlp.experts.fc1 [E, 2 I, D] / fc2 [E, D, I], named mlp.experts.fc1.E
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file

from stoa.contracts.errors import CheckpointError
from trainer_gpu import host
from trainer_gpu.hub_files import INDEX, HubFiles
from trainer_gpu.model_config import Lfm2Config
from trainer_gpu.weights import local_weights

_SHARD_BYTES = 4 * 2**30

Form = Literal["same", "qkv", "channel_major", "depthwise", "gate_up"]


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter or buffer and the hub tensors it is made of. Experts carry their number in the model."""

    megatron: str
    hub: tuple[str, ...]
    form: Form
    layer: int = -1
    expert: int = -1


def weight_map(config: Lfm2Config) -> list[Weight]:
    """Every weight of the model, once, in the order of the layers."""
    weights = [
        Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "same"),
        Weight("decoder.final_layernorm.weight", ("model.embedding_norm.weight",), "same"),
    ]
    for layer in range(config.num_layers):
        weights.extend(_layer_weights(config, layer))
    return weights


def _layer_weights(config: Lfm2Config, layer: int) -> Iterator[Weight]:
    """The weights of one layer: norms, attention or convolution, dense MLP or router and experts."""

    def weight(name: str, sources: tuple[str, ...], form: Form = "same", expert: int = -1) -> Weight:
        hub = tuple(f"model.layers.{layer}.{source}" for source in sources)
        return Weight(f"decoder.layers.{layer}.{name}", hub, form, layer, expert)

    yield weight("input_layernorm.weight", ("operator_norm.weight",))
    yield weight("pre_mlp_layernorm.weight", ("ffn_norm.weight",))
    if layer in config.attention_layers:
        projections = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
        yield weight("self_attention.linear_qkv.weight", projections, "qkv")
        yield weight("self_attention.linear_proj.weight", ("self_attn.out_proj.weight",))
        for name in ("q_layernorm", "k_layernorm"):
            yield weight(f"self_attention.{name}.weight", (f"self_attn.{name}.weight",))
    else:
        yield weight("self_attention.in_proj.weight", ("conv.in_proj.weight",), "channel_major")
        yield weight("self_attention.conv_weight", ("conv.conv.weight",), "depthwise")
        yield weight("self_attention.out_proj.weight", ("conv.out_proj.weight",))
    if layer not in config.moe_layers:
        yield weight("mlp.linear_fc1.weight", ("feed_forward.w1.weight", "feed_forward.w3.weight"), "gate_up")
        yield weight("mlp.linear_fc2.weight", ("feed_forward.w2.weight",))
        return
    yield weight("mlp.router.weight", ("feed_forward.gate.weight",))
    if config.use_expert_bias:
        yield weight("mlp.router.expert_bias", ("feed_forward.expert_bias",))
    for expert in range(config.num_experts):
        there = f"feed_forward.experts.{expert}"
        yield weight(f"mlp.experts.fc1.{expert}", (f"{there}.w1.weight", f"{there}.w3.weight"), "gate_up", expert)
        yield weight(f"mlp.experts.fc2.{expert}", (f"{there}.w2.weight",), "same", expert)


def hub_shapes(config: Lfm2Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that a hub checkpoint of this architecture holds."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_size
    groups = config.num_kv_heads * config.head_size
    fixed = {
        "q_proj": (heads, hidden),
        "k_proj": (groups, hidden),
        "v_proj": (groups, hidden),
        "self_attn.out_proj": (hidden, heads),
        "layernorm": (config.head_size,),
        "conv.in_proj": (3 * hidden, hidden),
        "conv.conv": (hidden, 1, config.conv_kernel),
        "conv.out_proj": (hidden, hidden),
        "feed_forward.gate": (config.num_experts, hidden),
        "expert_bias": (config.num_experts,),
        "embed_tokens": (config.vocab_size, hidden),
        "norm": (hidden,),
    }
    for weight in weight_map(config):
        size = config.moe_ffn_size if weight.expert >= 0 else config.dense_ffn_size
        fed = {"w1": (size, hidden), "w3": (size, hidden), "w2": (hidden, size)}
        for name in weight.hub:
            stem = name.removesuffix(".weight")
            yield name, next(shape for end, shape in (fixed | fed).items() if stem.endswith(end))


def load_hub(model: GPTModel, config: Lfm2Config, folder: Path) -> None:
    """Fill `model` from the safetensors of `folder`, one tensor in memory at a time; types are cast to the model's.

    Raises:
        CheckpointError: a tensor is missing, left over, or of the wrong shape, or a file is torn. The message names
            the tensor; the model may be half filled and must not be used.
    """
    targets = local_weights(model)
    with HubFiles(folder) as files:
        known: set[str] = set()
        for weight in weight_map(config):
            known.update(weight.hub)
            target = targets.get(weight.megatron)
            if target is not None:
                parts = [files.read(name) for name in weight.hub]
                _copy(target, weight, parts, config)
        left_over = files.names - known - _tied_copies(files)
        if left_over:
            raise files.error(f"holds a tensor the architecture has no place for: {min(left_over)}")


def save_hub(model: GPTModel, config: Lfm2Config, folder: Path, masters: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write `folder` as a hub checkpoint: config.json as it was read, and safetensors in the weights' own type.

    Args:
        masters: fp32 masters by parameter name, written instead of the parameters. With expert parallelism every
            process must call; the first one writes.

    Raises:
        CheckpointError: `folder` holds weights already.
    """
    is_writer = dist.get_rank() == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.safetensors")):
            raise CheckpointError(f"{folder} holds weights already", hint="write into an empty folder")
        (folder / "config.json").write_text(config.source, encoding="utf-8")
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total_bytes = 0

    def flush() -> None:
        if pending:
            if is_writer:
                save_file(pending, folder / _part_name(len(shards)), metadata={"format": "pt"})
            shards.append(list(pending))
            pending.clear()

    fetch = _fetcher(model, config, masters)
    for weight in weight_map(config):
        tensor = fetch(weight)
        size = tensor.numel() * tensor.element_size()
        if sum(t.numel() * t.element_size() for t in pending.values()) + size > _SHARD_BYTES:
            flush()
        total_bytes += size
        for name, part in zip(weight.hub, to_hub(tensor, weight, config), strict=True):
            pending[name] = part.cpu().contiguous()
    flush()
    if is_writer:
        _name_shards(folder, shards, total_bytes)


def mlx_tensors(
    model: GPTModel, config: Lfm2Config, masters: Mapping[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under the name and shape mlx_lm gives it after `sanitize`, one at a time.

    Args:
        masters: fp32 masters by parameter name (`Trainable.masters`), yielded instead of the parameters.

    Yields:
        (name, tensor) on the model's device; contiguous, without gradient, and only to be read: it may share memory
        with a weight. The experts of a layer come stacked [E, out, in] (made when asked for: one stack at a time is
        alive). With expert parallelism every process must iterate; all get the full tensors.
    """
    renamed = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"} if config.family == "lfm2_moe" else {}
    fetch = _fetcher(model, config, masters)
    stacks: dict[int, list[Weight]] = {}
    for weight in weight_map(config):
        if weight.expert >= 0:
            stacks.setdefault(weight.layer, []).append(weight)
            continue
        for name, part in zip(weight.hub, to_hub(fetch(weight), weight, config), strict=True):
            stem, _, last = name.removesuffix(".weight").rpartition(".")
            if weight.form == "depthwise":
                part = part.transpose(1, 2)
            yield (f"{stem}.{renamed[last]}.weight" if last in renamed else name), part.contiguous()
    for layer, experts in stacks.items():
        for source, target in renamed.items():
            parts = [
                to_hub(fetch(weight), weight, config)[i]
                for weight in experts
                for i, name in enumerate(weight.hub)
                if name.endswith(f".{source}.weight")
            ]
            yield f"model.layers.{layer}.feed_forward.switch_mlp.{target}.weight", torch.stack(parts)


def to_megatron(parts: list[torch.Tensor], weight: Weight, config: Lfm2Config) -> torch.Tensor:
    """Hub tensors -> the Megatron parameter. Inverse of `to_hub`."""
    if weight.form == "qkv":
        groups, size = config.num_kv_heads, config.head_size
        rows = [part.reshape(groups, -1, size, part.shape[-1]) for part in parts]
        return torch.cat(rows, dim=1).reshape(-1, parts[0].shape[-1])
    if weight.form == "channel_major":
        return parts[0].unflatten(0, (3, -1)).transpose(0, 1).flatten(0, 1)
    if weight.form == "depthwise":
        return parts[0].squeeze(1)
    if weight.form == "gate_up":
        return torch.cat(parts)
    return parts[0]


def to_hub(tensor: torch.Tensor, weight: Weight, config: Lfm2Config) -> list[torch.Tensor]:
    """The Megatron parameter -> hub tensors, views where possible. Inverse of `to_megatron`."""
    if weight.form == "qkv":
        groups, size = config.num_kv_heads, config.head_size
        per_group = config.num_heads // groups
        rows = tensor.unflatten(0, (groups, per_group + 2, size)).split((per_group, 1, 1), dim=1)
        return [part.flatten(0, 2) for part in rows]
    if weight.form == "channel_major":
        return [tensor.unflatten(0, (-1, 3)).transpose(0, 1).flatten(0, 1)]
    if weight.form == "depthwise":
        return [tensor.unsqueeze(1)]
    if weight.form == "gate_up":
        return list(tensor.chunk(2))
    return [tensor]


def _copy(target: torch.Tensor, weight: Weight, parts: list[torch.Tensor], config: Lfm2Config) -> None:
    """Copy hub tensors into place, or say which has the wrong shape."""
    for name, part, own in zip(weight.hub, parts, to_hub(target, weight, config), strict=True):
        if part.shape != own.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(part.shape)}; config.json makes it {tuple(own.shape)}",
                hint="config.json and the weights are of different models",
            )
    with torch.no_grad():
        target.copy_(to_megatron(parts, weight, config))


def _fetcher(model: GPTModel, config: Lfm2Config, masters: Mapping[str, torch.Tensor] | None) -> Callable[[Weight], torch.Tensor]:
    """A function that gives a weight whole; an expert of another process is sent by its owner."""
    weights = local_weights(model)
    num_owners = parallel_state.get_expert_model_parallel_world_size()
    group = cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())
    fc1, fc2 = (2 * config.moe_ffn_size, config.hidden_size), (config.hidden_size, config.moe_ffn_size)
    dtype = model.config.params_dtype if masters is None else torch.float32

    def fetch(weight: Weight) -> torch.Tensor:
        is_here, name = weight.megatron in weights, weight.megatron
        if is_here:
            tensor = masters[name] if masters is not None and name in masters else weights[name]
        else:
            tensor = torch.empty(fc1 if weight.form == "gate_up" else fc2, dtype=dtype, device=host.device())
        if weight.expert >= 0 and num_owners > 1:
            dist.broadcast(tensor, group_src=weight.expert // (config.num_experts // num_owners), group=group)
        return tensor

    return fetch


def _tied_copies(files: HubFiles) -> set[str]:
    """`lm_head.weight`, where a checkpoint spells the tied embedding twice. Both must be equal."""
    if "lm_head.weight" not in files.names:
        return set()
    if not torch.equal(files.read("lm_head.weight"), files.read("model.embed_tokens.weight")):
        raise files.error("has an lm_head that differs from the embedding config.json ties it to")
    return {"lm_head.weight"}


def _part_name(part: int) -> str:
    return f"part-{part:05d}.safetensors"


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the parts their hub names, and an index if there are several."""
    if len(shards) == 1:
        (folder / _part_name(0)).replace(folder / "model.safetensors")
        return
    weight_files: dict[str, str] = {}
    for part, names in enumerate(shards):
        final = f"model-{part + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part_name(part)).replace(folder / final)
        weight_files.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_files}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
