"""Fifty thousand steps of the Mac's engine on a tiny model: does anything grow? `python -m benchmarks.soak --json`.

Sweeps with tool turns, early ends and more episodes than the pool holds, so that some are parked, one after another on one
pool; weights are updated in place between them. Memory is looked at between sweeps, where nothing is going on.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import psutil

from environments.base import Limits, Outcome, Question, Reply
from stoa.config.host import MacHost
from stoa.config.run import Rollout
from stoa.weights.layout import layout_of
from worker_mac.bench import random_weights
from worker_mac.guest import Guest
from worker_mac.memory import CACHE_BYTES, MemoryPlan
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.player import Player
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting
from worker_mac.versions import Served

NUM_STEPS: Final = 50_000
GROUPS: Final = 3
GROUP_SIZE: Final = 4
TINY: Final[dict[str, Any]] = {
    "model_type": "lfm2_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_dense_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "use_expert_bias": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


class Rambling:
    """Turns of random length, up to four with replies between them."""

    name = "rambling"
    limits = Limits(4, 40, 160)
    stop_ids = frozenset(range(6))

    def question_ids(self, split: str) -> Sequence[str]:
        """As many as one likes."""
        return ["0"]

    def question(self, question_id: str) -> Question:
        """Of no words."""
        return Question(question_id, "", (), "train", "")

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """5 to 44 ids."""
        numbers = random.Random(question_id)
        return tuple(numbers.randrange(8, 128) for _ in range(numbers.randint(5, 44)))

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """A few ids more, or the end."""
        numbers = random.Random(f"{list(turns[-1])}")
        if numbers.random() < 0.3:
            return Reply((), True, "answered")
        return Reply(tuple(numbers.randrange(8, 128) for _ in range(numbers.randint(1, 20))), False, "")

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """Nothing is learned."""
        return Outcome(0.0, {})


class Cramped(Player):
    """Has pages for half of its episodes."""

    def _plan(self, castings: Sequence[Casting]) -> MemoryPlan:
        plan = super()._plan(castings)
        return replace(plan, num_pages=max(8, plan.num_pages // 3))


def soak(num_steps: int) -> dict[str, Any]:
    """Play until so many steps are done."""
    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(CACHE_BYTES)
    layout, config = layout_of(TINY, "float32"), read_model_config(TINY)
    live = random_weights(layout)
    model, codes = Model(config, live.arrays), live.state.arrays["model.embed_tokens.weight"].view(np.uint8).reshape(-1)
    steps = sweeps = parked = episodes = 0
    active: list[int] = []
    resident: list[int] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        player = Cramped(
            Rambling(), Rollout(groups=GROUPS, group_size=GROUP_SIZE), layout, config, Guest(MacHost()), folder=Path(folder),
            state_folder=Path(folder),
        )  # fmt: skip
        while steps < num_steps:
            castings = [
                Casting(group, str(sweeps * GROUPS + group), seed_of(sweeps, group, one))
                for group in range(GROUPS)
                for one in range(GROUP_SIZE)
            ]
            played = player.play(
                Served(sweeps, str(sweeps), model, live), castings, lambda group, ended: None, should_stop=lambda: False,
                on_step=lambda done, tokens: None,
            )  # fmt: skip
            steps, parked, episodes, sweeps = (
                steps + played.num_steps,
                parked + played.num_parked,
                episodes + played.num_episodes,
                sweeps + 1,
            )
            live.settle()
            codes[np.random.default_rng(sweeps).integers(0, codes.size, 20)] += 1
            mx.synchronize()
            active.append(mx.get_active_memory())
            resident.append(psutil.Process().memory_info().rss)
            if sweeps % 50 == 0:
                print(f"{steps} steps, {active[-1]} bytes in use", file=sys.stderr, flush=True)
    settled = len(active) // 10
    return {
        "num_steps": steps,
        "num_sweeps": sweeps,
        "num_episodes": episodes,
        "num_parked": parked,
        "active_memory_growth": active[-1] - active[min(2, len(active) - 1)],
        "active_memory_bytes": active[-1],
        "active_memory_bytes_most": max(active),
        "cache_memory_bytes": mx.get_cache_memory(),
        "resident_bytes_growth": resident[-1] - resident[settled],
        "seconds": time.monotonic() - started,
        "conditions": {"device": "cpu", "model": "random LFM2-MoE, 3 layers", "growth": "between sweeps, after the third"},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    asked = parser.parse_args(arguments)
    found = soak(asked.steps)
    if not asked.json:
        for key, value in found.items():
            print(f"{key:32} {value}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
