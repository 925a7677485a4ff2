"""A Mac that is started while HEAD says that its run has stopped: how long it waits for the run to go on.

HEAD of a resumed run says so once a trainer has taken it, which takes as long as loading a model, or as a pause. Temporal knows
it at once: a Mac that is not behind a proxy may look in its own namespace, which is the run's too where all is on one network.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

import structlog
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError

from activities.connection import connect
from stoa.config.run import Temporal
from stoa.contracts import names
from stoa.contracts.access import Access
from stoa.contracts.errors import ServiceError

RESUME_SECONDS: Final = 60.0
"""A worker started on a stopped run waits this long for it to be resumed, and again as long as Temporal says that it was."""
TICK_SECONDS: Final = 1.0
ASK_SECONDS: Final = 5.0

_log = structlog.get_logger(__name__)


async def begins(
    head_state: Callable[[], str],
    goes_on: Callable[[], Awaitable[bool]],
    is_leaving: Callable[[], bool],
    pause: Callable[[float], Awaitable[None]],
    *,
    resume_seconds: float = RESUME_SECONDS,
) -> bool:
    """False if the run has stopped and is not resumed, or we are asked to end. `head_state` is asked on a thread."""
    deadline, said = time.monotonic() + resume_seconds, ""
    while not is_leaving():
        if await asyncio.to_thread(head_state) != "stopped":
            return True
        why = said or "the run has stopped"
        if time.monotonic() > deadline:
            if not await goes_on():
                hint = "once it is resumed and its trainer is there, start this Mac again"
                _log.warning("run_over", reason="the run has stopped", hint=hint)
                return False
            deadline, why = time.monotonic() + resume_seconds, "the run was resumed, and no trainer has taken it yet"
        if why != said:
            said = why
            hint = "it may be resumed" if why == "the run has stopped" else "is it paused, is its trainer there? `stoa status` says"
            _log.info("worker_waiting", reason=why, hint=hint, seconds=resume_seconds)
        await pause(min(TICK_SECONDS, resume_seconds))
    return False


async def goes_on(temporal: Temporal, access: Access, run: str) -> bool:
    """Whether the run's workflow is running in this Mac's namespace; False also where nobody can tell."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            client = await connect(temporal.address, temporal.namespace_mac, access=access)
            handle = client.get_workflow_handle(names.run_workflow_id(run))
            found = await handle.describe(rpc_timeout=timedelta(seconds=ASK_SECONDS))
    except (TimeoutError, RPCError, ServiceError):
        return False
    return found.status == WorkflowExecutionStatus.RUNNING
