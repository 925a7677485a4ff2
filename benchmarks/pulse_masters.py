"""Masters that move as under Adam, with the tensor shapes of LFM2.5-8B-A1B: what the benchmark of weight sync measures on.

Adam's moments start in their stationary state, so that no version is a cold start: with gradients mu + noise per element,
v is 1 + mu^2 and m has mean mu and variance (1 - b1) / (1 + b1). The signal-to-noise ratio |mu| is drawn per tensor, the
sign of mu per column: were it one sign a tensor, the signs of its changes would hardly need a bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoa.weights.layout import Layout, layout_of

BETA1: Final = 0.9
RATIOS: Final = (0.0, 0.1, 0.3, 1.0)
"""Signal-to-noise ratios of the gradient, dealt to the tensors in turn."""
LFM25: Final = {
    "model_type": "lfm2_moe",
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "use_expert_bias": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_theta": 5_000_000.0, "rope_type": "default"},
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
}


def full_layout() -> Layout:
    """All 8,466,202,624 codes of LFM2.5-8B-A1B."""
    return layout_of(LFM25, "bfloat16")


def scaled_layout(num_experts: int) -> Layout:
    """Rows as long as the model's, but four layers, few experts and a short vocabulary."""
    scaled = {
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "num_experts": num_experts,
        "vocab_size": 4096,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }
    return layout_of({**LFM25, **scaled}, "bfloat16")


@dataclass(slots=True)
class _Tensor:
    weights: NDArray[np.float32]
    momentum: NDArray[np.float32]
    drift: NDArray[np.float32]
    """mu of every column."""
    scale: np.float32
    """sqrt(v)."""


class Masters:
    """float32 masters of a layout and their Adam momentum; rows differ in width, tensors in width and ratio."""

    def __init__(self, layout: Layout, *, learning_rate: float, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._rate = np.float32(learning_rate)
        self._tensors: dict[str, _Tensor] = {}
        spread = np.float32(np.sqrt((1 - BETA1) / (1 + BETA1)))
        for number, spec in enumerate(layout.tensors):
            width = np.float32(0.02) * self._random.lognormal(0, 0.3, (*spec.shape[:-1], 1)).astype(np.float32)
            ratio = RATIOS[number % len(RATIOS)] if not spec.frozen else 0.0
            drift = np.float32(ratio) * self._random.choice(np.array([-1, 1], np.float32), spec.shape[-1])
            momentum = self._random.standard_normal(spec.shape, np.float32) * spread + drift
            weights = np.multiply(self._random.standard_normal(spec.shape, np.float32), width, dtype=np.float32)
            self._tensors[spec.name] = _Tensor(weights, momentum, drift, np.float32(np.sqrt(1 + ratio**2)))
        self._frozen = {spec.name for spec in layout.tensors if spec.frozen}

    def step(self) -> None:
        """One optimizer step: m = b1 m + (1 - b1) g, w -= lr m / sqrt(v)."""
        for name, tensor in self._tensors.items():
            if name in self._frozen:
                continue
            gradient = self._random.standard_normal(tensor.weights.shape, np.float32)
            gradient += tensor.drift
            gradient *= np.float32(1 - BETA1)
            tensor.momentum *= np.float32(BETA1)
            tensor.momentum += gradient
            np.multiply(tensor.momentum, self._rate / tensor.scale, out=gradient)
            tensor.weights -= gradient

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Names and masters."""
        for name, tensor in self._tensors.items():
            yield name, tensor.weights
