"""Times each kernel and the plain ops it stands for on this Mac, beside what the roofline says of its chip.

    python -m metal.bench      prints `Report` as JSON; `stoa bench kernels` puts it into words

Each kernel is timed at the shapes of one layer of LFM2.5-8B-A1B at one width of batch and multiplied by the number of
layers. Where there is no Metal back end nothing is timed and only the roofline is given.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from metal import roofline
from metal.attention import AttentionKernel, PrefixKernel, group_rows
from metal.check import Dims, Tiled, Verdict
from metal.conv import ConvKernel
from metal.experts import ExpertsKernel
from metal.head import HeadKernel
from metal.kernels import Launcher, launch_on_metal, metal_works
from metal.ops import verdicts
from metal.reference import Int8, attend_plain, convolve_plain, draw_plain, experts_plain
from metal.router import RouterKernel, RouterRule, route_plain
from metal.sizes import PAGE_TOKENS
from stoa.telemetry import log as telemetry

NAMES = {"K1": "experts", "K2": "head", "K3": "attention", "K4": "router", "K5": "prefix", "K6": "conv"}
_CALLS_A_TRY = 8
_TRIES = 7

Result = mx.array | Iterable[mx.array]
Pair = tuple[Callable[[], Result], Callable[[], Result], int]
"""A call of the kernel, of the plain ops, and how many layers do it."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one decode step over all layers; None where nothing was or can be said."""

    kernel: str
    kernel_seconds: float | None
    plain_seconds: float | None
    roofline_seconds: float | None
    stock_roofline_seconds: float | None


def chip_name() -> str:
    """What the system calls its chip, "Apple M4 Pro"; "" where it is no Mac."""
    if sys.platform != "darwin":
        return ""
    asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=10, check=False)
    return asked.stdout.strip()


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured here: `verdicts` of the kernels at these widths, and a row each. Without Metal nothing is."""

    chip: str
    measured: bool
    rows: tuple[Timed, ...]
    verdicts: tuple[Verdict, ...]


def dims_of(shape: roofline.Shape) -> Dims:
    """What kernels are compiled for in a bf16 model of this shape."""
    return Dims(
        shape.hidden, shape.inner, shape.num_experts, shape.top_k, shape.num_heads, shape.num_kv_heads, shape.head_size,
        shape.conv_kernel, mx.bfloat16, mx.bfloat16,
    )  # fmt: skip


def measure(
    shape: roofline.Shape = roofline.LFM25,
    step: roofline.Step = roofline.FULL_STEP,
    *,
    launcher: Launcher = launch_on_metal,
    available: Callable[[], bool] = metal_works,
    chip: str | None = None,
) -> Report:
    """Check every kernel, then time those that agree. Takes about a minute and 1 GB on a Mac; elsewhere it times nothing."""
    name = chip_name() if chip is None else chip
    known, works, can_time = roofline.chip_named(name), roofline.work(shape, step), available()
    # Plain ops read the shared tokens as they read all others; the tables of README.md have K3 there.
    works["K5"] = works["K5"][0], roofline.work(shape, roofline.Step(step.rows, step.shared_tokens))["K3"][1]
    found = verdicts(dims_of(shape), launcher=launcher, available=available)
    agree = {one.kernel for one in found if one.uses_kernel}
    rows: list[Timed] = []
    for number, kernel in NAMES.items():
        ours, stock = (one.seconds(known) if known else None for one in works[number])
        by_kernel, by_plain = None, None
        if can_time:
            kernel_call, plain_call, num_layers = _PAIRS[kernel](shape, step, launcher)
            by_kernel = _seconds(kernel_call) * num_layers if kernel in agree else None
            by_plain = _seconds(plain_call) * num_layers
            mx.clear_cache()
        rows.append(Timed(kernel, by_kernel, by_plain, ours, stock))
    return Report(name, can_time, tuple(rows), found)


def _seconds(call: Callable[[], Result]) -> float:
    """Median seconds of a call; several are put into one evaluation, so that waiting for the GPU is shared by them."""

    def once() -> float:
        began = time.perf_counter()
        mx.eval([call() for _ in range(_CALLS_A_TRY)])
        return (time.perf_counter() - began) / _CALLS_A_TRY

    once()  # compiles
    return statistics.median(once() for _ in range(_TRIES))


def _matrix(*shape: int) -> Int8:
    *outer, width = shape
    codes = mx.random.randint(0, 1 << 31, (*outer, width // 4)).astype(mx.uint32)
    groups = (*outer, width // 64)
    made = Int8(codes, mx.full(groups, 2.0**-9, mx.bfloat16), mx.full(groups, -0.25, mx.bfloat16))
    mx.eval(*made)
    return made


def _numbers(*shape: int) -> mx.array:
    made = mx.random.normal(shape).astype(mx.bfloat16)
    mx.eval(made)
    return made


def _experts(shape: roofline.Shape, step: roofline.Step, launcher: Launcher) -> Pair:
    kernel, x = ExpertsKernel(launcher), _numbers(step.rows, shape.hidden)
    up = (shape.num_experts, shape.inner, shape.hidden)
    matrices = (_matrix(*up), _matrix(*up), _matrix(shape.num_experts, shape.hidden, shape.inner))
    chosen = np.argsort(np.random.default_rng(0).random((step.rows, shape.num_experts)), axis=1)[:, : shape.top_k]
    experts = mx.array(chosen.astype(np.uint32))
    weights = mx.ones(experts.shape)
    return (
        lambda: kernel(x, experts, weights, *matrices),
        lambda: experts_plain(x, experts, weights, *matrices, sort=True),
        shape.moe_layers,
    )


def _head(shape: roofline.Shape, step: roofline.Step, launcher: Launcher) -> Pair:
    kernel, x, embedding = HeadKernel(launcher), _numbers(step.rows, shape.hidden), _matrix(shape.vocab, shape.hidden)
    uniform = mx.arange(step.rows) / step.rows
    return lambda: kernel(x, embedding, uniform), lambda: draw_plain(x, embedding, uniform), 1


def _tiles(shape: roofline.Shape, step: roofline.Step, num_tokens: int, num_shared: int) -> Tiled:
    """Rows of `num_tokens` tokens of which `num_shared` are in the same pages for each group."""
    a_row, shared = -(-num_tokens // PAGE_TOKENS), num_shared // PAGE_TOKENS
    ids = np.arange(step.rows * a_row, dtype=np.int32).reshape(step.rows, a_row)
    ids[:, :shared] = ids[np.arange(step.rows) // step.group_rows * step.group_rows, :shared]
    pool = (ids.size, shape.num_kv_heads, PAGE_TOKENS, shape.head_size)
    queries = _numbers(step.rows, 1, shape.num_heads, shape.head_size)
    return queries, _numbers(*pool), _numbers(*pool), mx.array(ids), mx.full((step.rows, 1), num_tokens, mx.int32)


def _attention(shape: roofline.Shape, step: roofline.Step, launcher: Launcher) -> Pair:
    kernel, scale = AttentionKernel(launcher), shape.head_size**-0.5
    tiles = _tiles(shape, step, step.tokens, 0)
    return lambda: kernel(*tiles, scale), lambda: attend_plain(*tiles, scale), shape.attention_layers


def _prefix(shape: roofline.Shape, step: roofline.Step, launcher: Launcher) -> Pair:
    """The shared tokens alone: once a group by K5, or once a row by plain ops."""
    kernel, scale = PrefixKernel(launcher), shape.head_size**-0.5
    tiles = _tiles(shape, step, step.shared_tokens + 1, step.shared_tokens)
    prompts = np.full(step.rows, step.shared_tokens, np.int32)
    groups = group_rows(np.array(tiles[3]), np.array(tiles[4]), prompts, step.group_rows)
    if groups is None:
        raise ValueError(f"no page is shared by rows that share {step.shared_tokens} tokens")
    queries, keys, values, tables, lengths = tiles
    shared = queries, keys, values, tables[:, : step.shared_tokens // PAGE_TOKENS], lengths - 1
    return lambda: kernel(*tiles, scale, groups), lambda: attend_plain(*shared, scale), shape.attention_layers


def _router(shape: roofline.Shape, step: roofline.Step, launcher: Launcher) -> Pair:
    kernel, x, gate = RouterKernel(launcher), _numbers(step.rows, shape.hidden), _numbers(shape.num_experts, shape.hidden)
    rule, bias = RouterRule(shape.num_experts, shape.top_k, True, 1.0), mx.zeros((shape.num_experts,))
    return lambda: kernel(x, gate, bias, rule), lambda: route_plain(x, gate, bias, rule), shape.moe_layers


def _conv(shape: roofline.Shape, step: roofline.Step, launcher: Launcher) -> Pair:
    kernel, projected = ConvKernel(launcher), _numbers(step.rows, 3 * shape.hidden)
    tails, taps = _numbers(step.rows, shape.conv_kernel - 1, shape.hidden), _numbers(shape.hidden, shape.conv_kernel, 1)
    return lambda: kernel(projected, tails, taps), lambda: convolve_plain(projected, tails, taps), shape.conv_layers


_PAIRS: dict[str, Callable[[roofline.Shape, roofline.Step, Launcher], Pair]] = {
    "experts": _experts,
    "head": _head,
    "attention": _attention,
    "router": _router,
    "prefix": _prefix,
    "conv": _conv,
}


def main() -> int:
    """Print the report of this machine; what is logged on the way goes to stderr."""
    telemetry.configure()
    sys.stdout.write(json.dumps(asdict(measure())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
