"""Transformers, Megatron and mlx_lm on the same random weights in fp32: `python -m benchmarks.parity --json`.

Logits of all three and gradients of every tensor are compared on inputs whose router margins are far above rounding, so
that nobody chooses another expert by chance. Then six faults that a conversion could really have are planted in what
Megatron loads, one at a time, and each must be seen in its logits. The dense family is compared in the same way.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from mlx.utils import tree_flatten
from mlx_lm.models import lfm2, lfm2_moe
from safetensors.torch import load_file, save_file
from transformers import Lfm2Config as HubDenseConfig
from transformers import Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM, PreTrainedModel

from trainer_gpu import host
from trainer_gpu.convert import load_hub, mlx_tensors, to_hub, weight_map
from trainer_gpu.model import Lfm2Config, build_model, forward_packed, read_model_config, token_logprobs_packed
from trainer_gpu.modules import SigmoidRouter
from trainer_gpu.weights import by_weight

SEQ_LENS = (33, 7, 1, 40, 21)
VOCAB = 256
THETA, WRONG_THETA = 5e6, 1e6
LEAST_MARGIN = 1e-4
"""Between the last chosen and the first left-out expert's score, on the inputs used; rounding is about 1e-6."""
LOGITS_BOUND, GRADIENTS_BOUND, PLANTED_BOUND = 1e-5, 1e-6, 1e-2
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Gradients:
    """Max abs difference over all tensors, as a share of the whole gradient's norm, by pair of engines."""

    relative: dict[str, float]
    num_tensors: int
    norm: float


@dataclass(frozen=True, slots=True)
class Parity:
    """Largest differences of one family, by pair of engines."""

    logits: dict[str, float]
    gradients: Gradients
    logits_std: float
    router_margin: float


def hub_model(family: str) -> PreTrainedModel:
    """A small random model of the reference library: convolutions, attention with grouped heads, experts with a bias."""
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": None,  # else the reference gives the row of token 0 no gradient
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    }
    layers = ["conv", "conv", "full_attention", "conv", "full_attention", "conv"]
    if family == "lfm2":
        dense = HubDenseConfig(**shared, intermediate_size=192, block_multiple_of=32, num_hidden_layers=len(layers), layer_types=layers)
        return randomise(Lfm2ForCausalLM(dense), 2)
    moe = Lfm2MoeConfig(
        **shared,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=len(layers),
        layer_types=layers,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_expert_bias=True,
    )
    return randomise(Lfm2MoeForCausalLM(moe), 1)


def randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Weights large enough for the model to have opinions; a non-zero expert_bias; no row of zeros."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=draw)
            if "norm" in name:
                tensor.copy_(1 + 0.3 * noise)
            else:
                tensor.copy_(noise * (0.5 if "conv.conv" in name else 0.3 if "gate.weight" in name else 0.07))
    return model.eval()


def megatron_model(folder: Path) -> tuple[Lfm2Config, GPTModel]:
    """The trainer's model with the weights of a hub folder."""
    config = read_model_config(folder)
    model = build_model(config, torch.float32)
    load_hub(model, config, folder)
    return config, model


def served_model(config: Lfm2Config, tensors: Tensors) -> nn.Module:
    """mlx_lm's own model with these weights, by name; a missing, extra or misshapen tensor raises."""
    module, extra = (lfm2_moe, {}) if config.num_experts else (lfm2, {"block_dim": config.hidden_size})
    model = module.Model(module.ModelArgs.from_dict(json.loads(config.source) | extra))
    model.load_weights([(name, mx.array(tensor.detach().numpy())) for name, tensor in tensors.items()], strict=True)
    return model


def choose_ids(model: GPTModel) -> tuple[torch.Tensor, float]:
    """Random token ids [T] on which no router is near a tie, and the smallest margin of all tokens and layers."""
    best = (torch.zeros(0), -1.0)
    for seed in range(200):
        ids = torch.randint(0, VOCAB, (sum(SEQ_LENS),), generator=torch.Generator().manual_seed(seed))
        margin = _margin(model, ids)
        if margin > best[1]:
            best = (ids, margin)
        if margin >= LEAST_MARGIN:
            break
    return best


def _margin(model: GPTModel, ids: torch.Tensor) -> float:
    margins = [1.0]

    def note(router: SigmoidRouter, inputs: tuple[torch.Tensor, ...]) -> None:
        scores = torch.sigmoid(router.gating(inputs[0]).flatten(0, -2))
        scores = scores if router.expert_bias is None else scores + router.expert_bias
        best = scores.topk(router.topk + 1, dim=1).values
        margins.append(float((best[:, -2] - best[:, -1]).min()))

    routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]
    hooks = [router.register_forward_pre_hook(note) for router in routers]
    with torch.no_grad():
        forward_packed(model, ids, SEQ_LENS)
    for hook in hooks:
        hook.remove()
    return min(margins)


def hub_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Each sequence by itself through transformers, [T, V]."""
    return torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split(list(SEQ_LENS))])


def mlx_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Each sequence by itself through mlx_lm, [T, V]."""
    parts = [model(mx.array(part.numpy())[None])[0] for part in ids.split(list(SEQ_LENS))]
    return torch.from_numpy(np.concatenate([np.array(part) for part in parts]))


def hub_gradients(model: PreTrainedModel, ids: torch.Tensor) -> Tensors:
    """d(sum of -ln p / T) of every tensor under its name on disk."""
    model.zero_grad()
    parts = [part for part in ids.split(list(SEQ_LENS)) if len(part) > 1]
    losses = [F.cross_entropy(model(input_ids=part[None]).logits[0, :-1], part[1:], reduction="sum") for part in parts]
    (torch.stack(losses).sum() / len(ids)).backward()
    gradients: Tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise AssertionError(f"{name} has no gradient")
        gradients.update(_unstacked(name, parameter.grad))
    return gradients


def _unstacked(name: str, grad: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The reference keeps experts stacked in memory and apart on disk."""
    stem, _, last = name.rpartition(".")
    for expert, part in enumerate(grad if last in ("gate_up_proj", "down_proj") else ()):
        if last == "down_proj":
            yield f"{stem}.{expert}.w2.weight", part
        else:
            yield f"{stem}.{expert}.w1.weight", part.chunk(2)[0]
            yield f"{stem}.{expert}.w3.weight", part.chunk(2)[1]
    if last not in ("gate_up_proj", "down_proj"):
        yield name, grad


def megatron_gradients(model: GPTModel, ids: torch.Tensor) -> Tensors:
    """The same of the trainer's model, from a packed row, by weight."""
    model.zero_grad()
    logprobs, _ = token_logprobs_packed(model, ids, SEQ_LENS)
    (-logprobs.sum() / len(ids)).backward()
    gradients: Tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise AssertionError(f"{name} has no gradient")
        gradients[name] = parameter.grad
    return by_weight(gradients)


def mlx_gradients(model: nn.Module, ids: torch.Tensor) -> Tensors:
    """The same of mlx_lm's model, by its own names."""

    def loss(model: nn.Module) -> mx.array:
        parts = [mx.array(part.numpy()) for part in ids.split(list(SEQ_LENS)) if len(part) > 1]
        losses = [nn.losses.cross_entropy(model(part[None])[0, :-1], part[1:], reduction="sum") for part in parts]
        return mx.stack(losses).sum() / len(ids)

    _, grads = nn.value_and_grad(model, loss)(model)
    return {name: torch.from_numpy(np.array(grad)) for name, grad in tree_flatten(grads)}


def compare_gradients(config: Lfm2Config, model: GPTModel, hub: PreTrainedModel, served: nn.Module, ids: torch.Tensor) -> Gradients:
    """All tensors, Megatron's against each of the others under the other's names."""
    grads = megatron_gradients(model, ids)
    theirs = hub_gradients(hub, ids)
    ours: Tensors = {}
    for weight in weight_map(config):
        if not weight.megatron.endswith("expert_bias"):
            ours.update(zip(weight.hub, to_hub(grads[weight.megatron], weight, config), strict=True))
    norm = float(torch.stack([grad.norm() for grad in theirs.values()]).norm())
    by_mlx_name = {name: grad for name, grad in mlx_tensors(model, config, grads) if not name.endswith("expert_bias")}
    from_mlx = {name: grad for name, grad in mlx_gradients(served, ids).items() if not name.endswith("expert_bias")}
    pairs = {"transformers_megatron": (theirs, ours), "megatron_mlx": (by_mlx_name, from_mlx)}
    for pair, (one, other) in pairs.items():
        if one.keys() != other.keys():
            raise AssertionError(f"{pair}: gradients of other tensors: {sorted(one.keys() ^ other.keys())[:4]}")
    relative = {pair: max(largest(one[name], other[name]) for name in one) / norm for pair, (one, other) in pairs.items()}
    return Gradients(relative, len(theirs), norm)


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Max abs difference."""
    return float((a - b).abs().max())


def compare(family: str, folder: Path) -> tuple[Parity, torch.Tensor, PreTrainedModel]:
    """All pairs of one family; also the ids used and the reference."""
    hub = hub_model(family)
    hub.save_pretrained(folder)
    config, model = megatron_model(folder)
    ids, margin = choose_ids(model)
    with torch.no_grad():
        reference, ours = hub_logits(hub, ids), forward_packed(model, ids, SEQ_LENS)
    server = served_model(config, dict(mlx_tensors(model, config)))
    served = mlx_logits(server, ids)
    logits = {
        "transformers_megatron": largest(reference, ours),
        "transformers_mlx": largest(reference, served),
        "megatron_mlx": largest(ours, served),
    }
    gradients = compare_gradients(config, model, hub, server, ids)
    return Parity(logits, gradients, float(reference.std()), margin), ids, hub


def planted_faults() -> Mapping[str, Callable[[Tensors], None]]:
    """Faults of a conversion, each over the whole model, done to hub tensors in place."""
    return {
        "w1_w3_swapped": lambda tensors: _swap(tensors, ".w1.", ".w3."),
        "conv_taps_reversed": lambda tensors: _each(tensors, "conv.conv.weight", lambda w: w.flip(-1)),
        "no_expert_bias": lambda tensors: _each(tensors, "expert_bias", torch.zeros_like),
        "q_norm_for_k_norm": lambda tensors: _swap(tensors, ".q_layernorm.", ".k_layernorm."),
        "in_proj_thirds_swapped": lambda tensors: _each(tensors, "conv.in_proj.weight", lambda w: w.roll(len(w) // 3, 0)),
    }


def _swap(tensors: Tensors, one: str, other: str) -> None:
    for name in [name for name in tensors if one in name]:
        twin = name.replace(one, other)
        tensors[name], tensors[twin] = tensors[twin], tensors[name]


def _each(tensors: Tensors, ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(ending)]:
        tensors[name] = change(tensors[name]).contiguous()


def plant(folder: Path, scratch: Path, hub: PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    """Max abs logit difference from the reference with each fault in what Megatron loads."""
    config_text = (folder / "config.json").read_text(encoding="utf-8")
    with torch.no_grad():
        reference = hub_logits(hub, ids)

    def seen(name: str, config: str, tensors: Tensors) -> float:
        faulty = scratch / name
        faulty.mkdir()
        (faulty / "config.json").write_text(config, encoding="utf-8")
        save_file(tensors, faulty / "model.safetensors")
        with torch.no_grad():
            return largest(reference, forward_packed(megatron_model(faulty)[1], ids, SEQ_LENS))

    found: dict[str, float] = {}
    for name, change in planted_faults().items():
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        found[name] = seen(name, config_text, tensors)
    wrong = json.loads(config_text)
    wrong["rope_parameters"]["rope_theta"] = WRONG_THETA
    found["wrong_rope_theta"] = seen("wrong_rope_theta", json.dumps(wrong), load_file(folder / "model.safetensors"))
    return found


def measure() -> dict[str, object]:
    """Both families, and the planted faults in the one with experts."""
    host.setup_process(num_threads=1, seed=0)
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        moe, ids, hub = compare("lfm2_moe", scratch / "moe")
        dense, _, _ = compare("lfm2", scratch / "dense")
        planted = plant(scratch / "moe", scratch, hub, ids)
    return {
        "max_abs_logit_difference": max(*moe.logits.values(), *dense.logits.values()),
        "max_relative_gradient_difference": max(*moe.gradients.relative.values(), *dense.gradients.relative.values()),
        "smallest_planted_difference": min(planted.values()),
        "smallest_router_margin": moe.router_margin,
        "logits_std": moe.logits_std,
        "logit_differences": {"lfm2_moe": moe.logits, "lfm2": dense.logits},
        "gradient_differences": {"lfm2_moe": moe.gradients.relative, "lfm2": dense.gradients.relative},
        "gradient_norms": {"lfm2_moe": moe.gradients.norm, "lfm2": dense.gradients.norm},
        "num_gradients_compared": {"lfm2_moe": moe.gradients.num_tensors, "lfm2": dense.gradients.num_tensors},
        "planted_differences": planted,
        "num_tokens": sum(SEQ_LENS),
        "bounds": {"logits": LOGITS_BOUND, "gradients": GRADIENTS_BOUND, "planted": PLANTED_BOUND},
    }


def main() -> None:
    """Print the numbers: JSON to standard output, or a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    found = measure()
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, float):
            print(f"{name:40} {value:.3g}", file=sys.stdout)


if __name__ == "__main__":
    main()
