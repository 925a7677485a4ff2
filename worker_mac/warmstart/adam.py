"""AdamW in fp32 over flat names, with the learning rate's rise and fall. Pure: the same numbers in, the same bits out.

Loshchilov and Hutter 2019, algorithm 2, without weight decay; bias corrected as in Kingma and Ba 2015.
"""

import math
from typing import Final

import mlx.core as mx

from worker_mac.warmstart.settings import Settings

BETAS: Final = (0.9, 0.95)
EPSILON: Final = 1e-8
Arrays = dict[str, mx.array]


class Adam:
    """The moments of every trained parameter, and how many steps they have seen."""

    def __init__(self, trained: Arrays) -> None:
        self.first = {name: mx.zeros(array.shape) for name, array in trained.items()}
        self.second = {name: mx.zeros(array.shape) for name, array in trained.items()}
        self.num_steps = 0

    def step(self, trained: Arrays, gradient: Arrays, rate: float) -> Arrays:
        """New parameters; the moments move on."""
        self.num_steps += 1
        one, two = (1 - beta**self.num_steps for beta in BETAS)
        new: Arrays = {}
        for name, value in trained.items():
            self.first[name] = BETAS[0] * self.first[name] + (1 - BETAS[0]) * gradient[name]
            self.second[name] = BETAS[1] * self.second[name] + (1 - BETAS[1]) * mx.square(gradient[name])
            scaled = (self.first[name] / one) / (mx.sqrt(self.second[name] / two) + EPSILON)
            new[name] = value - (rate * scaled).astype(value.dtype)
            mx.eval(new[name], self.first[name], self.second[name])
        return new


def rate_at(step: int, settings: Settings) -> float:
    """The learning rate of a step, from 0: a straight rise, then half a cosine down to nothing."""
    if step < settings.num_warmup_steps:
        return settings.learning_rate * (step + 1) / settings.num_warmup_steps
    progress = (step - settings.num_warmup_steps) / max(1, settings.num_steps - settings.num_warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
