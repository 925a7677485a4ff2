"""Low-rank adapters over matrices that are split between ranks: layers usable with any mlx_lm model that is sharded.

mlx shards a matrix by its outputs (all-to-sharded: every rank sees the whole input and makes a slice of the output) or by
its inputs (sharded-to-all: every rank sees a slice of the input and the products are summed). An adapter over either has
one half that is split as the matrix is, and one that every rank holds whole:

    all-to-sharded   y_r = W_r x + s B_r (A x)           A whole, B split by outputs
    sharded-to-all   y   = sum_r W_r x_r + s B (sum_r A_r x_r)     A split by inputs, B whole

What crosses the wire for an adapter is the inner product alone, `r` numbers a token. Both gradients of the half that is
whole come out complete on every rank, so equal halves stay equal. Stacks of experts are split the same way; the block
around them, as mlx_lm splits it, sums outputs and the gradient of its input over all ranks. `gather_adapters` puts the
halves together under the names and shapes of stock mlx_lm.

Legend: I inputs, O outputs of the whole matrix, R inner size, N ranks, E experts.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
    sum_gradients,
)
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from stoa.contracts.errors import LayoutError

Half = Literal["lora_a", "lora_b"]
BY_OUTPUTS: Final = (AllToShardedLinear, QuantizedAllToShardedLinear)
BY_INPUTS: Final = (ShardedToAllLinear, QuantizedShardedToAllLinear)
STACKS: Final = (SwitchLinear, QuantizedSwitchLinear)
_STACK_BY_OUTPUTS: Final = (".gate_proj", ".up_proj")
_STACK_BY_INPUTS: Final = ".down_proj"


class Sizes(NamedTuple):
    """Of the slice of a matrix that this rank holds."""

    outputs: int
    inputs: int


def local_sizes(linear: Any) -> Sizes:
    """Sizes of a rank's slice, of one expert in a stack; packed rows of `bits` bits hold 32 / bits numbers a word."""
    outputs, inputs = linear.weight.shape[-2:]
    bits = getattr(linear, "bits", None)
    return Sizes(outputs, inputs if bits is None else inputs * 32 // bits)


def total_gradient(x: mx.array, group: mx.distributed.Group) -> mx.array:
    """`x` itself; its gradient is the sum of all ranks'."""
    return cast(Callable[[mx.array], mx.array], sum_gradients(group))(x)


class AllToShardedLoRALinear(nn.Module):
    """An adapter over a matrix split by outputs. `lora_a` [I, R] is whole, `lora_b` [R, O / N] is this rank's slice."""

    split_half: Half = "lora_b"
    split_axis: int = 1

    def __init__(self, linear: Any, *, rank: int, scale: float, group: mx.distributed.Group) -> None:
        """Raises LayoutError for a matrix that is not split by outputs."""
        super().__init__()
        if not isinstance(linear, BY_OUTPUTS):
            raise LayoutError(f"{type(linear).__name__} is not split by its outputs")
        sizes = local_sizes(linear)
        self.linear = linear
        self.scale = scale
        self.group = group
        limit = 1 / math.sqrt(sizes.inputs)
        self.lora_a = mx.random.uniform(-limit, limit, (sizes.inputs, rank))
        self.lora_b = mx.zeros((rank, sizes.outputs))

    def __call__(self, x: mx.array) -> mx.array:
        """[.., I] to this rank's slice of the outputs."""
        inner = total_gradient(x @ self.lora_a, self.group)
        return self.linear(x) + (self.scale * (inner @ self.lora_b)).astype(x.dtype)


class ShardedToAllLoRALinear(nn.Module):
    """An adapter over a matrix split by inputs. `lora_a` [I / N, R] is this rank's slice, `lora_b` [R, O] is whole."""

    split_half: Half = "lora_a"
    split_axis: int = 0

    def __init__(self, linear: Any, *, rank: int, scale: float, group: mx.distributed.Group) -> None:
        """Raises LayoutError for a matrix that is not split by inputs."""
        super().__init__()
        if not isinstance(linear, BY_INPUTS):
            raise LayoutError(f"{type(linear).__name__} is not split by its inputs")
        sizes = local_sizes(linear)
        self.linear = linear
        self.scale = scale
        self.group = group
        inputs = sizes.inputs * group.size()
        limit = 1 / math.sqrt(inputs)
        # Drawn whole, so that it is what one Mac with this seed would draw.
        self.lora_a = take_slice(mx.random.uniform(-limit, limit, (inputs, rank)), 0, group)
        self.lora_b = mx.zeros((rank, sizes.outputs))

    def __call__(self, x: mx.array) -> mx.array:
        """This rank's slice [.., I / N] of the inputs to the whole output."""
        inner = mx.distributed.all_sum(x @ self.lora_a, group=self.group)
        return self.linear(x) + (self.scale * (inner @ self.lora_b)).astype(x.dtype)


class AllToShardedLoRASwitch(nn.Module):
    """An adapter over a stack split by outputs. `lora_a` [E, R, I] is whole, `lora_b` [E, O / N, R] is this rank's slice.

    The gradient of the input is this rank's part of it: the block around the stack sums it.
    """

    split_half: Half = "lora_b"
    split_axis: int = 1

    def __init__(self, stack: Any, *, rank: int, scale: float, group: mx.distributed.Group) -> None:
        super().__init__()
        num, sizes = stack.weight.shape[0], local_sizes(stack)
        self.linear = stack
        self.scale = scale
        self.group = group
        limit = 1 / math.sqrt(sizes.inputs)
        self.lora_a = mx.random.uniform(-limit, limit, (num, rank, sizes.inputs))
        self.lora_b = mx.zeros((num, sizes.outputs, rank))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """[.., 1, I] and the expert of each to this rank's slice of the outputs."""
        lora_a = self.lora_a
        # Of `lora_a` the gradient is all ranks', of `x` this rank's alone.
        whole = total_gradient(_gather(mx.stop_gradient(x), lora_a, indices, sorted_indices), self.group)
        own = _gather(x, mx.stop_gradient(lora_a), indices, sorted_indices)
        z = _gather(whole + _gradient_only(own), self.lora_b, indices, sorted_indices)
        return self.linear(x, indices, sorted_indices=sorted_indices) + (self.scale * z).astype(x.dtype)


class ShardedToAllLoRASwitch(nn.Module):
    """An adapter over a stack split by inputs. `lora_a` [E, R, I / N] is this rank's slice, `lora_b` [E, O, R] is whole.

    What it gives is this rank's part of the outputs: the block around the stack sums it.
    """

    split_half: Half = "lora_a"
    split_axis: int = 2

    def __init__(self, stack: Any, *, rank: int, scale: float, group: mx.distributed.Group) -> None:
        super().__init__()
        num, sizes = stack.weight.shape[0], local_sizes(stack)
        self.linear = stack
        self.scale = scale
        self.group = group
        inputs = sizes.inputs * group.size()
        limit = 1 / math.sqrt(inputs)
        self.lora_a = take_slice(mx.random.uniform(-limit, limit, (num, rank, inputs)), 2, group)
        self.lora_b = mx.zeros((num, sizes.outputs, rank))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """This rank's slice [.., 1, I / N] of the inputs and the expert of each to its part of the outputs."""
        own = _gather(x, self.lora_a, indices, sorted_indices)
        z = _gather(own, mx.stop_gradient(self.lora_b), indices, sorted_indices)
        # `lora_b` learns from the whole inner product.
        whole = mx.distributed.all_sum(mx.stop_gradient(own), group=self.group)
        z = z + _gradient_only(_gather(mx.stop_gradient(whole), self.lora_b, indices, sorted_indices))
        return self.linear(x, indices, sorted_indices=sorted_indices) + (self.scale * z).astype(x.dtype)


def _gather(x: mx.array, matrices: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
    """Rows through the matrix [.., outputs, inputs] of the expert of each."""
    return mx.gather_mm(x, matrices.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices)


def _gradient_only(x: mx.array) -> mx.array:
    """Zeros through which a gradient goes as through `x`."""
    return x - mx.stop_gradient(x)


ShardedLoRA = AllToShardedLoRALinear | ShardedToAllLoRALinear | AllToShardedLoRASwitch | ShardedToAllLoRASwitch


def stack_adapter(path: str) -> "type[AllToShardedLoRASwitch] | type[ShardedToAllLoRASwitch]":
    """The adapter for a stack of experts of this path. Raises LayoutError for one that is split in no known way."""
    if path.endswith(_STACK_BY_OUTPUTS):
        return AllToShardedLoRASwitch
    if path.endswith(_STACK_BY_INPUTS):
        return ShardedToAllLoRASwitch
    raise LayoutError(f"{path}: how these experts are split is not known here", hint="leave experts without adapters")


def add_sharded_adapters(model: Any, *, rank: int, scale: float, group: mx.distributed.Group, experts: bool = False) -> list[str]:
    """Put an adapter on every matrix of `model` that is split over `group`; returns their paths, in order.

    Each rank draws what it holds: seed them alike, and whole halves are equal. experts: on stacks of experts too, all of
    which are split, in blocks that sum outputs and input gradients. Raises LayoutError for stacks of unknown names.
    """
    made: list[tuple[str, nn.Module]] = []
    for path, module in sorted(model.named_modules()):
        if isinstance(module, BY_OUTPUTS):
            made.append((path, AllToShardedLoRALinear(module, rank=rank, scale=scale, group=group)))
        elif isinstance(module, BY_INPUTS):
            made.append((path, ShardedToAllLoRALinear(module, rank=rank, scale=scale, group=group)))
        elif experts and isinstance(module, STACKS):
            made.append((path, stack_adapter(path)(module, rank=rank, scale=scale, group=group)))
    model.update_modules(tree_unflatten(made))
    return [path for path, _ in made]


def split_halves(model: Any) -> Iterator[tuple[str, int]]:
    """(parameter's name, axis) of every half that is split over ranks."""
    for path, module in sorted(model.named_modules()):
        if isinstance(module, ShardedLoRA):
            yield f"{path}.{module.split_half}", module.split_axis


def take_slice(whole: mx.array, axis: int, group: mx.distributed.Group) -> mx.array:
    """This rank's slice of a whole half. Raises LayoutError if the ranks cannot share it evenly."""
    if whole.shape[axis] % group.size():
        raise LayoutError(f"an axis of {whole.shape[axis]} cannot be shared by {group.size()} ranks")
    return mx.contiguous(mx.split(whole, group.size(), axis=axis)[group.rank()])


def join_slices(part: mx.array, axis: int, group: mx.distributed.Group) -> mx.array:
    """The whole half from every rank's slice, on every rank."""
    parts = mx.distributed.all_gather(part[None], group=group)
    return mx.concatenate([parts[rank] for rank in range(group.size())], axis=axis)


def gather_adapters(model: Any, group: mx.distributed.Group) -> dict[str, mx.array]:
    """All trained parameters with split halves put together: the names and shapes of stock mlx_lm, on every rank."""
    axes = dict(split_halves(model))
    found: dict[str, mx.array] = {}
    for name, array in sorted(cast(list[tuple[str, mx.array]], tree_flatten(model.trainable_parameters()))):
        found[name] = join_slices(array, axes[name], group) if name in axes else array
        mx.eval(found[name])
    return found
