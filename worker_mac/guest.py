"""A worker as a guest on somebody's Mac: looks at the Mac once a second and keeps the present decision for the engine.

The looking is done by a thread, because probes take milliseconds that a decode step does not have. What is decided is
`power.py`'s, what is sensed `senses.py`'s.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import structlog

from stoa.config.host import MacHost
from worker_mac.holds import awake
from worker_mac.power import PLAY, Decision, Senses, decide
from worker_mac.senses import NoProbe, Probe

_log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
_LONGEST_REST_SECONDS: Final = 1.0


class Guest:
    """The present decision. Without a probe nothing is known, and everything is played."""

    def __init__(
        self,
        allowed: MacHost | None = None,
        probe: Probe | None = None,
        *,
        spent_budget: Callable[[], str] = lambda: "",
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """spent_budget: which budget of the network is spent, in words."""
        self.allowed = allowed or MacHost()
        self._probe, self._spent_budget, self._look_seconds = probe or NoProbe(), spent_budget, look_seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._senses = Senses(time.monotonic())
        self.spool_bytes = 0
        """Kept up to date by the engine."""
        self.decision: Decision = PLAY

    def start(self) -> None:
        """Look once, then every second until `close`."""
        self.look()
        self._thread = threading.Thread(target=self._watch, name="guest", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the looking."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> Decision:
        """Sense, decide, and say so if the decision is another one."""
        before = self.decision
        self._senses = replace(self._probe.read(), spent_budget=self._spent_budget(), spool_bytes=self.spool_bytes)
        self.decision = decide(self._senses, self.allowed, before)
        if (self.decision.state, self.decision.reason) != (before.state, before.reason):
            _log.info("guest_decided", state=self.decision.state, reason=self.decision.reason)
        return self.decision

    @property
    def must_leave(self) -> str:
        """Why groups in hand must be let go of now; "" while they may go on."""
        decision = self.decision
        return decision.reason if decision.leaves(time.monotonic()) else ""

    @property
    def may_transfer(self) -> bool:
        """False while the network is not ours to use."""
        return self.decision.kind not in ("network", "budget")

    def rest(self, step_seconds: float) -> None:
        """Rest after a step that took so long, by the share of time that is ours."""
        duty = self.decision.duty
        if duty < 1.0:
            self._ended.wait(min(step_seconds * (1.0 / duty - 1.0), _LONGEST_REST_SECONDS))

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Keep the Mac awake while the block runs, if it is on mains."""
        if self._senses.on_mains:
            with awake(os.getpid()):
                yield
        else:
            yield

    def _watch(self) -> None:
        while not self._ended.wait(self._look_seconds):
            self.look()
