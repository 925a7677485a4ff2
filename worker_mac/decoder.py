"""Runs pieces of work on a model: integers in, one graph, integers and floats out.

What the tokens mean and who plays is the sweep's business, what is fed when the schedule's. All calls come from one
thread, and nothing here gives out an `mx.array`: results are numpy arrays, so no caller can pin a graph. A step is over
when it returns; nothing runs ahead of what the sweep knows.

Legend: R rows sampled from, N tokens fed, L MoE layers, K experts a token, V vocabulary.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import GpuInterruptedError
from worker_mac.cache import Cache
from worker_mac.model import Feed, Model
from worker_mac.plan import Ints, Layout, Work, lay_out
from worker_mac.sampler import NEUTRAL, Sampling, draw

GPU_ROWS: Final = 64
"""On a GPU numbers of rows are multiples of this, so that MLX picks the same kernels whatever the number."""
_INTERRUPTED: Final = ("Impacting Interactivity", "kIOGPUCommandBufferCallbackError", "Command buffer execution failed")
"""In messages of MLX: the system's watchdog, or a fault, ended a command buffer."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step gave: for each sequence of the work that samples, in the work's order, int32 [R] and float32 [R]."""

    tokens: Ints
    logprobs: NDArray[np.float32]
    routes: NDArray[np.uint8] | None = None
    """uint8 [N, L, K], the experts of every token fed, in the work's order; None if they are not asked for."""


class Decoder:
    """A model and its cache. Pages and slots are as the work says."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        num_slots: int,
        *,
        record_routing: bool = False,
        sampling: Sampling = NEUTRAL,
        pad_to: int | None = None,
    ) -> None:
        """pad_to: numbers of rows are multiples of this; by the device unless given."""
        self._model = model
        self.record_routing, self.sampling = record_routing, sampling
        self._num_taps = model.config.conv_kernel - 1
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        self._pad_to = pad_to or (GPU_ROWS if on_gpu else 1)
        self._size = num_pages, num_slots
        self._cache = Cache(model.cache_shape, num_pages, num_slots)

    @property
    def num_slots(self) -> int:
        """Slots for tails, the one of zeros included."""
        return self._size[1]

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of pages and slots."""
        return self._cache.num_bytes

    def reset(self) -> None:
        """A new cache in place of one whose contents are not known."""
        self._cache = Cache(self._model.cache_shape, *self._size)

    def step(self, work: Work, uniform: NDArray[np.float32]) -> Drawn:
        """Feed a piece of work; draw a token for each sequence that samples, with its float32 number of `uniform`.

        `uniform` has one number a sequence of the work; those that do not sample have one that is not used. Raises
        GpuInterruptedError if the system ended the work on the GPU: the cache is worth nothing then.
        """
        layout = lay_out(work, self._num_taps, pad_to=self._pad_to)
        try:
            return self._step(work, layout, uniform)
        except RuntimeError as error:
            if any(words in str(error) for words in _INTERRUPTED):
                raise GpuInterruptedError(str(error)[:200]) from error
            raise

    def logits(self, work: Work) -> NDArray[np.float32]:
        """Feed a piece of work; what the next token of each sequence that samples would be drawn from: float32 [R, V]."""
        layout = lay_out(work, self._num_taps, pad_to=self._pad_to)
        hidden, _ = self._feed(work, layout)
        found = self._model.logits(hidden)
        mx.eval(found, self._cache.arrays())
        order = np.argsort(layout.order)
        return np.array(found)[order]

    def _step(self, work: Work, layout: Layout, uniform: NDArray[np.float32]) -> Drawn:
        hidden, routes = self._feed(work, layout)
        num_drawn = len(layout.order)
        if not num_drawn:
            mx.eval(self._cache.arrays(), routes)
            return Drawn(np.zeros(0, np.int32), np.zeros(0, np.float32), _stacked(routes, layout))
        numbers = np.zeros(hidden.shape[0], np.float32)
        numbers[:num_drawn] = uniform[layout.order]
        if self.sampling == NEUTRAL:
            tokens, logprobs = self._model.draw(hidden, mx.array(numbers))
        else:
            tokens, logprobs = draw(self._model.logits(hidden), mx.array(numbers), self.sampling)
        mx.eval(tokens, logprobs, self._cache.arrays(), routes)
        back = np.argsort(layout.order)
        return Drawn(np.array(tokens)[back], np.array(logprobs)[back], _stacked(routes, layout))

    def _feed(self, work: Work, layout: Layout) -> tuple[mx.array, list[mx.array]]:
        """Final hidden states of the rows to sample from, and each MoE layer's experts if they are recorded."""
        self._cache.copy(work.page_copies, work.slot_copies)
        routes: list[mx.array] = []
        hidden = self._model.hidden(Feed.of(layout, self._model), self._cache, routes if self.record_routing else None)
        return hidden if layout.sampled is None else hidden[mx.array(layout.sampled)], routes


def _stacked(routes: list[mx.array], layout: Layout) -> NDArray[np.uint8] | None:
    """Experts of the real tokens, in the work's order."""
    if not routes:
        return None
    packed = np.stack([np.array(layer) for layer in routes], axis=1).astype(np.uint8)
    found = np.empty((len(layout.token_places), *packed.shape[1:]), np.uint8)
    found[layout.token_places] = packed[: len(layout.token_places)]
    return found
