"""One Mac's run of layers as a model: what comes in is the tokens or the neighbour's hidden states, what goes out likewise.

A `Decoder` made on it keeps pages and tails of these layers only. Who steps when is `lead.py`'s and `follow.py`'s.

Legend: N tokens fed, D hidden size.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker_mac.cache import Cache
from worker_mac.decoder import Decoder, Drawn
from worker_mac.model import Feed, Model, Share
from worker_mac.model_config import ModelConfig
from worker_mac.plan import Work


class Neighbours(Protocol):
    """The way hidden states take, from each Mac to the next; see `link.RingLink`."""

    def send(self, x: mx.array) -> None: ...  # noqa: D102

    def abort(self) -> None: ...  # noqa: D102

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array: ...  # noqa: D102


class StageModel(Model):
    """Some consecutive layers of a policy."""

    def __init__(
        self,
        config: ModelConfig,
        arrays: Mapping[str, mx.array],
        layers: range,
        link: Neighbours,
        *,
        without_kernels: Collection[str] = (),
    ) -> None:
        super().__init__(config, arrays, without_kernels=without_kernels, share=Share(layers))
        self._link = link

    def hidden(self, feed: Feed, cache: Cache, routes: list[mx.array] | None = None) -> mx.array:
        """As `Model.hidden` of the last of the Macs; before it, what was handed on: [N, D]."""
        coming = (feed.tokens.shape[0], self.config.hidden_size)
        x_ND = self.embed(feed) if self.is_first else self._link.receive(coming, self.dtype)
        x_ND = self.run(x_ND, feed, cache, routes)
        if self.is_last:
            return self.finish(x_ND)
        try:
            # With the caches, which would else keep the whole graph alive.
            mx.eval(x_ND, cache.arrays(), routes or [])
        except RuntimeError:  # the system ended it: `Decoder.step` says what is raised then
            self._link.abort()
            raise
        self._link.send(x_ND)
        return x_ND


def step_stage(decoder: Decoder, work: Work, uniform: NDArray[np.float32], *, is_last: bool) -> Drawn:
    """A step of one Mac: on the last what `Decoder.step` gives, before it only the experts of these layers."""
    return decoder.step(work if is_last else replace(work, samples=np.zeros_like(work.samples)), uniform)
