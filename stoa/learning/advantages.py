"""How much better an episode was than its group: the advantage, and which groups have none to give.

Rewards come in as `admit` worked them out. Episodes belong together by group, never by position in a batch, so a group
with a lost episode or a shuffled batch changes nothing.
"""

import math

import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import NonFiniteError


def group_advantages(rewards: NDArray[np.float64], *, normalise: bool = False) -> NDArray[np.float64]:
    """Advantages of one group's episodes: reward minus the group's mean, without a standard deviation (arXiv 2503.20783).

    Args:
        rewards: float64 [E], at least one.
        normalise: divide by the group's population standard deviation.

    Returns:
        float64 [E]. All 0 for a group whose rewards are equal. The sums are exactly rounded, so the order of episodes
        cannot change a bit.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
    """
    if not np.isfinite(rewards).all():
        raise NonFiniteError(f"a reward of a group is not finite: {rewards.tolist()}")
    if is_constant(rewards):
        return np.zeros(len(rewards), dtype=np.float64)
    advantages = rewards - math.fsum(rewards) / len(rewards)
    if normalise:
        advantages = advantages / math.sqrt(math.fsum(np.square(advantages)) / len(rewards))
    return advantages


def is_constant(rewards: NDArray[np.float64]) -> bool:
    """True if all rewards of a group are exactly equal, so that it gives no gradient."""
    return bool(rewards.max() == rewards.min())
