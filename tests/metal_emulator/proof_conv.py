"""K6 on the emulator."""

import mlx.core as mx
import numpy as np

from metal.conv import ConvKernel
from metal.kernels import Launcher
from metal.reference import convolve_plain
from tests.metal_emulator.proof import Array64, Errors, check, exact, mutants_of, rounded, same_bits, wide

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


class ConvProof:
    """`alone_and_in_64` feeds the same row by itself."""

    mutants = mutants_of("K6")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        num_rows, width = int(numbers.integers(1, 9)), int(numbers.choice([32, 64, 192, 512]))
        num_taps, dtype = int(numbers.choice([2, 3, 4])), DTYPES[numbers.integers(3)]
        x, x64 = rounded(numbers.normal(0, 1, (num_rows, 3 * width)), dtype)
        tails, tails64 = rounded(numbers.normal(0, 1, (num_rows, num_taps - 1, width)), dtype)
        taps_dtype = mx.bfloat16 if dtype == mx.float32 and numbers.random() < 0.4 else dtype
        taps, taps64 = rounded(numbers.normal(0, 1, (width, num_taps, 1)), taps_dtype)
        mixed, new_tails = ConvKernel(launcher)(x, tails, taps)

        def kept(number: Array64) -> Array64:
            """As every product and sum of the operation is rounded: in float32 that is left to the bound."""
            return number if dtype == mx.float32 else wide(mx.array(number.astype(np.float32)).astype(dtype))

        b, c, value = np.split(x64, 3, axis=1)
        line = np.concatenate([tails64, kept(b * value)[:, None]], axis=1)
        total = kept(line[:, 0] * taps64[:, 0, 0])
        for tap in range(1, num_taps):
            total = kept(total + kept(line[:, tap] * taps64[:, tap, 0]))
        errors.add("mixed", mixed, c * total)
        exact("tails", new_tails.astype(mx.float32), line[:, 1:].astype(np.float32))
        for one, other in zip((mixed, new_tails), convolve_plain(x, tails, taps), strict=True):
            check(same_bits(one, other), "other bits than plain ops")

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers, kernel = np.random.default_rng(5), ConvKernel(launcher)
        x, _ = rounded(numbers.normal(0, 1, (64, 192)), mx.bfloat16)
        tails, _ = rounded(numbers.normal(0, 1, (64, 2, 64)), mx.bfloat16)
        taps, _ = rounded(numbers.normal(0, 1, (64, 3, 1)), mx.bfloat16)
        together = kernel(x, tails, taps)
        return all(
            same_bits(one[row : row + 1], alone)
            for row in (0, 31, 63)
            for one, alone in zip(together, kernel(x[row : row + 1], tails[row : row + 1], taps), strict=True)
        )
