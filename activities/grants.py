"""The control activity that says what a Mac may generate next, waiting for room without holding a thread.

Hundreds of Macs may wait at once: each wait is a coroutine that asks the injected `Granter` now and then, the less often
the more of them there are.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from temporalio import activity

from activities.edge import BEAT_SECONDS, STALL_SECONDS, EngineProgress, application_error, attended, first_beat
from stoa.contracts import names
from stoa.contracts.errors import StoaError
from stoa.contracts.fleet_messages import Grant, GrantRequest, WaitsFor
from stoa.contracts.ports import Granter

NUM_THREADS: Final = 4
MIN_POLL_SECONDS: Final = 0.25
TELL_SECONDS: Final = 10.0
POLL_SECONDS_A_WAIT: Final = 0.005
"""A thousand waiting Macs ask every 5 s each, 200 times a second together."""


class GrantActivities:
    """What a Mac may generate next."""

    def __init__(self, granter: Granter) -> None:
        self._granter = granter
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grant")
        self._num_waiting = 0

    @activity.defn(name=names.GRANT_SWEEP, no_thread_cancel_exception=True)
    async def grant(self, request: GrantRequest) -> Grant:
        """The grant of (host, sweep), waiting for room at most `wait_seconds`."""
        progress = EngineProgress(first_beat(request))
        with attended(progress, BEAT_SECONDS, STALL_SECONDS):
            self._num_waiting += 1
            try:
                return await self._wait(request, progress)
            except StoaError as error:
                raise application_error(error) from error
            except asyncio.CancelledError:
                told = activity.cancellation_details()
                if told is not None and told.not_found:
                    # Its session is over, as at the end of every run: nobody waits for an answer, and none is sent.
                    activity.raise_complete_async()
                raise
            finally:
                self._num_waiting -= 1

    async def _wait(self, request: GrantRequest, progress: EngineProgress) -> Grant:
        deadline = time.monotonic() + request.wait_seconds
        loop = asyncio.get_running_loop()
        waited_for: WaitsFor = ""
        while True:
            answer = await loop.run_in_executor(self._threads, self._granter.grant, request, progress)
            waited_for = answer.waits_for or waited_for
            answer = replace(answer, waits_for=waited_for)  # what came after a wait says what for
            if _is_final(answer, request):
                return answer
            if time.monotonic() >= deadline or progress.stopping:
                return answer
            await asyncio.sleep(max(MIN_POLL_SECONDS, POLL_SECONDS_A_WAIT * self._num_waiting))


def _is_final(answer: Grant, request: GrantRequest) -> bool:
    """True if waiting cannot change the answer, or its news should be told at once: a short wait asks for that."""
    if answer.question_ids or answer.newest_sweep >= 0 or request.evaluation or answer.run_state == "stopped":
        return True
    return answer.run_state != "running" and request.wait_seconds <= TELL_SECONDS
