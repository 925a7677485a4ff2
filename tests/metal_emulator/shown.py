"""All that is shown of the kernels on the emulator, as `python -m benchmarks.metal` prints it."""

import sys
import time
from dataclasses import asdict, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from metal import roofline
from metal.attention import AttentionKernel
from metal.bench import dims_of
from metal.check import KERNELS, self_check
from metal.experts import ExpertsKernel
from metal.head import HeadKernel
from metal.router import order_plain
from metal.sizes import PAGE_TOKENS
from tests.metal_emulator.emulator import Emulator
from tests.metal_emulator.proof import Proof, finding, fuzz, int8, mutants_of, rounded
from tests.metal_emulator.proof_attention import make_tiles
from tests.metal_emulator.proofs import PROOFS
from tests.unit.worker_mac.emulated import GROUPS, PLAIN, Launches, episodes

tables = roofline.tables
ROWS: Final = (64, 48, 32, 31, 16, 8)
NAMES: Final = {
    "K1": "experts",
    "K2": "lm_head and sampling",
    "K3": "paged attention",
    "K4": "router",
    "K5": "shared prefix",
    "K6": "short convolution",
}


def prove(kernel: str, proof: Proof, num_cases: int) -> dict[str, Any]:
    """All that is shown of one kernel."""
    began = time.process_time()
    done = fuzz(proof, num_cases)
    missed = [mutant.kind for mutant in mutants_of(kernel) if not finding(proof, mutant)]
    return {
        "name": NAMES[kernel],
        "num_fuzz_cases": done.num_cases,
        "max_error": done.errors.float32,
        "max_error_roundings": done.errors.rounding,
        "threadgroup_bytes": done.threadgroup_bytes,
        "mutants_planted": len(mutants_of(kernel)),
        "mutants_caught": len(mutants_of(kernel)) - len(missed),
        "mutants_missed": missed,
        "rows_bit_identical_alone_and_in_64": proof.alone_and_in_64(Emulator().metal_kernel),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def tilings() -> dict[str, dict[str, dict[str, float]]]:
    """K1 beside stock MLX, means over 200 seeded draws of LFM2.5's experts."""
    shape = roofline.LFM25
    found: dict[str, dict[str, dict[str, float]]] = {"row_overcompute": {}, "weight_reads": {}}
    for rows in ROWS:
        ours, stock = (roofline.mean_tiling(shape, rows, stock=which) for which in (False, True))
        for key in found:
            found[key][str(rows)] = {"ours": getattr(ours, key), "stock": getattr(stock, key)}
    return found


def counted_weight_reads() -> dict[str, float]:
    """Reads of each used expert's gate codes that the emulator counts, 32 experts, top 4, uniform, one draw."""
    found: dict[str, float] = {}
    for rows in ROWS:
        numbers = np.random.default_rng(rows)
        x, _ = rounded(numbers.normal(0, 1, (rows, 64)), mx.bfloat16)
        gate, up = int8(numbers, (32, 64, 64))[0], int8(numbers, (32, 64, 64))[0]
        experts = np.argsort(numbers.random((rows, 32)), axis=1)[:, :4].astype(np.uint32)
        emulator = Emulator()
        ExpertsKernel(emulator.metal_kernel).inner(x, 4, order_plain(mx.array(experts), 32), gate, up)
        found[str(rows)] = emulator.loaded["stoa_experts_up/gate_codes"] / (len(np.unique(experts)) * 64 * 64)
    return found


def counted_key_reads() -> float:
    """Reads of each key that the emulator counts, with 4 query heads a key/value head."""
    numbers, emulator = np.random.default_rng(0), Emulator()
    lengths = [600, 33, 512]
    AttentionKernel(emulator.metal_kernel)(*make_tiles(numbers, lengths, (2, 4, 64), mx.bfloat16).arrays, 0.125)
    return emulator.loaded["stoa_paged_attention/keys"] / (sum(lengths) * 2 * 64 * 2)


def counted_embedding_reads() -> float:
    """Reads of the embedding's codes for 64 rows, beyond the one block a row draws from."""
    numbers, emulator = np.random.default_rng(0), Emulator()
    x, _ = rounded(numbers.normal(0, 1, (64, 64)), mx.bfloat16)
    embedding, _ = int8(numbers, (256, 64))
    HeadKernel(emulator.metal_kernel).partial(x, embedding)
    return emulator.loaded["stoa_head_partial/codes"] / (256 * 64)


def engine() -> dict[str, Any]:
    """Two groups of two episodes on a tiny model, all ops by emulated kernels, beside plain ops."""
    model = Launches().model
    pairs = list(zip(episodes(model, GROUPS), episodes(PLAIN, GROUPS), strict=True))
    (alone,) = episodes(model, GROUPS[3:])
    return {
        "tokens_equal": all(ours.ids.tolist() == plain.ids.tolist() for ours, plain in pairs),
        "max_logprob_difference_nats": max(float(np.abs(ours.logprobs - plain.logprobs).max()) for ours, plain in pairs),
        "bits_alone_as_in_groups": alone.logprobs.tobytes() == pairs[3][0].logprobs.tobytes(),
        "num_sampled_tokens": sum(len(ours.logprobs) for ours, _ in pairs),
    }


def start_up_checks() -> dict[str, dict[str, str]]:
    """What a Mac's start-up check says of each kernel at LFM2.5's widths, "" for agreement: by type, by kernel."""
    found: dict[str, dict[str, str]] = {}
    for dtype in (mx.float32, mx.bfloat16):
        dims = replace(dims_of(roofline.LFM25), dtype=dtype, raw_dtype=dtype)
        found[str(dtype)] = {kernel: self_check(kernel, dims, Emulator().metal_kernel).reason for kernel in KERNELS}
    return found


def measure(num_cases: int) -> dict[str, Any]:
    """Everything."""
    kernels = {}
    for kernel, proof in PROOFS.items():
        kernels[kernel] = prove(kernel, proof, num_cases)
        print(kernel, kernels[kernel], file=sys.stderr, flush=True)
    kernels["K1"] |= tilings() | {"weight_reads_counted": counted_weight_reads()}
    kernels["K2"] |= {"weight_reads_counted_64_rows": counted_embedding_reads()}
    kernels["K3"] |= {"key_reads_counted": counted_key_reads(), "page_tokens": PAGE_TOKENS}
    works = roofline.work(roofline.LFM25, roofline.FULL_STEP)
    for kernel, (ours, stock) in works.items():
        kernels[kernel]["by_formula"] = {"ours": asdict(ours), "stock": asdict(stock)}
    return {
        "num_fuzz_cases": min(one["num_fuzz_cases"] for one in kernels.values()),
        "mutants_planted": sum(one["mutants_planted"] for one in kernels.values()),
        "mutants_caught": sum(one["mutants_caught"] for one in kernels.values()),
        "max_error": max(one["max_error"] for one in kernels.values()),
        "max_error_roundings": max(one["max_error_roundings"] for one in kernels.values()),
        "rows_bit_identical_alone_and_in_64": all(one["rows_bit_identical_alone_and_in_64"] for one in kernels.values()),
        "engine_on_kernels": engine(),
        "kernels": kernels,
        "conditions": "Linux CPU emulator, random thread order; errors of fp32 results relative to max(1, |value|), of 16-bit results in "
        "halves of the last place; formulas for LFM2.5-8B-A1B at 64 rows of 4,096 tokens, 2,048 of them shared by 8; nothing timed",
    }
