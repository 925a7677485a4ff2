"""How often one caller may call: a bucket of tokens each, and how many calls it may have open."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from cli.proxying.refusal import Code, RefusedError

MAX_CALLERS: Final = 20_000
"""Callers remembered; the one that was silent longest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits of one caller."""

    calls_per_second: float = 20.0
    burst_calls: float = 60.0
    open_calls: int = 12


@dataclass(slots=True)
class _Use:
    tokens: float
    at: float
    num_open: int = 0
    num_refused: int = 0


class Limiter:
    """Counts the calls of each caller. For one event loop."""

    def __init__(self, rates: Rates, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates, self._clock = rates, clock
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    @contextmanager
    def call(self, caller: str) -> Iterator[None]:
        """Room for one call, given back at its end. Raises RefusedError (RESOURCE_EXHAUSTED) if there is none."""
        use = self._use(caller)
        if use.num_open >= self._rates.open_calls:
            raise RefusedError(Code.RESOURCE_EXHAUSTED, f"{use.num_open} calls are open already: wait for one to end")
        if use.tokens < 1.0:
            raise RefusedError(Code.RESOURCE_EXHAUSTED, f"more than {self._rates.calls_per_second:g} calls a second: slow down")
        use.tokens -= 1.0
        use.num_open += 1
        try:
            yield
        finally:
            use.num_open -= 1

    def _use(self, caller: str) -> _Use:
        now = self._clock()
        use = self._uses.get(caller)
        if use is None:
            use = self._uses[caller] = _Use(self._rates.burst_calls, now)
            if len(self._uses) > MAX_CALLERS:
                self._uses.popitem(last=False)
        self._uses.move_to_end(caller)
        use.tokens = min(self._rates.burst_calls, use.tokens + (now - use.at) * self._rates.calls_per_second)
        use.at = now
        return use
