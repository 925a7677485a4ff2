"""K2, the end of a step: hidden states to one drawn token a row and its log-probability. `reference.draw_plain` says what it means.

Logits are made block by block and two numbers kept of each, so the [R, V] logits never exist. The uniform number is given,
or made here of a row's key and position by the sampler's own counter function. Kernel and plain ops differ by rounding of
the cumulative sum only.

Legend: R rows, D width, V words, B blocks of 32 words.
"""

from typing import Final

import mlx.core as mx

from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, expect_int8, launch_on_metal
from metal.products import Int8

BLOCK: Final = 32
"""Words a threadgroup scores."""
_THREADS: Final = 128
_NAME = "head"


class HeadKernel:
    """As `draw_plain`, by head_partial.metal and head_pick.metal."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        matrix = ("x", "codes", "scales", "biases")
        self._partial = Kernel("head_partial", inputs=(*matrix, "size"), outputs=("highest", "sums"), uses="int8_tile", launcher=launcher)
        self._pick = Kernel(
            "head_pick",
            inputs=(*matrix, "highest", "sums", "uniform", "keys", "positions", "size"),
            outputs=("tokens", "logprobs"),
            uses="int8_tile",
            launcher=launcher,
        )

    def __call__(self, hidden: mx.array, embedding: Int8, uniform: mx.array) -> tuple[mx.array, mx.array]:
        """Tokens int32 [R] and logprobs float32 [R]; `uniform` float32 [R]. Raises KernelArgumentsError."""
        expect(_NAME, "hidden", hidden, (-1, -1), *FLOATS)
        expect(_NAME, "uniform", uniform, (hidden.shape[0],), mx.float32)
        none = mx.zeros((1,), mx.uint64)
        return self._drawn(hidden, embedding, uniform, none, none.astype(mx.int64), counted=False)

    def counted(self, hidden: mx.array, embedding: Int8, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """As a call with the uniform numbers of uint64 [R] keys at int64 [R] positions. Raises KernelArgumentsError."""
        expect(_NAME, "hidden", hidden, (-1, -1), *FLOATS)
        expect(_NAME, "keys", keys, (hidden.shape[0],), mx.uint64)
        expect(_NAME, "positions", positions, (hidden.shape[0],), mx.int64)
        return self._drawn(hidden, embedding, mx.zeros((1,)), keys, positions, counted=True)

    def partial(self, hidden: mx.array, embedding: Int8) -> tuple[mx.array, mx.array]:
        """The highest logit and the sum of exp(logit - highest) of each row and block, float32 [R, B] each."""
        expect(_NAME, "hidden", hidden, (-1, -1), *FLOATS)
        expect(_NAME, "embedding's codes", embedding.codes, (-1, -1), mx.uint32)
        num_rows, num_words = hidden.shape[0], embedding.codes.shape[0]
        demand(_NAME, min(num_rows, num_words) > 0, f"no rows or no words: {num_rows} and {num_words}")
        expect_int8(_NAME, "embedding", embedding, num_words, hidden.shape[1])
        num_blocks = -(-num_words // BLOCK)
        highest, sums = self._partial(
            inputs=[hidden, *embedding, mx.array([num_rows, num_words], dtype=mx.int32)],
            template=[("D", hidden.shape[1])],
            grid=(_THREADS * num_blocks, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(num_rows, num_blocks)] * 2,
            output_dtypes=[mx.float32] * 2,
        )
        return highest, sums

    def _drawn(
        self, hidden: mx.array, embedding: Int8, uniform: mx.array, keys: mx.array, positions: mx.array, *, counted: bool
    ) -> tuple[mx.array, mx.array]:
        highest, sums = self.partial(hidden, embedding)
        size = mx.array([highest.shape[1], embedding.codes.shape[0]], dtype=mx.int32)
        tokens, logprobs = self._pick(
            inputs=[hidden, *embedding, highest, sums, uniform, keys, positions, size],
            template=[("D", hidden.shape[1]), ("COUNTED", counted)],
            grid=(_THREADS * hidden.shape[0], 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(hidden.shape[0],)] * 2,
            output_dtypes=[mx.int32, mx.float32],
        )
        return tokens, logprobs
