"""What a model remembers of each row of a batch: keys and values of attention layers, tails of short convolutions.

Rows are independent: each has its own number of tokens. How many that is, and who plays in a row, is the decoder's
business; arrays of one capacity serve all rows, so memory is rows x longest.

Legend: R rows, G key/value heads, C capacity in tokens, H head size, T taps kept (kernel size - 1), D hidden size.
"""

from dataclasses import dataclass

import mlx.core as mx

CAPACITY_STEP = 32
"""Capacity grows by this many tokens at a time."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the arrays look like, by the model."""

    attention_layers: tuple[int, ...]
    conv_layers: tuple[int, ...]
    num_kv_heads: int
    head_size: int
    taps: int
    hidden_size: int
    dtype: mx.Dtype


class Cache:
    """keys, values: layer -> [R, G, C, H]; tails: layer -> [R, T, D]."""

    def __init__(self, shape: CacheShape, num_rows: int) -> None:
        self._shape = shape
        self.num_rows = num_rows
        self.capacity = 0
        empty = (num_rows, shape.num_kv_heads, 0, shape.head_size)
        self.keys = {layer: mx.zeros(empty, shape.dtype) for layer in shape.attention_layers}
        self.values = {layer: mx.zeros(empty, shape.dtype) for layer in shape.attention_layers}
        tail = (num_rows, shape.taps, shape.hidden_size)
        self.tails = {layer: mx.zeros(tail, shape.dtype) for layer in shape.conv_layers}

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in every row."""
        if num_tokens <= self.capacity:
            return
        wanted = -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
        more = mx.zeros((self.num_rows, self._shape.num_kv_heads, wanted - self.capacity, self._shape.head_size), self._shape.dtype)
        for arrays in (self.keys, self.values):
            for layer, array in arrays.items():
                arrays[layer] = mx.concatenate([array, more], axis=2)
        self.capacity = wanted

    def take(self, rows: mx.array) -> None:
        """Become the cache of these rows, in this order: int32 [R']. A row may be taken many times (a shared prompt)."""
        for arrays in (self.keys, self.values, self.tails):
            for layer, array in arrays.items():
                arrays[layer] = array[rows]
        self.num_rows = rows.shape[0]

    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated with a step: an unevaluated tail would keep the step's whole graph alive."""
        return [*self.keys.values(), *self.values.values(), *self.tails.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())
