"""K6, one step of the gated short convolution: all rows by one token. `reference.convolve_plain` says what it means.

Legend: R rows, D width, T taps kept.
"""

import mlx.core as mx

from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, launch_on_metal

_NAME = "conv"


class ConvKernel:
    """As `convolve_plain`, by short_conv.metal; the same bits, as its every product and sum is rounded alike."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        self._step = Kernel("short_conv", inputs=("projected", "tails", "kernel_taps"), outputs=("mixed", "new_tails"), launcher=launcher)

    def __call__(self, x: mx.array, tails: mx.array, kernel: mx.array) -> tuple[mx.array, mx.array]:
        """X [R, 3 D], tails [R, T, D], kernel [D, T + 1, 1]. Raises KernelArgumentsError."""
        expect(_NAME, "x", x, (-1, -1), *FLOATS)
        num_rows, width = x.shape[0], x.shape[1] // 3
        demand(
            _NAME, min(num_rows, width) > 0 and x.shape[1] == 3 * width and width % 32 == 0, f"{num_rows} rows of width {x.shape[1]} / 3"
        )
        # Taps of another type would make plain ops compute in float32, unless that is the type of x already.
        expect(_NAME, "kernel", kernel, (width, -1, 1), *(FLOATS if x.dtype == mx.float32 else (x.dtype,)))
        num_taps = kernel.shape[1]
        demand(_NAME, num_taps >= 2, f"{num_taps} taps keep nothing")
        expect(_NAME, "tails", tails, (num_rows, num_taps - 1, width), x.dtype)
        mixed, new_tails = self._step(
            inputs=[x, tails, kernel],
            template=[("T", x.dtype), ("D", width), ("TAPS", num_taps)],
            grid=(width, num_rows, 1),
            threadgroup=(next(size for size in (256, 128, 64, 32) if width % size == 0), 1, 1),
            output_shapes=[(num_rows, width), (num_rows, num_taps - 1, width)],
            output_dtypes=[x.dtype] * 2,
        )
        return mixed, new_tails
