"""How a token is drawn: one uniform number an episode and position, one distribution in fp32, one inverse CDF.

In training the distribution is the policy's own, temperature 1 with no filters; an evaluation may ask for another. The
logprob returned is always that of the distribution sampled from. Nothing here depends on who else is in the batch: the
uniform number is a hash of the episode's key and the position, so an episode alone and in a batch of 64 draws the same.

Legend: R rows, V vocabulary.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.reference import pick

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_BITS: Final = 23


@dataclass(frozen=True, slots=True)
class Sampling:
    """How logits become the distribution sampled from: divided by `temperature` (0: the likeliest token), then filtered.

    Filters as they are commonly defined, applied in this order to what the one before left: `top_k` likeliest tokens
    (0: all); the smallest set of likeliest tokens whose probability reaches `top_p`; tokens at least `min_p` times as
    likely as the likeliest. Of equally likely tokens the lower one comes first.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


NEUTRAL: Final = Sampling()


def seed_of(*parts: str | int) -> int:
    """A seed in [0, 2**63) from names and numbers; the same on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") >> 1


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Uniform numbers in [0, 1 - 2**-23] on a grid of 2**-23: uint64 [R] keys, int64 [R] positions -> float32 [R].

    The counter-based generator is SplitMix64 (Steele, Lea, Flood 2014): the finaliser of key + (position + 1) * golden.
    The grid is as wide as fp32 can multiply by a total without reaching it, which `draw` relies on.
    """
    with np.errstate(over="ignore"):
        z = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(64 - _BITS)).astype(np.float32) * np.float32(2.0**-_BITS)


def draw(logits: mx.array, uniform: mx.array, sampling: Sampling = NEUTRAL) -> tuple[mx.array, mx.array]:
    """Draw a token a row from what `sampling` makes of the logits, and give its natural-log probability in that.

    Args:
        logits: float32 [R, V].
        uniform: float32 [R] from `uniforms`.
        sampling: temperature and filters.

    Returns:
        tokens int32 [R], logprobs float32 [R].
    """
    return pick(filtered(logits, sampling), uniform)


def filtered(logits: mx.array, sampling: Sampling) -> mx.array:
    """Logits float32 [R, V] of the distribution sampled from; -inf where it is 0."""
    if sampling.temperature == 0.0:
        places_V = mx.arange(logits.shape[-1], dtype=mx.uint32)
        return mx.where(places_V == mx.argmax(logits, axis=-1, keepdims=True), logits, -mx.inf)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        logits = _likeliest(logits, sampling)
    if sampling.min_p > 0.0:
        floor_R1 = logits.max(axis=-1, keepdims=True) + float(np.log(sampling.min_p))
        logits = mx.where(logits >= floor_R1, logits, -mx.inf)
    return logits


def _likeliest(logits: mx.array, sampling: Sampling) -> mx.array:
    order_RV = mx.argsort(-logits, axis=-1)  # stable: the lower of equals first
    sorted_RV = mx.take_along_axis(logits, order_RV, axis=-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        sorted_RV = mx.where(mx.arange(logits.shape[-1]) < sampling.top_k, sorted_RV, -mx.inf)
    if sampling.top_p < 1.0:
        probabilities_RV = mx.softmax(sorted_RV, axis=-1)
        before_RV = mx.cumsum(probabilities_RV, axis=-1) - probabilities_RV
        sorted_RV = mx.where(before_RV < sampling.top_p, sorted_RV, -mx.inf)
    return mx.put_along_axis(mx.full(logits.shape, -mx.inf), order_RV, sorted_RV, axis=-1)
