"""Checks each kernel on this machine before it is used: compiled, and three seeded cases against plain MLX ops.

Cases have the model's own widths, head sizes and types, since a kernel is compiled for them, and few rows. Inputs are
short numbers whose products every matrix unit forms exactly, so that the comparison sees faults and no rounding of
inputs; what is left is the rounding of sums and of the result.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.attention import MOST_QUERIES, AttentionKernel, PrefixKernel, group_rows
from metal.conv import ConvKernel
from metal.experts import ExpertsKernel
from metal.head import HeadKernel
from metal.kernels import Launcher, launch_on_metal
from metal.reference import Int8, attend_plain, convolve_plain, draw_plain, experts_plain
from metal.router import OrderKernel, RouterKernel, RouterRule, order_plain, route_plain
from metal.sizes import PAGE_TOKENS
from stoa.contracts.errors import KernelArgumentsError

KERNELS: Final = ("experts", "head", "attention", "router", "prefix", "conv")
"""The parts of a model that a kernel may compute: K1 to K6."""
_TOLERANCES: Final = {mx.float32: 2e-3, mx.bfloat16: 3e-2, mx.float16: 5e-3}
"""|difference| over |value| and the root of the mean square. A fault is above; reduced-precision matrix units and roundings are
below."""
_CLEAR: Final = 1e-5
"""Scores nearer to each other, but not equal, may be chosen either way: exp is rounded in more than one way."""
_SPREAD: Final = 2.0**-9


@dataclass(frozen=True, slots=True)
class Dims:
    """What of a model its kernels depend on. A dense model has no experts."""

    hidden: int
    inner: int
    num_experts: int
    top_k: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    conv_kernel: int
    dtype: mx.Dtype
    """Of activations."""
    raw_dtype: mx.Dtype
    """Of weights that are not int8, and of keys and values."""

    @property
    def group_rows(self) -> int:
        """Rows that the kernel of shared prompts takes at a time."""
        return max(1, min(8, MOST_QUERIES // max(1, self.num_heads // self.num_kv_heads)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a kernel computes; `reason` says why it does not."""

    kernel: str
    uses_kernel: bool
    reason: str = ""
    seconds: float = 0.0


def self_check(kernel: str, dims: Dims, launcher: Launcher = launch_on_metal) -> Verdict:
    """Compile one of KERNELS and compare it with plain ops on three seeded cases. Never raises for what a kernel does."""
    began = time.monotonic()
    try:
        reason = _CHECKS[kernel](dims, launcher)
    except KernelArgumentsError as error:
        reason = f"not made for this model: {error.message}"
    except (RuntimeError, ValueError, OSError) as error:  # a body that the driver's compiler refuses, or whose file is gone
        reason = f"does not run: {str(error)[:200]}"
    return Verdict(kernel, not reason, reason, time.monotonic() - began)


def _check_experts(dims: Dims, launcher: Launcher) -> str:
    if not dims.num_experts:
        return "this model has no experts"
    numbers, kernel = np.random.default_rng(1), ExpertsKernel(launcher)
    num_experts = min(dims.num_experts, max(dims.top_k + 3, 7))  # 8 offsets and more, as of any larger number: see attention
    shapes = ((dims.inner, dims.hidden), (dims.inner, dims.hidden), (dims.hidden, dims.inner))
    matrices = [_matrix(numbers, num_experts, *shape) for shape in shapes]
    for num_tokens in (1, 13, 64):
        x = _short(numbers, (num_tokens, dims.hidden), dims.dtype)
        # A quarter of the tokens like the first experts best: shares from nothing to several passes.
        liking = np.where(np.arange(num_experts) < dims.top_k, 4.0 * (np.arange(num_tokens)[:, None] % 4 == 0), 0.0)
        order = np.argsort(-(liking + numbers.gumbel(0, 1, (num_tokens, num_experts))), axis=1)
        experts = mx.array(order[:, : dims.top_k].astype(np.uint32))
        weights = mx.array(numbers.integers(1, 9, (num_tokens, dims.top_k)).astype(np.float32) / 8)
        wanted = experts_plain(x.astype(mx.float32), experts, weights, *matrices)
        if fault := _differ("outputs", kernel(x, experts, weights, *matrices), wanted):
            return f"{fault} at {num_tokens} tokens"
    return ""


def _check_head(dims: Dims, launcher: Launcher) -> str:
    numbers, kernel = np.random.default_rng(2), HeadKernel(launcher)
    for num_rows, num_words in ((7, 4300), (1, 33), (65, 300)):
        x, embedding = _short(numbers, (num_rows, dims.hidden), dims.dtype), _matrix(numbers, num_words, dims.hidden)
        spread = (np.arange(num_rows) + numbers.random(num_rows)) / num_rows
        uniform = mx.array(np.floor(spread * (1 << 23)).astype(np.float32) / (1 << 23))
        tokens, logprobs = kernel(x, embedding, uniform)
        wanted = draw_plain(x, embedding, uniform)
        if not mx.array_equal(tokens, wanted[0]).item():
            return f"other tokens at {num_rows} rows"
        if fault := _differ("logprobs", logprobs, wanted[1]):
            return f"{fault} at {num_rows} rows"
    return ""


def _check_attention(dims: Dims, launcher: Launcher) -> str:
    numbers, kernel, scale = np.random.default_rng(3), AttentionKernel(launcher), dims.head_size**-0.5
    # MLX compiles arguments of 8 numbers and more in another address space than shorter ones: one case has so many rows.
    for lengths in ([[1]], [[33, 34], [512, 513], [64, 65]], [[1100], [31], [1], [32], [2], [63], [5], [96]]):
        tiles = _tiles(numbers, dims, lengths)
        if fault := _differ("outputs", kernel(*tiles, scale), _attend(tiles, scale)):
            return f"{fault} at rows of {lengths} tokens"
    return ""


def _check_prefix(dims: Dims, launcher: Launcher) -> str:
    numbers, kernel, own, scale = np.random.default_rng(4), PrefixKernel(launcher), AttentionKernel(launcher), dims.head_size**-0.5
    many = [64, 0, 64, *(PAGE_TOKENS * pages for pages in (1, 3, 4, 5, 6, 7, 8))]  # 8 groups, see above
    cases = (([[40]], [32]), ([[whole + 3] for whole in many], many), ([[700, 701], [600, 601], [30, 31], [90, 91]], [576, 576, 40, 70]))
    for lengths, prompts in cases:
        tiles = _tiles(numbers, dims, lengths, prompts)
        groups = group_rows(np.array(tiles[3]), np.array(lengths, np.int32), np.array(prompts, np.int32), dims.group_rows)
        if groups is None:
            raise AssertionError("these rows share pages")
        got = own(*tiles, scale, shared=(groups, kernel(*tiles, scale, groups)))
        if fault := _differ("outputs", got, _attend(tiles, scale)):
            return f"{fault} at rows of {lengths} tokens"
    return ""


def _check_router(dims: Dims, launcher: Launcher) -> str:
    if not dims.num_experts:
        return "this model has no experts"
    numbers, kernel, order = np.random.default_rng(5), RouterKernel(launcher), OrderKernel(launcher)
    for num_tokens, normalise in ((1, True), (37, False), (64, True)):
        rule = RouterRule(dims.num_experts, dims.top_k, normalise, 1.0 if normalise else 2.5)
        x = _short(numbers, (num_tokens, dims.hidden), dims.dtype)
        # Logits of a few units: where sigmoid is all but 1, scores are equal by rounding.
        gate = _short(numbers, (dims.num_experts, dims.hidden), dims.raw_dtype, divisor=256)
        gate[numbers.integers(1, dims.num_experts, dims.num_experts // 2).tolist()] = gate[0]  # experts that tie
        bias = mx.array(numbers.integers(0, 3, dims.num_experts).astype(np.float32) / 2)
        got, wanted = kernel(x, gate, bias, rule), route_plain(x, gate, bias, rule)
        if np.array(got.experts).max() >= dims.num_experts:
            return f"experts that are none at {num_tokens} tokens"
        scores = mx.sigmoid(x.astype(mx.float32) @ gate.astype(mx.float32).T) + bias
        away = mx.abs(mx.take_along_axis(scores, got.experts, axis=1) - mx.take_along_axis(scores, wanted.experts, axis=1))
        other = got.experts != wanted.experts
        if mx.any(other & ((away > _CLEAR) | (away == 0.0))).item() or not mx.array_equal(got.record, got.experts.astype(mx.uint8)).item():
            return f"other experts at {num_tokens} tokens"
        found, right = order(got.experts, dims.num_experts), order_plain(got.experts, dims.num_experts)
        if not all(mx.array_equal(one, other).item() for one, other in zip(found, right, strict=True)):
            return f"another order at {num_tokens} tokens"
        if fault := _differ("weights", got.weights, wanted.weights):
            return f"{fault} at {num_tokens} tokens"
    return ""


def _check_conv(dims: Dims, launcher: Launcher) -> str:
    """To the bit: tokens that are fed several at a time go through plain ops."""
    numbers, kernel = np.random.default_rng(6), ConvKernel(launcher)
    taps = _normal(numbers, (dims.hidden, dims.conv_kernel, 1), dims.raw_dtype)
    for num_rows in (1, 5, 64):
        x = _normal(numbers, (num_rows, 3 * dims.hidden), dims.dtype)
        tails = _normal(numbers, (num_rows, dims.conv_kernel - 1, dims.hidden), dims.dtype)
        for name, one, other in zip(("outputs", "tails"), kernel(x, tails, taps), convolve_plain(x, tails, taps), strict=True):
            if not mx.array_equal(one, other).item():
                return f"other {name} at {num_rows} rows"
    return ""


_CHECKS: Final[dict[str, Callable[[Dims, Launcher], str]]] = {
    "experts": _check_experts,
    "head": _check_head,
    "attention": _check_attention,
    "router": _check_router,
    "prefix": _check_prefix,
    "conv": _check_conv,
}


def _differ(what: str, got: mx.array, wanted: mx.array) -> str:
    """What is wrong of a result, or ""."""
    found, right = got.astype(mx.float32), wanted.astype(mx.float32)
    worst = np.array((mx.abs(found - right) / (mx.abs(right) + mx.sqrt(mx.square(right).mean()))).max()).item()
    return "" if worst <= _TOLERANCES[got.dtype] else f"{what} differ by {worst:.3g}"


def _short(numbers: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, *, divisor: int = 4) -> mx.array:
    """Numbers of a few bits: whole ones from -8 to 8 over `divisor`."""
    return mx.array((numbers.integers(-8, 9, shape) / divisor).astype(np.float32)).astype(dtype)


def _matrix(numbers: np.random.Generator, *shape: int) -> Int8:
    """Int8 weights between -1/4 and 1/4 whose dequantised values have 8 bits."""
    *outer, width = shape
    codes = numbers.integers(0, 256, shape, dtype=np.uint8)
    groups = (*outer, width // 64)
    return Int8(mx.array(codes.view(np.uint32)), mx.full(groups, _SPREAD, mx.bfloat16), mx.full(groups, -128 * _SPREAD, mx.bfloat16))


def _normal(numbers: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(numbers.normal(0, 1, shape).astype(np.float32)).astype(dtype)


Tiled = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
"""queries, keys, values, tables, lengths, as `attend_plain` takes them."""


def _tiles(numbers: np.random.Generator, dims: Dims, lengths: list[list[int]], prompts: list[int] | None = None) -> Tiled:
    """Tiles over shuffled pages; the whole pages of equal prompts are the same. What no row holds is a large number."""
    counts = [-(-max(its) // PAGE_TOKENS) for its in lengths]
    num_pages = sum(counts) + 2
    table = np.zeros((len(lengths), max(counts)), np.int32)
    free = numbers.permutation(num_pages).tolist()
    owners: dict[int, int] = {}
    for tile, count in enumerate(counts):
        prompt = 0 if prompts is None else prompts[tile]
        whole = prompt // PAGE_TOKENS if max(lengths[tile]) > prompt else 0
        owner = owners.setdefault(prompt, tile) if whole else tile
        table[tile, :count] = [free.pop() for _ in range(count)]
        table[tile, :whole] = table[owner, :whole]
    held = np.zeros(num_pages * PAGE_TOKENS, bool)
    for tile, its in enumerate(lengths):
        places = np.arange(max(its))
        held[table[tile, places // PAGE_TOKENS] * PAGE_TOKENS + places % PAGE_TOKENS] = True
    pool = (num_pages, dims.num_kv_heads, PAGE_TOKENS, dims.head_size)
    keys, values = (_blank(_short(numbers, pool, dims.raw_dtype), held.reshape(num_pages, 1, PAGE_TOKENS, 1)) for _ in range(2))
    queries = _short(numbers, (len(lengths), len(lengths[0]), dims.num_heads, dims.head_size), dims.dtype)
    return queries, keys, values, mx.array(table), mx.array(np.array(lengths, np.int32))


def _blank(pool: mx.array, held: NDArray[np.bool_]) -> mx.array:
    return mx.where(mx.array(held.astype(np.uint8)) == 1, pool, mx.array(1e4, dtype=pool.dtype))


def _attend(tiles: Tiled, scale: float) -> mx.array:
    queries, keys, values, tables, lengths = tiles
    return attend_plain(queries.astype(mx.float32), keys.astype(mx.float32), values.astype(mx.float32), tables, lengths, scale)
