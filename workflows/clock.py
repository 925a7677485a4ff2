"""The time of a workflow's present task, refused where it is an older task's.

A query that waited for a worker, after an outage, brings along the events that no workflow task has seen yet. The SDK applies
them at once, at the time of the task before, while replay applies them at the time of the task that follows. Whoever compares
times would then decide one thing today and another on replay, and the workflow would be stuck for good (TMPRL1100). Such a task
shows by its history, which has grown while time has not. Failing it costs nothing but the query: the worker forgets what it
has of the workflow, and the next task replays history as it is.
"""

from temporalio import workflow


class OldTaskError(RuntimeError):
    """Fails the task, not the workflow: events were to be applied at the time of an older task."""


class TaskClock:
    """Reads the time for everything that a workflow decides or remembers. Answers of queries need none of it."""

    def __init__(self) -> None:
        self._seen = (0.0, 0)

    def now(self) -> float:
        """Seconds since the epoch, the same on replay. Raises OldTaskError; call it in every signal handler."""
        now, length = workflow.time(), workflow.info().get_current_history_length()
        seen_at, seen_length = self._seen
        if now == seen_at and length > seen_length and not workflow.unsafe.is_replaying():
            raise OldTaskError(f"events {seen_length + 1} to {length} came with a query, before their own task, which takes them up")
        self._seen = (now, length)
        return now
