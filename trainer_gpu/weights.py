"""The weights of this process under their names in the whole model: where each lies in a parameter, as views.

A parameter that stacks the experts of a layer counts as one weight an expert, numbered in the whole model, so that
nobody else needs to know which process holds which experts. What hub checkpoints call them is `convert.py`'s.
"""

from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

_EXPERTS = ".mlp.experts."


def local_weights(model: GPTModel) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers of this process, detached views; the experts of `NAME` are `NAME.<number>`."""
    return by_weight({name: parameter.detach() for name, parameter in model.named_parameters()}) | saved_buffers(model)


def by_weight(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of this process's parameters' names and shapes (gradients, say), cut into views by weight."""
    cut: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_stacked(name):
            first = first_expert(tensor.shape[0])
            cut.update((f"{name}.{first + i}", view) for i, view in enumerate(tensor))
        else:
            cut[name] = tensor
    return cut


def saved_buffers(model: GPTModel) -> dict[str, torch.Tensor]:
    """Buffers that are part of the model: `expert_bias` is, Megatron's counters and tables are not."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}


def is_stacked(name: str) -> bool:
    """Whether a parameter of this name stacks experts along its first dimension."""
    return _EXPERTS in name


def first_expert(num_local: int) -> int:
    """Number in the whole model of the first of this process's `num_local` experts."""
    return parallel_state.get_expert_model_parallel_rank() * num_local
