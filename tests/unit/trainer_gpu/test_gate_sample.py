"""Which dropped tokens a step keeps for its readers, by hand: probabilities that moved by 0.3, away from and towards the sampler."""

import numpy as np

from stoa.config.run import Gate
from trainer_gpu.gate_sample import gate_sample
from trainer_gpu.metrics import Tokens
from trainer_gpu.rows import Origin

KEPT, UP, DOWN = (0.5, 0.5, 1.0), (0.9, 0.5, 1.0), (0.2, 0.5, -1.0)
"""pi, mu, advantage: not moved; risen with a positive advantage; fallen with a negative one. The gate's delta is 0.2."""
INWARD, NO_ADVANTAGE = (0.2, 0.5, 1.0), (0.9, 0.5, 0.0)


def tokens(*rows: tuple[float, float, float]) -> Tokens:
    pi, mu, advantages = (np.array(column) for column in zip(*rows, strict=True))
    return Tokens(np.log(pi), np.log(mu), advantages, np.zeros(len(rows)))


def test_first_group_and_the_one_that_lost_most_are_kept_whole() -> None:
    """Rows may mix groups: group 2's episode 1 comes first, group 0's episodes last."""
    seen = tokens(DOWN, KEPT, DOWN, UP, UP, KEPT, KEPT, UP)
    origins = [Origin("a", 0, 3, 2, 1), Origin("a", 0, 1, 1, 0), Origin("a", 0, 1, 2, 0), Origin("b", 0, 2, 0, 0), Origin("b", 0, 1, 0, 1)]
    assert gate_sample(seen, origins, Gate()) == {0: ((), (0,)), 2: ((0,), (0, 2))}


def test_moves_towards_the_sampler_and_tokens_that_teach_nothing_are_not_dropped() -> None:
    assert gate_sample(tokens(INWARD, NO_ADVANTAGE), [Origin("a", 0, 2, 0, 0)], Gate()) == {0: ((),)}


def test_step_without_episodes_has_no_sample() -> None:
    assert gate_sample(Tokens(*(np.zeros(0) for _ in range(4))), [], Gate()) == {}
