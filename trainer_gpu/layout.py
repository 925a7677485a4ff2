"""How the model is cut over processes, and Megatron's process groups for that cut.

Layouts that are known to train wrongly are refused here. Assumes the process group exists.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from stoa.contracts.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """Sizes of the cuts. What is left over is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1


DATA_PARALLEL = Layout()


def check_layout(layout: Layout, world_size: int) -> None:
    """Refuse what is known to train wrongly, or is not built.

    Raises:
        LayoutError: names the cut and why.
    """
    hint = "use data and expert parallelism: the experts are nine tenths of the model"
    if layout.tensor != 1:
        # Measured: tensor 2 with expert 1 and expert-tensor 1 loses the other rank's expert gradients without a word.
        raise LayoutError("tensor parallelism trains the experts wrongly in megatron-core 0.16", hint=hint)
    if layout.context != 1:
        raise LayoutError("context parallelism cuts the short convolution's window at rank borders", hint=hint)
    if layout.pipeline != 1:
        raise LayoutError("pipeline parallelism is not built: a step runs whole micro-batches", hint=hint)
    if layout.expert < 1 or world_size % layout.expert:
        raise LayoutError(f"expert parallelism {layout.expert} does not divide {world_size} processes", hint=hint)


def initialize_layout(layout: Layout, seed: int, *, wait_seconds: float) -> None:
    """Set up Megatron's process groups for `layout`, and its CUDA generators where there is CUDA. Raises LayoutError.

    wait_seconds: longest that a process waits for another in one of these groups.
    """
    check_layout(layout, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=layout.expert,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=cast(int, wait_seconds / 60),
    )
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def is_initialized() -> bool:
    """Whether `initialize_layout` was called, and not undone."""
    return parallel_state.model_parallel_is_initialized()


def expert_parallel_size() -> int:
    """Processes that share one set of experts."""
    return parallel_state.get_expert_model_parallel_world_size()


def expert_share(asked: int, num_experts: int, world_size: int) -> int:
    """Processes that share one set of experts: what was asked for, or for 0 the most that divides both counts.

    Without experts there is nothing to share, and every process has the whole model. Raises LayoutError if they cannot be
    shared out evenly.
    """
    if not num_experts:
        return 1
    if asked and num_experts % asked:
        raise LayoutError(f"expert parallelism {asked} does not divide {num_experts} experts", hint="leave learning.expert_parallel at 0")
    return asked or math.gcd(num_experts, world_size)


def destroy_layout() -> None:
    """Undo `initialize_layout`."""
    parallel_state.destroy_model_parallel()
