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
class Origin:
    """Where an episode comes from."""

    host: str
    version: int
    num_sampled: int
    group: int
    """Number of its group in the step, and its own in the group."""
    episode: int


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row: ids int64 [T], where bool [T], log_mu and advantages fp32 [T] (0 outside `where`).

    routing: the sampler's experts int64 [T, L, K], None where they were not recorded.
    origins: of each episode; a row without any is filling, of which nothing is learned.
    """

    ids: torch.Tensor
    seq_lens: list[int]
    where: torch.Tensor
    log_mu: torch.Tensor
    advantages: torch.Tensor
    routing: torch.Tensor | None
    origins: tuple[Origin, ...]


def share(bins: Sequence[Sequence[int]], rank: int, num_ranks: int, *, even: bool) -> list[tuple[int, ...]]:
    """The micro-batches of a rank, by episode number: every `num_ranks`th bin.

    even: all ranks get equally many, the last ones of some ranks without an episode.
    """
    mine = [tuple(bin_) for bin_ in bins[rank::num_ranks]]
    return mine + [()] * (-(-len(bins) // num_ranks) - len(mine)) if even else mine


def rows_of_rank(groups: Sequence[Group], learning: Learning) -> list[Row]:
    """This rank's rows of the step, each of at most `micro_batch_tokens` where its episodes allow it, on the device."""
    episodes: list[tuple[Episode, float, Origin]] = []
    for number, group in enumerate(groups):
        advantages = group_advantages(group.rewards, normalise=learning.normalise_advantage)
        for place, (episode, advantage) in enumerate(zip(group.episodes, advantages, strict=True)):
            origin = Origin(group.host, group.version, len(episode.logprobs), number, place)
            episodes.append((episode, float(advantage), origin))
    lengths = [len(episode.ids) for episode, _, _ in episodes]
    bins = pack(lengths, learning.micro_batch_tokens)
    # Ranks that share experts meet in every layer with experts.
    mine = share(bins, host.rank(), host.num_ranks(), even=layout.expert_parallel_size() > 1)
    routes = [episode.routing for episode, _, _ in episodes if episode.routing is not None]
    experts = routes[0].shape[1:] if len(routes) == len(episodes) else None
    return [_row([episodes[i] for i in numbers], experts) for numbers in mine]


def _row(episodes: Sequence[tuple[Episode, float, Origin]], experts: tuple[int, ...] | None) -> Row:
    """The episodes one after another; without any a token of filling, for a rank that must take part all the same."""
    blank = 0 if episodes else 1
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
        [len(episode.ids) for episode, _, _ in episodes] + [1] * blank,
        torch.from_numpy(where).to(device),
        torch.from_numpy(log_mu).to(device),
        torch.from_numpy(spread * where).to(device),
        routing,
        tuple(origin for _, _, origin in episodes),
    )


def _join(parts: Sequence[np.ndarray], dtype: type[np.generic], num_zeros: int) -> np.ndarray:
    """The arrays one after another as `dtype`, then zeros."""
    return np.concatenate([*parts, np.zeros(num_zeros, dtype)]).astype(dtype)
