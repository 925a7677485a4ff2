"""One optimizer step from admitted groups: advantages, micro-batches, and what was measured on the way.

Which groups are trained on is `intake.py`'s choice, how they lie in rows is `rows.py`'s, and where the numbers go is the
engine's. The loss is divided by a count planned before the step (sequences x tokens), so neither short groups nor the
cut into micro-batches, nor that over ranks, changes it.

Shapes: T tokens of a packed row, S sampled tokens, L layers with experts, K experts a token.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from stoa.bucket.steps import GroupMismatch
from stoa.config.run import Learning
from stoa.rollouts.records import Group
from trainer_gpu import host
from trainer_gpu.gate_sample import Places, gate_sample
from trainer_gpu.loss import dppo_loss
from trainer_gpu.metrics import ReplayedRow, Tokens, group_metrics, group_mismatch, place_metrics, replay_metrics, token_metrics
from trainer_gpu.model import recorded_routing, replayed_routing, token_logprobs_packed
from trainer_gpu.parallel import Trainable
from trainer_gpu.rows import Origin, Row, rows_of_rank

COMPARE_EVERY_STEPS: Final = 4
"""How often what takes time is measured: the update's norm, and a row with the router's own choice beside the sampler's."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step did. `metrics` is flat: name to number."""

    metrics: dict[str, float]
    num_tokens: int
    tokens_of_host: dict[str, Tokens]
    gated: Mapping[int, Places] = field(default_factory=dict)
    """Number of a group -> tokens of its episodes that the gate dropped, of a few groups."""
    mismatches: tuple[GroupMismatch, ...] = ()
    """Of each group, in their order."""


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
        NonFiniteError: the gradient is not finite; nothing has changed, on any rank.

    With several ranks all must call with the same arguments; each takes its share of the rows, and only rank 0 gets
    metrics.
    """
    denominator = float(planned_sequences * learning.tokens_per_sequence)
    rows = rows_of_rank(groups, learning)
    replay = [_compare_replay(trainable.model, row, row.routing) for row in rows[:1] if row.routing is not None and _is_compared(step)]
    seen: list[Tokens] = []
    rate = learning_rate(learning, step)
    trainable.set_learning_rate(rate)
    losses = row_losses(trainable.model, rows, learning, denominator, seen, on_row)
    grad_norm = trainable.step(losses)
    moved = {"update_norm": trainable.update_norm()} if _is_compared(step) else {}
    parts = host.collect((seen, [origin for row in rows for origin in row.origins], replay))
    if not parts:
        return StepOutcome({}, 0, {})
    tokens = Tokens.concatenate([part for seen, _, _ in parts for part in seen])
    origins = [origin for _, found, _ in parts for origin in found]
    num_sampled = [origin.num_sampled for origin in origins]
    owner = np.repeat(np.array([origin.host for origin in origins], np.str_), num_sampled)
    metrics = {
        **group_metrics(groups, version, learning.max_staleness),
        **token_metrics(tokens, learning.gate),
        **place_metrics(tokens, learning.gate, num_sampled, [version - o.version for o in origins]),
        **replay_metrics([row for _, _, replay in parts for row in replay]),
        "infra_fault_rate": 1.0 - sum(len(group.episodes) for group in groups) / planned_sequences,
        "grad_norm": grad_norm,
        **moved,
        "learning_rate": rate,
        "num_rows": float(sum(len(seen) for seen, _, _ in parts)),
    }
    num_tokens = sum(group.num_tokens for group in groups)
    of_host = {str(name): tokens.select(owner == name) for name in np.unique(owner)}
    sample = gate_sample(tokens, origins, learning.gate)
    return StepOutcome(metrics, num_tokens, of_host, sample, _mismatches(tokens, origins))


@torch.no_grad()
def compare_groups(trainable: Trainable, groups: Sequence[Group], learning: Learning) -> tuple[GroupMismatch, ...]:
    """How far the sampler's numbers of each group, at least one, are from the policy's as it is: as a step would see them.

    With several ranks all must call with the same arguments; only rank 0 gets the answer, others nothing.
    """
    rows = rows_of_rank(groups, learning)
    seen: list[Tokens] = []
    for row in rows:
        with nullcontext() if row.routing is None else replayed_routing(trainable.model, row.routing):
            log_pi, entropy = token_logprobs_packed(trainable.model, row.ids, row.seq_lens, row.where)
        seen.append(Tokens.of_tensors(*(part[row.where] for part in (log_pi, row.log_mu, row.advantages, entropy))))
    parts = host.collect((seen, [origin for row in rows for origin in row.origins]))
    if not parts:
        return ()
    tokens = Tokens.concatenate([part for found, _ in parts for part in found])
    return _mismatches(tokens, [origin for _, found in parts for origin in found])


def _mismatches(tokens: Tokens, origins: Sequence[Origin]) -> tuple[GroupMismatch, ...]:
    """Of each group in order. The tokens are those of `origins`, one after another."""
    number_S = np.repeat([origin.group for origin in origins], [origin.num_sampled for origin in origins])
    order_S = np.argsort(number_S, kind="stable")
    cuts = np.flatnonzero(np.diff(number_S[order_S])) + 1
    return tuple(group_mismatch(tokens.select(where)) for where in np.split(order_S, cuts))


def _is_compared(step: int) -> bool:
    return step % COMPARE_EVERY_STEPS == 1


def learning_rate(learning: Learning, step: int) -> float:
    """Rises linearly over the first `warmup_steps` steps, which already move; then constant."""
    return learning.learning_rate * min(1.0, step / max(1, learning.warmup_steps))


def row_losses(
    model: GPTModel,
    rows: Sequence[Row],
    learning: Learning,
    denominator: float,
    seen: list[Tokens],
    on_row: Callable[[str], None],
) -> Iterator[Callable[[], torch.Tensor]]:
    """One closure a row. What the forward pass said of the sampled tokens is kept in `seen`, off the graph.

    Where a number of it is not finite the gradient is not either, so that all ranks know before a weight has moved.
    """

    def loss(row: Row) -> torch.Tensor:
        with nullcontext() if row.routing is None else replayed_routing(model, row.routing):
            log_pi, entropy = token_logprobs_packed(model, row.ids, row.seq_lens, row.where)
        ours, mu, advantages = log_pi[row.where], row.log_mu[row.where], row.advantages[row.where]
        seen.append(Tokens.of_tensors(ours, mu, advantages, entropy[row.where]))
        value = dppo_loss(ours, mu, advantages, denominator=denominator, gate=learning.gate)
        return value if seen[-1].is_finite else value * math.nan

    for number, row in enumerate(rows):
        yield lambda row=row: loss(row)
        on_row(f"row {number + 1} of {len(rows)}")


@torch.no_grad()
def _compare_replay(model: GPTModel, row: Row, routing_TLK: torch.Tensor) -> ReplayedRow:
    """One row as its sampler routed it and as the router here would: two forward passes, no gradient."""
    with replayed_routing(model, routing_TLK):
        replayed, _ = token_logprobs_packed(model, row.ids, row.seq_lens, row.where)
    with recorded_routing(model) as recorded:
        free, _ = token_logprobs_packed(model, row.ids, row.seq_lens, row.where)
    differs_TL = (recorded[0].sort(-1).values != routing_TLK.sort(-1).values).any(-1)
    fed_T = torch.ones(len(row.ids), dtype=torch.bool, device=row.ids.device)
    fed_T[torch.tensor(row.seq_lens).cumsum(0).to(row.ids.device) - 1] = False  # the last token of a sequence is never fed to a sampler
    log_pi, log_free, log_mu = (t[row.where].double().cpu().numpy() for t in (replayed, free, row.log_mu))
    return ReplayedRow(log_pi, log_free, log_mu, differs_TL[fed_T].flatten().cpu().numpy())
