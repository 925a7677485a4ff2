"""DPPO in torch: which tokens are kept, and the loss whose gradient is the policy's.

The torch twin of `stoa.learning.gate`, which is the reference; both answer the same golden file. Packing, forward
passes and metrics are elsewhere. The denominator is given by the caller, fixed before the step, so how a step is cut
into micro-batches cannot change it.

Shapes: T sampled tokens.
"""

import torch

from stoa.config.run import Gate
from stoa.learning.gate import DUAL_CLIP, KL_EPSILON, MAX_LOG_RATIO, PPO_CLIP


def keep_mask(log_pi: torch.Tensor, log_mu: torch.Tensor, advantages: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Bool [T]: False where the gate drops a token. Arguments as in `dppo_loss`; arXiv 2602.04879, eq. 12-14."""
    pi, mu = log_pi.exp(), log_mu.exp()
    up, down = advantages > 0, advantages < 0
    outward = (up & (pi > mu)) | (down & (pi < mu))
    ratio = _ratio(log_pi, log_mu)
    clipped = (up & (ratio > 1 + PPO_CLIP)) | (down & (ratio < 1 - PPO_CLIP))
    far = (pi - mu).abs() > gate.delta
    match gate.mode:
        case "tv":
            return ~(outward & far)
        case "kl":
            return ~(outward & (_binary_kl(pi, mu, log_pi, log_mu) > gate.delta_kl))
        case "symmetric":
            return ~far
        case "ppo_clip":
            return ~clipped
        case "dual_clip_tv":
            return ~(clipped | (down & (ratio > DUAL_CLIP)) | (outward & far))
        case "off":
            return torch.ones_like(up)


def dppo_loss(log_pi: torch.Tensor, log_mu: torch.Tensor, advantages: torch.Tensor, *, denominator: float, gate: Gate) -> torch.Tensor:
    """Sum over sampled tokens of -A * stopgrad(min(pi / mu, C)) * ln pi * keep, over a fixed denominator.

    Its value means nothing; its gradient is the policy's (arXiv 2602.04879, eq. 23).

    Args:
        log_pi: [T], ln probability of the sampled token under the trainer, differentiable.
        log_mu: [T], the same under the engine that sampled it: never recomputed by the trainer.
        advantages: [T], of the token's episode.
        denominator: planned sequences x planned tokens of a sequence, over the whole step.
        gate: which tokens are dropped, and the cap C on the ratio.

    Returns:
        Scalar of log_pi's dtype.
    """
    detached = log_pi.detach()
    weight = _ratio(detached, log_mu).clamp(max=gate.ratio_cap) * keep_mask(detached, log_mu, advantages, gate)
    return -(advantages * weight * log_pi).sum() / denominator


def _ratio(log_pi: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    return (log_pi - log_mu).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _binary_kl(pi: torch.Tensor, mu: torch.Tensor, log_pi: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    """KL of (mu, 1 - mu) from (pi, 1 - pi), with the reference's guard inside the second logarithm."""
    rest = ((1 - mu + KL_EPSILON) / (1 - pi + KL_EPSILON)).log()
    return mu * (log_mu - log_pi) + (1 - mu) * rest
