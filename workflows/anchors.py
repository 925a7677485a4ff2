"""When a version comes with an anchor (full weights): every so many versions, or as joining Macs make it worth its upload.

A Mac that joins fetches the newest anchor and the deltas after it. With A bytes an anchor, d bytes a delta and j joins a
version, an anchor every k versions costs, a version, A / k to send and on average j * d * (k - 1) / 2 that Macs fetch
beyond the anchor. The sum is least at k = sqrt(2 * A / (j * d)). Roll-ups make joins cheaper than this, so anchors come
rather too early than too late.
"""

import math

from stoa.contracts.messages import RunInput
from workflows.state import RunProgress

JOINS_WEIGHT = 0.1
"""Of the newest version in the running mean of joins a version."""


def cadence(state: RunProgress, rules: RunInput) -> tuple[int, bool]:
    """Most versions between two anchors, and whether the cost of joins may bring them sooner."""
    if state.anchor_every:
        return state.anchor_every, state.anchor_by_join_cost
    return rules.anchor_every_versions, rules.anchor_by_join_cost


def is_due(state: RunProgress, rules: RunInput, version: int) -> bool:
    """True if `version`, which comes next, is to have an anchor."""
    every, by_join_cost = cadence(state, rules)
    if every <= 0:
        return False
    if not by_join_cost:
        return version % every == 0
    return version - max(state.anchored_version, 0) >= min(every, best_distance(state))


def best_distance(state: RunProgress) -> float:
    """Versions between two anchors at which sending and joining together cost least; infinite while nobody joins."""
    joins_bytes = state.joins_a_version * state.delta_bytes
    if joins_bytes <= 0 or state.weights_bytes <= 0:
        return math.inf
    return max(1.0, math.sqrt(2.0 * state.weights_bytes / joins_bytes))


def mean_joins(state: RunProgress) -> float:
    """Joins a version, with those since the last version counted in."""
    return (1.0 - JOINS_WEIGHT) * state.joins_a_version + JOINS_WEIGHT * state.num_joins
