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

from metal.attention import PAGE, AttentionKernel, Paged, PrefixKernel, attend_plain, share
from metal.conv import ConvKernel, conv_plain
from metal.experts import ExpertsKernel, experts_plain
from metal.head import HeadKernel, head_plain
from metal.int8 import Int8
from metal.kernels import Launcher, launch_on_metal
from metal.routing import RouterKernel, RouterRule, Routing, order_plain, route_plain
from stoa.contracts.errors import KernelArgumentsError

KERNELS: Final = ("experts", "head", "attention", "router", "prefix", "conv")
"""The parts of a model that a kernel may compute: K1 to K6."""
MOST_MEMBERS: Final = 8
"""Episodes of a group, at most."""
_TOLERANCES: Final = {mx.float32: 2e-3, mx.bfloat16: 3e-2, mx.float16: 5e-3}
"""|difference| over the root of the mean square. A fault is above; reduced-precision matrix units and roundings are below."""
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
    except (RuntimeError, ValueError) as error:  # MLX raises these for a body that the driver's compiler refuses
        reason = f"does not run: {str(error)[:200]}"
    return Verdict(kernel, not reason, reason, time.monotonic() - began)


def _check_experts(dims: Dims, launcher: Launcher) -> str:
    if not dims.num_experts:
        return "this model has no experts"
    numbers, kernel = np.random.default_rng(1), ExpertsKernel(launcher)
    num_experts = dims.top_k + 3
    shapes = ((dims.inner, dims.hidden), (dims.inner, dims.hidden), (dims.hidden, dims.inner))
    matrices = [_matrix(numbers, num_experts, *shape) for shape in shapes]
    for num_tokens in (1, 13, 64):
        x = _short(numbers, (num_tokens, dims.hidden), dims.dtype)
        # A quarter of the tokens like the first experts best: shares from nothing to several passes.
        liking = np.where(np.arange(num_experts) < dims.top_k, 4.0 * (np.arange(num_tokens)[:, None] % 4 == 0), 0.0)
        order = np.argsort(-(liking + numbers.gumbel(0, 1, (num_tokens, num_experts))), axis=1)
        experts = mx.array(order[:, : dims.top_k].astype(np.uint32))
        weights = mx.array(numbers.integers(1, 9, (num_tokens, dims.top_k)).astype(np.float32) / 8)
        routing = Routing(experts, weights, experts.astype(mx.uint8), *order_plain(experts, num_experts))
        wanted = experts_plain(x.astype(mx.float32), routing, *matrices)
        if fault := _differ("outputs", kernel(x, routing, *matrices), wanted):
            return f"{fault} at {num_tokens} tokens"
    return ""


def _check_head(dims: Dims, launcher: Launcher) -> str:
    numbers, kernel = np.random.default_rng(2), HeadKernel(launcher)
    for num_rows, num_words in ((2, 4300), (9, 33), (65, 300)):
        x, embedding = _short(numbers, (num_rows, dims.hidden), dims.dtype), _matrix(numbers, num_words, dims.hidden)
        keys = mx.array(numbers.integers(0, 1 << 63, num_rows).astype(np.uint64))
        positions = mx.array(numbers.integers(0, 1 << 20, num_rows))
        tokens, logprobs = kernel(x, embedding, keys, positions)
        wanted = head_plain(x, embedding, keys, positions)
        if not mx.array_equal(tokens, wanted[0]).item():
            return f"other tokens at {num_rows} rows"
        if fault := _differ("logprobs", logprobs, wanted[1]):
            return f"{fault} at {num_rows} rows"
    return ""


def _check_attention(dims: Dims, launcher: Launcher) -> str:
    numbers, kernel = np.random.default_rng(3), AttentionKernel(launcher)
    for lengths in ([1], [33, 512, 64], [1100, 31]):
        q, paged = _rows(numbers, dims, lengths)
        if fault := _differ("outputs", kernel(q, paged, dims.head_size**-0.5), _attend(q, paged, dims)):
            return f"{fault} at rows of {lengths} tokens"
    return ""


def _check_prefix(dims: Dims, launcher: Launcher) -> str:
    numbers, kernel, own = np.random.default_rng(4), PrefixKernel(launcher), AttentionKernel(launcher)
    for lengths, members, prompts in (
        ([40], [[0]], [32]),
        ([70, 3, 97], [[2, 0]], [64]),
        ([700, 600, 70, 90], [[0, 1], [3, 2]], [576, 40]),
    ):
        q, paged = _rows(numbers, dims, lengths, shared=list(zip(members, prompts, strict=True)))
        groups, scale = share(members, prompts, len(lengths), MOST_MEMBERS), dims.head_size**-0.5
        if groups is None:
            raise AssertionError("these groups share pages")
        got = own(q, paged, scale, shared=(groups, kernel(q, paged, groups, scale)))
        if fault := _differ("outputs", got, _attend(q, paged, dims)):
            return f"{fault} at rows of {lengths} tokens"
    return ""


def _check_router(dims: Dims, launcher: Launcher) -> str:
    if not dims.num_experts:
        return "this model has no experts"
    numbers, kernel = np.random.default_rng(5), RouterKernel(launcher)
    for num_tokens, normalise in ((1, True), (37, False), (64, True)):
        rule = RouterRule(dims.num_experts, dims.top_k, normalise, 1.0 if normalise else 2.5)
        x = _short(numbers, (num_tokens, dims.hidden), dims.dtype)
        gate = _short(numbers, (dims.num_experts, dims.hidden), dims.dtype, divisor=32)
        gate[numbers.integers(1, dims.num_experts, dims.num_experts // 2).tolist()] = gate[0]  # experts that tie
        bias = mx.array(numbers.integers(0, 3, dims.num_experts).astype(np.float32) / 2)
        got, wanted = kernel(x, gate, bias, rule), route_plain(x, gate, bias, rule)
        for name in ("experts", "record", "order", "offsets", "counts"):
            if not mx.array_equal(getattr(got, name), getattr(wanted, name)).item():
                return f"other {name} at {num_tokens} tokens"
        if fault := _differ("weights", got.weights, wanted.weights):
            return f"{fault} at {num_tokens} tokens"
    return ""


def _check_conv(dims: Dims, launcher: Launcher) -> str:
    numbers, kernel = np.random.default_rng(6), ConvKernel(launcher)
    taps = _short(numbers, (dims.hidden, dims.conv_kernel), dims.dtype)
    for num_rows in (1, 5, 64):
        projected = _short(numbers, (num_rows, 3 * dims.hidden), dims.dtype)
        tails = _short(numbers, (num_rows, dims.conv_kernel - 1, dims.hidden), dims.dtype)
        active = mx.array(numbers.random(num_rows) < 0.7)  # pyright: ignore[reportArgumentType] - MLX takes bools
        got = kernel(projected, tails, taps, active)
        wanted = conv_plain(projected.astype(mx.float32), tails.astype(mx.float32), taps.astype(mx.float32), active)
        for name, one, other in zip(("outputs", "tails"), got, wanted, strict=True):
            if fault := _differ(name, one, other):
                return f"{fault} at {num_rows} rows"
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
    worst = np.array(mx.abs(found - right).max() / mx.sqrt(mx.square(right).mean())).item()
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


def _rows(
    numbers: np.random.Generator, dims: Dims, lengths: list[int], *, shared: list[tuple[list[int], int]] | None = None
) -> tuple[mx.array, Paged]:
    """Queries of rows over shuffled pages; what no row holds is NaN."""
    counts = [-(-length // PAGE) for length in lengths]
    table = np.zeros((len(lengths), max(counts)), np.int32)
    free = numbers.permutation(sum(counts) + 2).tolist()
    for row, count in enumerate(counts):
        table[row, :count] = [free.pop() for _ in range(count)]
    for members, prompt in shared or []:
        for row in members[1:]:
            table[row, : prompt // PAGE] = table[members[0], : prompt // PAGE]
    pool = (sum(counts) + 2, dims.num_kv_heads, PAGE, dims.head_size)
    held = np.zeros(pool[0] * PAGE, bool)
    for row, length in enumerate(lengths):
        places = np.arange(length)
        held[table[row, places // PAGE] * PAGE + places % PAGE] = True
    keys, values = (_blank(_short(numbers, pool, dims.dtype), held.reshape(pool[0], 1, PAGE, 1)) for _ in range(2))
    q = _short(numbers, (len(lengths), dims.num_heads, dims.head_size), dims.dtype)
    return q, Paged(keys, values, mx.array(table), mx.array(np.array(lengths, np.int32)), max(lengths))


def _blank(pool: mx.array, held: NDArray[np.bool_]) -> mx.array:
    return mx.where(mx.array(held.astype(np.uint8)) == 1, pool, mx.array(np.nan, dtype=pool.dtype))


def _attend(q: mx.array, paged: Paged, dims: Dims) -> mx.array:
    wide = paged._replace(keys=paged.keys.astype(mx.float32), values=paged.values.astype(mx.float32))
    return attend_plain(q.astype(mx.float32), wide, dims.head_size**-0.5)
