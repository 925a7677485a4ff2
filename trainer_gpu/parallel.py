"""The model wrapped for training: gradient and weight buffers, optimizer, one step.

Megatron's DDP and distributed optimizer do the work: gradients are summed over the processes that hold the same
weights, each of which updates a part of them. The update is `adam.py`'s, the state by name `state.py`'s, the layout over
processes `layout.py`'s; losses and batches are elsewhere. Assumes `trainer_gpu.host.setup_process` has run in this process.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from stoa.contracts.errors import NonFiniteError
from trainer_gpu import host
from trainer_gpu.adam import Adam
from trainer_gpu.state import Masters, TrainerState


class Trainable:
    """A model with its gradient buffers and its Adam state. `build_optimizer` makes one."""

    def __init__(self, model: GPTModel, optimizer_config: OptimizerConfig, make_adam: Callable[[list[dict[str, Any]]], Adam]) -> None:
        self.model = model
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True)
        self._ddp = DistributedDataParallel(model.config, config, model)
        self._ddp.broadcast_params()
        # "The inner optimizer owns the masters": Megatron sets this itself only for TransformerEngine's optimizer.
        optimizer_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        with host.cuda_literals():
            optimizer = get_megatron_optimizer(optimizer_config, [self._ddp], use_gloo_process_groups=False)
        self._optimizer = cast(ChainedOptimizer, optimizer)  # what 0.16 returns for every model without FSDP
        parts = cast(list[DistributedOptimizer], self._optimizer.chained_optimizers)
        self._adams: list[Adam] = []
        for part in parts:
            self._adams.append(make_adam(part.optimizer.param_groups))
            part.optimizer = self._adams[-1]  # pyright: ignore[reportAttributeAccessIssue]
        self.state = TrainerState(model, parts)
        self._clip_grad = optimizer_config.clip_grad

    def step(self, losses: Iterable[Callable[[], torch.Tensor]]) -> float:
        """One optimizer step.

        Args:
            losses: one closure a micro-batch; each runs the forward pass and returns a scalar that is summed over
                micro-batches and processes. Nothing is divided by anything here: a loss carries its denominator.
                Processes that share experts must bring equally many.

        Returns:
            The global gradient norm before clipping.

        Raises:
            NonFiniteError: the gradient holds NaN or infinity; no parameter and no moment has changed.
        """
        grad_norm = self.gradient_norm(losses)
        if not math.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}; the step was not taken",
                hint="look at the batch: a logprob, an advantage or a weight is not finite",
            )
        with host.cuda_literals(), torch.no_grad():
            for part in self._optimizer.chained_optimizers:
                if self._clip_grad > 0:
                    clip_grad_by_total_norm_fp32(list[torch.Tensor](part.get_parameters()), self._clip_grad, grad_norm, True)
            self._optimizer.step_with_ready_grads()
        return grad_norm

    def gradient_norm(self, losses: Iterable[Callable[[], torch.Tensor]]) -> float:
        """Global norm of the gradient of `losses`, as `step` would find it: NaN or infinite where that is; nothing is changed by it."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        for loss in losses:
            loss().backward()
        # calculate_per_token_loss makes this a plain sum over processes; without a token count it stays one.
        finalize_model_grads([self._ddp], num_tokens=None)
        with host.cuda_literals(), torch.no_grad():
            self._optimizer.prepare_grads()
            return float(self._optimizer.get_grad_norm())

    def set_learning_rate(self, rate: float) -> None:
        """Learning rate of the steps from now on."""
        for part in self._optimizer.chained_optimizers:
            for group in part.param_groups:
                group["lr"] = rate * group.get("lr_mult", 1.0)

    def gradients(self) -> dict[str, torch.Tensor]:
        """fp32 gradients of the last step by parameter name, summed and clipped, as views: this process's part of each."""
        return {name: cast(Any, parameter).main_grad for name, parameter in self.model.named_parameters()}

    def masters(self) -> Mapping[str, torch.Tensor]:
        """fp32 master of every weight of this process by its name in `local_weights`: what the optimizer changes.

        Where processes share the state of a weight, all must ask for the same ones in the same order.
        """
        return Masters(self.state, self.model)

    def load_state(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take a saved state; the next step is bit-equal to one never interrupted. All processes must call.

        Raises CheckpointError as `TrainerState.load`; the state is then half filled.
        """
        self.state.load(tensors)
        self.share_weights()

    def update_norm(self) -> float:
        """Norm over all weights of what the last step's moments moved them by, weight decay left out; all must call."""
        square = torch.tensor([sum(adam.update_norm() ** 2 for adam in self._adams)], dtype=torch.float64, device=host.device())
        dist.all_reduce(square)
        return math.sqrt(float(square))

    def share_weights(self) -> None:
        """Give every process the weights that others have updated or loaded; all must call."""
        self._ddp.start_param_sync()

    def forget(self) -> None:
        """Take the model's parameters, which somebody has filled anew, as masters of an optimizer that never stepped."""
        for adam in self._adams:
            adam.forget()


def build_optimizer(
    model: GPTModel,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad: float,
    moment_dtype: torch.dtype = torch.float32,
    on_host: bool = False,
) -> Trainable:
    """Wrap `model` for training with AdamW. An fp32 model is its own master; bf16 gets fp32 masters.

    Args:
        clip_grad: largest global gradient norm; 0 turns clipping off. Norm weights are never decayed.
        moment_dtype: of Adam's moments between steps, fp32 or bf16.
        on_host: keep masters and moments in the host's memory, and update them there.
    """
    dtype = model.config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=lr,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return Trainable(model, config, lambda groups: Adam(groups, betas=betas, eps=eps, moment_dtype=moment_dtype, on_host=on_host))
