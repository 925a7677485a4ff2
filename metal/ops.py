"""The table from which a model takes its ops: a Metal kernel where its switch says so, else the plain reference.

Replacing an op by a kernel is one line here. The references say what each op means; they are in `reference.py` and
`router.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from metal.reference import attend_plain, convolve_plain, draw_plain, experts_plain
from metal.router import Router, RouterRule


@dataclass(frozen=True, slots=True)
class Ops:
    """Callables with the signatures of `route_plain` (its rule bound), `attend_plain`, `experts_plain`, `convolve_plain`, `draw_plain`."""

    route: Router | None
    """None for a model without experts."""
    attend: Callable[..., mx.array]
    experts: Callable[..., mx.array]
    convolve: Callable[..., tuple[mx.array, mx.array]]
    draw: Callable[..., tuple[mx.array, mx.array]]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the ops that an own kernel computes."""
        return ("router",) if self.route is not None and self.route.switch.uses_kernel else ()


def choose_ops(rule: RouterRule | None) -> Ops:
    """The ops of a model with this routing rule, None for one without experts."""
    return Ops(None if rule is None else Router(rule), attend_plain, experts_plain, convolve_plain, draw_plain)
