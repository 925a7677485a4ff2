"""K4 on the emulator: choice, ties, weights, record; and the order by expert."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.kernels import Launcher
from metal.router import Order, OrderKernel, RouterKernel, RouterRule
from tests.metal_emulator.proof import Array64, Errors, check, exact, mutants_of, rounded, same_bits

SIZES = ((64, 8, 2), (64, 32, 4), (128, 64, 6), (96, 40, 5), (64, 5, 5))
CLEAR = 1e-5
"""Scores apart by less may be chosen either way by sums in another order."""


class RouterProof:
    """Half of the cases have whole numbers whose logits are exact and often equal, half have normal ones."""

    mutants = mutants_of("K4")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        width, num_experts, top_k = SIZES[numbers.integers(len(SIZES))]
        num_tokens, dtype = int(numbers.integers(1, 14)), (mx.float32, mx.bfloat16)[numbers.integers(2)]
        rule = RouterRule(num_experts, top_k, bool(numbers.random() < 0.5), float(numbers.choice([1.0, 2.5])))
        coarse = numbers.random() < 0.5
        x = numbers.integers(-2, 3, (num_tokens, width)) if coarse else numbers.normal(0, 1, (num_tokens, width))
        gate = numbers.integers(-1, 2, (num_experts, width)) / 8.0 if coarse else numbers.normal(0, width**-0.5, (num_experts, width))
        if numbers.random() < 0.5:  # experts that no token can tell apart
            gate[numbers.integers(num_experts, size=num_experts // 2)] = gate[0]
        if numbers.random() < 0.15:  # scores of a millionth: what is added to their sum counts
            x, gate = np.full_like(x, 1.0), -np.abs(gate) - 14.0 / width
        bias = numbers.choice([0.0, 0.25, 0.5], num_experts) if coarse else numbers.normal(0, 0.2, num_experts)
        x_, x64 = rounded(np.asarray(x, np.float64), dtype)
        gate_, gate64 = rounded(gate, dtype)
        bias_, bias64 = rounded(bias, mx.float32)
        routing = RouterKernel(launcher)(x_, gate_, bias_, rule)
        scores = 1.0 / (1.0 + np.exp(-(x64 @ gate64.T)))
        chosen = np.array(routing.experts).astype(np.int64)
        check(chosen.max() < num_experts, "an expert that is none")
        _check_choice(chosen, scores + bias64, x64 @ gate64.T, bias64)
        weights = np.take_along_axis(scores, chosen, axis=1)
        if rule.normalise:
            weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-6)
        errors.add("weights", routing.weights, weights * rule.scale)
        exact("record", routing.record, chosen.astype(np.uint8))
        _check_order(chosen.reshape(-1), num_experts, OrderKernel(launcher)(routing.experts, num_experts))
        self._long_order(launcher, numbers, num_experts)

    def _long_order(self, launcher: Launcher, numbers: np.random.Generator, num_experts: int) -> None:
        """The order of more places than one pass of a simdgroup takes, of uneven experts."""
        if numbers.random() > 0.2:
            return
        num_places = int(numbers.integers(33, 200))
        flat = np.minimum(numbers.exponential(num_experts / 4, num_places).astype(np.uint32), num_experts - 1)
        _check_order(flat, num_experts, OrderKernel(launcher)(mx.array(flat[:, None]), num_experts))

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers, kernel = np.random.default_rng(5), RouterKernel(launcher)
        rule = RouterRule(32, 4, True, 1.0)
        x, _ = rounded(numbers.normal(0, 1, (64, 64)), mx.bfloat16)
        gate, _ = rounded(numbers.normal(0, 0.1, (32, 64)), mx.bfloat16)
        bias = mx.array(numbers.normal(0, 0.1, 32).astype(np.float32))
        together = kernel(x, gate, bias, rule)
        return all(
            same_bits(one[row : row + 1], alone)
            for row in (0, 31, 63)
            for one, alone in zip(together, kernel(x[row : row + 1], gate, bias, rule), strict=True)
        )


def _check_choice(chosen: NDArray[np.int64], biased: Array64, logits: Array64, bias: Array64) -> None:
    """Each choice is the best of what is left, the lowest index among those whose logit and bias are the same."""
    for token, row in enumerate(chosen):
        left = biased[token].copy()
        for expert in row:
            check(left[expert] > -np.inf, "an expert chosen twice")
            check(left[expert] >= left.max() - CLEAR, "not the best that is left")
            twins = (logits[token] == logits[token][expert]) & (bias == bias[expert]) & (left > -np.inf)
            check(int(np.flatnonzero(twins)[0]) == expert, "not the lowest of equals")
            left[expert] = -np.inf


def _check_order(flat: NDArray[np.integer], num_experts: int, found: Order) -> None:
    sizes = np.bincount(flat.astype(np.int64), minlength=num_experts)
    exact("counts", found.counts, sizes)
    exact("offsets", found.offsets, np.concatenate([[0], np.cumsum(sizes)]))
    exact("order", found.order, np.argsort(flat, kind="stable"))
