"""K1 on the emulator: each half against float64 on what it was given, and the whole layer."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.experts import ExpertsKernel
from metal.kernels import Launcher
from metal.router import order_plain
from tests.metal_emulator.proof import Array64, Errors, int8, mutants_of, rounded, same_bits, wide

DTYPES = (mx.float32, mx.bfloat16)
SIZES = ((64, 64), (64, 128), (128, 64))


class ExpertsProof:
    """Sizes of experts' shares go from none over a part of a tile to a third pass of 32 rows."""

    mutants = mutants_of("K1")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        width, inner_width = SIZES[numbers.integers(len(SIZES))]
        num_experts, dtype = int(numbers.choice([4, 9])), DTYPES[numbers.integers(2)]
        top_k = int(numbers.integers(1, 4))
        num_tokens = int(numbers.choice([1, 3, 7, 8, 9, 17, 33, 80]))
        x, x64 = rounded(numbers.normal(0, 1, (num_tokens, width)), dtype)
        gate, gate64 = int8(numbers, (num_experts, inner_width, width))
        up, up64 = int8(numbers, (num_experts, inner_width, width))
        down, down64 = int8(numbers, (num_experts, width, inner_width))
        experts = _uneven(numbers, num_tokens, num_experts, top_k)
        weights = numbers.uniform(0, 1, experts.shape).astype(np.float32)
        places, kernel = order_plain(mx.array(experts), num_experts), ExpertsKernel(launcher)

        inner = kernel.inner(x, top_k, places, gate, up)
        order = np.array(places.order)
        chosen, rows = experts.reshape(-1)[order], x64[order // top_k]
        wanted = _silu(np.einsum("nd,nid->ni", rows, gate64[chosen])) * np.einsum("nd,nid->ni", rows, up64[chosen])
        errors.add("inner", inner, wanted)
        shares = kernel.shares(inner, mx.array(weights), places, down)
        wanted = np.empty((order.size, width))
        wanted[order] = weights.reshape(-1)[order, None] * np.einsum("ni,ndi->nd", wide(inner), down64[chosen])
        errors.add("shares", shares, wanted.reshape(num_tokens, top_k, width))
        if dtype == mx.float32:
            rows, chosen = np.repeat(x64, top_k, axis=0), experts.reshape(-1)
            hidden = _silu(np.einsum("nd,nid->ni", rows, gate64[chosen])) * np.einsum("nd,nid->ni", rows, up64[chosen])
            out = weights.reshape(-1, 1) * np.einsum("ni,ndi->nd", hidden, down64[chosen])
            layer = kernel(x, mx.array(experts), mx.array(weights), gate, up, down)
            errors.add("layer", layer, out.reshape(num_tokens, top_k, width).sum(axis=1))

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers, kernel = np.random.default_rng(5), ExpertsKernel(launcher)
        x, _ = rounded(numbers.normal(0, 1, (64, 64)), mx.bfloat16)
        matrices = [int8(numbers, (4, 64, 64))[0] for _ in range(3)]
        experts = _uneven(numbers, 64, 4, 2)
        weights = numbers.uniform(0, 1, experts.shape).astype(np.float32)
        together = kernel(x, mx.array(experts), mx.array(weights), *matrices)
        for row in (0, 31, 63):
            one = slice(row, row + 1)
            alone = kernel(x[one], mx.array(experts[one]), mx.array(weights[one]), *matrices)
            if not same_bits(alone, together[row : row + 1]):
                return False
        return True


def _silu(x: Array64) -> Array64:
    return x / (1.0 + np.exp(-x))


def _uneven(numbers: np.random.Generator, num_tokens: int, num_experts: int, top_k: int) -> NDArray[np.uint32]:
    """Distinct experts a token, some of them much more often than others."""
    liking = numbers.normal(0, float(numbers.choice([1.5, 5.0])), num_experts)
    noise = numbers.gumbel(0, 1, (num_tokens, num_experts))
    return np.argsort(-(liking + noise), axis=1)[:, :top_k].astype(np.uint32)
