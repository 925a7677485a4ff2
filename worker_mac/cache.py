"""What a model remembers: pages of keys and values of its attention layers, tails of its short convolutions.

Arrays of one size from the first step to the last; who holds which page and slot is `pages.py`'s and `schedule.py`'s
business. Slot 0 is never written: it holds the zeros that a sequence begins with.

Legend: P pages, G key/value heads, H head size, S slots, T taps kept (kernel size - 1), D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from metal.sizes import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the arrays look like, by the model; `dtype` is that of keys and values, `tail_dtype` that of activations."""

    attention_layers: tuple[int, ...]
    conv_layers: tuple[int, ...]
    num_kv_heads: int
    head_size: int
    taps: int
    hidden_size: int
    dtype: mx.Dtype
    tail_dtype: mx.Dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return 2 * len(self.attention_layers) * self.num_kv_heads * PAGE_TOKENS * self.head_size * self.dtype.size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's tails in all layers."""
        return len(self.conv_layers) * self.taps * self.hidden_size * self.tail_dtype.size


class Cache:
    """keys, values: layer -> [P, G, 32, H]; tails: layer -> [S, T, D]."""

    def __init__(self, shape: CacheShape, num_pages: int, num_slots: int) -> None:
        self.shape, self.num_pages, self.num_slots = shape, num_pages, num_slots
        page, tail = (shape.num_kv_heads, PAGE_TOKENS, shape.head_size), (shape.taps, shape.hidden_size)
        self.keys = {layer: mx.zeros((num_pages, *page), shape.dtype) for layer in shape.attention_layers}
        self.values = {layer: mx.zeros((num_pages, *page), shape.dtype) for layer in shape.attention_layers}
        self.tails = {layer: mx.zeros((num_slots, *tail), shape.tail_dtype) for layer in shape.conv_layers}
        mx.eval(self.arrays())

    def copy(self, pages: Sequence[tuple[int, int]], slots: Sequence[tuple[int, int]]) -> None:
        """Copy pages and slots, as (from, to); all are read before any is written."""
        for pairs, pools in ((pages, (self.keys, self.values)), (slots, (self.tails,))):
            if not pairs:
                continue
            sources, targets = mx.array([source for source, _ in pairs]), mx.array([target for _, target in pairs])
            for pool in pools:
                taken = [array[sources] for array in pool.values()]
                # Done now: a pool that is still to be read would be copied whole instead of written in place.
                mx.eval(taken)
                for array, rows in zip(pool.values(), taken, strict=True):
                    array[targets] = rows

    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated with a step: an unevaluated one would keep the step's whole graph alive."""
        return [*self.keys.values(), *self.values.values(), *self.tails.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())
