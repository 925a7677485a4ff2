"""What one optimizer step says about itself: flat numbers for its manifest, all computed after the fact in numpy.

The gate's rules are `stoa.learning.gate`'s; nothing here feeds back into the step.

Shapes: S sampled tokens of a step.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stoa.bucket.steps import Dropped, GroupMismatch
from stoa.config.run import Gate
from stoa.learning import gate as gate_reference
from stoa.learning.staleness import histogram, lag_versions
from stoa.rollouts.records import Group

LOG_RATIO_PERMILLE = (1, 10, 500, 990, 999)
"""Quantiles of ln(pi / mu) that are kept, in thousandths."""
NUM_PLACES = 4
"""Equal parts of an episode's sampled tokens whose mismatch is told apart."""
BAD_FALL = 0.5
"""A token with a negative advantage whose probability fell by more than this is bad: arXiv 2602.04879, section 4."""
FAR_NATS = 0.2
"""A token whose two logprobs differ by more counts as far."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of each sampled token: trainer logprob, sampler logprob, advantage and entropy, float64 [S]."""

    log_pi: NDArray[np.float64]
    log_mu: NDArray[np.float64]
    advantages: NDArray[np.float64]
    entropy: NDArray[np.float64]

    @classmethod
    def of_tensors(cls, log_pi: torch.Tensor, log_mu: torch.Tensor, advantages: torch.Tensor, entropy: torch.Tensor) -> "Tokens":
        """From tensors of any float type on any device, [S] each; off the graph."""
        return cls(*(t.detach().to("cpu", torch.float64).numpy() for t in (log_pi, log_mu, advantages, entropy)))

    @classmethod
    def concatenate(cls, parts: Sequence["Tokens"]) -> "Tokens":
        """One after another."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    @property
    def is_finite(self) -> bool:
        """True if no number of it is NaN or infinite."""
        return all(bool(np.isfinite(getattr(self, name)).all()) for name in self.__slots__)

    def select(self, where: NDArray[np.bool_] | NDArray[np.intp]) -> "Tokens":
        """Those where `where` [S] is true, or in the places it lists."""
        return Tokens(*(getattr(self, name)[where] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class ReplayedRow:
    """A row under the sampler's experts (log_pi) and under the router's own (log_free), float64 [S] with log_mu.

    differs: of each token that a sampler was fed and each layer, whether the two chose different sets of experts.
    """

    log_pi: NDArray[np.float64]
    log_free: NDArray[np.float64]
    log_mu: NDArray[np.float64]
    differs: NDArray[np.bool_]


def replay_metrics(rows: Sequence[ReplayedRow]) -> dict[str, float]:
    """Mismatch with and without routing replay on the same rows; nothing if no row was compared.

    A row that only the router's own choice makes NaN or infinite says nothing.
    """
    rows = [row for row in rows if np.isfinite(row.log_free).all()]
    if not rows:
        return {}
    pi, free, mu = (np.exp(np.concatenate([getattr(row, name) for row in rows])) for name in ("log_pi", "log_free", "log_mu"))
    differs = np.concatenate([row.differs for row in rows])
    return {
        "mismatch_replayed": float(np.abs(pi - mu).mean()),
        "mismatch_not_replayed": float(np.abs(free - mu).mean()),
        "routing_differs_fraction": float(differs.mean()),
    }


def mismatch(tokens: Tokens) -> NDArray[np.float64]:
    """|pi - mu| of every token, [S]."""
    return np.abs(np.exp(tokens.log_pi) - np.exp(tokens.log_mu))


def token_metrics(tokens: Tokens, gate: Gate) -> dict[str, float]:
    """Gate, divergence and policy metrics of a step. Rates of the gate count tokens with an advantage only."""
    far = mismatch(tokens)
    ratio = gate_reference.ratio(tokens.log_pi, tokens.log_mu)
    up, down = tokens.advantages > 0, tokens.advantages < 0
    keep = gate_reference.keep_mask(tokens.log_pi, tokens.log_mu, tokens.advantages, gate)
    p50, p99 = np.quantile(far, (0.5, 0.99))
    terms = -tokens.advantages * np.minimum(ratio, gate.ratio_cap) * keep * tokens.log_pi
    metrics = {
        "loss": float(terms.mean()),
        "gate_drop_rate": _share(~keep, up | down),
        "gate_drop_rate_positive": _share(~keep, up),
        "gate_drop_rate_negative": _share(~keep, down),
        "ratio_capped_fraction": _share(ratio > gate.ratio_cap, up | down),
        "bad_fraction": _share(np.exp(tokens.log_mu) - np.exp(tokens.log_pi) > BAD_FALL, down),
        "mismatch_mean": float(far.mean()),
        "mismatch_p50": float(p50),
        "mismatch_p99": float(p99),
        "mismatch_max": float(far.max()),
        # k3 estimates KL(mu, pi) from samples of mu without bias and is never negative.
        "k3": float(np.mean(ratio - 1.0 - np.log(ratio))),
        "binary_kl_mean": float(gate_reference.binary_kl(tokens.log_pi, tokens.log_mu).mean()),
        "ess_fraction": float(ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum())),
        "entropy": float(tokens.entropy.mean()),
        "logprob_positive_mean": float(tokens.log_pi[up].mean()) if up.any() else 0.0,
        "sampled_tokens": float(len(far)),
    }
    quantiles = np.quantile(tokens.log_pi - tokens.log_mu, np.array(LOG_RATIO_PERMILLE) / 1000)
    metrics.update((f"log_ratio_permille_{which}", float(value)) for which, value in zip(LOG_RATIO_PERMILLE, quantiles, strict=True))
    for mode, rate in gate_reference.drop_rates(tokens.log_pi, tokens.log_mu, tokens.advantages, gate).items():
        metrics[f"would_drop_rate_{mode}"] = rate
    return metrics


def group_mismatch(tokens: Tokens) -> GroupMismatch:
    """What the tokens of one group say of their sampler; log ratios are clamped to +-20, as in the loss."""
    far = mismatch(tokens)
    log_ratio = np.clip(tokens.log_pi - tokens.log_mu, -20.0, 20.0)
    ratio = np.exp(log_ratio)
    return GroupMismatch(
        mean=float(far.mean()),
        k3=float(np.mean(ratio - 1.0 - log_ratio)),
        p99=float(np.quantile(far, 0.99)),
        far_share=float(np.mean(np.abs(log_ratio) > FAR_NATS)),
        ratio_mean=float(ratio.mean()),
        likeliness=float(np.mean(tokens.log_pi + tokens.entropy)),
    )


def host_metrics(tokens: Tokens, gate: Gate) -> dict[str, float]:
    """What one host's tokens say of it: fields of `HostCounts`."""
    far = mismatch(tokens)
    keep = gate_reference.keep_mask(tokens.log_pi, tokens.log_mu, tokens.advantages, gate)
    return {
        "mismatch_mean": float(far.mean()),
        "mismatch_p99": float(np.quantile(far, 0.99)),
        "gate_drop_rate": _share(~keep, tokens.advantages != 0),
    }


def place_metrics(tokens: Tokens, gate: Gate, lengths: Sequence[int], lags: Sequence[int]) -> dict[str, float]:
    """Where in its episode, in which episodes and at which lag tokens differ from the sampler.

    Args:
        tokens: of the episodes one after another.
        lengths: sampled tokens of each episode.
        lags: versions of lag of each episode.
    """
    far = mismatch(tokens)
    starts = np.cumsum([0, *lengths[:-1]])
    of_episode = np.add.reduceat(far, starts) / np.array(lengths)
    metrics = {"mismatch_episode_p90": float(np.quantile(of_episode, 0.9)), "mismatch_episode_max": float(of_episode.max())}
    place = np.concatenate([np.arange(length) * NUM_PLACES // length for length in lengths])
    for number in range(NUM_PLACES):
        if (place == number).any():
            metrics[f"mismatch_quarter_{number + 1}"] = float(far[place == number].mean())
    keep = gate_reference.keep_mask(tokens.log_pi, tokens.log_mu, tokens.advantages, gate)
    lag = np.repeat(np.array(lags), lengths)
    for value in sorted(set(lags)):
        metrics[f"gate_drop_rate_lag_{value}"] = _share(~keep & (lag == value), (tokens.advantages != 0) & (lag == value))
    return metrics


def group_metrics(groups: Sequence[Group], version: int, max_staleness: int) -> dict[str, float]:
    """Reward, lengths and staleness of the groups of a step, each episode counted once."""
    episodes = [episode for group in groups for episode in group.episodes]
    lags = [lag_versions(version, group.version) for group in groups]
    metrics = {
        "num_groups": float(len(groups)),
        "num_episodes": float(len(episodes)),
        "reward_mean": float(np.mean([episode.reward for episode in episodes])),
        "search_rate": _part_mean(groups, "searched"),
        "cover": _part_mean(groups, "cover"),
        "exact_match": _part_mean(groups, "exact_match"),
        "malformed_rate": _part_mean(groups, "malformed"),
        "unanswered_rate": float(np.mean([episode.reward_parts.get("answer_words", 1.0) == 0 for episode in episodes])),
        "num_calls_mean": _part_mean(groups, "num_calls"),
        "empty_retrieval_rate": _part_mean(groups, "num_empty") / max(_part_mean(groups, "num_calls"), 1.0 / len(episodes)),
        "answer_words_mean": _part_mean(groups, "answer_words"),
        "turns_mean": float(np.mean([len(episode.turns) for episode in episodes])),
        "episode_tokens_mean": float(np.mean([len(episode.ids) for episode in episodes])),
        "episode_tokens_max": float(max(len(episode.ids) for episode in episodes)),
        "sampled_tokens_per_episode": float(np.mean([len(episode.logprobs) for episode in episodes])),
        "truncated_rate": float(np.mean([episode.stop_reason == "token_limit" for episode in episodes])),
        "staleness_mean": float(np.mean(lags)),
        "staleness_max": float(max(lags)),
        "staleness_beyond_fraction": float(np.mean([lag > max_staleness for lag in lags])),
    }
    for lag, num in histogram(lags).items():
        metrics[f"staleness_{lag}"] = float(num)
    latencies = [group.timings.pull_latency_seconds for group in groups if group.timings.pull_latency_seconds > 0]
    if latencies:
        metrics["pull_latency_seconds"] = float(np.median(latencies))
    return metrics


def drop_metrics(dropped: Sequence[Dropped], num_used: int) -> dict[str, float]:
    """How many admitted groups each reason cost, and which share of those that came had equal rewards."""
    reasons = Counter(drop.reason for drop in dropped)
    metrics = {f"dropped_{reason}": float(num) for reason, num in reasons.items()}
    num_flat = sum(reasons[reason] for reason in ("all_zero", "all_one", "all_equal"))
    metrics["zero_variance_fraction"] = num_flat / max(1, num_flat + num_used)
    return metrics


def _part_mean(groups: Sequence[Group], name: str) -> float:
    return float(np.mean([episode.reward_parts.get(name, 0.0) for group in groups for episode in group.episodes]))


def _share(hit: NDArray[np.bool_], among: NDArray[np.bool_]) -> float:
    return float(np.count_nonzero(hit & among)) / max(1, int(np.count_nonzero(among)))
