"""Small random checkpoints, and a Megatron model with the weights of one."""

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from transformers import PreTrainedModel

from trainer_gpu.convert import load_hub
from trainer_gpu.model import Lfm2Config, build_model, read_model_config

SEQ_LENS = (33, 7, 1, 40, 21)
VOCAB = 256


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough for the model to have opinions; a non-zero expert_bias; no row of zeros."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=draw)
            if "norm" in name:
                tensor.copy_(1 + 0.3 * noise)
            elif name.endswith("expert_bias"):
                tensor.copy_(0.1 * noise)
            else:
                tensor.copy_(noise * (0.5 if "conv.conv" in name else 0.05 if "gate.weight" in name else 0.15))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Lfm2Config, GPTModel]:
    """(config, Megatron model with the folder's weights)."""
    config = read_model_config(folder)
    model = build_model(config, dtype)
    load_hub(model, config, folder)
    return config, model
