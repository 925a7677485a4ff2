"""Logprobs of given tokens under stock mlx_lm with a checkpoint's own weights: what the int8 engine is measured against.

No sampling, no cache, no batching: one episode at a time, whole.
"""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from stoa.rollouts.records import Episode


def forced_logprobs(folder: Path, episodes: Sequence[Episode]) -> list[NDArray[np.float32]]:
    """Natural-log probability of every sampled token of each episode, given the tokens before it.

    Args:
        folder: a hub checkpoint that mlx_lm loads; its weights' type is the type of the forward pass.
        episodes: as recorded by any engine.

    Returns:
        float32 [sum(mask)] an episode.
    """
    model, _ = load_model(folder)
    found: list[NDArray[np.float32]] = []
    for episode in episodes:
        logits_TV = model(mx.array(episode.ids[None, :-1]))[0].astype(mx.float32)
        log_p_TV = logits_TV - mx.logsumexp(logits_TV, axis=-1, keepdims=True)
        targets_T1 = mx.array(episode.ids[1:, None])
        log_p_T = np.array(mx.take_along_axis(log_p_TV, targets_T1, axis=-1)[:, 0])
        found.append(log_p_T[episode.mask[1:] == 1])
    return found
