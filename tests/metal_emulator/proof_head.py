"""K2 on the emulator: blocks, the uniform number, the drawn word and its log-probability."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.head import BLOCK, HeadKernel
from metal.kernels import Launcher
from tests.metal_emulator.proof import Array64, Errors, check, int8, mutants_of, rounded, same_bits

SIZES = ((64, 32), (64, 70), (64, 1), (128, 257), (64, 4200))
SLACK = 1e-5
"""How far the uniform number may lie outside the drawn word's share of [0, 1], by rounding of the running sums."""


class HeadProof:
    """From one word to more blocks than the 128 threads that search them."""

    mutants = mutants_of("K2")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        width, num_words = SIZES[numbers.integers(len(SIZES))]
        num_rows = int(numbers.choice([1, 2, 9])) if num_words > 1000 else int(numbers.choice([1, 3, 8, 17, 65, 130]))
        dtype = (mx.float32, mx.bfloat16)[numbers.integers(2)]
        x, x64 = rounded(numbers.normal(0, float(numbers.choice([0.5, 3.0])), (num_rows, width)), dtype)
        embedding, embedding64 = int8(numbers, (num_words, width))
        keys = numbers.integers(0, 1 << 63, num_rows).astype(np.uint64)
        positions = numbers.integers(0, 5000, num_rows)
        kernel = HeadKernel(launcher)
        logits = x64 @ embedding64.T
        highest, sums = kernel.partial(x, embedding)
        _check_blocks(highest, sums, logits, errors)
        uniform = splitmix(keys, positions)
        counted = bool(numbers.random() < 0.5)
        if counted:
            tokens, logprobs = kernel.counted(x, embedding, mx.array(keys), mx.array(positions))
        else:
            tokens, logprobs = kernel(x, embedding, mx.array(uniform.astype(np.float32)))
        drawn = np.array(tokens)
        check(bool((drawn >= 0).all() and (drawn < num_words).all()), "a word that is none")
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_all = np.log(np.exp(shifted).sum(axis=1))
        rows = np.arange(num_rows)
        errors.add("logprobs", logprobs, shifted[rows, drawn] - log_all)
        check(bool((np.array(logprobs) <= 0).all()), "a probability above 1")
        until = np.cumsum(np.exp(shifted - log_all[:, None]), axis=1)
        before = until[rows, drawn] - np.exp(shifted[rows, drawn] - log_all)
        check(bool((uniform >= before - SLACK).all() and (uniform <= until[rows, drawn] + SLACK).all()), "another word than drawn")

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers, kernel = np.random.default_rng(5), HeadKernel(launcher)
        x, _ = rounded(numbers.normal(0, 1, (64, 64)), mx.bfloat16)
        embedding, _ = int8(numbers, (70, 64))
        keys = mx.array(numbers.integers(0, 1 << 63, 64).astype(np.uint64))
        positions = mx.array(np.arange(64))
        together = (*kernel.partial(x, embedding), *kernel.counted(x, embedding, keys, positions))
        for row in (0, 31, 63):
            one = slice(row, row + 1)
            alone = (*kernel.partial(x[one], embedding), *kernel.counted(x[one], embedding, keys[one], positions[one]))
            if not all(same_bits(whole[one], part) for whole, part in zip(together, alone, strict=True)):
                return False
        return True


def splitmix(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> Array64:
    """The uniform numbers, with Python's integers."""
    mask = (1 << 64) - 1
    found: list[float] = []
    for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
        z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found.append(((z ^ (z >> 31)) >> 41) * 2.0**-23)
    return np.array(found)


def _check_blocks(highest: mx.array, sums: mx.array, logits: Array64, errors: Errors) -> None:
    num_blocks = -(-logits.shape[1] // BLOCK)
    padded = np.full((logits.shape[0], num_blocks * BLOCK), -np.inf)
    padded[:, : logits.shape[1]] = logits
    blocks = padded.reshape(logits.shape[0], num_blocks, BLOCK)
    errors.add("highest", highest, blocks.max(axis=2))
    errors.add("sums", sums, np.exp(blocks - blocks.max(axis=2, keepdims=True)).sum(axis=2))
