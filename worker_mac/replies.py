"""What environments answer to ended turns, worked out by a few threads while the rest of a sweep is decoded.

Only what an environment says of itself (`Limits.reply_seconds`) decides that an answer is waited for here; one that is
instantaneous is worked out where its turn ended. Nothing here touches MLX or knows what an answer means. An answer that
is not there in time, and every fault of the tools, is the episode's loss and nobody's reward.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from stoa.contracts.errors import InfrastructureFaultError

NUM_THREADS: Final = 16
"""Answers that are worked out at once: no sweep asks a search server for more."""
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Asked(Generic[_Answer]):
    future: Future[_Answer]
    at: float
    begun_at: float | None = None


class Replies(Generic[_Answer]):
    """Answers on the way, by episode. For one thread; close it when the sweep is over."""

    def __init__(self, limit_seconds: float, num_threads: int = NUM_THREADS) -> None:
        """`limit_seconds`: longest that one answer may take once a thread has begun with it."""
        self._limit_seconds = limit_seconds
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="reply")
        self._asked: dict[int, _Asked[_Answer]] = {}
        self._moved_at = time.monotonic()
        """When an answer came last: who waits for a thread is given up only if nobody is answered any more."""

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, episode: int, work_out: Callable[[], _Answer]) -> None:
        """Have an episode's answer worked out."""

        def begin() -> _Answer:
            asked.begun_at = time.monotonic()
            return work_out()

        asked: _Asked[_Answer] = _Asked(Future(), time.monotonic())
        asked.future = self._pool.submit(begin)
        self._asked[episode] = asked

    def take(self) -> list[tuple[int, Callable[[], _Answer]]]:
        """Episodes whose answers have come, or come no more; calling gives the answer, or raises what became of it.

        InfrastructureFaultError for an answer that took too long; its thread is busy for as long as the tool hangs.
        """
        if not self._asked:
            return []
        now = time.monotonic()
        found: list[tuple[int, Callable[[], _Answer]]] = []
        for episode, asked in list(self._asked.items()):
            if asked.future.done():
                found.append((episode, asked.future.result))
                self._moved_at = now
            elif now - (asked.begun_at or max(asked.at, self._moved_at)) > self._limit_seconds:
                asked.future.cancel()
                found.append((episode, self._late))
            else:
                continue
            del self._asked[episode]
        return found

    def wait(self, seconds: float) -> None:
        """Until an answer has come, at most so long."""
        wait([asked.future for asked in self._asked.values()], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Nobody waits for what is still on its way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _late(self) -> _Answer:
        raise InfrastructureFaultError(
            f"an environment gave no answer in {self._limit_seconds:.0f} s", hint="look at what its tools need: a search server, a disk"
        )
