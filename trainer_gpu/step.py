"""One optimizer step from admitted groups: advantages, packing, micro-batches, and what was measured on the way.

Which groups are trained on is `intake.py`'s choice, and where the numbers go is the engine's. The loss is divided by a
count planned before the step (sequences x tokens), so neither short groups nor the cut into micro-batches change it.

Shapes: T tokens of a packed row, S sampled tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from stoa.config.run import Learning
from stoa.learning.advantages import group_advantages
from stoa.learning.batching import pack
from stoa.rollouts.records import Episode, Group
from trainer_gpu import host
from trainer_gpu.loss import dppo_loss
from trainer_gpu.metrics import Tokens, group_metrics, token_metrics
from trainer_gpu.model import token_logprobs_packed
from trainer_gpu.parallel import Trainable


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step did. `metrics` is flat: name to number."""

    metrics: dict[str, float]
    num_tokens: int
    tokens_of_host: dict[str, Tokens]


@dataclass(frozen=True, slots=True)
class _Row:
    """One packed row: ids int64 [T], where bool [T], log_mu and advantages fp32 [T] (0 outside `where`)."""

    ids: torch.Tensor
    seq_lens: list[int]
    where: torch.Tensor
    log_mu: torch.Tensor
    advantages: torch.Tensor
    hosts: list[str]
    sampled_lens: list[int]


def optimizer_step(
    trainable: Trainable,
    groups: Sequence[Group],
    learning: Learning,
    *,
    version: int,
    step: int,
    planned_sequences: int,
    on_row: Callable[[str], None],
) -> StepOutcome:
    """Take one step on `groups` (rewards as recomputed by `admit`), in place.

    Args:
        version: newest published version, for staleness.
        step: number of this step, from 1; sets the learning rate while it warms up.
        planned_sequences: groups_per_step x group_size; with tokens_per_sequence it makes the denominator.
        on_row: told of each finished micro-batch, so that a heartbeat can go on.

    Raises:
        NonFiniteError: the gradient is not finite; nothing has changed.
    """
    denominator = float(planned_sequences * learning.tokens_per_sequence)
    rows = pack_rows(groups, learning)
    seen: list[Tokens] = []
    rate = learning_rate(learning, step)
    trainable.set_learning_rate(rate)
    losses = _losses(trainable.model, rows, learning, denominator, seen, on_row)
    grad_norm = trainable.step(losses)
    tokens = Tokens.concatenate(seen)
    metrics = {
        **group_metrics(groups, version),
        **token_metrics(tokens, learning.gate),
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "num_rows": float(len(rows)),
    }
    return StepOutcome(metrics, sum(group.num_tokens for group in groups), _by_host(tokens, rows))


def learning_rate(learning: Learning, step: int) -> float:
    """Rises linearly over the first `warmup_steps` steps, which already move; then constant."""
    return learning.learning_rate * min(1.0, step / max(1, learning.warmup_steps))


def pack_rows(groups: Sequence[Group], learning: Learning) -> list[_Row]:
    """All episodes of the step, packed into rows of at most `micro_batch_tokens`, on the model's device."""
    episodes: list[tuple[Episode, float, str]] = []
    for group in groups:
        advantages = group_advantages(group.rewards, normalise=learning.normalise_advantage)
        episodes += [(e, float(a), group.host) for e, a in zip(group.episodes, advantages, strict=True)]
    lengths = [len(episode.ids) for episode, _, _ in episodes]
    return [_row([episodes[i] for i in bin_]) for bin_ in pack(lengths, learning.micro_batch_tokens)]


def _row(episodes: Sequence[tuple[Episode, float, str]]) -> _Row:
    ids = np.concatenate([episode.ids for episode, _, _ in episodes]).astype(np.int64)
    where = np.concatenate([episode.mask for episode, _, _ in episodes]).astype(bool)
    log_mu = np.zeros(len(ids), np.float32)
    log_mu[where] = np.concatenate([episode.logprobs for episode, _, _ in episodes])
    spread = np.concatenate([np.full(len(episode.ids), advantage, np.float32) for episode, advantage, _ in episodes])
    device = host.device()
    return _Row(
        torch.from_numpy(ids).to(device),
        [len(episode.ids) for episode, _, _ in episodes],
        torch.from_numpy(where).to(device),
        torch.from_numpy(log_mu).to(device),
        torch.from_numpy(spread * where).to(device),
        [name for _, _, name in episodes],
        [len(episode.logprobs) for episode, _, _ in episodes],
    )


def _losses(
    model: GPTModel,
    rows: Sequence[_Row],
    learning: Learning,
    denominator: float,
    seen: list[Tokens],
    on_row: Callable[[str], None],
) -> Iterator[Callable[[], torch.Tensor]]:
    """One closure a row. What the forward pass said of the sampled tokens is kept in `seen`, off the graph."""

    def loss(row: _Row) -> torch.Tensor:
        log_pi, entropy = token_logprobs_packed(model, row.ids, row.seq_lens, row.where)
        ours, mu, advantages = log_pi[row.where], row.log_mu[row.where], row.advantages[row.where]
        seen.append(Tokens.of_tensors(ours, mu, advantages, entropy[row.where]))
        return dppo_loss(ours, mu, advantages, denominator=denominator, gate=learning.gate)

    for number, row in enumerate(rows):
        yield lambda row=row: loss(row)
        on_row(f"row {number + 1} of {len(rows)}")


def _by_host(tokens: Tokens, rows: Sequence[_Row]) -> dict[str, Tokens]:
    names = np.array([name for row in rows for name in row.hosts])
    lens = np.array([num for row in rows for num in row.sampled_lens])
    owner = np.repeat(names, lens)
    return {str(name): tokens.select(owner == name) for name in np.unique(names)}
