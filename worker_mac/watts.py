"""What the whole machine draws, where a program tells it: `macmon` to anybody who has it, `powermetrics` to root alone.

Readings are taken beside other work, on a thread. What tools print is parsed by functions that are tested on samples.
"""

import json
import os
import re
import shutil
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from worker_mac.senses import run_tool

_COMBINED = re.compile(r"^Combined Power[^:]*:\s*([\d.]+)\s*mW", re.MULTILINE)
_MACMON: Final = ("macmon", "pipe", "-s", "1", "-i", "500")
_POWERMETRICS: Final = ("powermetrics", "-n", "1", "-i", "500", "--samplers", "cpu_power")
Meter = Callable[[], float | None]
"""Reads watts once; None where nobody tells."""


@dataclass(slots=True)
class Draw:
    """Readings in watts, as they come."""

    readings: list[float] = field(default_factory=list[float])

    @property
    def watts(self) -> float | None:
        """Their median; None without one."""
        return statistics.median(self.readings) if self.readings else None


@contextmanager
def metered(meter: Meter) -> Iterator[Draw]:
    """Within the block `meter` is read again and again; the first time that it tells nothing is the last."""
    draw, ended = Draw(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            found = meter()
            if found is None:
                return
            if not ended.is_set():
                draw.readings.append(found)
            ended.wait(0.25)

    watcher = threading.Thread(target=watch, name="watts", daemon=True)
    watcher.start()
    try:
        yield draw
    finally:
        ended.set()
        watcher.join(timeout=5.0)


def watts_here() -> float | None:
    """Watts of this machine now; takes half a second where a program tells, no time elsewhere."""
    if shutil.which(_MACMON[0]) is not None:
        return read_macmon(run_tool(_MACMON))
    if shutil.which(_POWERMETRICS[0]) is not None and os.geteuid() == 0:
        return read_powermetrics(run_tool(_POWERMETRICS))
    return None


def read_macmon(text: str) -> float | None:
    """`sys_power`, the whole Mac, of one line of `macmon pipe`; where that is 0, `all_power`, the chip."""
    try:
        tree = json.loads(text.strip().splitlines()[-1])
        found = [float(tree[name]) for name in ("sys_power", "all_power") if name in tree]
    except (IndexError, ValueError, TypeError):
        return None
    return next((watts for watts in found if 0.0 < watts < 2000.0), None)


def read_powermetrics(text: str) -> float | None:
    """`Combined Power (CPU + GPU + ANE)`, of the chip alone."""
    found = _COMBINED.search(text)
    return float(found.group(1)) / 1000.0 if found else None
