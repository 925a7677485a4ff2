"""Compiles and calls the `.metal` bodies of this folder, and checks what they are called with.

What launches a body is a port: `mx.fast.metal_kernel`, which raises where there is no Metal back end, or an emulator with
the same signature. Whether a kernel is used is `ops.py`'s to say.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol, cast

import mlx.core as mx

from metal.products import Int8
from metal.sizes import GROUP_SIZE
from stoa.contracts.errors import KernelArgumentsError

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
"""Types of activations and of scales that bodies take."""
_FOLDER = Path(__file__).parent

Compiled = Callable[..., list[mx.array]]


class Launcher(Protocol):
    """Makes a callable of a body, as `mx.fast.metal_kernel` does."""

    def __call__(self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = "") -> Compiled:
        """See `mx.fast.metal_kernel`."""
        ...


def launch_on_metal(name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = "") -> Compiled:
    """The launcher of Macs."""
    made: object = mx.fast.metal_kernel(name=name, input_names=input_names, output_names=output_names, source=source, header=header)
    return cast(Compiled, made)


def metal_works() -> bool:
    """True if MLX computes on an Apple GPU in this process."""
    return mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu


class Kernel:
    """One body, `<name>.metal`, compiled on first use for each set of template values. `uses`: a body of shared functions."""

    def __init__(
        self,
        name: str,
        *,
        inputs: Sequence[str],
        outputs: Sequence[str],
        uses: str = "",
        launcher: Launcher = launch_on_metal,
    ) -> None:
        self.name = name
        self.source = body_text(name)
        self.header = body_text(uses) if uses else ""
        self._inputs, self._outputs, self._launcher = list(inputs), list(outputs), launcher

    @cached_property
    def _compiled(self) -> Compiled:
        return self._launcher(f"stoa_{self.name}", self._inputs, self._outputs, self.source, self.header)

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: Sequence[tuple[str, int | bool | mx.Dtype]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Run the kernel; arguments as `mx.fast.metal_kernel` has them. Raises RuntimeError without a Metal back end."""
        return self._compiled(
            inputs=inputs,
            template=list(template),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
        )


@cache
def body_text(name: str) -> str:
    """The text of `<name>.metal`, read once a process: what was checked is what runs, whatever becomes of the file."""
    return (_FOLDER / f"{name}.metal").read_text("ascii")


def expect(kernel: str, name: str, array: mx.array, shape: tuple[int, ...], *dtypes: mx.Dtype) -> None:
    """Raise KernelArgumentsError unless `array` has this shape (-1: any) and one of these types."""
    fits = array.ndim == len(shape) and all(want in (-1, have) for have, want in zip(array.shape, shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise KernelArgumentsError(f"{kernel}: {name} has shape {tuple(array.shape)}, not ({wanted})")
    if array.dtype not in dtypes:
        raise KernelArgumentsError(f"{kernel}: {name} is {array.dtype}, not {' or '.join(str(dtype) for dtype in dtypes)}")


def demand(kernel: str, holds: bool, what: str) -> None:
    """Raise KernelArgumentsError saying `what` unless it holds."""
    if not holds:
        raise KernelArgumentsError(f"{kernel}: {what}")


def expect_int8(kernel: str, name: str, weight: Int8, *shape: int) -> None:
    """Raise KernelArgumentsError unless `weight` is int8 of this shape, unpacked, with inner dimensions of whole groups."""
    *outer, inner = shape
    demand(kernel, inner > 0 and inner % GROUP_SIZE == 0, f"{name} has inner dimension {inner}, not a multiple of {GROUP_SIZE}")
    expect(kernel, f"{name}'s codes", weight.codes, (*outer, inner // 4), mx.uint32)
    for part in (weight.scales, weight.biases):
        expect(kernel, f"{name}'s scales and biases", part, (*outer, inner // GROUP_SIZE), mx.bfloat16, mx.float32)
    demand(kernel, weight.scales.dtype == weight.biases.dtype, f"{name} has scales and biases of two types")
