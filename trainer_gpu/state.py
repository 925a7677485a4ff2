"""The trainer's state as named tensors: masters and moments of the optimizer, its count of steps, saved buffers.

Every process holds pieces: the optimizer's state is spread over the processes that hold the same weights, and experts
over those that share them. A piece is named by its place in the whole weight, so a state saved by one number of
processes, cut in any way, loads into any other.

    KIND.NAME                 a whole weight, in its shape; kinds are master (fp32), exp_avg and exp_avg_sq
    KIND.NAME[START:STOP]     elements START to STOP - 1 of the flattened weight, 1-D
    buffer.NAME               a saved buffer
    optimizer.step            int64 scalar
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from stoa.contracts.errors import CheckpointError
from trainer_gpu import host
from trainer_gpu.adam import Adam, Piece
from trainer_gpu.weights import is_stacked, local_weights, saved_buffers

MASTER, FIRST_MOMENT, SECOND_MOMENT, BUFFER = "master", "exp_avg", "exp_avg_sq", "buffer"
KINDS = (MASTER, FIRST_MOMENT, SECOND_MOMENT)
STEP = "optimizer.step"
_TORN = "the checkpoint is of another architecture, or torn"
_PIECE: Final = re.compile(r"(?P<weight>.*)\[(?P<start>\d+):(?P<stop>\d+)\]")


@dataclass(frozen=True, slots=True)
class Held:
    """A whole weight, and the elements of it, from `start` on, whose optimizer state this process has (None: no such)."""

    shape: tuple[int, ...]
    first: int
    """First element of this process's parameter: above 0 where experts before its own are another's."""
    group: dist.ProcessGroup
    """Processes that hold the same parameter, each with the state of a part of it."""
    start: int
    piece: Piece | None

    @property
    def size(self) -> int:
        """Elements of the whole weight."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """After the last element whose state is here."""
        return self.start + (self.piece.master.numel() if self.piece else 0)

    def name(self, kind: str, weight: str) -> str:
        """What this process's piece of `kind` is called."""
        whole = (self.start, self.stop) == (0, self.size)
        return f"{kind}.{weight}" if whole else f"{kind}.{weight}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor's name taken apart. `start` and `stop` are None for a whole one."""

    kind: str
    weight: str
    start: int | None
    stop: int | None

    @classmethod
    def of(cls, name: str) -> "Named":
        """The parts of `name`."""
        kind, _, rest = name.partition(".")
        found = _PIECE.fullmatch(rest)
        return cls(kind, found["weight"], int(found["start"]), int(found["stop"])) if found else cls(kind, rest, None, None)


class TrainerState:
    """This process's share of the state, and ways in and out."""

    def __init__(self, model: GPTModel, parts: Sequence[DistributedOptimizer]) -> None:
        """`parts`: Megatron's optimizers of `model`, each around an `Adam`."""
        self._model = model
        self._adams = [cast(Adam, part.optimizer) for part in parts]
        self._held = dict(_held(model, parts))

    def tensors(self, *, own: bool = False) -> dict[str, torch.Tensor]:
        """All of this process's tensors as views. `own`: without what the first process has as well."""
        tensors: dict[str, torch.Tensor] = {}
        for weight, held in self._held.items():
            if held.piece is not None:
                for kind, tensor in _kinds(held.piece).items():
                    name = held.name(kind, weight)
                    tensors[name] = tensor if name.endswith("]") else tensor.view(held.shape)
        if not own or host.rank() == 0:
            tensors.update((f"{BUFFER}.{name}", buffer) for name, buffer in saved_buffers(self._model).items())
            tensors[STEP] = torch.tensor(self._adams[0].num_steps, dtype=torch.int64)
        return tensors

    def wants(self, name: str) -> bool:
        """Whether a tensor of this name, of any process, holds something of this process's state."""
        named = Named.of(name)
        held = self._held.get(named.weight)
        if named.kind not in KINDS or held is None:
            return name == STEP or (named.kind == BUFFER and named.weight in saved_buffers(self._model))
        start, stop = (0, held.size) if named.start is None or named.stop is None else (named.start, named.stop)
        return start < held.stop and held.start < stop

    def check_names(self, names: Collection[str]) -> None:
        """Raise CheckpointError unless `names` hold the state of all processes together once; all must call."""
        sizes: dict[str, int] = {}
        others: set[str] = {STEP, *(f"{BUFFER}.{name}" for name in saved_buffers(self._model))}
        for shared in host.exchange({weight: held.size for weight, held in self._held.items()}):
            sizes.update(shared)
        spans: dict[str, list[tuple[int, int]]] = {f"{kind}.{weight}": [] for kind in KINDS for weight in sizes}
        strange: list[str] = []
        for name in names:
            named = Named.of(name)
            whole = f"{named.kind}.{named.weight}"
            if whole in spans:
                start, stop = named.start or 0, named.stop if named.stop is not None else sizes[named.weight]
                spans[whole].append((start, stop))
            elif name in others:
                others.discard(name)
            else:
                strange.append(name)
        lacking = [*others, *(name for name, found in spans.items() if not _tiles(found, sizes[name.partition(".")[2]]))]
        for title, wrong in (("lacks", lacking), ("also holds", strange)):
            if wrong:
                raise CheckpointError(f"the trainer state {title} {len(wrong)} tensors: {', '.join(sorted(wrong)[:3])}", hint=_TORN)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take what this process needs of the named tensors, one at a time, in any order and cut; others are passed over.

        The weights that the forward pass reads follow the masters of this process only: `Trainable.share_weights`.

        Raises:
            CheckpointError: a tensor has another shape, or one of this process's is missing; the state is half filled.
        """
        missing = {name: tensor.numel() for name, tensor in self.tensors().items()}
        buffers = saved_buffers(self._model)
        for name, tensor in tensors:
            named = Named.of(name)
            held = self._held.get(named.weight)
            if name == STEP:
                for adam in self._adams:
                    adam.num_steps = int(tensor)
                missing.pop(STEP, None)
            elif named.kind == BUFFER and named.weight in buffers:
                buffers[named.weight].copy_(_shaped(tensor, tuple(buffers[named.weight].shape), name))
                missing.pop(name, None)
            elif named.kind in KINDS and held is not None and held.piece is not None:
                num_filled = _fill(held, named, tensor, name)
                missing[held.name(named.kind, named.weight)] -= num_filled
        left = sorted(name for name, size in missing.items() if size)
        if left:
            raise CheckpointError(f"the trainer state lacks {len(left)} tensors: {', '.join(left[:3])}", hint=_TORN)
        for held in self._held.values():
            if held.piece is not None:
                held.piece.weight.copy_(held.piece.master)

    def whole_master(self, weight: str, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Elements from `first` on of this process's parameter `weight` as one fp32 tensor of `shape`, on the device.

        Where other processes have the state of a part, all that hold the parameter must ask at the same moment.
        """
        held = self._held[weight]
        start = held.first + first
        stop = start + math.prod(shape)
        low, high = max(start, held.start), min(stop, held.stop)
        piece = held.piece.master if held.piece is not None else torch.empty(0)
        if held.group.size() == 1:
            return piece[low - held.start : high - held.start].view(shape).to(host.device())
        whole = torch.zeros(stop - start, dtype=torch.float32, device=host.device())
        if low < high:
            whole[low - start : high - start].copy_(piece[low - held.start : high - held.start])
        dist.all_reduce(whole.view(torch.int32), group=held.group)  # every bit from one process, the others add 0
        return whole.view(shape)


class Masters(Mapping[str, torch.Tensor]):
    """The fp32 master of each weight of this process by its name in `local_weights`, whole, made when asked for.

    With several processes all must ask for the same weights in the same order.
    """

    def __init__(self, state: TrainerState, model: GPTModel) -> None:
        self._state = state
        self._places: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        parameters = dict(model.named_parameters())
        for name, view in local_weights(model).items():
            owner = name.rpartition(".")[0] if name not in parameters else name
            if owner in parameters:
                first = int(view.storage_offset()) - int(parameters[owner].storage_offset())
                self._places[name] = (owner, first, tuple(view.shape))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._state.whole_master(*self._places[name])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _held(model: GPTModel, parts: Sequence[DistributedOptimizer]) -> Iterator[tuple[str, Held]]:
    """(name, what is held of it) of every parameter of this process."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    cuts = parallel_state.get_expert_model_parallel_world_size()
    for part in parts:
        pieces: dict[torch.Tensor, torch.Tensor] = {}
        for models, shards in ((part.model_float16_groups, part.shard_float16_groups), (part.model_fp32_groups, part.shard_fp32_groups)):
            for whole, cut in zip(models, shards, strict=True):
                pieces.update(zip(whole, cut, strict=True))
        for parameter in (one for buffer in part.buffers for one in buffer.params):
            name, shape = names[parameter], tuple(parameter.shape)
            first = 0
            if is_stacked(name) and cuts > 1:
                first = parallel_state.get_expert_model_parallel_rank() * parameter.numel()
                shape = (cuts * shape[0], *shape[1:])
            weight = pieces.get(parameter)
            start = first + (int(weight.storage_offset()) - int(parameter.storage_offset()) if weight is not None else 0)
            piece = cast(Adam, part.optimizer).piece(weight) if weight is not None else None
            yield name, Held(shape, first, cast(dist.ProcessGroup, part.data_parallel_group), start, piece)


def _kinds(piece: Piece) -> dict[str, torch.Tensor]:
    return {MASTER: piece.master, FIRST_MOMENT: piece.exp_avg, SECOND_MOMENT: piece.exp_avg_sq}


def _fill(held: Held, named: Named, tensor: torch.Tensor, name: str) -> int:
    """Copy the part of a named tensor that falls into what is held here; returns how many elements that were."""
    if named.start is None or named.stop is None:
        start, stop = 0, held.size
        _shaped(tensor, held.shape, name)
    else:
        start, stop = named.start, named.stop
        _shaped(tensor, (stop - start,), name)
    low, high = max(start, held.start), min(stop, held.stop)
    if held.piece is None or low >= high:
        return 0
    target = _kinds(held.piece)[named.kind]
    target[low - held.start : high - held.start].copy_(tensor.flatten()[low - start : high - start])
    return high - low


def _tiles(spans: list[tuple[int, int]], size: int) -> bool:
    """Whether spans cover 0 ... size, each element once."""
    end = 0
    for start, stop in sorted(spans):
        if start != end or stop <= start:
            return False
        end = stop
    return end == size


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """`tensor`, if it has `shape`; else CheckpointError."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"the trainer state's {name} has shape {tuple(tensor.shape)}, not {shape}", hint=_TORN)
    return tensor
