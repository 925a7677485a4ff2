"""The forward pass of LFM2 and LFM2-MoE on int8 weights with plain MLX ops, for rows of different lengths at once.

Weights are named and packed as `stoa.weights.layout` says and may change in place between two calls. Nothing here
samples, schedules or knows of episodes. Activations are fp32 where the layout's raw type is, else bf16; router and
final logits are always computed in fp32.

Legend: N tokens fed (all rows packed), S rows fed, W most tokens of one row, R rows of the cache, C its capacity,
D hidden size, Q query heads, G key/value heads, H head size, E experts, K experts a token, V vocabulary, T taps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx

from metal.router import Router, RouterRule
from stoa.contracts.errors import LayoutError
from stoa.weights.layout import BITS, GROUP_SIZE
from worker_mac.cache import Cache, CacheShape
from worker_mac.model_config import ModelConfig

SORT_EXPERTS_FROM: Final = 64
"""On a GPU, expert rows are sorted from this many on, so that rows of one expert share its weights."""


class Int8(NamedTuple):
    """An int8 matrix or stack of them: codes uint32 [.., out, in / 4], scales and biases bf16 [.., out, in / 64]."""

    codes: mx.array
    scales: mx.array
    biases: mx.array


class AttentionWeights(NamedTuple):
    """Projections and the norms of queries and keys [H]."""

    q: Int8
    k: Int8
    v: Int8
    out: Int8
    q_norm: mx.array
    k_norm: mx.array


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


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens for some rows, packed row after row; what the host planned, as arrays.

    `rows` None: all rows of the cache in order. `padded` None: every row gets exactly W tokens, so packed is padded.
    `active` None: all rows; else False rows are fed a dummy whose keys will be overwritten and whose tail is kept.
    """

    tokens: mx.array  # int32 [N]
    slots: mx.array  # int32 [N], row of the cache of each token
    positions: mx.array  # int32 [N]
    starts: mx.array  # int32 [S], position of each row's first token
    width: int
    rows: mx.array | None = None  # int32 [S]
    padded: mx.array | None = None  # int32 [S, W], index of each token in the packed order; any valid one for padding
    packed: mx.array | None = None  # int32 [N], index of each packed token in the flattened padded order
    counts: mx.array | None = None  # int32 [S], tokens of each row, where they differ
    active: mx.array | None = None  # bool [S]

    def pad(self, x: mx.array) -> mx.array:
        """[N, ..] -> [S, W, ..]; padding repeats a token and is never read."""
        if self.padded is None:
            return x.reshape(-1, self.width, *x.shape[1:])
        return x[self.padded]

    def pack(self, x: mx.array) -> mx.array:
        """[S, W, ..] -> [N, ..]."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.packed is None else flat[self.packed]


def linear(x: mx.array, weight: Int8) -> mx.array:
    """X [.., in] times an int8 matrix [out, in], transposed: [.., out] in the type of x."""
    return mx.quantized_matmul(x, *weight, transpose=True, group_size=GROUP_SIZE, bits=BITS)


def silu(x: mx.array) -> mx.array:
    """X * sigmoid(x)."""
    return x * mx.sigmoid(x)


class Model:
    """A policy over live weights: `arrays` are used where they lie, never copied."""

    def __init__(self, config: ModelConfig, arrays: Mapping[str, mx.array], *, sort_experts: bool | None = None) -> None:
        self.config = config
        self._arrays = arrays
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        self._sort_experts = on_gpu if sort_experts is None else sort_experts
        self.dtype = self._raw("model.embedding_norm").dtype
        self._embedding = self._int8("model.embed_tokens")
        self._head_norm = self._raw("model.embedding_norm")
        self._layers = [self._layer(index) for index in range(config.num_layers)]
        self.router: Router | None = None
        if config.num_experts:
            rule = RouterRule(config.num_experts, config.experts_per_token, config.normalise_weights, config.routed_scale)
            self.router = Router(rule)

    @property
    def cache_shape(self) -> CacheShape:
        """Shape of this model's cache."""
        config = self.config
        conv = tuple(i for i in range(config.num_layers) if i not in config.attention_layers)
        return CacheShape(
            config.attention_layers, conv, config.num_kv_heads, config.head_size, config.conv_kernel - 1,
            config.hidden_size, self.dtype,
        )  # fmt: skip

    @property
    def ops(self) -> str:
        """What computes: "metal" if an own kernel does a part, "plain" if only MLX does."""
        return "metal" if self.router is not None and self.router.switch.uses_kernel else "plain"

    def new_cache(self, num_rows: int) -> Cache:
        """An empty cache of `num_rows` rows."""
        return Cache(self.cache_shape, num_rows)

    def hidden(self, feed: Feed, cache: Cache, routes: list[mx.array] | None = None) -> mx.array:
        """Feed tokens: writes the cache, gives the final hidden states [N, D]. The cache must have room for them.

        `routes`, if given, is appended the experts [N, K] of each MoE layer.
        """
        columns_C = mx.arange(cache.capacity, dtype=mx.int32)
        places_SW = feed.starts[:, None] + mx.arange(feed.width, dtype=mx.int32)
        visible_S1WC = (columns_C <= places_SW[..., None])[:, None]
        codes, scales, biases = (array[feed.tokens] for array in self._embedding)
        x_ND = mx.dequantize(codes, scales.astype(self.dtype), biases.astype(self.dtype), group_size=GROUP_SIZE, bits=BITS)
        for index, layer in enumerate(self._layers):
            normed_ND, mixer = self._norm(x_ND, layer.operator_norm), layer.mixer
            if isinstance(mixer, AttentionWeights):
                x_ND = x_ND + self._attend(index, mixer, normed_ND, feed, cache, visible_S1WC)
            else:
                x_ND = x_ND + self._convolve(index, mixer, normed_ND, feed, cache)
            normed_ND = self._norm(x_ND, layer.ffn_norm)
            if layer.routing is None or self.router is None:
                x_ND = x_ND + self._mlp(layer.mlp, normed_ND)
            else:
                logits_NE = normed_ND.astype(mx.float32) @ layer.routing.gate.astype(mx.float32).T
                experts_NK, weights_NK = self.router(logits_NE, layer.routing.bias)
                x_ND = x_ND + self._experts(layer.mlp, normed_ND, experts_NK, weights_NK)
                if routes is not None:
                    routes.append(experts_NK)
        return self._norm(x_ND, self._head_norm)

    def logits(self, hidden: mx.array) -> mx.array:
        """Final hidden states [.., D] to fp32 logits [.., V], through the tied embedding."""
        return linear(hidden.astype(mx.float32), self._embedding)

    def _norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self.config.norm_eps)

    def _attend(self, index: int, weights: AttentionWeights, x_ND: mx.array, feed: Feed, cache: Cache, visible_S1WC: mx.array) -> mx.array:
        config = self.config
        num_q, num_kv, size = config.num_heads, config.num_kv_heads, config.head_size
        q_NQH = self._norm(linear(x_ND, weights.q).reshape(-1, num_q, size), weights.q_norm)
        k_NGH = self._norm(linear(x_ND, weights.k).reshape(-1, num_kv, size), weights.k_norm)
        v_NGH = linear(x_ND, weights.v).reshape(-1, num_kv, size)
        both_NQGH = self._rotate(mx.concatenate([q_NQH, k_NGH], axis=1), feed.positions)
        q_NQH, k_NGH = both_NQGH[:, :num_q], both_NQGH[:, num_q:]
        heads_G = mx.arange(num_kv, dtype=mx.int32)
        where = (feed.slots[:, None], heads_G[None], feed.positions[:, None])
        cache.keys[index][where] = k_NGH
        cache.values[index][where] = v_NGH
        keys, values = cache.keys[index], cache.values[index]
        if feed.rows is not None:
            keys, values = keys[feed.rows], values[feed.rows]
        q_SQWH = feed.pad(q_NQH).transpose(0, 2, 1, 3)
        out_SQWH = mx.fast.scaled_dot_product_attention(q_SQWH, keys, values, scale=size**-0.5, mask=visible_S1WC)
        out_SWQH = out_SQWH.transpose(0, 2, 1, 3)
        return linear(feed.pack(out_SWQH.reshape(*out_SWQH.shape[:2], -1)), weights.out)

    def _rotate(self, x: mx.array, positions: mx.array) -> mx.array:
        """Rotary embedding of heads [N, heads, H] at int32 [N] positions."""
        # Each token is its own row of length 1 here, so that one array of offsets gives every token its position.
        size, theta = self.config.head_size, self.config.rope_theta
        return mx.fast.rope(x[:, :, None], size, traditional=False, base=theta, scale=1.0, offset=positions)[:, :, 0]

    def _convolve(self, index: int, weights: ConvWeights, x_ND: mx.array, feed: Feed, cache: Cache) -> mx.array:
        gate_ND, carry_ND, value_ND = mx.split(linear(x_ND, weights.into), 3, axis=-1)
        tails = cache.tails[index]
        tail_STD = tails if feed.rows is None else tails[feed.rows]
        line_SLD = mx.concatenate([tail_STD, feed.pad(gate_ND * value_ND)], axis=1)
        num_taps, width = self.config.conv_kernel, feed.width
        kernel_TD = weights.kernel.squeeze(-1).T
        # One order of additions for every width, so that a row does not depend on what it was fed together with.
        out_SWD = line_SLD[:, :width] * kernel_TD[0]
        for tap in range(1, num_taps):
            out_SWD = out_SWD + line_SLD[:, tap : tap + width] * kernel_TD[tap]
        if feed.counts is None:
            new_STD = line_SLD[:, width:]
        else:
            places = feed.counts[:, None] + mx.arange(num_taps - 1, dtype=mx.int32)
            new_STD = mx.take_along_axis(line_SLD, places[..., None], axis=1)
        if feed.active is not None:
            new_STD = mx.where(feed.active[:, None, None], new_STD, tail_STD)
        if feed.rows is None:
            cache.tails[index] = new_STD
        else:
            cache.tails[index][feed.rows] = new_STD
        return linear(carry_ND * feed.pack(out_SWD), weights.out)

    def _mlp(self, weights: MlpWeights, x_ND: mx.array) -> mx.array:
        return linear(silu(linear(x_ND, weights.gate)) * linear(x_ND, weights.up), weights.down)

    def _experts(self, weights: MlpWeights, x_ND: mx.array, experts_NK: mx.array, weights_NK: mx.array) -> mx.array:
        rows, chosen, order = x_ND[:, None, None], experts_NK, None
        top_k = experts_NK.shape[-1]
        if self._sort_experts and experts_NK.size >= SORT_EXPERTS_FROM:
            order = mx.argsort(experts_NK.reshape(-1))
            rows, chosen = x_ND[order // top_k][:, None], experts_NK.reshape(-1)[order]

        def project(x: mx.array, weight: Int8) -> mx.array:
            return mx.gather_qmm(
                x, *weight, rhs_indices=chosen, transpose=True, group_size=GROUP_SIZE, bits=BITS,
                sorted_indices=order is not None,
            )  # fmt: skip

        inner = silu(project(rows, weights.gate)) * project(rows, weights.up)
        out = project(inner, weights.down).squeeze(-2)
        if order is not None:
            out = out[mx.argsort(order)].reshape(-1, top_k, out.shape[-1])
        return (out * weights_NK[..., None].astype(out.dtype)).sum(axis=1)

    def _layer(self, index: int) -> LayerWeights:
        path = f"model.layers.{index}"
        if index in self.config.attention_layers:
            q, k, v, out = (self._int8(f"{path}.self_attn.{name}_proj") for name in ("q", "k", "v", "out"))
            q_norm, k_norm = (self._raw(f"{path}.self_attn.{name}_layernorm") for name in ("q", "k"))
            mixer = AttentionWeights(q, k, v, out, q_norm, k_norm)
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

    def _int8(self, module: str) -> Int8:
        return Int8(*(self._array(f"{module}.{part}") for part in ("weight", "scales", "biases")))

    def _raw(self, module: str) -> mx.array:
        return self._array(f"{module}.weight")

    def _array(self, name: str) -> mx.array:
        found = self._arrays.get(name)
        if found is None:
            raise LayoutError(f"the weights lack {name}", hint="config.json and the weights are of different models")
        return found
