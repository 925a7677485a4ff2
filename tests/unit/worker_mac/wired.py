"""A wired set inside one process for tests: followers on threads, connections over socket pairs, hidden states in queues.

Everything but the collectives themselves is the real thing; those are played by `queue.Queue`s and a barrier.
"""

import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress

import mlx.core as mx
import numpy as np

from stoa.contracts.errors import GpuInterruptedError, LinkMismatchError, StoaError
from stoa.weights.state import WeightState
from worker_mac.cluster.follow import Follower
from worker_mac.cluster.lead import Ranks, WiredSet
from worker_mac.cluster.wire import Channel


class Sums:
    """Sums over threads, in the order of ranks."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.parts = threading.Barrier(ranks, timeout=30), {}

    def total(self, rank: int, x: mx.array) -> mx.array:
        self.parts[rank] = np.array(x)
        self.barrier.wait()
        total = sum(self.parts[one] for one in sorted(self.parts))
        self.barrier.wait()
        return mx.array(total)


class QueueLink:
    """One place of a ring of queues. Arrays cross as numpy, bit for bit."""

    def __init__(self, before: queue.Queue, after: queue.Queue, rank: int = 0, sums: Sums | None = None) -> None:
        self._before, self._after, self._rank, self._sums = before, after, rank, sums
        self.bytes_sent = 0

    def send(self, x: mx.array) -> None:
        self._after.put(np.array(x.view(mx.uint8)))
        self._after.put((x.shape, x.dtype))
        self.bytes_sent += x.nbytes

    def agree(self, shape: tuple[int, ...], dtype: mx.Dtype, num_sums: int) -> None:
        """Told by the real link's test."""

    def total(self, x: mx.array) -> mx.array:
        self.bytes_sent += x.nbytes
        return self._sums.total(self._rank, x)

    def watched(self, what: str) -> nullcontext:
        return nullcontext()

    def abort(self) -> None:
        self._after.put(None)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        found = self._before.get(timeout=30)
        if found is None:
            raise GpuInterruptedError("the one before was interrupted")
        said = self._before.get(timeout=30)
        if said != (shape, dtype):
            raise LinkMismatchError(f"{said} is not {(shape, dtype)}")
        return mx.array(found).view(dtype).reshape(shape)


@contextmanager
def followed(num_macs: int) -> Iterator[tuple[Ranks, QueueLink]]:
    """The first of so many Macs: the others, and its link."""
    lost: list[StoaError] = []
    queues, sums = [queue.Queue() for _ in range(num_macs)], Sums(num_macs)
    threads, channels = [], []
    for rank in range(1, num_macs):
        here, there = socket.socketpair()
        channels.append(Channel(here, f"Mac {rank}"))
        follower = Follower(Channel(there, "the first Mac"), QueueLink(queues[rank - 1], queues[rank], rank, sums))
        threads.append(threading.Thread(target=_follow, args=(follower,), daemon=True))
        threads[-1].start()
    ranks = Ranks(channels, lost.append)
    try:
        yield ranks, QueueLink(queues[-1], queues[0], 0, sums)
    finally:
        ranks.close()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)


@contextmanager
def wired_set(config: Mapping[str, object], state: WeightState | None, spans: list[range], **options: object) -> Iterator[WiredSet]:
    """A set that holds the weights of `state`, or zeros."""
    from stoa.weights.layout import layout_of

    layout = state.layout if state is not None else layout_of(config, "float32")
    with followed(len(spans)) as (ranks, link):
        wired = WiredSet(ranks, link, config, layout, spans, **options)
        if state is not None:
            fill(wired, state)
        yield wired


def _follow(follower: Follower) -> None:
    with suppress(StoaError):  # as `rank.main` ends
        follower.run()


def fill(wired: WiredSet, state: WeightState) -> None:
    """Put weights in, array by array, as an anchor is read."""
    digests = {}
    for spec in state.layout.arrays:
        data = memoryview(np.ascontiguousarray(state.arrays[spec.name]).reshape(-1).view(np.uint8)).cast("B")
        at = 0

        def read(buffer: memoryview, data: memoryview = data) -> int:
            nonlocal at
            count = min(len(buffer), len(data) - at)
            buffer[:count] = data[at : at + count]
            at += count
            return count

        digests[spec.name] = wired.weights.state.fill(spec.name, read, spec.name)
    wired.weights.state.accept(digests, state.state_id(), "the test's weights")
