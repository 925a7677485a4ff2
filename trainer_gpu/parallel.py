"""The model wrapped for training: gradient buffers, optimizer, one step, state in and out.

Megatron's DDP, optimizers and gradient reduction do the work. The loss, the batches and checkpoint files are
elsewhere; the layout over processes is in `layout.py`. Assumes `trainer_gpu.host.setup_process` has run in this process.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.typed_torch import not_none

from stoa.contracts.errors import CheckpointError, NonFiniteError
from trainer_gpu import host

MASTER, FIRST_MOMENT, SECOND_MOMENT, BUFFER = "master", "exp_avg", "exp_avg_sq", "buffer"
KINDS = (MASTER, FIRST_MOMENT, SECOND_MOMENT)
STEP = "optimizer.step"
_EXPERT = ".local_experts."
_TORN = "the checkpoint is of another architecture, or torn"


class Trainable:
    """A model with its gradient buffers and its Adam state. `build_optimizer` makes one."""

    def __init__(self, model: GPTModel, optimizer_config: OptimizerConfig) -> None:
        self.model = model
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False)
        self._ddp = DistributedDataParallel(model.config, config, model)
        self._ddp.broadcast_params()
        with host.cuda_literals():
            optimizer = get_megatron_optimizer(optimizer_config, [self._ddp], use_gloo_process_groups=False)
        self._optimizer = cast(ChainedOptimizer, optimizer)  # what 0.16 returns for every model without FSDP
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
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        for loss in losses:
            loss().backward()
        # calculate_per_token_loss makes this a plain sum over processes; without a token count it stays one.
        finalize_model_grads([self._ddp], num_tokens=None)
        with host.cuda_literals(), torch.no_grad():
            self._optimizer.prepare_grads()
            grad_norm = float(self._optimizer.get_grad_norm())
            if not torch.isfinite(torch.tensor(grad_norm)):
                raise NonFiniteError(
                    f"the gradient norm is {grad_norm}; the step was not taken",
                    hint="look at the batch: a logprob, an advantage or a weight is not finite",
                )
            for part in self._optimizer.chained_optimizers:
                if self._clip_grad > 0:
                    clip_grad_by_total_norm_fp32(list[torch.Tensor](part.get_parameters()), self._clip_grad, grad_norm)
            self._optimizer.step_with_ready_grads()
        return grad_norm

    def set_learning_rate(self, rate: float) -> None:
        """Learning rate of the steps from now on."""
        for part in self._optimizer.chained_optimizers:
            for group in part.param_groups:
                group["lr"] = rate * group.get("lr_mult", 1.0)

    def gradients(self) -> dict[str, torch.Tensor]:
        """fp32 gradients of the last step by parameter name, summed and clipped, as views."""
        return {global_name(self.model, n): cast(Any, p).main_grad for n, p in self.model.named_parameters()}

    def masters(self) -> dict[str, torch.Tensor]:
        """fp32 master of every parameter of this process by name, as views: what the optimizer changes."""
        return {global_name(self.model, n): getattr(p, "main_param", p).detach() for n, p in self.model.named_parameters()}

    def state_names(self) -> set[str]:
        """Names of the tensors of this rank's state; see `state_tensors`."""
        masters = [f"{kind}.{global_name(self.model, n)}" for n, _ in self.model.named_parameters() for kind in KINDS]
        buffers = [f"{BUFFER}.{name}" for name, _ in self.model.named_buffers() if is_saved_buffer(name)]
        return {*masters, *buffers, STEP}

    def state_tensors(self, *, own: bool = False) -> dict[str, torch.Tensor]:
        """Masters, moments, step count and buffers of this process in one flat dict, as views.

        Keys: `master.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` (fp32), `buffer.NAME`, `optimizer.step` (int64 scalar).
        Before the first step the moments are zeros that take no memory.

        Args:
            own: leave out what a rank before this one holds as well, so that all ranks together have each tensor once.
        """
        tensors: dict[str, torch.Tensor] = {}
        num_steps = 0
        first_of = {True: parallel_state.get_expert_data_parallel_rank() == 0, False: parallel_state.get_data_parallel_rank() == 0}
        for name, master, adam in self._adam_entries():
            state = adam.state.get(master, {})
            num_steps = max(num_steps, int(state.get("step", 0)), *(int(g.get("step", 0)) for g in adam.param_groups))
            if own and not first_of[_EXPERT in name]:
                continue
            tensors[f"{MASTER}.{name}"] = master.detach()
            for key in (FIRST_MOMENT, SECOND_MOMENT):
                tensors[f"{key}.{name}"] = state[key] if key in state else master.new_zeros(()).expand(master.shape)
        if own and not first_of[False]:
            return tensors
        for name, buffer in self.model.named_buffers():
            if is_saved_buffer(name):
                tensors[f"{BUFFER}.{name}"] = buffer
        tensors[STEP] = torch.tensor(num_steps, dtype=torch.int64)
        return tensors

    def check_names(self, names: Collection[str]) -> None:
        """Raise CheckpointError unless `names` are those of the state of all ranks together; all ranks must call."""
        expected = set[str]().union(*host.exchange(self.state_names()))
        for title, strange in (("lacks", expected - set(names)), ("also holds", set(names) - expected)):
            if strange:
                shown = ", ".join(sorted(strange)[:3])
                raise CheckpointError(f"the trainer state {title} {len(strange)} tensors: {shown}", hint=_TORN)

    @torch.no_grad()
    def load_state(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Restore what `state_tensors` returned, one tensor at a time; the next step is bit-equal to one never interrupted.

        Names that are not this rank's are passed over.

        Raises:
            CheckpointError: a tensor has another shape, or one of this rank's is missing; the state is half filled.
        """
        parameters = {global_name(self.model, n): p for n, p in self.model.named_parameters()}
        entries = {name: (master, adam) for name, master, adam in self._adam_entries()}
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if is_saved_buffer(name)}
        missing = self.state_names()
        num_steps = 0
        for full_name, tensor in tensors:
            if full_name not in missing:
                continue
            missing.discard(full_name)
            kind, _, name = full_name.partition(".")
            if full_name == STEP:
                num_steps = int(tensor)
            elif kind == BUFFER:
                buffers[name].copy_(_shaped(tensor, buffers[name], full_name))
            else:
                master, adam = entries[name]
                if kind == MASTER:
                    master.copy_(_shaped(tensor, master, full_name))
                    parameters[name].copy_(master)
                else:
                    adam.state[master][kind] = _shaped(tensor, master, full_name).to(master.device, torch.float32, copy=True)
        if missing:
            raise CheckpointError(f"the trainer state lacks {len(missing)} tensors: {', '.join(sorted(missing)[:3])}", hint=_TORN)
        for master, adam in entries.values():
            if isinstance(adam, torch.optim.AdamW):
                adam.state[master]["step"] = torch.tensor(float(num_steps))
            else:  # fused Adam counts once a group; not run here
                for group in adam.param_groups:
                    group["step"] = num_steps

    @torch.no_grad()
    def forget(self) -> None:
        """Take the model's parameters, which somebody has filled anew, as masters of an optimizer that never stepped."""
        for parameter in self.model.parameters():
            master = getattr(parameter, "main_param", parameter)
            if master is not parameter:
                master.copy_(parameter)
        for part in self._optimizer.chained_optimizers:
            part.optimizer.state.clear()
            for group in part.param_groups:
                group.pop("step", None)

    def _adam_entries(self) -> Iterable[tuple[str, torch.Tensor, torch.optim.Optimizer]]:
        """(parameter name, its master, the torch optimizer that owns the master)."""
        owner = {
            id(master): part.optimizer
            for part in self._optimizer.chained_optimizers
            for group in part.param_groups
            for master in group["params"]
        }
        for name, parameter in self.model.named_parameters():
            master = getattr(parameter, "main_param", parameter)
            yield global_name(self.model, name), master, owner[id(master)]


def build_optimizer(
    model: GPTModel,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad: float,
) -> Trainable:
    """Wrap `model` for training with AdamW. An fp32 model is its own master; bf16 gets fp32 masters.

    Args:
        clip_grad: largest global gradient norm; 0 turns clipping off. Norm weights are never decayed.
    """
    dtype = model.config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=lr,
        weight_decay=weight_decay,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        clip_grad=clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=False,
    )
    return Trainable(model, config)


def global_name(model: GPTModel, name: str) -> str:
    """The parameter's name with the expert's number in the whole model instead of on this process."""
    head, mark, tail = name.partition(_EXPERT)
    if not mark:
        return name
    local, _, rest = tail.partition(".")
    size = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * (not_none(model.config.num_moe_experts) // size)
    return f"{head}{mark}{first + int(local)}.{rest}"


def is_saved_buffer(name: str) -> bool:
    """Whether a buffer is part of the model: expert_bias is, Megatron's token counters are not."""
    return name.endswith("expert_bias")


def _shaped(tensor: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor`, if it has the shape of `like`; else CheckpointError."""
    if tensor.shape != like.shape:
        raise CheckpointError(f"the trainer state's {name} has shape {tuple(tensor.shape)}, not {tuple(like.shape)}", hint=_TORN)
    return tensor
