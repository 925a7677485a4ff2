"""What the trainer needs of the machine: its processes, their collectives, and the pretence of CUDA where there is none.

Every CPU shim lives here and nowhere else; where CUDA exists nothing is patched, and importing this module patches
nothing either: `setup_process` does, once, before anything of Megatron is built. What ranks tell each other is not
known here.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

from stoa.config.load import torchrun_launch
from stoa.contracts.errors import GpuMemoryError
from trainer_gpu.layout import DATA_PARALLEL, Layout, destroy_layout, initialize_layout, is_initialized

HAS_CUDA = torch.cuda.is_available()
COLLECTIVE_SECONDS: Final = 600.0
"""Longest that a rank waits for another in the middle of a step or of reading the weights: beyond it the other is lost."""
EXCHANGE_SECONDS: Final = 1800.0
"""The same between two parts of a command: one rank may upload while the rest has nothing to do."""

_Value = TypeVar("_Value")
_host_groups: list[dist.ProcessGroup] = []


class _CudaMeansCpu(TorchFunctionMode):
    """Reads `device='cuda'` as the CPU and lets `Tensor.type()` answer `torch.cuda.*`.

    Megatron's optimizers spell both out. `.type()` therefore lies inside this mode: enter it around optimizer calls
    only, never around a forward or a backward pass.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


@contextmanager
def cuda_literals() -> Iterator[None]:
    """Make Megatron's literal 'cuda' mean `device()` inside the block. Does nothing where CUDA exists."""
    if HAS_CUDA:
        yield
    else:
        with _CudaMeansCpu():
            yield


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Inside the block the GPU's memory may run out: raises GpuMemoryError, which says that `what` was too much."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(
            f"{what} does not fit the GPU: {str(error).partition(chr(10))[0][:300]}",
            hint="go on with more GPUs or larger ones; a new run may set learning.micro_batch_tokens, moment_dtype or "
            "optimizer_on_host as `stoa plan gpu` says",
        ) from error


def device() -> torch.device:
    """The device that holds the parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else torch.device("cpu")


def join_processes() -> None:
    """Form the process group. A second call does nothing.

    A process that torchrun did not start forms a group of one over an in-memory store. Gloo and NCCL are kept on the
    loopback interface as long as all processes are on this host, so that nothing listens on another address; NCCL's data
    goes between GPUs.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if HAS_CUDA else "gloo"
    launch = torchrun_launch()
    if launch is None:
        _stay_on_loopback()
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return
    if launch.num_local == launch.num_ranks:
        _stay_on_loopback()
    if HAS_CUDA:
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    _host_groups.append(cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=EXCHANGE_SECONDS))))


def setup_process(num_threads: int = 1, seed: int = 0, layout: Layout = DATA_PARALLEL) -> None:
    """Join the process group, set up Megatron's parallel state and seed the generators. A second call does nothing.

    Args:
        num_threads: torch's intra-op threads.
        seed: of torch's generators (and of Megatron's CUDA generators).
        layout: the parallel layout; default is data parallel over all processes.

    Raises:
        LayoutError: the layout is one that cannot be trained correctly.
    """
    join_processes()
    if is_initialized():
        return
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    if not HAS_CUDA:
        _pretend_cuda()
    initialize_layout(layout, seed, wait_seconds=COLLECTIVE_SECONDS)


def teardown_process() -> None:
    """Undo `setup_process`. Does nothing when there is no process group."""
    if not dist.is_initialized():
        return
    destroy_layout()
    _host_groups.clear()
    dist.destroy_process_group()


def rank() -> int:
    """Number of this process among those of the trainer, 0 when there is only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Processes of the trainer."""
    return dist.get_world_size() if dist.is_initialized() else 1


def exchange(value: _Value) -> list[_Value]:
    """The values of all ranks in their order, on every rank; all must call. Values travel pickled between our own ranks."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value, group=_host_groups[0])
    return values


def collect(value: _Value) -> list[_Value]:
    """The values of all ranks in their order on rank 0, nothing on the others; all must call."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] | None = [None] * num_ranks() if rank() == 0 else None
    dist.gather_object(value, values, dst=0, group=_host_groups[0])
    return values or []


class _NoStream:
    """A CUDA stream, and an event of one, on a machine that has neither: everything is done in order already."""

    def wait_stream(self, _other: "_NoStream") -> None:
        """Nothing to wait for."""

    def record_event(self) -> "_NoStream":
        """Done by now."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's `maybe_move_tensor_to_cpu`, which leaves sizes that are on the CPU already in a type gloo refuses."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _pretend_cuda() -> None:
    """What Megatron calls outside `cuda_literals`, and no compiling: one step would wait 30 s for it."""
    stream = _NoStream()
    for name, stand_in in {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda device=None: None,
        "Stream": _NoStream,  # a class, because transformers names it in annotations
        "current_stream": lambda: stream,
        "stream": lambda _stream: nullcontext(),
    }.items():
        setattr(torch.cuda, name, stand_in)
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes
    torch.compiler.set_stance("force_eager")


def _stay_on_loopback() -> None:
    """Tell both libraries of the interface: `lo` on Linux, `lo0` on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    interface = next(name for name in ("lo", "lo0") if name in names)
    os.environ.update({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface})
