"""K6, one decode step of the gated short convolution: all rows by one token.

Legend: R rows, D width, T taps (the kernel's size).
"""

import mlx.core as mx

from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, launch_on_metal

_NAME = "conv"


def conv_plain(projected: mx.array, tails: mx.array, taps: mx.array, active: mx.array) -> tuple[mx.array, mx.array]:
    """One step of y = c * conv(b * x).

    Args:
        projected: [R, 3 D], the thirds b, c and x.
        tails: [R, T - 1, D], the last b * x of each row, oldest first.
        taps: [D, T].
        active: bool [R]; the tail of a row that is not active stays.

    Returns:
        y [R, D] and the new tails.
    """
    gate_RD, carry_RD, value_RD = mx.split(projected, 3, axis=-1)
    line_RTD = mx.concatenate([tails, (gate_RD * value_RD)[:, None]], axis=1)
    out_RD = line_RTD[:, 0] * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        out_RD = out_RD + line_RTD[:, tap] * taps[:, tap]
    return carry_RD * out_RD, mx.where(active[:, None, None], line_RTD[:, 1:], tails)


class ConvKernel:
    """As `conv_plain`, by short_conv.metal."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        self._step = Kernel(
            "short_conv", inputs=("projected", "tails", "kernel_taps", "active"), outputs=("mixed", "new_tails"), launcher=launcher
        )

    def __call__(self, projected: mx.array, tails: mx.array, taps: mx.array, active: mx.array) -> tuple[mx.array, mx.array]:
        """As `conv_plain`. Raises KernelArgumentsError."""
        expect(_NAME, "projected", projected, (-1, -1), *FLOATS)
        num_rows, width = projected.shape[0], projected.shape[1] // 3
        expect(_NAME, "taps", taps, (width, -1), projected.dtype)
        num_taps = taps.shape[1]
        demand(_NAME, num_rows > 0 and projected.shape[1] == 3 * width and width % 32 == 0, f"{num_rows} rows of width {width}")
        demand(_NAME, num_taps >= 2, f"{num_taps} taps keep nothing")
        expect(_NAME, "tails", tails, (num_rows, num_taps - 1, width), projected.dtype)
        expect(_NAME, "active", active, (num_rows,), mx.bool_)
        mixed, new_tails = self._step(
            inputs=[projected, tails, taps, active],
            template=[("T", projected.dtype), ("D", width), ("TAPS", num_taps)],
            grid=(width, num_rows, 1),
            threadgroup=(next(size for size in (256, 128, 64, 32) if width % size == 0), 1, 1),
            output_shapes=[(num_rows, width), tuple(tails.shape)],
            output_dtypes=[projected.dtype] * 2,
        )
        return mixed, new_tails
