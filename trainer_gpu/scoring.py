"""What the trainer's policy, as it is now, says of groups: logprobs of their sampled tokens, without a step.

Used to measure how far a sampler is from the trainer. One process; assumes that no step is running.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from stoa.config.run import Learning
from stoa.rollouts.records import Group
from trainer_gpu.convert import save_hub
from trainer_gpu.metrics import Tokens
from trainer_gpu.model import token_logprobs_packed
from trainer_gpu.policy import Policy
from trainer_gpu.rows import rows_of_rank


@torch.no_grad()
def score(policy: Policy, groups: Sequence[Group], learning: Learning) -> list[Tokens]:
    """Tokens of each group, in order: ours, the sampler's, the advantage and the entropy of every sampled token."""
    scored: list[Tokens] = []
    for group in groups:
        parts: list[Tokens] = []
        for row in rows_of_rank([group], learning):
            log_pi, entropy = token_logprobs_packed(policy.trainable.model, row.ids, row.seq_lens, row.where)
            parts.append(Tokens.of_tensors(*(t[row.where] for t in (log_pi, row.log_mu, row.advantages, entropy))))
        scored.append(Tokens.concatenate(parts))
    return scored


def write_hub_folder(policy: Policy, folder: Path) -> None:
    """The fp32 masters as a hub checkpoint, for an engine that takes no part in the run."""
    save_hub(policy.trainable.model, policy.config, folder, policy.trainable.masters())
