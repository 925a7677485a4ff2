"""A hub checkpoint of random weights in the shape of the demo's small policy: what a policy made on Macs alone begins as."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from environments.search.small_policy import INITIAL_DEVIATION, shape, write_tokenizer
from environments.search.vocabulary import build_tokenizer

_SAME_IN_EVERY_SMALL_POLICY: Final = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "conv_bias": False,
    "norm_eps": 1e-5,
}


def write_fresh(folder: Path, seed: int) -> None:
    """Matrices normal with deviation INITIAL_DEVIATION, norms 1, router biases 0; one seed gives the same bytes everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    config = _SAME_IN_EVERY_SMALL_POLICY | shape(tokenizer)
    draw = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, size in _shapes():
        if name.endswith("norm.weight"):
            tensors[name] = np.ones(size, np.float32)
        elif name.endswith("expert_bias"):
            tensors[name] = np.zeros(size, np.float32)
        else:
            tensors[name] = draw.normal(0.0, INITIAL_DEVIATION, size).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sampling = {"bos_token_id": config["bos_token_id"], "do_sample": True, "eos_token_id": config["eos_token_id"], "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(sampling, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_tokenizer(tokenizer, folder)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the small policy, as the hub names them."""
    config = shape(build_tokenizer())
    hidden, dense, expert = (int(str(config[name])) for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"))
    num_experts, heads, kv_heads = (int(str(config[name])) for name in ("num_experts", "num_attention_heads", "num_key_value_heads"))
    head = hidden // heads
    yield "model.embed_tokens.weight", (int(str(config["vocab_size"])), hidden)
    yield "model.embedding_norm.weight", (hidden,)
    for layer, kind in enumerate(list(config["layer_types"])):  # pyright: ignore[reportArgumentType] - a list of words
        path = f"model.layers.{layer}"
        if kind == "conv":
            yield f"{path}.conv.in_proj.weight", (3 * hidden, hidden)
            yield f"{path}.conv.conv.weight", (hidden, 1, int(str(config["conv_L_cache"])))
            yield f"{path}.conv.out_proj.weight", (hidden, hidden)
        else:
            for name, size in (("q", hidden), ("k", kv_heads * head), ("v", kv_heads * head), ("out", hidden)):
                yield f"{path}.self_attn.{name}_proj.weight", (size, hidden)
            yield f"{path}.self_attn.q_layernorm.weight", (head,)
            yield f"{path}.self_attn.k_layernorm.weight", (head,)
        yield f"{path}.operator_norm.weight", (hidden,)
        yield f"{path}.ffn_norm.weight", (hidden,)
        if layer < int(str(config["num_dense_layers"])):
            blocks = [(f"{path}.feed_forward", dense)]
        else:
            yield f"{path}.feed_forward.gate.weight", (num_experts, hidden)
            yield f"{path}.feed_forward.expert_bias", (num_experts,)
            blocks = [(f"{path}.feed_forward.experts.{number}", expert) for number in range(num_experts)]
        for block, size in blocks:
            yield f"{block}.w1.weight", (size, hidden)
            yield f"{block}.w3.weight", (size, hidden)
            yield f"{block}.w2.weight", (hidden, size)
