"""How a draining run comes to its end: what it still waits for, and until when. Pure functions; nothing here awaits.

It ends when too few groups for another step are on the way, and by its bound at the latest: a Mac that is gone, a trainer
that is gone or a session that nobody serves must not keep it for ever.
"""

from datetime import UTC, datetime

from stoa.contracts.fleet_messages import Census
from stoa.contracts.messages import RunInput
from workflows.state import RunProgress


def bound_seconds(rules: RunInput) -> float:
    """How long a drain may take: half as long again as a sweep may last, and then the longest wait of a step for groups."""
    return 1.5 * rules.evaluation.part_timeout_seconds + rules.starved_seconds


def drained_reason(state: RunProgress, rules: RunInput, census: Census, now: float) -> str:
    """Why a draining run has drained, empty while more may come. A census is asked for when a step has too few groups."""
    if not state.draining or state.ending or state.head_state != "draining":
        return ""
    enough = census.num_groups_waiting >= max(1, rules.groups_per_step)
    if (census.num_groups_running or enough) and now < state.drain_until:
        return ""
    left = census.num_groups_running + census.num_groups_waiting
    return f"drained: {left} groups were left" if left else "drained"


def overdue_reason(state: RunProgress, now: float) -> str:
    """Why a drain ends though nobody says that all was used up: its time is over. Empty before that."""
    if not (state.bounded_drain and state.draining and now >= state.drain_until):
        return ""
    left = max(0, state.groups_running) + max(0, state.groups_waiting)
    return f"drained as far as its time allowed: {left} groups were left" if state.groups_running >= 0 else "its time to drain is over"


def sentence(state: RunProgress, now: float) -> str:
    """What a draining run waits for and until when."""
    until = datetime.fromtimestamp(state.drain_until, UTC)
    counted = (
        f"{state.groups_running} groups are being played, {state.groups_waiting} wait for the trainer"
        if state.groups_running >= 0
        else "groups on the way are being counted"
    )
    return (
        f"draining ({state.reason}): {counted}; ends by {until:%H:%M:%S} UTC, in {max(0.0, state.drain_until - now):.0f} s, at the latest"
    )
