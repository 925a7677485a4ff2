"""How a token is drawn: one uniform number an episode and position, one fp32 log-softmax, one inverse CDF.

The distribution sampled from is the policy's own, temperature 1 with no filters, and the logprob returned is of exactly
that distribution. Nothing here depends on who else is in the batch: the uniform number is a hash of the episode's key
and the position, so an episode alone and in a batch of 64 draws the same tokens.

Legend: R rows, V vocabulary.
"""

import hashlib
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_BITS: Final = 23


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


def draw(logits: mx.array, uniform: mx.array) -> tuple[mx.array, mx.array]:
    """Draw a token a row and give its natural-log probability.

    Args:
        logits: float32 [R, V].
        uniform: float32 [R] from `uniforms`.

    Returns:
        tokens int32 [R], logprobs float32 [R]. A token of probability 0 is never drawn: the first index whose
        cumulative sum passes uniform * total has added something to the sum, and the last index always passes.
    """
    normaliser_R1 = mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs_RV = logits - normaliser_R1
    cumulative_RV = mx.cumsum(mx.exp(logprobs_RV), axis=-1)
    passed_RV = cumulative_RV > uniform[:, None] * cumulative_RV[:, -1:]
    tokens_R1 = mx.argmax(passed_RV, axis=-1, keepdims=True)
    logprobs_R = mx.take_along_axis(logprobs_RV, tokens_R1, axis=-1)[:, 0]
    # Rounding may put a near-certain token a hair above 0, which no probability is.
    return tokens_R1[:, 0].astype(mx.int32), mx.minimum(logprobs_R, 0.0)
