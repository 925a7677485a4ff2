"""What this MLX on this machine makes of a fixed small model: 64 logprobs, and their name.

The model is worked out from a hash, so that every machine has the same one; it has each part of the real ones (short
convolution, grouped attention with head size 64, int8 experts, a tied head). `EXPECTED` are the logprobs in exact
arithmetic: far from them a machine computes wrongly; close to them two machines may still differ in the last bits, and
their fingerprints do. Who acts on it is `selftest.py` and the trainer.
"""

import hashlib
from collections.abc import Collection
from importlib import metadata
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from stoa.weights.grid import bf16_bits
from stoa.weights.layout import Layout, TensorSpec, layout_of
from stoa.weights.state import WeightState
from worker_mac.forced import Forced
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.sampler import seed_of, uniforms
from worker_mac.weights import LiveWeights

CONFIG: Final[dict[str, object]] = {
    "model_type": "lfm2_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_dense_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}
NUM_PROMPT_TOKENS: Final = 24
NUM_LOGPROBS: Final = 64
# A step of the grid and its lowest value, both exact in bf16: codes 0 to 255 stand for -0.1245 to 0.1245.
_SCALE: Final = 2.0**-10
_BIAS: Final = -127.5 * _SCALE


def fixed_ids() -> NDArray[np.int32]:
    """int32 [NUM_PROMPT_TOKENS + NUM_LOGPROBS]: the prompt and the tokens forced after it."""
    number = NUM_PROMPT_TOKENS + NUM_LOGPROBS
    return (_noise("ids", number) * 512).astype(np.int32)


def fixed_state() -> WeightState:
    """The fixed model's weights."""
    layout: Layout = layout_of(CONFIG, "float32")
    arrays: dict[str, NDArray[np.generic]] = {}
    for spec in layout.tensors:
        noise = _noise(spec.name, spec.num_elements).reshape(spec.shape)
        if spec.kind == "int8":
            arrays[spec.name] = (noise * 256).astype(np.uint8)
            arrays[spec.scales] = bf16_bits(np.full(spec.grid_shape, _SCALE, np.float32))
            arrays[spec.biases] = bf16_bits(np.full(spec.grid_shape, _BIAS, np.float32))
        else:
            arrays[spec.name] = _raw(spec, noise)
    return WeightState(layout, arrays)


def fixed_model(plain_ops: Collection[str] = ()) -> Model:
    """The fixed model in MLX's memory. `plain_ops`: parts that no Metal kernel is to compute."""
    return Model(read_model_config(CONFIG), LiveWeights.of(fixed_state()).arrays, without_kernels=plain_ops)


def logprobs(model: Model) -> NDArray[np.float32]:
    """float32 [NUM_LOGPROBS]: natural-log probability of each forced token under the fixed model, as the engine decodes it."""
    ids, at = fixed_ids(), NUM_PROMPT_TOKENS
    rows = Forced(model, 1, len(ids))
    rows.feed([ids[: at - 1]])
    logits_TV = mx.array(rows.walk(ids[None, at - 1 : -1])[:, 0])
    forced_T1 = mx.array(ids[at:, None])
    found_T1 = mx.take_along_axis(logits_TV, forced_T1, axis=-1) - mx.logsumexp(logits_TV, axis=-1, keepdims=True)
    return np.array(found_T1[:, 0])


def name_of(values: NDArray[np.float32]) -> str:
    """The fingerprint: MLX's version and the first 12 hex digits of the sha256 of the bytes of the logprobs."""
    return f"{metadata.version('mlx')}-{hashlib.sha256(values.astype('<f4').tobytes()).hexdigest()[:12]}"


def difference(values: NDArray[np.float32]) -> float:
    """Largest distance of a logprob from what exact arithmetic gives, in nats; infinite if one is not a number."""
    far = float(np.abs(values.astype(np.float64) - np.array(EXPECTED)).max())
    return far if np.isfinite(far) else float("inf")


def _raw(spec: TensorSpec, noise: NDArray[np.float32]) -> NDArray[np.float32]:
    if "norm" in spec.name:
        return 0.75 + 0.5 * noise
    return (noise - 0.5) * np.float32(0.125 if spec.frozen else 1.0)


def _noise(name: str, number: int) -> NDArray[np.float32]:
    """float32 [number] in [0, 1), the same on every machine."""
    key = np.full(number, seed_of("fingerprint", 0, name), np.uint64)
    return uniforms(key, np.arange(number, dtype=np.int64))


EXPECTED: Final = (
    -6.3250116, -7.8977027, -6.7508826, -5.5709204, -7.2659840, -8.1525874, -7.6255575, -7.5270142,
    -8.6149416, -9.1341027, -8.4952229, -7.8064569, -9.5104980, -8.2639043, -6.8188252, -8.6153222,
    -8.0017377, -6.5430721, -7.1671984, -5.9495726, -8.5198542, -6.7821192, -8.7317902, -6.4672014,
    -8.5820248, -7.4426474, -7.4270987, -8.3890465, -7.4863053, -7.1965300, -6.0693704, -6.8875548,
    -6.4917959, -6.9125415, -5.2319174, -6.1037989, -7.2993372, -7.2461407, -9.2840148, -8.2676736,
    -6.1553721, -7.6850653, -5.2943997, -6.2203431, -7.5890454, -4.6591023, -7.0681947, -6.7744510,
    -5.6138726, -8.3979863, -7.0825821, -7.4267126, -7.0807655, -9.2958040, -5.3375600, -4.8422655,
    -6.7398590, -8.9660921, -4.7876989, -4.8704751, -6.4009666, -5.7960329, -6.1746178, -4.4010388,
)  # fmt: skip
