"""How long each activity may wait, run and be silent, and how often it is tried: all numbers of that kind.

Everything scales with the heartbeat timeout of a run (30 s in production, a few seconds in a demo).
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from temporalio.common import RetryPolicy

PROGRAM_ERRORS: Final = (
    "TypeError",
    "KeyError",
    "ValueError",
    "AttributeError",
    "NameError",
    "IndexError",
    "AssertionError",
    "ImportError",
    "ModuleNotFoundError",
    "NotImplementedError",
    "ZeroDivisionError",
)
"""Faults of the program: trying again would loop for ever without anybody noticing."""

MAX_ACQUIRE_ATTEMPTS: Final = 999
"""The attempt is the lower three digits of the fencing token."""

MIN_LOAD_SECONDS: Final = 300.0
"""Loading a model takes its time, however short the heartbeat."""


@dataclass(frozen=True)
class Limits:
    """Limits of one activity; None where there is none."""

    start_to_close: timedelta
    retry: RetryPolicy
    schedule_to_start: timedelta | None = None
    heartbeat: timedelta | None = None


ONCE: Final = RetryPolicy(maximum_attempts=1)

CONTROL: Final = Limits(
    start_to_close=timedelta(seconds=30),
    retry=RetryPolicy(
        initial_interval=timedelta(seconds=1),
        maximum_interval=timedelta(seconds=30),
        maximum_attempts=10,
        non_retryable_error_types=PROGRAM_ERRORS,
    ),
)
"""Small control activities: safe to repeat, tried for about three minutes."""


SCORING: Final = Limits(start_to_close=timedelta(minutes=10), heartbeat=timedelta(seconds=60), retry=CONTROL.retry)
"""Reading and scoring all parts of an evaluation."""


def acquire(heartbeat_seconds: float) -> Limits:
    """Waits for a trainer as long as it takes; then loading is bounded."""
    return Limits(
        start_to_close=timedelta(seconds=max(60 * heartbeat_seconds, MIN_LOAD_SECONDS)),
        heartbeat=timedelta(seconds=heartbeat_seconds),
        retry=RetryPolicy(
            initial_interval=timedelta(seconds=2),
            backoff_coefficient=1.5,
            maximum_interval=timedelta(seconds=60),
            maximum_attempts=MAX_ACQUIRE_ATTEMPTS,
            non_retryable_error_types=PROGRAM_ERRORS,
        ),
    )


def train_step(heartbeat_seconds: float, step_timeout_seconds: float) -> Limits:
    """Once: what a lost step means is decided by the workflow, which takes the run anew."""
    silence = timedelta(seconds=heartbeat_seconds)
    return Limits(schedule_to_start=silence, start_to_close=timedelta(seconds=step_timeout_seconds), heartbeat=silence, retry=ONCE)


def publish(heartbeat_seconds: float, *, anchor: bool) -> Limits:
    """Three times: a publish that was done answers the same again. An anchor is the whole model and takes longer."""
    silence = timedelta(seconds=heartbeat_seconds)
    return Limits(
        schedule_to_start=silence,
        start_to_close=timedelta(seconds=max((120 if anchor else 40) * heartbeat_seconds, MIN_LOAD_SECONDS)),
        heartbeat=silence,
        retry=RetryPolicy(
            initial_interval=timedelta(seconds=1),
            maximum_interval=timedelta(seconds=30),
            maximum_attempts=3,
            non_retryable_error_types=PROGRAM_ERRORS,
        ),
    )


def grant(heartbeat_seconds: float, wait_seconds: float) -> Limits:
    """Waits for room inside; a control process that dies is noticed by its silence."""
    return Limits(
        start_to_close=timedelta(seconds=wait_seconds) + CONTROL.start_to_close,
        heartbeat=timedelta(seconds=heartbeat_seconds),
        retry=CONTROL.retry,
    )


def notice(heartbeat_seconds: float) -> Limits:
    """A word to a Mac's owner; it may have to wait for a sweep that is being given up."""
    return Limits(
        schedule_to_start=timedelta(seconds=4 * heartbeat_seconds),
        start_to_close=timedelta(seconds=heartbeat_seconds),
        retry=RetryPolicy(maximum_attempts=2),
    )


def namesake(heartbeat_seconds: float) -> Limits:
    """A word to one of the two Macs that poll a queue: it may reach the other one first, which passes it on."""
    return Limits(
        schedule_to_start=timedelta(seconds=heartbeat_seconds),
        start_to_close=timedelta(seconds=heartbeat_seconds),
        retry=RetryPolicy(initial_interval=timedelta(seconds=1), backoff_coefficient=1.0, maximum_attempts=6),
    )


def sweep(heartbeat_seconds: float, sweep_timeout_seconds: float) -> Limits:
    """Once: the session redoes a lost sweep under the same number."""
    silence = timedelta(seconds=heartbeat_seconds)
    return Limits(schedule_to_start=silence, start_to_close=timedelta(seconds=sweep_timeout_seconds), heartbeat=silence, retry=ONCE)
