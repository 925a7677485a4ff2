"""Exponentials of plain ops. MLX's own, and its sigmoid, take three times as long as its powers on a CPU other than Apple's.

A number has the same bits wherever it stands in an array: each is computed by itself.
"""

import sys
from typing import Final

import mlx.core as mx

_LOG2_E: Final = 1.4426950408889634


def exp(x: mx.array) -> mx.array:
    """E to the x; 0 for -inf. In fp32 it is off by |x| * 1e-7 of itself at most."""
    return mx.power(2.0, x * _LOG2_E) if _by_powers(x) else mx.exp(x)


def silu(x: mx.array) -> mx.array:
    """X * sigmoid(x)."""
    return x / (1.0 + exp(-x)) if _by_powers(x) else x * mx.sigmoid(x)


def _by_powers(x: mx.array) -> bool:
    return x.dtype == mx.float32 and sys.platform != "darwin" and mx.default_device().type == mx.DeviceType.cpu
