"""The processes that train together: sums, exchanges and agreements between them, and an end when one is gone.

A rank that died makes the others' next exchange fail at once; one that hangs makes them give up after a while, because a
collective itself has no limit. Nothing here knows what is trained.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import mlx.core as mx
import numpy as np

from stoa.contracts.errors import RankLostError, UsageError
from worker_mac.cluster.link import Watchdog

CHUNK_BYTES: Final = 16 << 20
"""Bytes of one collective: much memory is not needed twice at once."""
GAVE_UP: Final = 75
"""Exit code of a rank that waited in vain."""
_WORDS: Final = 256
"""Longest text that ranks tell each other, in bytes."""


class Ranks:
    """This process among those that train together; alone unless there is a group."""

    def __init__(self, group: mx.distributed.Group | None = None, *, wait_seconds: float = 300.0) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.bytes_summed = 0
        """Bytes of gradients that went into sums, of this rank."""
        self._watchdog = Watchdog(self._give_up, wait_seconds) if self.size > 1 else None

    @classmethod
    def join(cls, num_ranks: int, *, wait_seconds: float) -> "Ranks":
        """Meet the others over the ring that this process was started for. Raises RankLostError if they cannot be met."""
        if num_ranks == 1:
            return cls()
        try:
            group = mx.distributed.init(strict=True, backend="ring")
        except RuntimeError as error:
            raise RankLostError(f"the {num_ranks} processes cannot meet: {error}", hint="start them all again, on other ports") from error
        if group.size() != num_ranks:
            raise UsageError(f"{group.size()} processes were started for a warm start of {num_ranks}")
        return cls(group, wait_seconds=wait_seconds)

    def sum(self, vector: mx.array) -> mx.array:
        """The sum over all ranks of float32 [N], the same bits on each."""
        if self.group is None:
            return vector
        num = max(1, CHUNK_BYTES // 4)
        with self._limit():
            parts: list[mx.array] = []
            for start in range(0, vector.size, num):
                part = mx.distributed.all_sum(vector[start : start + num], group=self.group)
                mx.eval(part)
                parts.append(part)
        self.bytes_summed += vector.nbytes
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank; each rank gives as many, none beyond float32."""
        if self.group is None:
            return [list(numbers)]
        with self._limit():
            found = mx.distributed.all_gather(mx.array([list(numbers)], mx.float32), group=self.group)
            mx.eval(found)
        return [[float(number) for number in row] for row in np.array(found)]

    def from_first(self, array: mx.array) -> mx.array:
        """Rank 0's array on every rank; all give one of the same shape and type, float32 or bit patterns in it."""
        if self.group is None:
            return array
        with self._limit():
            sent = array if self.rank == 0 else mx.zeros_like(array)
            found = mx.distributed.all_sum(sent, group=self.group)
            mx.eval(found)
        return found

    def agree(self, what: str, words: str) -> None:
        """Raise UsageError on every rank, naming one that differs, unless all give the same words.

        What is exchanged has the same shape and type whatever the words, so a difference never hangs.
        """
        if self.group is None:
            return
        digest = np.frombuffer(hashlib.sha256(words.encode()).digest(), np.uint8)
        shown = np.frombuffer(words.encode()[:_WORDS].ljust(_WORDS), np.uint8)
        with self._limit():
            found = mx.distributed.all_gather(mx.array(np.concatenate([digest, shown]))[None], group=self.group)
            mx.eval(found)
        rows = np.array(found)
        for rank, row in enumerate(rows):
            if not np.array_equal(row[:32], rows[0, :32]):
                theirs, first = (bytes(each[32:]).decode(errors="replace").strip() for each in (row, rows[0]))
                raise UsageError(f"{what} of rank {rank} is not that of rank 0: {theirs} against {first}", hint="make them the same")

    @contextlib.contextmanager
    def _limit(self) -> Iterator[None]:
        watched = self._watchdog.over("an exchange with the other ranks") if self._watchdog else contextlib.nullcontext()
        with watched:
            try:
                yield
            except RuntimeError as error:
                raise RankLostError(f"rank {self.rank} lost the others: {error}", hint="start again with --resume") from error

    def _give_up(self, what: str) -> None:
        sys.stderr.write(f"error: rank {self.rank}: {what}; start again with --resume\n")
        sys.stderr.flush()
        os._exit(GAVE_UP)
