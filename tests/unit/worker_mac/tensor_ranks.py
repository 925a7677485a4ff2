"""One rank of a split policy that learns for many steps, as the test of equal halves starts it: FOLDER OUT."""

import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from environments.demonstrations import Demonstration
from worker_mac.sharded_lora import add_sharded_adapters, gather_adapters, split_halves
from worker_mac.warmstart import policy
from worker_mac.warmstart.batches import Host
from worker_mac.warmstart.learner import Learner
from worker_mac.warmstart.ranks import Ranks
from worker_mac.warmstart.settings import Settings


def learn(folder: Path, out: Path, ranks: Ranks, num_steps: int, bits: int) -> None:
    assert ranks.group is not None
    # Only what any model of mlx_lm offers: load, quantise, split itself, and the layers of sharded_lora.
    model, config = load_model(folder)
    policy.quantise(model, bits)
    model.shard(ranks.group)
    model.freeze()
    mx.random.seed(3)
    paths = add_sharded_adapters(model, rank=4, scale=2.0, group=ranks.group, experts=True)
    axes = dict(split_halves(model))
    settings = Settings(model="", out="", state="", split="tensor", num_ranks=2, learning_rate=3e-3, num_steps=200, num_warmup_steps=1)
    learner = Learner(policy.Policy(model), settings, ranks, hosts=[Host(1.0, 64)] * 2, rows_at=lambda length: 2, split_axes=axes)
    numbers = np.random.default_rng(0)
    rows = [Demonstration([int(i) for i in numbers.integers(1, config["vocab_size"], 12)], [0.0] * 4 + [1.0] * 8) for _ in range(4)]
    digests, losses = [], []
    for step in range(num_steps):
        losses.append(learner.step(step, rows).loss)
        whole = {name: array for name, array in learner.policy.trained.items() if name not in axes}
        digests.append(hashlib.sha256(b"".join(np.array(array).tobytes() for array in whole.values())).hexdigest())
    gathered = gather_adapters(model, ranks.group)
    probe = model(mx.array([rows[0].ids]))
    mx.eval(probe)
    np.savez(out / f"rank-{ranks.rank}-{bits}.npz", logits=np.array(probe), **{name: np.array(array) for name, array in gathered.items()})
    told = {"paths": paths, "axes": axes, "digests": digests, "losses": losses, "whole": len(whole)}
    (out / f"rank-{ranks.rank}-{bits}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    both = Ranks.join(2, wait_seconds=50)
    for packed, count in ((4, 100), (8, 10)):
        learn(Path(sys.argv[1]), Path(sys.argv[2]), both, count, packed)
