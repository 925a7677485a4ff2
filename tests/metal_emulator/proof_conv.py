"""K6 on the emulator."""

import mlx.core as mx
import numpy as np

from metal.conv import ConvKernel
from metal.kernels import Launcher
from tests.metal_emulator.proof import Errors, exact, mutants_of, rounded, same_bits, wide

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


class ConvProof:
    """`alone_and_in_64` feeds the same row by itself."""

    mutants = mutants_of("K6")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        num_rows, width = int(numbers.integers(1, 9)), int(numbers.choice([32, 64, 192, 512]))
        num_taps, dtype = int(numbers.choice([2, 3, 4])), DTYPES[numbers.integers(3)]
        projected, projected64 = rounded(numbers.normal(0, 1, (num_rows, 3 * width)), dtype)
        tails, tails64 = rounded(numbers.normal(0, 1, (num_rows, num_taps - 1, width)), dtype)
        taps, taps64 = rounded(numbers.normal(0, 1, (width, num_taps)), dtype)
        active = numbers.random(num_rows) < 0.7
        mixed, new_tails = ConvKernel(launcher)(projected, tails, taps, mx.array(active))
        b, c, x = np.split(projected64, 3, axis=1)
        fresh = wide(mx.array((b * x).astype(np.float32)).astype(dtype))  # b * x is exact in float64, then rounded as kept
        line = np.concatenate([tails64, fresh[:, None]], axis=1)
        errors.add("mixed", mixed, c * np.einsum("rtd,dt->rd", line, taps64))
        exact("tails", new_tails.astype(mx.float32), np.where(active[:, None, None], line[:, 1:], tails64).astype(np.float32))

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers, kernel = np.random.default_rng(5), ConvKernel(launcher)
        projected, _ = rounded(numbers.normal(0, 1, (64, 192)), mx.bfloat16)
        tails, _ = rounded(numbers.normal(0, 1, (64, 2, 64)), mx.bfloat16)
        taps, _ = rounded(numbers.normal(0, 1, (64, 3)), mx.bfloat16)
        active = mx.array(numbers.random(64) < 0.7)
        together = kernel(projected, tails, taps, active)
        return all(
            same_bits(one[row : row + 1], alone)
            for row in (0, 31, 63)
            for one, alone in zip(
                together, kernel(*(x[row : row + 1] for x in (projected, tails)), taps, active[row : row + 1]), strict=True
            )
        )
