"""How a workflow calls an activity by name, and what a failed call was: the few lines all three workflows share."""

import asyncio
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.exceptions import TimeoutError as ActivityTimeoutError
from temporalio.workflow import ActivityCancellationType, ActivityHandle

from workflows.limits import PROGRAM_ERRORS, Limits

Result = TypeVar("Result")


def call(
    name: str,
    argument: object,
    result_type: type[Result],
    limits: Limits,
    *,
    queue: str | None = None,
    summary: str | None = None,
    wait_when_cancelled: bool = False,
) -> ActivityHandle[Result]:
    """Start activity `name` (on the workflow's own queue by default); the UI shows `summary` beside it.

    With `wait_when_cancelled` a cancelled call ends when its worker has let go, and may still bring a result.
    """
    cancellation = ActivityCancellationType.WAIT_CANCELLATION_COMPLETED if wait_when_cancelled else ActivityCancellationType.TRY_CANCEL
    return workflow.start_activity(
        name,
        argument,
        task_queue=queue,
        result_type=result_type,
        schedule_to_start_timeout=limits.schedule_to_start,
        start_to_close_timeout=limits.start_to_close,
        heartbeat_timeout=limits.heartbeat,
        retry_policy=limits.retry,
        cancellation_type=cancellation,
        summary=summary,
    )


def forget(handle: ActivityHandle[Result]) -> ActivityHandle[Result]:
    """`handle`, which may be left without anybody awaiting it: its error is then nobody's."""
    handle.add_done_callback(_look_at)
    return handle


def _look_at(done: "asyncio.Task[object]") -> None:
    if not done.cancelled():
        done.exception()


def failure_kind(error: ActivityError) -> str:
    """Class name of the error behind a failed call; `timeout` for a worker that was lost or too slow."""
    if isinstance(error.cause, ActivityTimeoutError):
        return "timeout"
    if isinstance(error.cause, ApplicationError):
        return error.cause.type or ApplicationError.__name__
    return type(error.cause).__name__


def failure_text(error: ActivityError) -> str:
    """What a failed call says of its failure."""
    if isinstance(error.cause, ActivityTimeoutError):
        kind = error.cause.type
        return kind.name.lower() if kind is not None else "timeout"
    return error.cause.message if isinstance(error.cause, ApplicationError) else str(error.cause)


def is_hopeless(error: ActivityError) -> bool:
    """True if trying again cannot help: the error says so, or it is a fault of the program."""
    cause = error.cause
    return isinstance(cause, ApplicationError) and (cause.non_retryable or cause.type in PROGRAM_ERRORS)
