"""Looks at a run from outside while things break: every HEAD, every step, every group as it comes, and when.

Reads the bucket past all lines and proxies; what cannot be read just now is read later. Says after a fault how long it
took until the run, or the Mac that was struck, got on again.
"""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from benchmarks.fleet_plant import RUN, Plant
from cli.audit import HeadSeen
from stoa.bucket import keys
from stoa.bucket.head import Head, poll_head
from stoa.bucket.store import Store
from stoa.config.load import bucket_credentials
from stoa.contracts.errors import ObjectMissingError, ServiceUnavailableError
from stoa.contracts.ids import HostName

POLL_SECONDS = 0.25


@dataclass
class Watch:
    """Use as a context. What it has seen may be read at any time."""

    plant: Plant
    heads: list[HeadSeen] = field(default_factory=list)
    manifests: set[tuple[int, str]] = field(default_factory=set)
    """Version and manifest sha256 of every HEAD."""
    head: Head | None = None
    _steps: dict[str, float] = field(default_factory=dict)
    _groups: dict[HostName, float] = field(default_factory=dict)
    _counts: dict[HostName, int] = field(default_factory=dict)

    def __enter__(self) -> Self:
        settings = self.plant.config.bucket
        self._store = Store(settings, bucket_credentials(settings))  # without patience: what cannot be read is read later
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(30.0)

    @property
    def num_steps(self) -> int:
        """Steps that were done, those that were lost with a lease and done again included."""
        return len(self._steps)

    def step_after(self, at: float) -> float | None:
        """When the first step after `at` (monotonic) was seen to be done."""
        return min((seen for seen in tuple(self._steps.values()) if seen > at), default=None)

    def group_after(self, host: str, at: float) -> float | None:
        """When the newest group of a Mac was seen to be in the bucket, if that was after `at` (monotonic)."""
        seen = self._groups.get(HostName(host), 0.0)
        return seen if seen > at else None

    def _look(self) -> None:
        etag, epochs = "", set[int]()
        while not self._ended.is_set():
            with suppress(ServiceUnavailableError, ObjectMissingError):
                found = poll_head(self._store, RUN, self.plant.launched.document.public_key, etag)
                if found is not None:
                    self.head, etag = found
                    epochs.add(self.head.epoch)
                    self.heads.append(HeadSeen(time.time(), self.head.seq, self.head.epoch, self.head.version))
                    if self.head.version >= 0:
                        self.manifests.add((self.head.version, self.head.manifest_sha256))
                for epoch in sorted(epochs)[-2:]:
                    self._note_steps(epoch)
            self._note_groups()
            self._ended.wait(POLL_SECONDS)

    def _note_steps(self, epoch: int) -> None:
        prefix = keys.steps_of_epoch(RUN, epoch)
        known = max((key for key in self._steps if key.startswith(prefix)), default="")
        for listed in self._store.list(prefix, known):
            self._steps.setdefault(listed.key, time.monotonic())

    def _note_groups(self) -> None:
        """By what the Macs wrote down, which costs the bucket nothing."""
        for file in self.plant.folder.glob(f"state/*/runs/{RUN}/acknowledged"):
            host, size = HostName(file.parents[2].name), file.stat().st_size
            if size != self._counts.get(host):
                self._counts[host] = size
                self._groups[host] = time.monotonic()
