"""The DPPO gate: which sampled tokens are kept, and how heavily each counts. The numpy reference of all modes.

The torch twin is `trainer_gpu/loss.py`; both answer tests/golden/dppo.json. mu is the probability the sampler reported
for its token, never one the trainer computed again (arXiv 2602.04879, section 4); pi is the trainer's present one.
Loss per token: -A * stopgrad(min(pi / mu, C)) * ln pi * keep. All work is in the dtype that comes in.

A token is dropped when its gradient would push it further out from mu than the mode allows:

    tv            (A > 0 and pi - mu > delta) or (A < 0 and mu - pi > delta)      binary total variation, eq. 12 and 13
    kl            outward as above, and the binary KL of mu from pi > delta_kl    eq. 12 and 14
    symmetric     |pi - mu| > delta, whichever way the gradient points
    ppo_clip      (A > 0 and pi / mu > 1.2) or (A < 0 and pi / mu < 0.8)          PPO's clip
    dual_clip_tv  ppo_clip, or (A < 0 and pi / mu > 3), or tv                     PPO's dual clip with the TV gate on top
    off           never

Shapes: T sampled tokens; every array argument is [T] of one float dtype.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from stoa.config.run import Gate

GateMode = Literal["tv", "kl", "symmetric", "ppo_clip", "dual_clip_tv", "off"]
MODES: Final[tuple[GateMode, ...]] = get_args(GateMode)
PPO_CLIP: Final = 0.2
DUAL_CLIP: Final = 3.0
KL_EPSILON: Final = 1e-8
"""Added above and below inside the second logarithm of the binary KL."""
MAX_LOG_RATIO: Final = 20.0
"""ln(pi / mu) is clamped to this many nats either way."""

Float = TypeVar("Float", np.float32, np.float64)


@dataclass(frozen=True, slots=True)
class GateResult:
    """keep: bool [T]. coefficient: [T], min(pi / mu, C). The gradient of a token's loss by ln pi is -A * coefficient * keep."""

    keep: NDArray[np.bool_]
    coefficient: NDArray[np.floating]


def gate(log_pi: NDArray[Float], log_mu: NDArray[Float], advantages: NDArray[Float], settings: Gate) -> GateResult:
    """What the gate makes of every token.

    Args:
        log_pi: natural log of the trainer's probability of the sampled token.
        log_mu: the same of the engine that sampled it.
        advantages: of the token's episode.
        settings: mode, thresholds and the cap C.
    """
    capped = np.minimum(ratio(log_pi, log_mu), log_pi.dtype.type(settings.ratio_cap))
    return GateResult(keep_mask(log_pi, log_mu, advantages, settings), capped)


def ratio(log_pi: NDArray[Float], log_mu: NDArray[Float]) -> NDArray[Float]:
    """The ratio pi / mu with its logarithm clamped."""
    return np.exp(np.clip(log_pi - log_mu, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def keep_mask(log_pi: NDArray[Float], log_mu: NDArray[Float], advantages: NDArray[Float], settings: Gate) -> NDArray[np.bool_]:
    """Which tokens are kept, bool [T]: False where the gate of `settings.mode` drops a token. Arguments as in `gate`."""
    moved = np.exp(log_pi) - np.exp(log_mu)
    up, down = advantages > 0, advantages < 0
    outward = (up & (moved > 0)) | (down & (moved < 0))
    far = np.abs(moved) > settings.delta
    quotient = ratio(log_pi, log_mu)
    clipped = (up & (quotient > 1 + PPO_CLIP)) | (down & (quotient < 1 - PPO_CLIP))
    match settings.mode:
        case "tv":
            return ~(outward & far)
        case "kl":
            return ~(outward & (binary_kl(log_pi, log_mu) > settings.delta_kl))
        case "symmetric":
            return ~far
        case "ppo_clip":
            return ~clipped
        case "dual_clip_tv":
            return ~(clipped | (down & (quotient > DUAL_CLIP)) | (outward & far))
        case "off":
            return np.ones_like(up)


def binary_kl(log_pi: NDArray[Float], log_mu: NDArray[Float]) -> NDArray[np.floating]:
    """KL of (mu, 1 - mu) from (pi, 1 - pi) [T], in nats; arXiv 2602.04879, eq. 14, guarded where mu or pi is 1."""
    mu, pi = np.exp(log_mu), np.exp(log_pi)
    rest = np.log((1 - mu + KL_EPSILON) / (1 - pi + KL_EPSILON))
    return mu * (log_mu - log_pi) + (1 - mu) * rest


def drop_rates(log_pi: NDArray[Float], log_mu: NDArray[Float], advantages: NDArray[Float], settings: Gate) -> dict[GateMode, float]:
    """What every mode would have dropped of the same tokens, as a share of those with an advantage other than 0."""
    counted = advantages != 0
    num_counted = max(1, int(np.count_nonzero(counted)))
    rates: dict[GateMode, float] = {}
    for mode in MODES:
        keep = keep_mask(log_pi, log_mu, advantages, settings.model_copy(update={"mode": mode}))
        rates[mode] = int(np.count_nonzero(counted & ~keep)) / num_counted
    return rates
