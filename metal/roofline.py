"""What each kernel moves and computes in one decode step, by formula, beside stock MLX; nothing here was measured.

Time is the larger of bytes over 80 % of a chip's bandwidth and float operations over 60 % of its fp32 peak. The stock
expert kernel is simulated from its tiling in MLX 0.32.4: from 16 sorted rows and 4 rows an expert on, 16-row tiles over
the sorted list, each computed once for every expert in it; below that one matrix-vector product a row.

Legend: B rows, L tokens a row attends to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BANDWIDTH_SHARE: Final = 0.8
FLOPS_SHARE: Final = 0.6
INT8_BYTES: Final = 1.0 + 2 * 2 / 64
"""Bytes of an int8 code with its part of a bf16 scale and bias for 64 of them."""
_ACTIVATION_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Chip:
    """Public figures: memory bandwidth, and fp32 peak of the GPU."""

    name: str
    gigabytes_a_second: float
    teraflops: float


CHIPS: Final = (
    Chip("M1", 68, 2.6),
    Chip("M2", 100, 3.6),
    Chip("M4", 120, 4.3),
    Chip("M3 Pro", 150, 6.4),
    Chip("M4 Pro", 273, 8.5),
    Chip("M4 Max", 546, 17.0),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as the formulas need it; the defaults are LFM2.5-8B-A1B."""

    hidden: int = 2048
    inner: int = 1792
    num_experts: int = 32
    top_k: int = 4
    moe_layers: int = 22
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 64
    attention_layers: int = 6
    conv_layers: int = 18
    conv_kernel: int = 3
    vocab: int = 128_000


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step: rows, tokens each attends to, and how many of them its group of `group_rows` shares."""

    rows: int = 64
    tokens: int = 4096
    shared_tokens: int = 0
    group_rows: int = 8


LFM25: Final = Shape()
FULL_STEP: Final = Step(shared_tokens=2048)
"""The widest sweep of a Mac with memory for it, late in its episodes."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of all layers together."""

    num_bytes: float
    num_flops: float
    num_launches: int

    def seconds(self, chip: Chip) -> float:
        """By the roofline; launches cost nothing here."""
        moved = self.num_bytes / (chip.gigabytes_a_second * 1e9 * BANDWIDTH_SHARE)
        return max(moved, self.num_flops / (chip.teraflops * 1e12 * FLOPS_SHARE))


@dataclass(frozen=True, slots=True)
class Tiling:
    """`row_overcompute`: rows computed for each row wanted; `weight_reads`: reads of an expert's weights for each expert used."""

    row_overcompute: float
    weight_reads: float
    num_experts: float


def draw_experts(rows: int, num_experts: int, top_k: int, *, skew: float, seed: int) -> NDArray[np.int64]:
    """Rows of each expert for random distinct choices: int64 [E]. `skew`: deviation of the log of an expert's likelihood."""
    numbers = np.random.default_rng(seed)
    liking = numbers.normal(0.0, skew, num_experts) if skew else np.zeros(num_experts)
    chosen = np.argsort(-(liking + numbers.gumbel(0.0, 1.0, (rows, num_experts))), axis=1)[:, :top_k]
    return np.bincount(chosen.reshape(-1), minlength=num_experts)


def our_tiling(counts: NDArray[np.int64]) -> Tiling:
    """K1: 8-row tiles of one expert, weights read once for up to 32 of its rows."""
    used = int((counts > 0).sum())
    computed, passes = int((-(-counts // 8) * 8).sum()), int((-(-counts // 32)).sum())
    return Tiling(computed / int(counts.sum()), passes / used, used)


def stock_tiling(counts: NDArray[np.int64]) -> Tiling:
    """Stock MLX `gather_qmm` on sorted rows."""
    rows, used = int(counts.sum()), int((counts > 0).sum())
    if rows < 16 or rows // counts.size < 4:
        return Tiling(1.0, rows / used, used)
    experts = np.repeat(np.arange(counts.size), counts)
    runs = sum(len(np.unique(experts[first : first + 16])) for first in range(0, rows, 16))
    return Tiling(16 * runs / rows, runs / used, used)


def mean_tiling(shape: Shape, rows: int, *, stock: bool, skew: float = 0.0, num_draws: int = 200) -> Tiling:
    """Mean over seeded draws of the experts."""
    tile = stock_tiling if stock else our_tiling
    drawn = [tile(draw_experts(rows, shape.num_experts, shape.top_k, skew=skew, seed=seed)) for seed in range(num_draws)]
    return Tiling(
        float(np.mean([one.row_overcompute for one in drawn])),
        float(np.mean([one.weight_reads for one in drawn])),
        float(np.mean([one.num_experts for one in drawn])),
    )


def work(shape: Shape, step: Step) -> dict[str, tuple[Work, Work]]:
    """Kernel K1 to K6 -> (ours, stock MLX or plain ops), of one step over all layers."""
    return {
        "K1": (_experts(shape, step.rows, stock=False), _experts(shape, step.rows, stock=True)),
        "K2": _head(shape, step.rows),
        "K3": _attention(shape, step),
        "K4": _router(shape, step.rows),
        "K5": _prefix(shape, step),
        "K6": _conv(shape, step.rows),
    }


def _experts(shape: Shape, rows: int, *, stock: bool) -> Work:
    tiling = mean_tiling(shape, rows, stock=stock)
    places = rows * shape.top_k
    matrix = shape.hidden * shape.inner
    weights = 3 * matrix * INT8_BYTES * tiling.num_experts * tiling.weight_reads
    # Inner values out and in again, shares out and in again; stock keeps gate and up apart and permutes rows twice.
    passes = (2 * shape.inner + 3 * shape.hidden) if not stock else (6 * shape.inner + 7 * shape.hidden)
    moved = weights + places * passes * _ACTIVATION_BYTES
    return Work(
        moved * shape.moe_layers,
        6 * matrix * places * tiling.row_overcompute * shape.moe_layers,
        (2 + shape.top_k - 1 if not stock else 11) * shape.moe_layers,
    )


def _head(shape: Shape, rows: int) -> tuple[Work, Work]:
    weights = shape.vocab * shape.hidden * INT8_BYTES
    flops = 2.0 * shape.vocab * shape.hidden
    blocks = -(-shape.vocab // 32)
    again = rows * 32 * shape.hidden * INT8_BYTES
    ours = Work(weights * -(-rows // 64) + 4 * rows * blocks * 4 + again, flops * (-(-rows // 8) * 8), 2)
    # Logits out; read for their sum, for the logprobs (and out), for the running sum (and out), for the comparison.
    stock = Work(weights + rows * shape.vocab * 4 * 8, flops * rows, 9)
    return ours, stock


def _attention(shape: Shape, step: Step) -> tuple[Work, Work]:
    held = 2 * shape.num_kv_heads * shape.head_size * _ACTIVATION_BYTES * step.tokens
    pieces = -(-step.tokens // 512) * shape.num_heads * (shape.head_size + 2) * 4 * 2
    flops = 4.0 * step.rows * step.tokens * shape.num_heads * shape.head_size * shape.attention_layers
    ours = Work(step.rows * (held + pieces) * shape.attention_layers, flops, 2 * shape.attention_layers)
    # Plain ops gather the pages into rows first: in, out, and in again for the attention.
    return ours, Work(3 * step.rows * held * shape.attention_layers, flops, 6 * shape.attention_layers)


def _prefix(shape: Shape, step: Step) -> tuple[Work, Work]:
    """Of the shared tokens alone: once a group, against once a row by K3."""
    shared = Step(step.rows, step.shared_tokens, 0, step.group_rows)
    alone, _ = _attention(shape, shared)
    held = 2 * shape.num_kv_heads * shape.head_size * _ACTIVATION_BYTES * step.shared_tokens
    pieces = -(-step.shared_tokens // 512) * shape.num_heads * (shape.head_size + 2) * 4 * 2
    num_groups = -(-step.rows // step.group_rows)
    padded = num_groups * 32 / (step.rows * shape.num_heads / shape.num_kv_heads)  # query rows computed for each wanted
    moved = (num_groups * held + step.rows * pieces) * shape.attention_layers
    return Work(moved, alone.num_flops * padded, shape.attention_layers), alone


def _router(shape: Shape, rows: int) -> tuple[Work, Work]:
    gate = shape.num_experts * shape.hidden * _ACTIVATION_BYTES
    row = shape.hidden * _ACTIVATION_BYTES + shape.top_k * (4 + 4 + 1 + 4)
    flops = 2.0 * rows * shape.num_experts * shape.hidden * shape.moe_layers
    ours = Work((gate + rows * row) * shape.moe_layers, flops, 2 * shape.moe_layers)
    casts = rows * shape.hidden * 6 + shape.num_experts * shape.hidden * 6
    return ours, Work(ours.num_bytes + casts * shape.moe_layers, flops, (12 + 3 * shape.top_k) * shape.moe_layers)


def _conv(shape: Shape, rows: int) -> tuple[Work, Work]:
    kept = shape.conv_kernel - 1
    moved = rows * shape.hidden * _ACTIVATION_BYTES
    ours = Work(
        moved * (3 + 2 * kept + 1) * shape.conv_layers, 2.0 * rows * shape.hidden * (kept + 3) * shape.conv_layers, shape.conv_layers
    )
    # b * x, the line of taps, a product and a sum a tap, c * y, and the choice of the tail, each in and out.
    passes = 3 + 2 * (kept + 1) + 5 * kept + 2 + 3 + 3 * kept
    return ours, Work(moved * passes * shape.conv_layers, ours.num_flops, (6 + 2 * kept) * shape.conv_layers)


def tables(shape: Shape = LFM25, step: Step = FULL_STEP) -> str:
    """The tables of README.md."""
    return "\n\n".join([_tiling_table(shape), _work_table(shape, step), _time_table(shape, step)])


def _tiling_table(shape: Shape) -> str:
    lines = [
        "| rows | experts used | row_overcompute: ours, stock | weight_reads: ours, stock | skewed: ours, stock rows |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rows in (64, 48, 32, 31, 16, 8):
        ours, stock = (mean_tiling(shape, rows, stock=which) for which in (False, True))
        skewed = [mean_tiling(shape, rows, stock=which, skew=1.0).row_overcompute for which in (False, True)]
        lines.append(
            f"| {rows} | {ours.num_experts:.1f} | {ours.row_overcompute:.2f}, {stock.row_overcompute:.2f} "
            f"| {ours.weight_reads:.2f}, {stock.weight_reads:.2f} | {skewed[0]:.2f}, {skewed[1]:.2f} |"
        )
    return "\n".join(lines)


def _work_table(shape: Shape, step: Step) -> str:
    lines = ["| kernel | MB: ours, stock | GFLOP: ours, stock | launches: ours, stock |", "| --- | --- | --- | --- |"]
    for kernel, (ours, stock) in work(shape, step).items():
        lines.append(
            f"| {kernel} | {ours.num_bytes / 1e6:,.1f}, {stock.num_bytes / 1e6:,.1f} "
            f"| {ours.num_flops / 1e9:,.2f}, {stock.num_flops / 1e9:,.2f} | {ours.num_launches}, {stock.num_launches} |"
        )
    return "\n".join(lines)


def _time_table(shape: Shape, step: Step) -> str:
    works = work(shape, step)
    lines = [
        f"| ms a step: ours, stock | {' | '.join(works)} |",
        f"| --- |{' --- |' * len(works)}",
    ]
    for chip in CHIPS:
        cells = [f"{ours.seconds(chip) * 1e3:.2f}, {stock.seconds(chip) * 1e3:.2f}" for ours, stock in works.values()]
        lines.append(f"| {chip.name}, {chip.gigabytes_a_second:g} GB/s, {chip.teraflops:g} TFLOPS | {' | '.join(cells)} |")
    return "\n".join(lines)


def chip_named(name: str, chips: Sequence[Chip] = CHIPS) -> Chip | None:
    """The chip that the system calls so ("Apple M4 Pro"); None if it is not among them: an M1 Pro is no M1."""
    return next((chip for chip in chips if f"Apple {chip.name}" == name), None)


if __name__ == "__main__":
    print(tables())  # noqa: T201
