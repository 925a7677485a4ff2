"""All local experts of a layer in two grouped matrix products, with the same parameters as Megatron's SequentialMLP.

Each expert keeps its own named weight, so that checkpoints, optimizers and exports see what they see in
SequentialMLP; the weights of a layer are views of one block of memory, which is what the grouped product reads.

Shapes: R dispatched rows sorted by expert, E local experts, I inputs, O outputs.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP


class GroupedExperts(SequentialMLP):
    """SequentialMLP's weights, two kernels a pass instead of two an expert. Gated SiLU, no bias.

    The grouped product is checked against SequentialMLP on the CPU in fp32 and bf16; it was not run on CUDA.
    """

    def join_storage(self) -> None:
        """Move the experts' weights into one block each for fc1 and fc2. Call after the model is on its device."""
        self.fc1 = _join(self._weights("linear_fc1"))
        self.fc2 = _join(self._weights("linear_fc2"))

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Rows [R, D] sorted by expert, their counts [E] and routing weights [R] -> ([R, D], no bias)."""
        x = permuted_local_hidden_states
        ends = tokens_per_expert.cumsum(0).to(x.device, torch.int32)
        gate, up = _GroupedLinear.apply(x, ends, self.fc1, *self._weights("linear_fc1")).chunk(2, dim=-1)
        inner = F.silu(gate) * up * permuted_probs.unsqueeze(-1)
        return _GroupedLinear.apply(inner.to(x.dtype), ends, self.fc2, *self._weights("linear_fc2")), None

    def _weights(self, linear: str) -> list[torch.nn.Parameter]:
        return [cast(torch.nn.Parameter, expert.get_parameter(f"{linear}.weight")) for expert in self.local_experts]


def _join(weights: list[torch.nn.Parameter]) -> torch.Tensor:
    """One [E, O, I] tensor whose slices the parameters become."""
    block = torch.stack([weight.detach() for weight in weights])
    for weight, view in zip(weights, block, strict=True):
        weight.data = view
    return block


class _GroupedLinear(torch.autograd.Function):
    """x[rows of expert e] @ weight[e].T for all e. The gradient goes to the experts' own parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ends: torch.Tensor, block: torch.Tensor, *_weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, ends, block)
        return F.grouped_mm(x, block.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, block = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()  # the kernel refuses expanded gradients
        grad_x = F.grouped_mm(grad, block, offs=ends)
        grad_block = F.grouped_mm(grad.t(), x, offs=ends)
        return grad_x, None, None, *grad_block.unbind(0)
