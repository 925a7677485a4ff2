"""LFM2-MoE in float64 numpy, one whole sequence at a time: what the logprobs of a Mac's engine are measured against.

Written from the architecture's equations, without a cache, pages or batches. Experts are either chosen here or replayed
from a record, so that a choice on the edge is not mistaken for an error of arithmetic.

Legend: T tokens, D hidden size, N heads, H head size, E experts, K experts a token, L MoE layers, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoa.weights.state import WeightState

Array = NDArray[np.float64]


@dataclass(slots=True)
class Forward64:
    """A model's weights as they are dequantised, in float64; layers are made when they are first asked for."""

    config: Mapping[str, Any]
    state: WeightState
    chosen: list[NDArray[np.int64]] = field(default_factory=list)
    """What the last call would have chosen itself: [T, K] of each MoE layer."""

    def logprobs(self, ids: NDArray[np.int32], routing: NDArray[np.uint8] | None = None) -> Array:
        """float64 [T, V]: row t is the distribution of token t + 1. `routing`: uint8 [T, L, K], to be used in place of its own."""
        self.chosen = []
        embedding = self._weight("model.embed_tokens.weight")
        x_TD = embedding[ids]
        for index, kind in enumerate(self.config["layer_types"]):
            path = f"model.layers.{index}"
            normed = self._norm(x_TD, f"{path}.operator_norm.weight")
            x_TD = x_TD + (self._attention(path, normed) if kind == "full_attention" else self._convolution(path, normed))
            normed = self._norm(x_TD, f"{path}.ffn_norm.weight")
            x_TD = x_TD + self._block(path, normed, routing)
        logits_TV = self._norm(x_TD, "model.embedding_norm.weight") @ embedding.T
        shifted = logits_TV - logits_TV.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    def _weight(self, name: str) -> Array:
        return self.state.dequantise(name).astype(np.float64)

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config["norm_eps"]) * self._weight(name)

    def _convolution(self, path: str, x_TD: Array) -> Array:
        gate, carry, value = np.split(x_TD @ self._weight(f"{path}.conv.in_proj.weight").T, 3, axis=-1)
        line, kernel = gate * value, self._weight(f"{path}.conv.conv.weight")[:, :, 0]
        num_taps = kernel.shape[1]
        padded = np.concatenate([np.zeros((num_taps - 1, line.shape[1])), line])
        out = sum(padded[tap : tap + len(line)] * kernel[:, tap] for tap in range(num_taps))
        return (carry * out) @ self._weight(f"{path}.conv.out_proj.weight").T

    def _attention(self, path: str, x_TD: Array) -> Array:
        config, num_tokens = self.config, len(x_TD)
        num_q, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
        q, k, v = (
            (x_TD @ self._weight(f"{path}.self_attn.{name}_proj.weight").T).reshape(num_tokens, heads, -1)
            for name, heads in (("q", num_q), ("k", num_kv), ("v", num_kv))
        )
        theta = float(config["rope_parameters"]["rope_theta"])
        q = _rotated(self._norm(q, f"{path}.self_attn.q_layernorm.weight"), theta)
        k = _rotated(self._norm(k, f"{path}.self_attn.k_layernorm.weight"), theta)
        k, v = (np.repeat(part, num_q // num_kv, axis=1) for part in (k, v))
        scores_NTT = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
        scores_NTT[:, *np.triu_indices(num_tokens, 1)] = -np.inf
        weights = np.exp(scores_NTT - scores_NTT.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("nts,snh->tnh", weights, v).reshape(num_tokens, -1)
        return out @ self._weight(f"{path}.self_attn.out_proj.weight").T

    def _block(self, path: str, x_TD: Array, routing: NDArray[np.uint8] | None) -> Array:
        block = f"{path}.feed_forward"
        if f"{block}.gate.weight" not in self.state.layout.by_name:
            return _gated(x_TD, *(self._weight(f"{block}.{name}_proj.weight") for name in ("gate", "up", "down")))
        config, top_k = self.config, int(self.config["num_experts_per_tok"])
        scores_TE = 1 / (1 + np.exp(-(x_TD @ self._weight(f"{block}.gate.weight").T)))
        order = np.argsort(-(scores_TE + self._weight(f"{block}.expert_bias")), axis=-1, kind="stable")
        self.chosen.append(order[:, :top_k])
        chosen_TK = self.chosen[-1] if routing is None else routing[:, len(self.chosen) - 1].astype(np.int64)
        weights_TK = np.take_along_axis(scores_TE, chosen_TK, axis=-1)
        if config["norm_topk_prob"]:
            weights_TK = weights_TK / (weights_TK.sum(axis=-1, keepdims=True) + 1e-6)
        weights_TK = weights_TK * config.get("routed_scaling_factor", 1.0)
        gate, up, down = (self._weight(f"{block}.switch_mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        out = np.zeros_like(x_TD)
        for expert in np.unique(chosen_TK):
            tokens, places = np.nonzero(chosen_TK == expert)
            out[tokens] += weights_TK[tokens, places][:, None] * _gated(x_TD[tokens], gate[expert], up[expert], down[expert])
        return out


def num_route_flips(chosen: list[NDArray[np.int64]], routing: NDArray[np.uint8]) -> int:
    """Tokens and layers at which the recorded experts, uint8 [T, L, K], are another set than those chosen here."""
    ours = np.sort(np.stack(chosen, axis=1), axis=-1)
    return int((ours != np.sort(routing.astype(np.int64), axis=-1)).any(axis=-1).sum())


def _gated(x: Array, gate: Array, up: Array, down: Array) -> Array:
    inner = x @ gate.T
    return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T


def _rotated(x_TNH: Array, theta: float) -> Array:
    half = x_TNH.shape[-1] // 2
    angle = np.arange(len(x_TNH))[:, None] * theta ** (-np.arange(half) / half)
    cosines, sines = np.cos(angle)[:, None], np.sin(angle)[:, None]
    low, high = x_TNH[..., :half], x_TNH[..., half:]
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)
