"""K2, the end of a step: hidden states to one drawn token a row and its log-probability, in fp32 throughout.

The kernel makes logits block by block and keeps two numbers of each, so the [R, V] logits never exist. Both forms draw by
the inverse of the cumulative distribution at temperature 1, from a uniform number that is a hash of the row's key and
position; they differ by rounding of the cumulative sum only.

Legend: R rows, D width, V words, B blocks of 32 words.
"""

from typing import Final

import mlx.core as mx
import numpy as np

from metal.int8 import Int8, expect_int8, linear
from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, launch_on_metal

BLOCK: Final = 32
"""Words a threadgroup scores."""
_THREADS: Final = 128
_NAME = "head"
_SPLITMIX: Final = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def uniforms_plain(keys: mx.array, positions: mx.array) -> mx.array:
    """Uniform numbers in [0, 1 - 2**-23] on a grid of 2**-23: uint64 [R] keys, int64 [R] positions -> float32 [R].

    SplitMix64 (Steele, Lea, Flood 2014): the finaliser of key + (position + 1) * golden.
    """
    golden, first, second = mx.array(_SPLITMIX)
    z = keys + (positions.astype(mx.uint64) + 1) * golden
    z = (z ^ (z >> 30)) * first
    z = (z ^ (z >> 27)) * second
    z = z ^ (z >> 31)
    return (z >> 41).astype(mx.float32) * 2.0**-23


def draw_plain(logits: mx.array, uniform: mx.array) -> tuple[mx.array, mx.array]:
    """Draw a token a row and give its natural-log probability.

    Args:
        logits: float32 [R, V].
        uniform: float32 [R] on a grid of 2**-23, below 1.

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


def head_plain(x: mx.array, embedding: Int8, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
    """Tokens int32 [R] and logprobs float32 [R] for final hidden states x [R, D] and the tied embedding [V, D]."""
    return draw_plain(linear(x.astype(mx.float32), embedding), uniforms_plain(keys, positions))


class HeadKernel:
    """As `head_plain`, by head_partial.metal and head_pick.metal."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        matrix = ("x", "codes", "scales", "biases")
        self._partial = Kernel("head_partial", inputs=(*matrix, "size"), outputs=("highest", "sums"), uses="int8_tile", launcher=launcher)
        self._pick = Kernel(
            "head_pick",
            inputs=(*matrix, "highest", "sums", "keys", "positions", "size"),
            outputs=("tokens", "logprobs"),
            uses="int8_tile",
            launcher=launcher,
        )

    def __call__(self, x: mx.array, embedding: Int8, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """As `head_plain`. Raises KernelArgumentsError."""
        num_rows, num_words = x.shape[0], embedding.codes.shape[0]
        expect(_NAME, "keys", keys, (num_rows,), mx.uint64)
        expect(_NAME, "positions", positions, (num_rows,), mx.int64)
        highest, sums = self.partial(x, embedding)
        tokens, logprobs = self._pick(
            inputs=[x, *embedding, highest, sums, keys, positions, mx.array([highest.shape[1], num_words], dtype=mx.int32)],
            template=[("D", x.shape[1])],
            grid=(_THREADS * num_rows, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(num_rows,)] * 2,
            output_dtypes=[mx.int32, mx.float32],
        )
        return tokens, logprobs

    def partial(self, x: mx.array, embedding: Int8) -> tuple[mx.array, mx.array]:
        """The highest logit and the sum of exp(logit - highest) of each row and block, float32 [R, B] each."""
        num_rows, num_words = x.shape[0], embedding.codes.shape[0]
        expect(_NAME, "x", x, (-1, -1), *FLOATS)
        demand(_NAME, num_rows > 0, "no rows")
        expect_int8(_NAME, "embedding", embedding, num_words, x.shape[1])
        num_blocks = -(-num_words // BLOCK)
        highest, sums = self._partial(
            inputs=[x, *embedding, mx.array([num_rows, num_words], dtype=mx.int32)],
            template=[("D", x.shape[1])],
            grid=(_THREADS * num_blocks, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(num_rows, num_blocks)] * 2,
            output_dtypes=[mx.float32] * 2,
        )
        return highest, sums
