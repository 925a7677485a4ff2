"""How old a group is when it is trained on, in versions.

The clock stops at consumption, not when a group was sampled or arrived: time in the queue counts.
"""

from collections.abc import Iterable


def lag_versions(trainer_version: int, group_version: int) -> int:
    """Versions published between the one a group was sampled from and the newest.

    A group is of one version. Raises ValueError if the group is of a version not yet published.
    """
    if group_version > trainer_version:
        raise ValueError(f"a group of version {group_version} cannot be older than the trainer's version {trainer_version}")
    return trainer_version - group_version


def is_stale(trainer_version: int, group_version: int, max_staleness_hard: int) -> bool:
    """True if a group must not be trained on any more."""
    return trainer_version - group_version > max_staleness_hard


def histogram(lags: Iterable[int]) -> dict[int, int]:
    """How many groups had each lag, by rising lag."""
    counts: dict[int, int] = {}
    for lag in sorted(lags):
        counts[lag] = counts.get(lag, 0) + 1
    return counts
