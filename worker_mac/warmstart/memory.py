"""What a warm start takes of a Mac's memory, worked out from shapes alone before anything is loaded, and how many rows that leaves
room for.

Pure arithmetic. The parts: frozen weights, what is trained with its gradient and moments, what one row's layers keep for
the backward pass, and the logits. Rounded up throughout: a plan that fits must fit.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stoa.contracts.errors import CheckpointError, UsageError
from worker_mac.warmstart.batches import padded
from worker_mac.warmstart.policy import GROUP_SIZE, HEAD_ROWS
from worker_mac.warmstart.settings import Settings

TRAINED_BYTES: Final = 28
"""A trained parameter: value, gradient of a batch and of the step, the sum of ranks, two moments, one new value; fp32."""
MARGIN_BYTES: Final = 96 << 20
"""Small arrays, buffers kept for reuse, and the runtime's own."""
_ROUTERS: Final = ("feed_forward.gate.weight", "mlp.gate.weight", "block_sparse_moe.gate.weight")
_SPLIT: Final = (".self_attn.", ".feed_forward.", ".mlp.", ".block_sparse_moe.")
_ITEM_BYTES: Final[Mapping[str, int]] = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint's files."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def size(self) -> int:
        """Numbers in it."""
        size = 1
        for length in self.shape:
            size *= length
        return size


def read_tensors(folder: Path) -> list[Tensor]:
    """All tensors of a checkpoint, from the files' headers alone. Raises CheckpointError for a torn file or none."""
    found: list[Tensor] = []
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > path.stat().st_size:
                    raise ValueError("its header is longer than the file")
                header: dict[str, dict[str, object]] = json.loads(file.read(length))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                shape = entry["shape"]
                if not isinstance(shape, list):
                    raise TypeError(f"the shape of {name} is no list")
                found.append(Tensor(name, tuple(int(length) for length in shape), _ITEM_BYTES[str(entry["dtype"])]))
        except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file: {error}", hint="fetch the checkpoint again") from error
    if not found:
        raise CheckpointError(f"{folder}: no model*.safetensors", hint="name the folder of a hub checkpoint")
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """What of an architecture sets the size of activations. `mlp_size`: of all experts of a token together."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_attention: int
    num_heads: int
    attention_size: int
    mlp_size: int
    experts_per_token: int

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "Shape":
        """From config.json. Raises CheckpointError where a size is missing."""

        def size(*names: str, default: int | None = None) -> int:
            value = next((config[name] for name in names if config.get(name) is not None), default)
            if not isinstance(value, int) or value < 0:
                raise CheckpointError(f"config.json says {value!r} for {names[0]}", hint="name the folder of a hub checkpoint")
            return value

        num_layers, heads, hidden = size("num_hidden_layers"), size("num_attention_heads"), size("hidden_size")
        kinds = config.get("layer_types")
        indices = config.get("full_attn_idxs")
        num_attention = num_layers
        if isinstance(kinds, list) and "conv" in kinds:
            num_attention = num_layers - kinds.count("conv")
        elif isinstance(indices, list):
            num_attention = len(indices)
        dense = size("intermediate_size", "block_ff_dim")
        top_k = size("num_experts_per_tok", default=0)
        expert = size("moe_intermediate_size", "intermediate_size", "block_ff_dim")
        head_size = size("head_dim", default=hidden // heads)
        kv_heads = size("num_key_value_heads", default=heads)
        mlp = max(dense, expert * top_k)
        return cls(hidden, size("vocab_size"), num_layers, num_attention, heads, (heads + 2 * kv_heads) * head_size, mlp, top_k)


@dataclass(frozen=True, slots=True)
class Plan:
    """A warm start's memory on one Mac."""

    limit_bytes: int
    weights_bytes: int
    trained_bytes: int
    fixed_bytes: int
    """Weights, what is trained, and the margin."""
    num_trained: int
    shape: Shape
    item_bytes: int
    grad_checkpoint: bool
    adapters: bool

    def row_bytes(self, length: int) -> int:
        """What one row of this padded length takes at the height of its backward pass, logits aside."""
        shape, item = self.shape, self.item_bytes
        top_k = max(1, shape.experts_per_token)
        # Kept or passing at once inside a layer: norms, projections, sums; adapters add fp32 twins of what projections give.
        mixer = 12 * shape.hidden_size + 4 * shape.attention_size
        block = 6 * shape.mlp_size + (3 * top_k + 8) * shape.hidden_size
        one = (mixer + block) * item
        if self.adapters:
            one += 4 * (shape.attention_size + 4 * shape.hidden_size + 3 * shape.mlp_size + top_k * shape.hidden_size)
        scores = 4 * shape.num_heads * length * length * 4
        if self.grad_checkpoint:
            return length * (shape.num_layers * shape.hidden_size * item + 2 * one) + scores
        return shape.num_layers * length * one + shape.num_attention * scores

    def head_bytes(self, num_targets: int) -> int:
        """What logits take, of at most HEAD_ROWS targets at once, with their gradient."""
        return min(num_targets, HEAD_ROWS) * self.shape.vocab_size * 4 * 4 + num_targets * self.shape.hidden_size * 4 * 4

    def rows_at(self, length: int) -> int:
        """Rows of this padded length that fit at once; 0 if not even one does."""
        room = self.limit_bytes - self.fixed_bytes
        rows = max(0, room // self.row_bytes(length)) if self.row_bytes(length) else 0
        while rows and rows * self.row_bytes(length) + self.head_bytes(rows * length) > room:
            rows = rows * 9 // 10 if rows > 10 else rows - 1
        return rows

    def total_bytes(self, rows: int, length: int) -> int:
        """Everything, with so many rows at once."""
        return self.fixed_bytes + rows * self.row_bytes(length) + self.head_bytes(rows * length)

    def longest(self, most: int) -> int:
        """The longest row, up to `most` tokens, that fits by itself; 0 if none does."""
        low, high = 0, padded(most)
        while low < high:
            middle = padded((low + high + 1) // 2)
            if middle <= low:
                break
            if self.rows_at(middle) >= 1:
                low = middle
            else:
                high = middle - 8
        return min(low, most)


def plan(config: Mapping[str, object], tensors: list[Tensor], settings: Settings, limit_bytes: int) -> Plan:
    """What the warm start takes on this Mac."""
    adapters = settings.mode == "lora"
    ranks = settings.num_ranks if settings.split == "tensor" else 1
    weights = sum(-(-_weight_bytes(tensor, settings) // (ranks if _is_split(tensor) else 1)) for tensor in tensors)
    adapted = [tensor for tensor in tensors if settings.experts or ".experts." not in tensor.name]
    trained = sum(_adapter_size(tensor, settings.rank) for tensor in adapted) if adapters else sum(t.size for t in tensors)
    # In full mode the weights themselves are among what is trained.
    trained_bytes = trained * (TRAINED_BYTES if adapters else TRAINED_BYTES - 4)
    item = max((tensor.item_bytes for tensor in tensors if len(tensor.shape) >= 2), default=4) if adapters else 4
    return Plan(
        limit_bytes=limit_bytes,
        weights_bytes=weights,
        trained_bytes=trained_bytes,
        fixed_bytes=weights + trained_bytes + MARGIN_BYTES,
        num_trained=trained,
        shape=Shape.of(config),
        item_bytes=item,
        grad_checkpoint=settings.grad_checkpoint,
        adapters=adapters,
    )


def _weight_bytes(tensor: Tensor, settings: Settings) -> int:
    if settings.mode == "full":
        return tensor.size * 4
    if settings.bits and _is_matrix(tensor) and tensor.shape[-1] % GROUP_SIZE == 0:
        return tensor.size * settings.bits // 8 + tensor.size // GROUP_SIZE * 2 * tensor.item_bytes
    return tensor.size * tensor.item_bytes


def _adapter_size(tensor: Tensor, rank: int) -> int:
    inside = ".layers." in f".{tensor.name}" and not tensor.name.endswith(_ROUTERS)
    return rank * (tensor.shape[-1] + tensor.shape[-2]) if inside and _is_matrix(tensor) else 0


def _is_split(tensor: Tensor) -> bool:
    """Whether ranks that split matrices hold a slice each: attention's, dense blocks' and experts'."""
    return _is_matrix(tensor) and any(part in tensor.name for part in _SPLIT) and not tensor.name.endswith(_ROUTERS)


def _is_matrix(tensor: Tensor) -> bool:
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight")


def refuse_unless_fits(found: Plan, needed_tokens: int, words: str) -> None:
    """Raise UsageError unless one row of so many tokens fits."""
    if found.rows_at(padded(needed_tokens)) >= 1:
        return
    needed = found.total_bytes(1, padded(needed_tokens))
    raise UsageError(
        f"{words} needs {needed / 1e9:.2f} GB for one row of {needed_tokens} tokens, and {found.limit_bytes / 1e9:.2f} GB may be used",
        hint="quantise with --bits 4, keep less with --grad-checkpoint, teach shorter rows with --max-tokens, or split it over Macs",
    )
