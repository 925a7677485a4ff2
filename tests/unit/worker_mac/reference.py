"""LFM2-MoE in numpy float64, written from the architecture's equations: the reference for logprobs.

One sequence, no cache, no batching, loops where they are clearer.
"""

from collections.abc import Mapping

import numpy as np

from stoa.weights.state import WeightState


def logprobs(config: Mapping[str, object], state: WeightState, ids: np.ndarray, routes: list[np.ndarray] | None = None) -> np.ndarray:
    """float64 [T, V]: row t is the distribution of token t + 1. `routes` gets the experts [T, K] of each MoE layer."""
    weights = {spec.name: state.dequantise(spec.name).astype(np.float64) for spec in state.layout.tensors}
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[ids]
    for index, kind in enumerate(config["layer_types"]):
        part = {name.split(f"layers.{index}.")[1]: w for name, w in weights.items() if f"layers.{index}." in name}
        normed = rms(x, part["operator_norm.weight"], config)
        x = x + (attention(part, normed, config) if kind == "full_attention" else short_conv(part, normed))
        normed = rms(x, part["ffn_norm.weight"], config)
        x = x + (experts(part, normed, config, routes) if "feed_forward.gate.weight" in part else dense(part, normed))
    logits = rms(x, weights["model.embedding_norm.weight"], config) @ embedding.T
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def rms(x: np.ndarray, weight: np.ndarray, config: Mapping[str, object]) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["norm_eps"]) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def short_conv(part: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, carry, value = np.split(x @ part["conv.in_proj.weight"].T, 3, axis=-1)
    line, kernel = gate * value, part["conv.conv.weight"][:, :, 0]
    out = np.zeros_like(line)
    for t in range(len(x)):
        for tap in range(kernel.shape[1]):
            source = t - (kernel.shape[1] - 1) + tap
            if source >= 0:
                out[t] += kernel[:, tap] * line[source]
    return (carry * out) @ part["conv.out_proj.weight"].T


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def attention(part: Mapping[str, np.ndarray], x: np.ndarray, config: Mapping[str, object]) -> np.ndarray:
    num_q, num_kv, theta = config["num_attention_heads"], config["num_key_value_heads"], config["rope_parameters"]["rope_theta"]
    tokens = len(x)
    q, k, v = (
        (x @ part[f"self_attn.{name}_proj.weight"].T).reshape(tokens, heads, -1)
        for name, heads in (("q", num_q), ("k", num_kv), ("v", num_kv))
    )
    q = rotated(rms(q, part["self_attn.q_layernorm.weight"], config), theta)
    k = rotated(rms(k, part["self_attn.k_layernorm.weight"], config), theta)
    out = np.zeros_like(q)
    for head in range(num_q):
        shared = head // (num_q // num_kv)
        scores = q[:, head] @ k[:, shared].T / np.sqrt(q.shape[-1])
        scores[np.triu_indices(tokens, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, shared]
    return out.reshape(tokens, -1) @ part["self_attn.out_proj.weight"].T


def dense(part: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up, down = (part[f"feed_forward.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(part: Mapping[str, np.ndarray], x: np.ndarray, config: Mapping[str, object], routes: list[np.ndarray] | None) -> np.ndarray:
    scores = 1 / (1 + np.exp(-(x @ part["feed_forward.gate.weight"].T)))
    gate, up, down = (part[f"feed_forward.switch_mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    out = np.zeros_like(x)
    if routes is not None:
        routes.append(np.zeros((len(x), config["num_experts_per_tok"]), np.int64))
    for t in range(len(x)):
        chosen = np.argsort(-(scores[t] + part["feed_forward.expert_bias"]), kind="stable")[: config["num_experts_per_tok"]]
        if routes is not None:
            routes[-1][t] = chosen
        weights = scores[t, chosen]
        if config["norm_topk_prob"]:
            weights = weights / (weights.sum() + 1e-6)
        for expert, weight in zip(chosen, weights * config["routed_scaling_factor"], strict=True):
            out[t] += weight * ((silu(x[t] @ gate[expert].T) * (x[t] @ up[expert].T)) @ down[expert].T)
    return out
