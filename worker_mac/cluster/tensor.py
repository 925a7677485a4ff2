"""A share of every layer on each Mac: heads, dense blocks and experts are dealt out, short convolutions are on all.

Each Mac computes with its rows of the first matrices of a block and the columns of the last one that belong to them; the
partial outputs are summed over the wire, twice a layer at most. It splits weights and keys, not activations, and waits
for the wire in every layer: `stage.py` is what a wired set uses unless its hosts.json says otherwise. All Macs compute the
same hidden states from the same sums, so their chips must round alike.

Legend: N tokens fed, D hidden size.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final, Literal, Protocol, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.sizes import GROUP_SIZE
from stoa.contracts.errors import GpuInterruptedError, RankLostError, WiredError
from stoa.weights.layout import Layout, TensorSpec
from stoa.weights.state import WeightState
from worker_mac.cache import Cache
from worker_mac.cluster.stage import Neighbours
from worker_mac.model import Feed, Model, Share
from worker_mac.model_config import ModelConfig
from worker_mac.weights import adopt

_Answer = TypeVar("_Answer")
Kind = Literal["rows", "columns", "whole"]
_BY_ROWS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
_BY_COLUMNS: Final = ("self_attn.out_proj", "down_proj", "w2")


class Summing(Protocol):
    """Sums over all Macs; see `link.RingLink`."""

    def agree(self, shape: tuple[int, ...], dtype: mx.Dtype, num_sums: int) -> None: ...  # noqa: D102

    def total(self, x: mx.array) -> mx.array: ...  # noqa: D102

    def watched(self, what: str) -> AbstractContextManager[None]: ...  # noqa: D102


class Wire(Neighbours, Summing, Protocol):
    """Both ways of exchanging hidden states; see `link.RingLink`."""


class TensorModel(Model):
    """One Mac's share of every layer of a policy. `arrays` are by `share_arrays`."""

    def __init__(
        self, config: ModelConfig, arrays: Mapping[str, mx.array], ranks: int, link: Summing, *, without_kernels: Collection[str] = ()
    ) -> None:
        super().__init__(config, arrays, without_kernels=without_kernels, share=Share(range(config.num_layers), ranks, link.total))
        self._link = link
        self._num_sums = config.num_layers + len(config.attention_layers)

    def hidden(self, feed: Feed, cache: Cache, routes: list[mx.array] | None = None) -> mx.array:
        """As `Model.hidden`, the same bits on every Mac."""
        self._link.agree((feed.tokens.shape[0], self.config.hidden_size), self.dtype, self._num_sums)
        return super().hidden(feed, cache, routes)


def together(link: Summing, compute: Callable[[], _Answer]) -> _Answer:
    """What all Macs compute at once. Raises RankLostError where the system ended this one's part: the others wait in a sum for it."""
    with link.watched("sums of all Macs"):
        try:
            return compute()
        except GpuInterruptedError as error:
            raise RankLostError(f"a step that all Macs take together was interrupted on one: {error.message}") from error


def share_arrays(state: WeightState, config: ModelConfig, rank: int, ranks: int) -> dict[str, mx.array]:
    """This Mac's part of whole weights, in MLX's memory. Raises WiredError if they cannot be dealt out evenly."""
    check_shares(state.layout, config, ranks)
    arrays: dict[str, mx.array] = {}
    for spec in state.layout.tensors:
        for array in spec.arrays:
            part = np.ascontiguousarray(_part(spec, state.arrays[array.name], rank, ranks))
            made = type(array)(array.name, part.shape, array.dtype)
            arrays[array.name], _ = adopt(made, part)
    return arrays


def check_shares(layout: Layout, config: ModelConfig, ranks: int) -> None:
    """Raises WiredError unless heads and the inner sizes of blocks can be dealt out to so many Macs."""
    if config.num_heads % ranks or config.num_kv_heads % ranks:
        raise WiredError(
            f"{config.num_heads} query and {config.num_kv_heads} key heads cannot be dealt out to {ranks} Macs",
            hint='wire as many Macs as divide both, or leave "split" out of hosts.json: layers are split then',
        )
    if config.head_norms == "all" or config.qkv_bias:
        what = "norms over all heads" if config.head_norms == "all" else "what is added to queries, keys and values"
        raise WiredError(f"{what} of a {config.family} cannot be dealt out", hint='leave "split" out of hosts.json: layers are split then')
    for spec in layout.tensors:
        kind = kind_of(spec.name)
        if kind == "columns" and spec.shape[-1] % (GROUP_SIZE * ranks):
            raise WiredError(
                f"{spec.name}: {spec.shape[-1]} columns cannot be dealt out to {ranks} Macs in whole groups of {GROUP_SIZE}",
                hint='wire fewer Macs, or leave "split" out of hosts.json: layers are split then',
            )


def share_layout(layout: Layout, ranks: int) -> Layout:
    """The tensors that each Mac holds: dealt ones in the shape of its part, in the order of the whole layout."""
    return replace(layout, tensors=tuple(replace(spec, shape=_share_shape(spec, ranks)) for spec in layout.tensors))


def kind_of(name: str) -> Kind:
    """How a tensor of this name is dealt out."""
    module = name.rpartition(".")[0]
    if module.endswith(_BY_COLUMNS):
        return "columns"
    return "rows" if module.endswith(_BY_ROWS) and not module.endswith("conv.in_proj") else "whole"


def _share_shape(spec: TensorSpec, ranks: int) -> tuple[int, ...]:
    kind, shape = kind_of(spec.name), spec.shape
    if kind == "rows":
        return (*shape[:-2], shape[-2] // ranks, shape[-1])
    return (*shape[:-1], shape[-1] // ranks) if kind == "columns" else shape


def _part(spec: TensorSpec, array: NDArray[np.generic], rank: int, ranks: int) -> NDArray[np.generic]:
    kind = kind_of(spec.name)
    if kind == "whole":
        return array
    axis = -2 if kind == "rows" else -1
    return np.split(array, ranks, axis=axis)[rank]
