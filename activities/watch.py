"""Whether a worker still polls: read from the SDK's own metrics, so that it works without asking the server.

A worker can stay up with no poll open (a lost connection that nobody closed, a poller that died); it looks healthy and
gets no work. What follows from silence is decided by `connection.supervise`.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Protocol

import structlog
from temporalio.runtime import BufferedMetricUpdate, MetricBuffer, Runtime, TelemetryConfig

BUFFER_UPDATES: Final = 100_000
"""Room for what a busy control process reports between two looks."""
SILENT_SECONDS: Final = 180.0
"""An idle poll is answered after a minute: three of them without one are no accident."""
HUNG_SECONDS: Final = 600.0
"""An engine's call that shows no sign of life for so long never will: its heartbeat stopped long ago."""
WATCH_SECONDS: Final = 2.0
"""Between two looks."""
LAG_SECONDS: Final = 1.0
"""An event loop that comes to a look so much late is told: something holds it that should be in a thread."""

_log = structlog.get_logger(__name__)

_POLLS: Final = frozenset({"temporal_long_request", "temporal_long_request_failure", "temporal_long_request_latency"})
_SLOTS: Final = "temporal_worker_task_slots_used"


class Updates(Protocol):
    """Where metric updates come from: `temporalio.runtime.MetricBuffer`."""

    def retrieve_updates(self) -> Sequence[BufferedMetricUpdate]:
        """All since the last call."""
        ...


@dataclass(slots=True)
class _Queue:
    """What was last seen of one task queue. Times are monotonic seconds."""

    seen_at: float
    slots_used: dict[str, int] = field(default_factory=dict)
    """Kind of task -> how many run."""


class PollWatch:
    """Follows the metrics of one SDK runtime. For one thread."""

    def __init__(self, updates: Updates, clock: Callable[[], float] = time.monotonic) -> None:
        self._updates = updates
        self._clock = clock
        self._queues: dict[str, _Queue] = {}

    def silent_seconds(self, queue: str) -> float:
        """Seconds without a poll of `queue` beginning or ending while it had nothing to do; counts from the first call."""
        now = self._clock()
        for update in self._updates.retrieve_updates():
            self._note(update, now)
        found = self._queues.setdefault(queue, _Queue(now))
        if any(found.slots_used.values()):
            found.seen_at = now
        return now - found.seen_at

    def begin(self, queue: str) -> None:
        """Another worker polls `queue` from here on."""
        self._queues[queue] = _Queue(self._clock())

    def _note(self, update: BufferedMetricUpdate, now: float) -> None:
        queue = update.attributes.get("task_queue")
        if not isinstance(queue, str):
            return
        name = update.metric.name
        if name in _POLLS:
            self._queues.setdefault(queue, _Queue(now)).seen_at = now
        elif name == _SLOTS:
            kind = str(update.attributes.get("worker_type", ""))
            self._queues.setdefault(queue, _Queue(now)).slots_used[kind] = int(update.value)


class WatchedRuntime(Runtime):
    """An SDK runtime whose workers can be watched; while one lives, somebody must look now and then, or updates are lost."""

    def __init__(self, worker_heartbeat_seconds: float | None) -> None:
        buffer = MetricBuffer(BUFFER_UPDATES)
        interval = None if worker_heartbeat_seconds is None else timedelta(seconds=worker_heartbeat_seconds)
        super().__init__(telemetry=TelemetryConfig(metrics=buffer), worker_heartbeat_interval=interval, disable_environment_info=True)
        self.watch = PollWatch(buffer)


def end_if_hung(silent_seconds: float, leave: Callable[[int], object] = os._exit) -> None:
    """End this process, whose engine hangs in a native call that nothing can interrupt: whoever keeps it starts it again."""
    if silent_seconds > HUNG_SECONDS:
        _log.critical("worker_hung", silent_seconds=round(silent_seconds))
        leave(1)
