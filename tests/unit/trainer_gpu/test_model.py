"""The Megatron model against transformers and mlx_lm on the same random weights, fp32, with planted faults."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.models import lfm2, lfm2_moe
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from stoa.contracts.errors import LayoutError
from tests.unit.trainer_gpu.checkpoints import SEQ_LENS, VOCAB, load
from trainer_gpu.convert import mlx_tensors, to_hub, weight_map
from trainer_gpu.model import forward_packed, recorded_routing, replayed_routing, token_logprobs_packed
from trainer_gpu.weights import by_weight, local_weights


def hub_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Each sequence by itself through transformers, [T, V]."""
    return torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split(list(SEQ_LENS))])


def mlx_logits(model: lfm2_moe.Model | lfm2.Model, ids: torch.Tensor) -> torch.Tensor:
    parts = [model(mx.array(part.numpy())[None])[0] for part in ids.split(list(SEQ_LENS))]
    return torch.from_numpy(np.concatenate([np.array(part) for part in parts]))


def mlx_model(module, folder: Path, tensors: dict[str, torch.Tensor]):
    """mlx_lm's own model, filled by name; strict, so a missing, extra or misshapen tensor raises."""
    import json

    model = module.Model(module.ModelArgs.from_dict(json.loads((folder / "config.json").read_text()) | extra_mlx_fields(module)))
    model.load_weights([(name, mx.array(t.numpy())) for name, t in tensors.items()], strict=True)
    return model


def extra_mlx_fields(module) -> dict[str, object]:
    return {"block_dim": 64} if module is lfm2 else {}


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_logits_equal_those_of_transformers_and_mlx(family: str, request: pytest.FixtureRequest, ids: torch.Tensor) -> None:
    hub, folder = request.getfixturevalue(f"{family}_hub"), request.getfixturevalue(f"{family}_folder")
    config, model = load(folder)
    with torch.no_grad():
        reference = hub_logits(hub, ids)
        ours = forward_packed(model, ids, SEQ_LENS)
    assert reference.std() > 0.5
    assert largest(ours, reference) / reference.std() < 1e-5
    served = mlx_model(lfm2_moe if family == "moe" else lfm2, folder, dict(mlx_tensors(model, config)))
    assert largest(ours, mlx_logits(served, ids)) / reference.std() < 1e-5


def hub_gradients(hub: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """d(mean -ln p) of every hub tensor under its name on disk."""
    hub.zero_grad()
    nll = [
        torch.nn.functional.cross_entropy(hub(input_ids=part[None]).logits[0, :-1], part[1:], reduction="sum")
        for part in ids.split(list(SEQ_LENS))
        if len(part) > 1
    ]
    (torch.stack(nll).sum() / len(ids)).backward()
    gradients = {}
    for name, parameter in hub.named_parameters():
        assert parameter.grad is not None, name
        if "experts.gate_up_proj" in name:
            stem = name.removesuffix(".gate_up_proj")
            for expert, grad in enumerate(parameter.grad):
                gradients[f"{stem}.{expert}.w1.weight"], gradients[f"{stem}.{expert}.w3.weight"] = grad.chunk(2)
        elif "experts.down_proj" in name:
            stem = name.removesuffix(".down_proj")
            gradients.update({f"{stem}.{expert}.w2.weight": grad for expert, grad in enumerate(parameter.grad)})
        else:
            gradients[name] = parameter.grad
    return gradients


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_gradients_of_every_tensor_equal_those_of_transformers(family: str, request: pytest.FixtureRequest, ids: torch.Tensor) -> None:
    reference = hub_gradients(request.getfixturevalue(f"{family}_hub"), ids)
    config, model = load(request.getfixturevalue(f"{family}_folder"))
    logprobs, _ = token_logprobs_packed(model, ids, SEQ_LENS)
    (-logprobs.sum() / len(ids)).backward()
    grads = by_weight({name: p.grad for name, p in model.named_parameters()})
    ours = {
        name: part
        for weight in weight_map(config)
        if not weight.megatron.endswith("expert_bias")
        for name, part in zip(weight.hub, to_hub(grads[weight.megatron], weight, config), strict=True)
    }
    assert ours.keys() == reference.keys()
    norm = float(torch.stack([g.norm() for g in reference.values()]).norm())
    worst = max(largest(ours[name], reference[name]) for name in reference)
    assert worst / norm < 1e-6
    idle = [name for name, g in ours.items() if not g.any()]
    assert all(".experts." in name for name in idle), "only an expert that no token chose has no gradient"
    assert len(idle) < len(ours) / 10


def swap(a: str, b: str):
    def fault(tensors: dict[str, torch.Tensor]) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return fault


def no_bias(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("expert_bias"):
            tensors[name] = torch.zeros_like(tensors[name])


def gates_swapped(tensors: dict[str, torch.Tensor]) -> None:
    b, c, x = tensors["model.layers.0.conv.in_proj.weight"].chunk(3)
    tensors["model.layers.0.conv.in_proj.weight"] = torch.cat([c, b, x])


def taps_reversed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.conv.conv.weight"] = tensors["model.layers.0.conv.conv.weight"].flip(-1).contiguous()


def heads_shuffled(tensors: dict[str, torch.Tensor]) -> None:
    q = tensors["model.layers.2.self_attn.q_proj.weight"]
    tensors["model.layers.2.self_attn.q_proj.weight"] = q.unflatten(0, (2, 2, 16)).transpose(0, 1).flatten(0, 2).contiguous()


FAULTS = {
    "no expert bias": no_bias,
    "gate and up of an expert swapped": swap(
        "model.layers.1.feed_forward.experts.3.w1.weight", "model.layers.1.feed_forward.experts.3.w3.weight"
    ),
    "two experts swapped": swap("model.layers.1.feed_forward.experts.3.w2.weight", "model.layers.1.feed_forward.experts.4.w2.weight"),
    "convolution gates swapped": gates_swapped,
    "convolution taps reversed": taps_reversed,
    "query heads given to the other group": heads_shuffled,
    "query norm for key norm": swap("model.layers.2.self_attn.q_layernorm.weight", "model.layers.2.self_attn.k_layernorm.weight"),
    "norms of a layer swapped": swap("model.layers.2.operator_norm.weight", "model.layers.2.ffn_norm.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_the_weights_is_seen_in_the_logits(fault: str, moe_hub, moe_folder, tmp_path: Path, ids) -> None:
    tensors = load_file(moe_folder / "model.safetensors")
    FAULTS[fault](tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((moe_folder / "config.json").read_text())
    _, model = load(tmp_path)
    with torch.no_grad():
        assert largest(forward_packed(model, ids, SEQ_LENS), hub_logits(moe_hub, ids)) > 1e-2


@pytest.mark.parametrize(("old", "new"), [('"rope_theta": 50000.0', '"rope_theta": 10000.0'), ('"norm_eps": 1e-05', '"norm_eps": 1e-02')])
def test_a_wrong_setting_is_seen_in_the_logits(old: str, new: str, moe_hub, moe_folder, tmp_path: Path, ids) -> None:
    text = (moe_folder / "config.json").read_text()
    assert old in text
    (tmp_path / "config.json").write_text(text.replace(old, new))
    (tmp_path / "model.safetensors").symlink_to(moe_folder / "model.safetensors")
    _, model = load(tmp_path)
    with torch.no_grad():
        assert largest(forward_packed(model, ids, SEQ_LENS), hub_logits(moe_hub, ids)) > 1e-3


def test_a_packed_row_equals_its_sequences_one_by_one(moe_folder: Path, ids: torch.Tensor) -> None:
    _, model = load(moe_folder)
    with torch.no_grad():
        packed = forward_packed(model, ids, SEQ_LENS)
        alone = torch.cat([forward_packed(model, part, [len(part)]) for part in ids.split(list(SEQ_LENS))])
        joined = forward_packed(model, ids, [len(ids)])
    assert largest(packed, alone) < 1e-5
    assert largest(joined[SEQ_LENS[0] :], packed[SEQ_LENS[0] :]) > 1e-2, "the test must see one sequence leak into the next"


def test_the_dense_batch_of_megatrons_own_forward_equals_the_packed_row(moe_folder: Path) -> None:
    _, model = load(moe_folder)
    batch = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        dense = model(batch, torch.arange(20).expand(3, 20), None)
        packed = forward_packed(model, batch.flatten(), [20, 20, 20])
    assert largest(dense.flatten(0, 1), packed) < 1e-5


def test_token_logprobs_are_those_of_the_full_softmax(moe_folder: Path, ids: torch.Tensor) -> None:
    _, model = load(moe_folder)
    first = torch.zeros(len(ids), dtype=torch.bool)
    first[torch.tensor((0, *SEQ_LENS[:-1])).cumsum(0)] = True
    with torch.no_grad():
        distribution = forward_packed(model, ids, SEQ_LENS).log_softmax(-1).roll(1, 0)
        logprobs, entropy = token_logprobs_packed(model, ids, SEQ_LENS)
        wanted = torch.arange(len(ids)) % 3 == 0
        some, some_entropy = token_logprobs_packed(model, ids, SEQ_LENS, wanted)
    expected = distribution.gather(1, ids[:, None])[:, 0].masked_fill(first, 0)
    assert largest(logprobs, expected) < 2e-6
    assert largest(entropy, -(distribution.exp() * distribution).sum(-1).masked_fill(first, 0)) < 1e-5
    assert torch.equal(some, logprobs * wanted)
    assert torch.equal(some_entropy, entropy * wanted)


def test_ids_that_do_not_fill_the_row_are_refused(moe_folder: Path) -> None:
    _, model = load(moe_folder)
    with pytest.raises(LayoutError, match="9 token ids, but sequence lengths add up to 8"):
        forward_packed(model, torch.zeros(9, dtype=torch.int64), [4, 4])


def test_replaying_the_own_routing_changes_nothing_and_another_does(moe_folder: Path, ids: torch.Tensor) -> None:
    _, model = load(moe_folder)
    with torch.no_grad():
        with recorded_routing(model) as recorded:
            plain = forward_packed(model, ids, SEQ_LENS)
        (indices,) = recorded
        assert indices.shape == (len(ids), 5, 2)
        with replayed_routing(model, indices.flip(-1)):
            again = forward_packed(model, ids, SEQ_LENS)
        with replayed_routing(model, (indices + 1) % 8):
            other = forward_packed(model, ids, SEQ_LENS)
        after = forward_packed(model, ids, SEQ_LENS)
    assert largest(again, plain) < 1e-5
    assert largest(other, plain) > 1e-1
    assert torch.equal(after, plain)


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        (torch.zeros(4, 5, 2, dtype=torch.int64), "one expert twice"),
        (torch.tensor([0, 8]).expand(4, 5, 2), "experts 0..8 of 8"),
        (torch.tensor([0, 1]).expand(4, 4, 2), r"shape \(4, 4, 2\), not \[tokens, 5, 2\]"),
    ],
)
def test_impossible_routing_is_refused(indices: torch.Tensor, problem: str, moe_folder: Path) -> None:
    _, model = load(moe_folder)
    with pytest.raises(LayoutError, match=problem), replayed_routing(model, indices):
        pass


def test_a_bf16_model_keeps_its_expert_bias_and_its_scores_in_fp32(moe_folder: Path, ids: torch.Tensor) -> None:
    config, model = load(moe_folder, torch.bfloat16)
    weights = local_weights(model)
    stored = load_file(moe_folder / "model.safetensors")
    for layer in config.moe_layers:
        bias = weights[f"decoder.layers.{layer}.mlp.router.expert_bias"]
        assert bias.dtype == torch.float32
        assert torch.equal(bias, stored[f"model.layers.{layer}.feed_forward.expert_bias"])
    assert {t.dtype for name, t in weights.items() if not name.endswith("expert_bias")} == {torch.bfloat16}
    logprobs, _ = token_logprobs_packed(model, ids, SEQ_LENS)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
