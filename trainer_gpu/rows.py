"""The episodes of a step as packed rows on the model's device: which rank runs which row, and what fills it up.

Advantages come from `stoa.learning.advantages`, the packing from `stoa.learning.batching`; both depend on the groups
alone, so every rank works out the same rows and takes its own without a word to the others.

Shapes: T tokens of a packed row, L layers with experts, K experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stoa.config.run import Learning
from stoa.learning.advantages import group_advantages
from stoa.learning.batching import pack
from stoa.rollouts.records import Episode, Group
from trainer_gpu import host, layout


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row: ids int64 [T], where bool [T], log_mu and advantages fp32 [T] (0 outside `where`).

    routing: the sampler's experts int64 [T, L, K], None where they were not recorded.
    hosts, sampled_lens: of each episode; sequences after them are filling, of which nothing is learned.
    """

    ids: torch.Tensor
    seq_lens: list[int]
    where: torch.Tensor
    log_mu: torch.Tensor
    advantages: torch.Tensor
    routing: torch.Tensor | None
    hosts: list[str]
    sampled_lens: list[int]


@dataclass(frozen=True, slots=True)
class Place:
    """One micro-batch of a rank: the episodes in it, by number, and the tokens that are added to them."""

    episodes: tuple[int, ...]
    num_filling: int


def share(bins: Sequence[Sequence[int]], lengths: Sequence[int], rank: int, num_ranks: int, *, even: bool) -> list[Place]:
    """The micro-batches of a rank: every `num_ranks`th bin.

    Args:
        bins: episode numbers of each row, from `pack`.
        lengths: tokens of each episode.
        even: all ranks get equally many rows, and the rows of one turn equally many tokens, filled up where needed.
    """
    if not even:
        return [Place(tuple(bin_), 0) for bin_ in bins[rank::num_ranks]]
    sizes = [sum(lengths[i] for i in bin_) for bin_ in bins]
    places: list[Place] = []
    for first in range(0, len(bins), num_ranks):
        mine = tuple(bins[first + rank]) if first + rank < len(bins) else ()
        places.append(Place(mine, max(sizes[first : first + num_ranks]) - sum(lengths[i] for i in mine)))
    return places


def rows_of_rank(groups: Sequence[Group], learning: Learning) -> list[Row]:
    """This rank's rows of the step, each of at most `micro_batch_tokens` where its episodes allow it, on the device."""
    episodes: list[tuple[Episode, float, str]] = []
    for group in groups:
        advantages = group_advantages(group.rewards, normalise=learning.normalise_advantage)
        episodes += [(e, float(a), group.host) for e, a in zip(group.episodes, advantages, strict=True)]
    lengths = [len(episode.ids) for episode, _, _ in episodes]
    bins = pack(lengths, learning.micro_batch_tokens)
    # Ranks that share experts meet in every layer with experts, and without CUDA with as many tokens each.
    even = layout.expert_parallel_size() > 1
    routes = [episode.routing for episode, _, _ in episodes if episode.routing is not None]
    experts = routes[0].shape[1:] if len(routes) == len(episodes) else None
    places = share(bins, lengths, host.rank(), host.num_ranks(), even=even)
    longest = max(lengths)
    return [_row([episodes[i] for i in place.episodes], _cut(place.num_filling, longest), experts) for place in places]


def _cut(num_tokens: int, longest: int) -> list[int]:
    """Filling as sequences no longer than an episode: attention costs their longest squared."""
    full, rest = divmod(num_tokens, longest)
    return [longest] * full + [rest] * (rest > 0)


def _row(episodes: Sequence[tuple[Episode, float, str]], filling: list[int], experts: tuple[int, ...] | None) -> Row:
    blank = sum(filling)
    ids = _join([episode.ids for episode, _, _ in episodes], np.int64, blank)
    where = _join([episode.mask for episode, _, _ in episodes], np.bool_, blank)
    log_mu = np.zeros(len(ids), np.float32)
    log_mu[where] = _join([episode.logprobs for episode, _, _ in episodes], np.float32, 0)
    spread = _join([np.full(len(episode.ids), advantage) for episode, advantage, _ in episodes], np.float32, blank)
    routing = None
    if experts is not None:
        num_layers, top_k = experts
        routes = [e.routing.astype(np.int64) for e, _, _ in episodes if e.routing is not None]
        routes.append(np.broadcast_to(np.arange(top_k), (blank, num_layers, top_k)))
        routing = torch.from_numpy(np.concatenate(routes)).to(host.device())
    device = host.device()
    return Row(
        torch.from_numpy(ids).to(device),
        [len(episode.ids) for episode, _, _ in episodes] + filling,
        torch.from_numpy(where).to(device),
        torch.from_numpy(log_mu).to(device),
        torch.from_numpy(spread * where).to(device),
        routing,
        [name for _, _, name in episodes],
        [len(episode.logprobs) for episode, _, _ in episodes],
    )


def _join(parts: Sequence[np.ndarray], dtype: type[np.generic], num_zeros: int) -> np.ndarray:
    """The arrays one after another as `dtype`, then zeros."""
    return np.concatenate([*parts, np.zeros(num_zeros, dtype)]).astype(dtype)
