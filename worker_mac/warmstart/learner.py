"""One optimizer step of a warm start, on one Mac or on several that hold equal policies or slices of one.

The update is the sum of every row's gradient divided by the sum of every target's weight, whoever computed which row: two
ranks make the update that one would, whatever their speeds and memories.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from environments.demonstrations import Demonstration
from stoa.contracts.errors import NonFiniteError
from worker_mac.warmstart.adam import Adam, Arrays, rate_at
from worker_mac.warmstart.batches import Batch, Host, micro_batches, split_rows
from worker_mac.warmstart.policy import Policy, number
from worker_mac.warmstart.ranks import Ranks
from worker_mac.warmstart.settings import Settings


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. `loss`: mean over targets by weight, nats; `num_tokens`: of the rows of all ranks, unpadded."""

    step: int
    loss: float
    gradient_norm: float
    num_rows: int
    num_tokens: int
    rows_left_out: int


class Learner:
    """A policy, its optimizer, and the ranks it learns with."""

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        ranks: Ranks,
        *,
        hosts: Sequence[Host],
        rows_at: Callable[[int], int],
        split_axes: dict[str, int] | None = None,
    ) -> None:
        """hosts: every rank's speed and longest row. rows_at: rows at once by padded length, here.

        split_axes: with matrices split over ranks, the axis of each parameter that is a slice.
        """
        self.policy = policy
        self.settings = settings
        self.hosts = tuple(hosts)
        self.split_axes = split_axes or {}
        self.adam = Adam(policy.trained)
        self._ranks = ranks
        self._rows_at = rows_at

    def step(self, step: int, rows: Sequence[Demonstration]) -> StepReport:
        """Learn one step's rows, the same on every rank; without a row that fits nothing changes, the moments neither.

        Raises NonFiniteError, and has then changed nothing.
        """
        lengths = [len(row.ids) for row in rows]
        sharing = self.settings.split == "data"
        division = split_rows(lengths, self.hosts if sharing else self.hosts[:1])
        mine = division[self._ranks.rank if sharing else 0]
        loss, weight, gradient = self._summed(rows, mine, lengths)
        if sharing:
            loss, weight, gradient = self._over_ranks(loss, weight, gradient)
        else:
            gradient = self._same_on_all(gradient)
        taught = [row for each in division for row in each]
        if not taught:
            return StepReport(step, 0.0, 0.0, 0, 0, len(rows))
        gradient = {name: array / weight for name, array in gradient.items()}
        norm = self._norm(gradient)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise NonFiniteError(f"step {step}: loss {loss}, gradient norm {norm}", hint="lower the learning rate")
        clip = min(1.0, self.settings.clip_grad / (norm + 1e-6))
        gradient = {name: array * clip for name, array in gradient.items()}
        self.policy.take(self.adam.step(self.policy.trained, gradient, rate_at(step, self.settings)))
        return StepReport(step, loss / weight, norm, len(taught), sum(lengths[row] for row in taught), len(rows) - len(taught))

    def _summed(self, rows: Sequence[Demonstration], mine: Sequence[int], lengths: Sequence[int]) -> tuple[float, float, Arrays]:
        """Losses, weights and gradients of this rank's rows, added up."""
        loss, weight = 0.0, 0.0
        total = {name: mx.zeros(array.shape) for name, array in self.policy.trained.items()}
        for batch in micro_batches(mine, lengths, self._rows_at):
            found = self.policy.gradient(Batch.of([rows[index] for index in batch]))
            loss, weight = loss + found.loss, weight + found.weight
            for name, array in found.arrays.items():
                total[name] = total[name] + array
            mx.eval(total)
        return loss, weight, total

    def _over_ranks(self, loss: float, weight: float, gradient: Arrays) -> tuple[float, float, Arrays]:
        if self._ranks.size == 1:
            return loss, weight, gradient
        # One vector: the two numbers come with the gradient, in one agreement about shapes.
        parts = [array.reshape(-1) for array in gradient.values()]
        summed = self._ranks.sum(mx.concatenate([mx.array([loss, weight], mx.float32), *parts]))
        loss, weight = (float(number) for number in np.array(summed[:2]))
        start, found = 2, {}
        for name, array in gradient.items():
            found[name] = summed[start : start + array.size].reshape(array.shape)
            start += array.size
        return loss, weight, found

    def _same_on_all(self, gradient: Arrays) -> Arrays:
        """Gradients of what every rank holds whole, averaged: unlike chips round unlike, and halves must stay equal."""
        whole = [name for name in gradient if name not in self.split_axes]
        if self._ranks.size == 1 or not whole:
            return gradient
        summed = self._ranks.sum(mx.concatenate([gradient[name].reshape(-1) for name in whole])) / self._ranks.size
        start, found = 0, dict(gradient)
        for name in whole:
            size = gradient[name].size
            found[name] = summed[start : start + size].reshape(gradient[name].shape)
            start += size
        return found

    def _norm(self, gradient: Arrays) -> float:
        """Of the whole gradient, slices of all ranks together."""
        squares = {name: number(mx.square(array).sum()) for name, array in gradient.items()}
        whole = sum(value for name, value in squares.items() if name not in self.split_axes)
        sliced = sum(value for name, value in squares.items() if name in self.split_axes)
        if self.split_axes:
            sliced = sum(numbers[0] for numbers in self._ranks.gather([sliced]))
        return math.sqrt(whole + sliced) if math.isfinite(whole + sliced) else math.nan
