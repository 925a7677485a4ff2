"""What the trainer needs of the machine: one process, its collectives, and the pretence of CUDA where there is none.

Every CPU shim lives here and nowhere else; where CUDA exists nothing is patched, and importing this module patches
nothing either: `setup_process` does, once, before anything of Megatron is built.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from trainer_gpu.layout import DATA_PARALLEL, Layout, destroy_layout, initialize_layout

HAS_CUDA = torch.cuda.is_available()


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


def device() -> torch.device:
    """The device that holds the parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else torch.device("cpu")


def setup_process(num_threads: int = 1, seed: int = 0, layout: Layout = DATA_PARALLEL) -> None:
    """Join the process group, set up Megatron's parallel state and seed the generators.

    A process that torchrun did not start forms a group of one over an in-memory store, and gloo is kept on the
    loopback interface, so nothing listens on another address. A second call does nothing.

    Args:
        num_threads: torch's intra-op threads.
        seed: of torch's generators (and of Megatron's CUDA generators).
        layout: the parallel layout; default is data parallel over all processes.

    Raises:
        LayoutError: the layout is one that cannot be trained correctly.
    """
    if dist.is_initialized():
        return
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    backend = "nccl" if HAS_CUDA else "gloo"
    if dist.is_torchelastic_launched():
        if HAS_CUDA:
            torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)

    if not HAS_CUDA:
        _pretend_cuda()
    try:
        initialize_layout(layout, seed)
    except BaseException:
        dist.destroy_process_group()
        raise


def teardown_process() -> None:
    """Undo `setup_process`. Does nothing when there is no process group."""
    if not dist.is_initialized():
        return
    destroy_layout()
    dist.destroy_process_group()


def _pretend_cuda() -> None:
    """The two functions Megatron calls outside `cuda_literals`, and no compiling: one step would wait 30 s for it."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.compiler.set_stance("force_eager")


def _loopback_interface() -> str:
    """`lo` on Linux, `lo0` on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0") if name in names)
