"""All local experts of a layer in two grouped matrix products, for Megatron's MoE layer in place of its SequentialMLP.

The weights of a layer's experts are one parameter for each product, so that they stay one block of memory wherever
gradient and parameter buffers move them: the grouped product reads blocks. `weights.py` names each expert in it.

Shapes: R dispatched rows sorted by expert, E local experts, D hidden, I inner, O outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none

from trainer_gpu import host


class GroupedExperts(MegatronModule):
    """E gated-SiLU MLPs without bias: `fc1` [E, 2 I, D] is gate over up, `fc2` [E, D, I] is down.

    The grouped product is checked against SequentialMLP on the CPU in fp32 and bf16; it was not run on CUDA.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config=config)
        hidden, inner = config.hidden_size, not_none(config.moe_ffn_hidden_size)
        self.fc1 = _weight(config, not_none(config.init_method), num_local_experts, 2 * inner, hidden)
        self.fc2 = _weight(config, not_none(config.output_layer_init_method), num_local_experts, hidden, inner)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Rows [R, D] sorted by expert, their counts [E] and routing weights [R] -> ([R, D], no bias)."""
        x = permuted_local_hidden_states
        ends = tokens_per_expert.cumsum(0).to(x.device, torch.int32)
        gate, up = _GroupedLinear.apply(x, ends, self.fc1).chunk(2, dim=-1)
        inner = F.silu(gate) * up * permuted_probs.unsqueeze(-1)
        return _GroupedLinear.apply(inner.to(x.dtype), ends, self.fc2), None


def _weight(config: TransformerConfig, init: Any, *shape: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=host.device()))
    with torch.no_grad():
        init(weight)
    # What Megatron's own expert layers say of theirs: gradients are summed over the processes with the same experts only.
    weight.allreduce = parallel_state.get_expert_model_parallel_world_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
    return weight


class _GroupedLinear(torch.autograd.Function):
    """x[rows of expert e] @ block[e].T for all e; block is [E, O, inputs].

    A process whose experts nobody chose has no rows at all, of which CUDA's kernel says nothing: it is not called then.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ends: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, ends, block)
        if not len(x):
            return x.new_zeros(0, block.shape[1])
        return F.grouped_mm(x, block.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, block = ctx.saved_tensors
        if not len(x):
            return torch.zeros_like(x), None, torch.zeros_like(block)
        grad = grad_outputs[0].contiguous()  # the kernel refuses expanded gradients
        return F.grouped_mm(grad, block, offs=ends), None, F.grouped_mm(grad.t(), x, offs=ends)
