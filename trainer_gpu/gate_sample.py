"""Which tokens the gate dropped, of a few groups a step: what marks them in the transcripts that a person reads.

A step's manifest is read by everybody who follows a run, so only a sample is kept: the group that lost most tokens and the
step's first.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from stoa.config.run import Gate
from stoa.learning.gate import keep_mask
from trainer_gpu.metrics import Tokens
from trainer_gpu.rows import Origin

Places = tuple[tuple[int, ...], ...]
"""Of each episode of a group: places among its sampled tokens, from 0."""


def gate_sample(tokens: Tokens, origins: Sequence[Origin], gate: Gate) -> Mapping[int, Places]:
    """Number of a group in its step -> the dropped tokens of its episodes, of at most two groups.

    tokens: of the episodes of `origins`, one after another. A token without an advantage has nothing to drop.
    """
    if not origins:
        return {}
    dropped = ~keep_mask(tokens.log_pi, tokens.log_mu, tokens.advantages, gate) & (tokens.advantages != 0)
    ends = np.cumsum([origin.num_sampled for origin in origins])
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for origin, part in zip(origins, np.split(dropped, ends[:-1]), strict=True):
        found.setdefault(origin.group, {})[origin.episode] = tuple(int(place) for place in np.flatnonzero(part))
    most = max(sorted(found), key=lambda group: sum(map(len, found[group].values())))
    return {group: tuple(places for _, places in sorted(found[group].items())) for group in sorted({min(found), most})}
