"""Compiles and calls the `.metal` bodies of this folder, and decides once a process whether a kernel may be used.

Linux has no Metal back end (`mx.fast.metal_kernel` raises when it is called), so every kernel has a plain-op reference
and a `Switch` between the two. A kernel that a start-up self-test finds to disagree is never used.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

import mlx.core as mx
import structlog

_FOLDER = Path(__file__).parent
_log = structlog.get_logger(__name__)


def metal_works() -> bool:
    """True if MLX computes on an Apple GPU in this process."""
    return mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu


class Kernel:
    """One kernel: the body in `<name>.metal`, compiled by MLX on first use for each set of template values."""

    def __init__(self, name: str, *, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.name = name
        self.source = (_FOLDER / f"{name}.metal").read_text("ascii")
        self._inputs, self._outputs = list(inputs), list(outputs)

    @cached_property
    def _compiled(self) -> Callable[..., list[mx.array]]:
        made: object = mx.fast.metal_kernel(
            name=f"stoa_{self.name}", input_names=self._inputs, output_names=self._outputs, source=self.source
        )
        return cast(Callable[..., list[mx.array]], made)

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: list[tuple[str, int | bool]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        """Run the kernel; arguments as `mx.fast.metal_kernel` has them. Raises RuntimeError without a Metal back end."""
        return self._compiled(
            inputs=inputs,
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
        )


class Switch:
    """Kernel or plain ops, decided on first use: `available()` first, then `self_test()`, which says "" or what differs."""

    def __init__(self, name: str, *, available: Callable[[], bool], self_test: Callable[[], str]) -> None:
        self._name = name
        self._available, self._self_test = available, self_test
        self.reason = "not decided yet"
        """Why plain ops are used; "" where the kernel is."""

    @cached_property
    def uses_kernel(self) -> bool:
        """True if the kernel computes; False if the plain ops do, for `reason`."""
        self.reason = self._decide()
        if self.reason and self.reason != "no Metal back end":
            _log.warning("kernel_refused", kernel=self._name, reason=self.reason)
        return not self.reason

    def _decide(self) -> str:
        if not self._available():
            return "no Metal back end"
        try:
            return self._self_test()
        except (RuntimeError, ValueError) as error:  # MLX raises these for a body the driver's compiler refuses
            return f"does not run: {str(error)[:200]}"
