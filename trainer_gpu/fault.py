"""Whose fault it is that a step is not finite: single groups', or the policy's own.

Looked for once a step was given up for its gradient, by all ranks with the same arguments; they come to the same answer,
because a gradient's norm is of all ranks. Nothing changes: no weight, no moment. What follows is the engine's.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from stoa.config.run import Learning
from stoa.contracts.errors import FaultyGroupsError, NonFiniteError
from stoa.rollouts.records import Group
from trainer_gpu import host
from trainer_gpu.model import token_logprobs_packed
from trainer_gpu.parallel import Trainable
from trainer_gpu.rows import rows_of_rank
from trainer_gpu.step import row_losses


def blame(
    trainable: Trainable, groups: Sequence[Group], learning: Learning, *, planned_sequences: int, on_group: Callable[[str], None]
) -> NonFiniteError:
    """Why a step on `groups` is not finite: FaultyGroupsError where single groups are at fault, each tried alone.

    The policy is at fault if its weights are not finite, or if it gives neither for any group nor for any prompt, which no
    Mac has chosen, what is finite. on_group: told of each group, so that a heartbeat can go on.
    """
    names = [name for found in host.exchange(broken(trainable.model.named_parameters())) for name in found]
    if names:
        return NonFiniteError(f"weights of the policy are NaN or infinite, the first {names[0]}")
    denominator = float(planned_sequences * learning.tokens_per_sequence)
    places: list[int] = []
    for place, group in enumerate(groups):
        on_group(f"not finite: trying group {place + 1} of {len(groups)} alone")
        if not _is_finite(trainable, group, learning, denominator):
            places.append(place)
    if not places:
        return NonFiniteError("the step is not finite, though each of its groups alone is")
    if len(places) == len(groups) and not any(_prompt_is_finite(trainable, group, denominator) for group in groups):
        return NonFiniteError("the policy's weights are finite, but what it makes of plain prompts is not")
    return FaultyGroupsError(f"not finite because of {len(places)} of {len(groups)} groups", tuple(places))


@torch.no_grad()
def broken(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of those that are NaN or infinite somewhere."""
    return [name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())]


def _is_finite(trainable: Trainable, group: Group, learning: Learning, denominator: float) -> bool:
    try:
        rows = rows_of_rank([group], learning)
    except NonFiniteError:  # a reward; on every rank
        return False
    return _has_norm(trainable.gradient_norm(row_losses(trainable.model, rows, learning, denominator, [], lambda row: None)))


def _prompt_is_finite(trainable: Trainable, group: Group, denominator: float) -> bool:
    """Whether the prompt alone can be learned; by every rank, so that those that share experts meet."""
    episode = group.episodes[0]
    ids = torch.from_numpy(episode.ids[: episode.turns[0].start].astype("int64")).to(host.device())

    def loss() -> torch.Tensor:
        log_pi, _ = token_logprobs_packed(trainable.model, ids, [len(ids)])
        return -log_pi.sum() / denominator

    return _has_norm(trainable.gradient_norm([loss]))


def _has_norm(norm: float) -> bool:
    return norm < float("inf")  # False for NaN
