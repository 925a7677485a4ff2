"""What a run has cost: GPU hours of its leases, and dollars at the price of its settings. Pure.

A box costs from the moment it holds the run to the moment it no longer does, whether it trains, waits or is paused.
"""

from dataclasses import replace

from stoa.contracts.messages import RunInput
from workflows.state import RunProgress

HOUR_SECONDS = 3600.0


def lease_ended(state: RunProgress, now: float) -> RunProgress:
    """The present lease is over, if one is held: what it cost is added up."""
    return replace(state, gpu_seconds=_gpu_seconds(state, now), gpu_since=0.0)


def gpu_hours(state: RunProgress, now: float) -> float:
    """GPUs times hours up to `now`."""
    return _gpu_seconds(state, now) / HOUR_SECONDS


def dollars(state: RunProgress, rules: RunInput, now: float) -> float:
    """What they cost."""
    return gpu_hours(state, now) * rules.stop.dollars_per_gpu_hour


def spent_reason(state: RunProgress, rules: RunInput, now: float) -> str:
    """Which budget is used up, empty while none is."""
    stop = rules.stop
    if stop.max_gpu_hours and gpu_hours(state, now) >= stop.max_gpu_hours:
        return f"{stop.max_gpu_hours:g} GPU hours are used"
    if stop.max_dollars and stop.dollars_per_gpu_hour and dollars(state, rules, now) >= stop.max_dollars:
        return f"{stop.max_dollars:g} dollars are spent"
    return ""


def spent_at(state: RunProgress, rules: RunInput) -> float | None:
    """When the nearest budget will be used up if the present lease goes on; None if no lease is held or no budget set."""
    stop = rules.stop
    limits = [stop.max_gpu_hours] if stop.max_gpu_hours else []
    if stop.max_dollars and stop.dollars_per_gpu_hour:
        limits.append(stop.max_dollars / stop.dollars_per_gpu_hour)
    if not limits or not state.gpu_since:
        return None
    left_seconds = min(limits) * HOUR_SECONDS - state.gpu_seconds
    return state.gpu_since + left_seconds / max(1, state.num_gpus)


def _gpu_seconds(state: RunProgress, now: float) -> float:
    running = max(0.0, now - state.gpu_since) * state.num_gpus if state.gpu_since else 0.0
    return state.gpu_seconds + running
