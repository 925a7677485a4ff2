"""Weights on their way to this Mac: heartbeats say how far they have come, and so does the worker to whoever looks at it.

A cold join may take many minutes inside one call. What is downloaded is `versions.py`'s business.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from stoa.contracts.ports import Progress
from stoa.telemetry.arriving import Arrival, Shown, watched

LEAST_BYTES: Final = 64_000_000
"""Less is here before anybody has read that it comes: most deltas."""
LOOK_SECONDS: Final = 1.0
_log = structlog.get_logger(__name__)


@contextmanager
def reported(
    look: Callable[[], Arrival | None], bytes_down: Callable[[], int], progress: Progress, *, seconds: float = LOOK_SECONDS
) -> Iterator[None]:
    """Within the block weights are brought in: each time bytes have come is a heartbeat.

    look: how far they are, None while none are on their way. bytes_down: everything this process has downloaded.
    """
    quiet = not _log.is_enabled_for(logging.INFO)
    bar, before = Shown("weights", _tell, least_bytes=LEAST_BYTES), -1

    def show(found: Arrival | None) -> None:
        nonlocal before
        now = bytes_down()
        if now != before:
            before = now
            progress.report("pulling weights" if found is None else f"pulling weights: {found}")
        if found is not None and not quiet:
            bar.show(found)

    try:
        show(look())
        with watched(look, show, seconds):
            yield
        bar.whole()
    finally:
        bar.close()


def _tell(found: Arrival) -> None:
    _log.info("weights_arriving", percent=found.percent, bytes=found.num_bytes, total_bytes=found.total_bytes)
