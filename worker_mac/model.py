"""The forward pass of LFM2 and LFM2-MoE on int8 weights, for tokens of many sequences at once, over paged keys and values.

Weights are named and packed as `stoa.weights.layout` says and may change in place between two calls. Which op computes
what a kernel may compute is `metal.ops`'s to say. Nothing here samples, schedules or knows of episodes. A token gets the
same bits whatever other tokens it is fed with, and whether alone or in a stretch. Router and final logits are always
computed in fp32.

Legend: N tokens fed, packed; X tiles of queries, W queries a tile, R rows of one token, S sequences of several tokens,
L lines of a convolution, D hidden size, Q query heads, G key/value heads, H head size, E experts, K experts a token,
V vocabulary, T taps kept.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.attention import Groups, group_rows, most_rows
from metal.check import Dims, Verdict
from metal.ops import Ops, choose_ops
from metal.products import Int8, gated, linear, linears, unpacked_rows
from metal.router import RouterRule, route_by_softmax
from metal.sizes import PAGE_TOKENS
from stoa.contracts.errors import LayoutError
from worker_mac.cache import Cache, CacheShape
from worker_mac.model_config import ModelConfig, Stretching
from worker_mac.plan import Ints, Layout, Tiles

_NO_LIMIT: Final = 1 << 30


class AttentionWeights(NamedTuple):
    """Projections; norms of queries and keys, [H] or of all heads at once, and what is added to queries, keys and values, if any."""

    q: Int8
    k: Int8
    v: Int8
    out: Int8
    norms: tuple[mx.array, mx.array] | None
    offsets: tuple[mx.array, mx.array, mx.array] | None


class ConvWeights(NamedTuple):
    """Projections and the depthwise kernel [D, T, 1]."""

    into: Int8
    out: Int8
    kernel: mx.array


class MlpWeights(NamedTuple):
    """Matrices of a dense block, or stacks of one an expert."""

    gate: Int8
    up: Int8
    down: Int8


class RoutingWeights(NamedTuple):
    """Router matrix [E, D] and the bias of the choice, float32 [E]."""

    gate: mx.array
    bias: mx.array


class LayerWeights(NamedTuple):
    """One layer; `routing` None in a dense one."""

    operator_norm: mx.array
    ffn_norm: mx.array
    mixer: AttentionWeights | ConvWeights
    mlp: MlpWeights
    routing: RoutingWeights | None


class Angles:
    """Cosines and sines of the rotary embedding by position, computed in double precision: in fp32 the angle of a late
    position is off by more than any other rounding here.
    """

    def __init__(self, head_size: int, theta: float, stretching: Stretching | None = None) -> None:
        self._rates = theta ** (-2.0 * np.arange(head_size // 2) / head_size)
        if stretching is not None:
            self._rates = stretched(self._rates, stretching)
        self._cosines = self._sines = np.zeros((0, 1, head_size // 2), np.float32)

    def at(self, positions: Ints) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """float32 [N, 1, H / 2] each, for int32 [N]."""
        num = int(positions.max()) + 1
        if num > len(self._cosines):
            angles = np.arange(2 * num)[:, None, None] * self._rates
            self._cosines, self._sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return self._cosines[positions], self._sines[positions]


def stretched(rates: NDArray[np.float64], how: Stretching) -> NDArray[np.float64]:
    """Rotary rates, radians a token, for longer texts; see `Stretching`."""
    if not how.known_tokens:
        return rates / how.factor
    waves = how.known_tokens * rates / (2 * np.pi)  # of each, within the texts that the model was made for
    kept = np.clip((waves - how.low) / (how.high - how.low), 0.0, 1.0)
    return rates * (kept + (1.0 - kept) / how.factor)


@dataclass(frozen=True, slots=True)
class TileFeed:
    """`plan.Tiles` as MLX arrays."""

    tables: mx.array
    lengths: mx.array
    queries: mx.array | None
    groups: Groups | None = None
    """Queries that read a common prompt together, where attention can."""

    @classmethod
    def of(cls, tiles: Tiles, model: "Model") -> "Iterator[TileFeed]":
        """The arrays, in blocks of as many tiles as the model's attention takes at once."""
        num_tiles, width = tiles.lengths.shape
        most = max(1, model.attention_rows(tiles.tables.shape[1]) // width)
        for start in range(0, num_tiles, most):
            block = slice(start, start + most)
            tables, lengths = tiles.tables[block], tiles.lengths[block]
            groups = None
            if model.group_rows and tiles.prompts is not None:
                groups = group_rows(tables, lengths, tiles.prompts[block], model.group_rows)
            queries = None if tiles.queries is None else mx.array(tiles.queries[block])
            yield cls(mx.array(tables), mx.array(lengths), queries, groups)


@dataclass(frozen=True, slots=True)
class StretchFeed:
    """`plan.Stretches` as MLX arrays."""

    slots: mx.array
    taps: mx.array
    tails: mx.array


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens of one step, int32: `plan.Layout` as MLX arrays, less what concerns sampling."""

    tokens: mx.array
    turns: tuple[mx.array, mx.array]
    """Cosine and sine of each token's rotary angles, float32 [N, 1, H / 2]."""
    pages: mx.array
    offsets: mx.array
    """Place of each token inside its page."""
    tiles: tuple[TileFeed, ...]
    unpack: mx.array | None
    num_single: int
    single_slots: mx.array
    stretches: StretchFeed | None

    @classmethod
    def of(cls, layout: Layout, model: "Model") -> "Feed":
        """The arrays of a layout, for this model."""
        stretches = layout.stretches
        cosines, sines = model.angles.at(layout.positions)
        return cls(
            tokens=mx.array(layout.tokens),
            turns=(mx.array(cosines), mx.array(sines)),
            pages=mx.array(layout.pages),
            offsets=mx.array(layout.positions % PAGE_TOKENS),
            tiles=tuple(feed for tiles in layout.tiles for feed in TileFeed.of(tiles, model)),
            unpack=None if layout.unpack is None else mx.array(layout.unpack),
            num_single=layout.num_single,
            single_slots=mx.array(layout.single_slots),
            stretches=None
            if stretches is None
            else StretchFeed(mx.array(stretches.slots), mx.array(stretches.taps), mx.array(stretches.tails)),
        )


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that one of several machines computes: some of the layers, or some of every layer's rows.

    ranks: machines that heads, dense blocks and experts are dealt out to; `total` sums their partial outputs.
    """

    layers: range
    ranks: int = 1
    total: Callable[[mx.array], mx.array] | None = None


class Model:
    """A policy over live weights: `arrays` are used where they lie, never copied."""

    def __init__(
        self,
        config: ModelConfig,
        arrays: Mapping[str, mx.array],
        *,
        dtype: mx.Dtype | None = None,
        sort_experts: bool | None = None,
        without_kernels: Collection[str] = (),
        ops: Ops | None = None,
        share: Share | None = None,
    ) -> None:
        """dtype: of activations, that of the raw weights unless given; keys and values are kept in that of the weights.

        without_kernels: parts of `metal.check.KERNELS` that plain ops are to compute. ops: chosen already. share: what of
        the model is here, all of it unless given.
        """
        self.config = config
        self._arrays = arrays
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        share = share or Share(range(config.num_layers))
        self.layers, self._total = share.layers, share.total
        self.is_first, self.is_last = self.layers.start == 0, self.layers.stop == config.num_layers
        self._heads = config.num_heads // share.ranks, config.num_kv_heads // share.ranks
        raw_dtype = self._raw(f"model.layers.{self.layers.start}.operator_norm").dtype
        self.dtype = dtype or raw_dtype
        # Both ends need it where the head is tied to it.
        is_tied = not config.has_head
        self._embedding = self._int8("model.embed_tokens") if self.is_first or (self.is_last and is_tied) else None
        self._head = self._embedding if is_tied else self._int8("model.head") if self.is_last else None
        self._head_norm = self._raw("model.embedding_norm") if self.is_last else None
        self._layers = {index: self._layer(index) for index in self.layers}
        self.angles = Angles(config.head_size, config.rope_theta, config.stretching)
        self._rule = RouterRule(config.num_experts, config.experts_per_token, config.normalise_weights, config.routed_scale)
        self.dims = self._dims(raw_dtype)
        sort_experts = on_gpu if sort_experts is None else sort_experts
        self._ops = ops or choose_ops(self.dims, without=without_kernels, sort_experts=sort_experts)
        conv = tuple(i for i in self.layers if i not in config.attention_layers)
        attention = tuple(i for i in self.layers if i in config.attention_layers)
        self.cache_shape = CacheShape(
            attention, conv, self._heads[1], config.head_size, config.conv_kernel - 1, config.hidden_size, raw_dtype, self.dtype
        )

    @property
    def ops(self) -> str:
        """What computes, for a fingerprint: "plain" if only MLX's own ops do, else "metal" and which parts if not all."""
        return self._ops.name

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What became of each kernel on this machine."""
        return self._ops.verdicts

    def attention_rows(self, num_pages: int) -> int:
        """Queries over tables of so many pages that attention takes at once."""
        if not self._ops.keeps_pieces:
            return _NO_LIMIT
        return most_rows(num_pages, self._heads[0], self.config.head_size)

    @property
    def group_rows(self) -> int:
        """Rows with a common prompt that attention takes together; 0 if it does not."""
        return self.dims.group_rows if self._ops.shares_prompts else 0

    def hidden(self, feed: Feed, cache: Cache, routes: list[mx.array] | None = None) -> mx.array:
        """Feed tokens: writes the cache, gives the final hidden states [N, D].

        `routes`, if given, is appended the experts uint8 [N, K] of each MoE layer.
        """
        return self.finish(self.run(self.embed(feed), feed, cache, routes))

    def embed(self, feed: Feed) -> mx.array:
        """The embeddings of a feed's tokens: [N, D]. Of the first layers' machine only."""
        return unpacked_rows(self._end(self._embedding), feed.tokens, self.dtype)

    def run(self, x_ND: mx.array, feed: Feed, cache: Cache, routes: list[mx.array] | None = None) -> mx.array:
        """Take what comes into the first of these layers through them: [N, D] to [N, D]; see `hidden`."""
        for index, layer in self._layers.items():
            normed_ND, mixer = self._norm(x_ND, layer.operator_norm), layer.mixer
            if isinstance(mixer, AttentionWeights):
                x_ND = x_ND + self._attend(index, mixer, normed_ND, feed, cache)
            else:
                x_ND = x_ND + self._convolve(index, mixer, normed_ND, feed, cache)
            normed_ND = self._norm(x_ND, layer.ffn_norm)
            if layer.routing is None:
                x_ND = x_ND + self._summed(gated(normed_ND, *layer.mlp))
                continue
            route = route_by_softmax if self.config.softmax_router else self._ops.route
            routing = route(normed_ND, layer.routing.gate, layer.routing.bias, self._rule)
            x_ND = x_ND + self._summed(self._ops.experts(normed_ND, routing.experts, routing.weights, *layer.mlp))
            if routes is not None:
                routes.append(routing.record)
        return x_ND

    def finish(self, x_ND: mx.array) -> mx.array:
        """What the last layer gives to final hidden states [N, D]. Of the last layers' machine only."""
        if self._head_norm is None:
            raise AssertionError(f"layers {self.layers} have no head")
        return self._norm(x_ND, self._head_norm)

    def draw(self, hidden: mx.array, uniform: mx.array) -> tuple[mx.array, mx.array]:
        """Final hidden states [R, D] and uniform numbers [R] to tokens int32 [R] and logprobs float32 [R]; temperature 1."""
        return self._ops.draw(hidden, self._end(self._head), uniform)

    def logits(self, hidden: mx.array) -> mx.array:
        """Final hidden states [.., D] to fp32 logits [.., V], through the head, which may be the embedding."""
        return linear(hidden.astype(mx.float32), self._end(self._head))

    def _end(self, weights: Int8 | None) -> Int8:
        if weights is None:
            raise AssertionError(f"layers {self.layers} have neither embedding nor head")
        return weights

    def _summed(self, x: mx.array) -> mx.array:
        return x if self._total is None else self._total(x)

    def _norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight.astype(self.dtype), self.config.norm_eps)

    def _attend(self, index: int, weights: AttentionWeights, x_ND: mx.array, feed: Feed, cache: Cache) -> mx.array:
        (num_q, num_kv), size = self._heads, self.config.head_size
        parts = linears(x_ND, (weights.q, weights.k, weights.v))
        if weights.offsets is not None:
            parts = [part + offset.astype(self.dtype) for part, offset in zip(parts, weights.offsets, strict=True)]
        norms, by_head = weights.norms, self.config.head_norms == "each"
        if norms is not None and not by_head:
            parts = [self._norm(parts[0], norms[0]), self._norm(parts[1], norms[1]), parts[2]]
        q_NQH, k_NGH, v_NGH = (part.reshape(-1, num, size) for part, num in zip(parts, (num_q, num_kv, num_kv), strict=True))
        if norms is not None and by_head:
            q_NQH, k_NGH = self._norm(q_NQH, norms[0]), self._norm(k_NGH, norms[1])
        both_NQGH = self._rotate(mx.concatenate([q_NQH, k_NGH], axis=1), feed)
        q_NQH, k_NGH = both_NQGH[:, :num_q], both_NQGH[:, num_q:]
        keys, values = cache.keys[index], cache.values[index]
        where = (feed.pages[:, None], mx.arange(num_kv, dtype=mx.int32)[None], feed.offsets[:, None])
        keys[where] = k_NGH
        values[where] = v_NGH
        outs: list[mx.array] = []
        num_taken = 0
        for tile in feed.tiles:
            if tile.queries is None:
                q_XWQH = q_NQH[num_taken : num_taken + tile.tables.shape[0], None]
                num_taken += tile.tables.shape[0]
            else:
                q_XWQH = q_NQH[tile.queries]
            out_XWQH = self._ops.attend(q_XWQH, keys, values, tile.tables, tile.lengths, size**-0.5, tile.groups)
            outs.append(out_XWQH.reshape(-1, num_q * size))
        out_ND = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return self._summed(linear(out_ND if feed.unpack is None else out_ND[feed.unpack], weights.out))

    def _rotate(self, x_NQH: mx.array, feed: Feed) -> mx.array:
        """Rotary embedding of heads (Su et al. 2021), the halves of a head being the two coordinates."""
        cosines, sines = feed.turns
        low, high = mx.split(x_NQH, 2, axis=-1)
        return mx.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1).astype(x_NQH.dtype)

    def _convolve(self, index: int, weights: ConvWeights, x_ND: mx.array, feed: Feed, cache: Cache) -> mx.array:
        x_N3D, tails, slots = linear(x_ND, weights.into), cache.tails[index], feed.single_slots
        outs: list[mx.array] = []
        news: list[mx.array] = []
        if feed.num_single:
            out_RD, new_RTD = self._ops.convolve(x_N3D[: feed.num_single], tails[slots], weights.kernel)
            outs.append(out_RD)
            news.append(new_RTD)
        if feed.stretches is not None:
            num = feed.stretches.taps.shape[0]
            out_ND, new_STD = _convolve_stretches(
                x_N3D[feed.num_single : feed.num_single + num], tails[feed.stretches.slots], weights.kernel, feed.stretches
            )
            outs.append(out_ND)
            news.append(new_STD)
            slots = feed.stretches.slots if feed.num_single == 0 else mx.concatenate([slots, feed.stretches.slots])
        tails[slots] = news[0] if len(news) == 1 else mx.concatenate(news)
        num_padding = x_ND.shape[0] - sum(out.shape[0] for out in outs)
        if num_padding:
            outs.append(mx.zeros((num_padding, x_ND.shape[1]), x_ND.dtype))
        return linear(outs[0] if len(outs) == 1 else mx.concatenate(outs), weights.out)

    def _layer(self, index: int) -> LayerWeights:
        path = f"model.layers.{index}"
        if index in self.config.attention_layers:
            q, k, v, out = (self._int8(f"{path}.self_attn.{name}_proj") for name in ("q", "k", "v", "out"))
            norms = offsets = None
            if self.config.head_norms != "none":
                norms = self._raw(f"{path}.self_attn.q_layernorm"), self._raw(f"{path}.self_attn.k_layernorm")
            if self.config.qkv_bias:
                qkv = [self._raw(f"{path}.self_attn.{name}_bias") for name in ("q", "k", "v")]
                offsets = qkv[0], qkv[1], qkv[2]
            mixer = AttentionWeights(q, k, v, out, norms, offsets)
        else:
            into, out = (self._int8(f"{path}.conv.{name}_proj") for name in ("in", "out"))
            mixer = ConvWeights(into, out, self._raw(f"{path}.conv.conv"))
        block, routing = f"{path}.feed_forward", None
        if self.config.num_experts and index >= self.config.num_dense_layers:
            names = ("switch_mlp.gate_proj", "switch_mlp.up_proj", "switch_mlp.down_proj")
            bias = self._arrays.get(f"{block}.expert_bias")
            no_bias = mx.zeros((self.config.num_experts,), mx.float32)
            routing = RoutingWeights(self._raw(f"{block}.gate"), no_bias if bias is None else bias)
        else:
            names = ("gate_proj", "up_proj", "down_proj") if self.config.num_experts else ("w1", "w3", "w2")
        mlp = MlpWeights(*(self._int8(f"{block}.{name}") for name in names))
        return LayerWeights(self._raw(f"{path}.operator_norm"), self._raw(f"{path}.ffn_norm"), mixer, mlp, routing)

    def _dims(self, raw_dtype: mx.Dtype) -> Dims:
        """What kernels are compiled for."""
        config = self.config
        inner = next((layer.mlp.gate.codes.shape[-2] for layer in self._layers.values() if layer.routing is not None), 0)
        return Dims(
            config.hidden_size, inner, config.num_experts if inner else 0, config.experts_per_token, *self._heads,
            config.head_size, config.conv_kernel, self.dtype, raw_dtype,
        )  # fmt: skip

    def _int8(self, module: str) -> Int8:
        return Int8(*(self._array(f"{module}.{part}") for part in ("weight", "scales", "biases")))

    def _raw(self, module: str) -> mx.array:
        return self._array(f"{module}.weight")

    def _array(self, name: str) -> mx.array:
        found = self._arrays.get(name)
        if found is None:
            raise LayoutError(f"the weights lack {name}", hint="config.json and the weights are of different models")
        return found


def _convolve_stretches(x_N3D: mx.array, tails_STD: mx.array, kernel: mx.array, feed: StretchFeed) -> tuple[mx.array, mx.array]:
    """As `metal.reference.convolve_plain`, in its order of additions, for several tokens of each sequence at once."""
    gate_ND, carry_ND, value_ND = mx.split(x_N3D, 3, axis=-1)
    lines_LD = mx.concatenate([tails_STD.reshape(-1, tails_STD.shape[-1]), gate_ND * value_ND])
    kernel_LD = kernel.squeeze(-1).T
    out_ND = lines_LD[feed.taps[:, 0]] * kernel_LD[0]
    for tap in range(1, kernel_LD.shape[0]):
        out_ND = out_ND + lines_LD[feed.taps[:, tap]] * kernel_LD[tap]
    return carry_ND * out_ND, lines_LD[feed.tails]
