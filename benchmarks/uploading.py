"""Decoding speed while finished groups go up: blocks of steps with and without the uploader at work, alternating.

The uploader, its spool, the cap on its bytes and the S3 server are the real ones; the engine has one core, everything else
the other, as a Mac has cores to spare for both.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.rollout_cases import GROUP_SIZE, GROUPS, Case
from benchmarks.servers import bucket_store
from stoa.config.host import MacHost
from worker_mac.forced import Forced
from worker_mac.limits import Budgets, CappedMeters
from worker_mac.uploader import Spool, Uploader

UPLOAD_BYTES_PER_SECOND: Final = 2_500_000
GROUP_BYTES: Final = 400_000
STEPS: Final = 100
"""Of a block."""
CONTEXT: Final = 24


@dataclass(frozen=True, slots=True)
class Uploading:
    """Medians over blocks. slowdown: seconds of a block while uploading over those of the quiet block before it."""

    slowdown: float
    quiet_step_seconds: float
    uploading_step_seconds: float
    num_blocks: int
    bytes_per_second: float


class _Feeder:
    """Puts a group into the uploader whenever it has less than two, while it is on."""

    def __init__(self, uploader: Uploader) -> None:
        self._uploader, self._on, self._ended = uploader, threading.Event(), threading.Event()
        self._data, self._number = np.random.default_rng(0).bytes(GROUP_BYTES), 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def switch(self, on: bool) -> None:
        if on:
            self._on.set()
        else:
            self._on.clear()
            self._uploader.wait(60.0)

    def close(self) -> None:
        self._ended.set()
        self._on.set()
        self._thread.join()

    def _run(self) -> None:
        while self._on.wait() and not self._ended.is_set():
            if len(self._uploader.pending()) < 2:
                self._uploader.put(f"runs/bench/groups/{self._number:06d}", self._data)
                self._number += 1
            time.sleep(0.01)


def decode_slowdown(case: Case, cores: Sequence[int], num_blocks: int) -> Uploading:
    """Measure; `cores` is empty where threads cannot be put on cores."""
    rows = Forced(case.served.model, GROUPS * GROUP_SIZE, 2 * CONTEXT)
    numbers = np.random.default_rng(1)
    rows.feed([numbers.integers(8, 200, CONTEXT).astype(np.int32)] * (GROUPS * GROUP_SIZE))
    _block(rows)
    quiet: list[float] = []
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        _put_on(cores[1:] or cores)
        with bucket_store(Path(scratch)) as store:
            budgets = Budgets(Path(scratch) / "network.json", 0, 0)
            store.meters = CappedMeters(MacHost(upload_bytes_per_second=UPLOAD_BYTES_PER_SECOND), budgets)
            uploader = Uploader(store, Spool(Path(scratch) / "spool"))
            feeder = _Feeder(uploader)
            _put_on(cores[:1])
            sent, sending = 0, 0.0
            for _ in range(num_blocks):
                quiet.append(_block(rows))
                feeder.switch(True)
                time.sleep(0.2)
                before, started = uploader.bytes_sent, time.monotonic()
                busy.append(_block(rows))
                sent, sending = sent + uploader.bytes_sent - before, sending + time.monotonic() - started
                feeder.switch(False)
            feeder.close()
            uploader.close()
            budgets.close()
    ratios = [one / other for one, other in zip(busy, quiet, strict=True)]
    return Uploading(
        statistics.median(ratios), statistics.median(quiet) / STEPS, statistics.median(busy) / STEPS, num_blocks, sent / sending
    )


def _put_on(cores: Sequence[int]) -> None:
    """Run this thread, and those it starts, on these cores."""
    if cores:
        os.sched_setaffinity(0, set(cores))


def _block(rows: Forced) -> float:
    """Seconds of a block of decode steps, each row fed one token at the same place, so that no step is longer than another."""
    tokens = [np.array([9], np.int32)] * len(rows.lengths)
    started = time.monotonic()
    for _ in range(STEPS):
        rows.lengths[:] = CONTEXT
        rows.feed(tokens)
    return time.monotonic() - started
