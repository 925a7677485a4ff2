"""The parts of a model that a kernel may compute, each with a switch: its kernel where that was checked, else plain MLX ops.

A model asks `Ops` and does not know which it gets. The choice is made once, when a model is built, by `choose`; what came
of each kernel stays readable as a `Verdict`.
"""

from collections.abc import Callable, Collection

import mlx.core as mx
import structlog

from metal.attention import AttentionKernel, Groups, Paged, PrefixKernel, Tails, attend_plain
from metal.check import KERNELS, Dims, Verdict, self_check
from metal.conv import ConvKernel, conv_plain
from metal.experts import ExpertsKernel, experts_plain
from metal.head import HeadKernel, head_plain
from metal.int8 import Int8
from metal.kernels import Launcher, launch_on_metal, metal_works
from metal.routing import RouterKernel, RouterRule, Routing, route_plain

NO_METAL = "no Metal back end"
SWITCHED_OFF = "switched off"
_log = structlog.get_logger(__name__)

LFM25 = Dims(2048, 1792, 32, 4, 32, 8, 64, 3, mx.bfloat16)
"""LFM2.5-8B-A1B, for a check without a model."""


class Ops:
    """One model's operations. Made by `choose` or `plain`."""

    def __init__(self, verdicts: Collection[Verdict], launcher: Launcher = launch_on_metal, *, sort_experts: bool = False) -> None:
        """`sort_experts`: let stock MLX see rows of one expert together, where it computes the experts."""
        self.verdicts = tuple(verdicts)
        self._sort_experts = sort_experts
        used = self.kernels
        self._experts = ExpertsKernel(launcher) if "experts" in used else None
        self._head = HeadKernel(launcher) if "head" in used else None
        self._attention = AttentionKernel(launcher) if "attention" in used else None
        self._router = RouterKernel(launcher) if "router" in used else None
        self._prefix = PrefixKernel(launcher) if "prefix" in used else None
        self._conv = ConvKernel(launcher) if "conv" in used else None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The parts that kernels compute."""
        return tuple(verdict.kernel for verdict in self.verdicts if verdict.uses_kernel)

    @property
    def name(self) -> str:
        """For a fingerprint: "metal" if kernels do all they were made for, "plain" if none does, else which do."""
        if not self.kernels:
            return "plain"
        refused = [verdict for verdict in self.verdicts if not verdict.uses_kernel]
        return f"metal({','.join(self.kernels)})" if refused else "metal"

    @property
    def shares_prefixes(self) -> bool:
        """True if `attend` gains by being told which rows share a prompt."""
        return self._prefix is not None

    def route(self, x: mx.array, gate: mx.array, bias: mx.array, rule: RouterRule) -> Routing:
        """See `route_plain`."""
        return (self._router or route_plain)(x, gate, bias, rule)

    def experts(self, x: mx.array, routing: Routing, gate: Int8, up: Int8, down: Int8) -> mx.array:
        """See `experts_plain`."""
        if self._experts is not None:
            return self._experts(x, routing, gate, up, down)
        return experts_plain(x, routing, gate, up, down, sort=self._sort_experts)

    def draw(self, x: mx.array, embedding: Int8, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """See `head_plain`."""
        return (self._head or head_plain)(x, embedding, keys, positions)

    def attend(self, q: mx.array, paged: Paged, scale: float, groups: Groups | None = None, tails: Tails | None = None) -> mx.array:
        """See `attend_plain`. `groups` may save work and changes nothing else."""
        if self._attention is None:
            return attend_plain(q, paged, scale, tails)
        if self._prefix is None or groups is None:
            return self._attention(q, paged, scale, tails)
        return self._attention(q, paged, scale, tails, shared=(groups, self._prefix(q, paged, groups, scale)))

    def convolve(self, projected: mx.array, tails: mx.array, taps: mx.array, active: mx.array) -> tuple[mx.array, mx.array]:
        """See `conv_plain`."""
        return (self._conv or conv_plain)(projected, tails, taps, active)


def plain(*, sort_experts: bool = False) -> Ops:
    """Plain MLX ops for everything."""
    return Ops((), sort_experts=sort_experts)


def choose(
    dims: Dims,
    *,
    without: Collection[str] = (),
    launcher: Launcher = launch_on_metal,
    available: Callable[[], bool] = metal_works,
    sort_experts: bool = False,
) -> Ops:
    """Check every kernel for this model and use those that agree with plain ops. `without`: parts not to use a kernel for."""
    return Ops(verdicts(dims, without=without, launcher=launcher, available=available), launcher, sort_experts=sort_experts)


def verdicts(
    dims: Dims = LFM25,
    *,
    without: Collection[str] = (),
    launcher: Launcher = launch_on_metal,
    available: Callable[[], bool] = metal_works,
) -> list[Verdict]:
    """What becomes of each of KERNELS on this machine; the engine's choice, and doctor's rows."""
    found: list[Verdict] = []
    works = available()
    for kernel in KERNELS:
        if kernel in without:
            found.append(Verdict(kernel, False, SWITCHED_OFF))
        elif not works:
            found.append(Verdict(kernel, False, NO_METAL))
        elif kernel == "prefix" and not any(one.kernel == "attention" and one.uses_kernel for one in found):
            found.append(Verdict(kernel, False, "needs the kernel of attention"))
        else:
            found.append(self_check(kernel, dims, launcher))
            report = _log.info if found[-1].uses_kernel else _log.warning
            report("kernel_checked", kernel=kernel, used=found[-1].uses_kernel, reason=found[-1].reason, seconds=found[-1].seconds)
    return found
