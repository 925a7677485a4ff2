"""The parts of a model that a kernel may compute, each with a switch: its kernel where that was checked, else plain MLX ops.

A model asks `Ops` and does not know which it gets. The choice is made once a process, by `choose_ops`; what came of each
kernel stays readable as a `Verdict`.
"""

from collections.abc import Callable, Collection
from functools import cache

import mlx.core as mx
import structlog

from metal.attention import AttentionKernel, Groups, PrefixKernel
from metal.check import KERNELS, Dims, Verdict, self_check
from metal.conv import ConvKernel
from metal.experts import ExpertsKernel
from metal.head import HeadKernel
from metal.kernels import Launcher, launch_on_metal, metal_works
from metal.reference import Int8, attend_plain, convolve_plain, draw_plain, experts_plain
from metal.router import RouterKernel, RouterRule, Routing, route_plain

NO_METAL = "no Metal back end"
SWITCHED_OFF = "switched off"
_log = structlog.get_logger(__name__)


class Ops:
    """One model's operations. Made by `choose_ops` or `plain`."""

    def __init__(self, verdicts: Collection[Verdict], launcher: Launcher = launch_on_metal, *, sort_experts: bool = False) -> None:
        """`sort_experts`: let stock MLX see rows of one expert together, where it computes the experts."""
        self.verdicts = tuple(verdicts)
        self._sort_experts = sort_experts
        used = self.kernels
        self._experts = ExpertsKernel(launcher) if "experts" in used else None
        self._attention = AttentionKernel(launcher) if "attention" in used else None
        self._prefix = PrefixKernel(launcher) if "prefix" in used else None
        self._head = HeadKernel(launcher) if "head" in used else draw_plain
        self._router = RouterKernel(launcher) if "router" in used else route_plain
        self._conv = ConvKernel(launcher) if "conv" in used else convolve_plain

    @property
    def kernels(self) -> tuple[str, ...]:
        """The parts that kernels compute."""
        return tuple(verdict.kernel for verdict in self.verdicts if verdict.uses_kernel)

    @property
    def name(self) -> str:
        """For a fingerprint: "plain" if no kernel computes, "metal" if all do, else "metal" and which do."""
        if not self.kernels:
            return "plain"
        return "metal" if len(self.kernels) == len(self.verdicts) else f"metal({','.join(self.kernels)})"

    @property
    def keeps_pieces(self) -> bool:
        """True if `attend` needs memory for every row it is given at once; plain ops see to that themselves."""
        return self._attention is not None

    @property
    def shares_prompts(self) -> bool:
        """True if `attend` gains by being told which rows share a prompt."""
        return self._prefix is not None

    def route(self, x: mx.array, gate: mx.array, bias: mx.array, rule: RouterRule) -> Routing:
        """See `route_plain`."""
        return self._router(x, gate, bias, rule)

    def experts(self, x: mx.array, experts: mx.array, weights: mx.array, gate: Int8, up: Int8, down: Int8) -> mx.array:
        """See `experts_plain`."""
        if self._experts is not None:
            return self._experts(x, experts, weights, gate, up, down)
        return experts_plain(x, experts, weights, gate, up, down, sort=self._sort_experts)

    def draw(self, hidden: mx.array, embedding: Int8, uniform: mx.array) -> tuple[mx.array, mx.array]:
        """See `draw_plain`."""
        return self._head(hidden, embedding, uniform)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array, lengths: mx.array, scale: float,
        groups: Groups | None = None,
    ) -> mx.array:  # fmt: skip
        """See `attend_plain`. `groups`: what `group_rows` says of these tiles, if prompts are shared."""
        if self._attention is None:
            return attend_plain(queries, keys, values, tables, lengths, scale)
        shared = None
        if self._prefix is not None and groups is not None:
            shared = groups, self._prefix(queries, keys, values, tables, lengths, scale, groups)
        return self._attention(queries, keys, values, tables, lengths, scale, shared=shared)

    def convolve(self, x: mx.array, tails: mx.array, kernel: mx.array) -> tuple[mx.array, mx.array]:
        """See `convolve_plain`."""
        return self._conv(x, tails, kernel)


def plain(*, sort_experts: bool = False) -> Ops:
    """Plain MLX ops for everything."""
    return Ops((), sort_experts=sort_experts)


def choose_ops(dims: Dims, *, without: Collection[str] = (), sort_experts: bool = False) -> Ops:
    """The ops of a model on this machine. `without`: parts that no kernel is to compute."""
    return Ops(_on_this_machine(dims, frozenset(without)), sort_experts=sort_experts)


@cache
def _on_this_machine(dims: Dims, without: frozenset[str]) -> tuple[Verdict, ...]:
    return verdicts(dims, without=without)


def verdicts(
    dims: Dims,
    *,
    without: Collection[str] = (),
    launcher: Launcher = launch_on_metal,
    available: Callable[[], bool] = metal_works,
) -> tuple[Verdict, ...]:
    """What becomes of each of KERNELS: checked against plain ops, unless it is switched off or there is no Metal."""
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
    return tuple(found)
