"""The Mac's engine beside mlx_lm's BatchGenerator on the same episodes in the same run: `python -m benchmarks.rollout --json`.

Eight groups of eight scripted episodes with tool turns and early ends, on the demo's policy and on a random LFM2-MoE of
100 million weights. Both engines read int8 weights and compute in fp32, on one core, with prompts fed once a group; runs
alternate and are timed in CPU seconds of the process. Then logprobs against a float64 forward pass with the recorded
experts, memory, decoding while groups are uploaded, and what the memory planner grants Macs of two sizes.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from benchmarks.forward64 import Forward64, num_route_flips
from benchmarks.pulse_masters import LFM25, full_layout
from benchmarks.rollout_cases import GROUP_SIZE, GROUPS, Case, demo_case, large_case
from benchmarks.stock_sweep import play as play_stock
from benchmarks.uploading import decode_slowdown
from stoa.config.host import MacHost
from stoa.config.run import Rollout
from stoa.rollouts.records import Episode
from worker_mac.decoder import Decoder, Drawn
from worker_mac.guest import Guest
from worker_mac.memory import CACHE_BYTES, Play, model_bytes, most_episodes
from worker_mac.model_config import read_model_config
from worker_mac.plan import Work
from worker_mac.player import Player
from worker_mac.sampler import seed_of
from worker_mac.sweep import Casting
from worker_mac.width import Learned, write_learned

NUM_ROUNDS: Final = {"demo": 9, "large": 2}
NUM_EXAMINED: Final = {"demo": 24, "large": 2}
"""Episodes whose logprobs are compared with the float64 forward pass."""
MEMORY_BYTES: Final = {"16gb": 11_453_000_000, "24gb": 16 << 30}
"""What macOS recommends for the GPU of Macs of two sizes."""
REAL_PLAY: Final = Play(group_size=8, longest_tokens=4096, prompt_tokens=400, mean_tokens=1800)
"""Episodes of a search task at full size: a prompt of 400 tokens, 1,800 tokens in the mean, at most 4,096."""


class ForcedPlayer(Player):
    """Plays the script's tokens whatever is drawn; drawing is paid for."""

    def __init__(self, case: Case, folder: Path, *, forced: bool = True) -> None:
        super().__init__(
            case.script, Rollout(groups=GROUPS, group_size=GROUP_SIZE), case.state.layout, read_model_config(case.config),
            Guest(MacHost()), folder=folder, state_folder=folder,
        )  # fmt: skip
        self._script = case.script if forced else None

    def _decoder(self, *arguments: Any, **options: Any) -> Decoder:
        decoder = super()._decoder(*arguments, **options)
        if self._script is not None:
            decoder.__class__ = _ForcedDecoder
            decoder.forced = self._script.forced  # type: ignore[attr-defined]
        return decoder


class _ForcedDecoder(Decoder):
    forced: list[dict[int, int]]

    def step(self, work: Work, uniform: NDArray[np.float32]) -> Drawn:
        drawn = super().step(work, uniform)
        chosen = np.flatnonzero(work.samples)
        ends = work.starts + work.counts
        tokens = [self.forced[int(work.sequences[row])][int(ends[row])] for row in chosen]
        return Drawn(np.array(tokens, np.int32), drawn.logprobs, drawn.routes)


@dataclass(frozen=True, slots=True)
class Timed:
    """One sweep of one engine."""

    cpu_seconds: float
    wall_seconds: float
    kv_bytes: int
    """Peak of memory above the weights: keys and values, pool included, and what a step takes beside them."""
    num_prompt_tokens: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both engines on one model; rates are medians over rounds, ratios ours over stock's or unshared's."""

    num_weights: int
    num_episodes: int
    num_sampled_tokens: int
    episodes_per_second: float
    stock_episodes_per_second: float
    episodes_per_second_ratio: float
    episodes_per_second_ratio_least: float
    peak_kv_bytes: int
    stock_peak_kv_bytes: int
    peak_kv_bytes_ratio: float
    prompt_prefill_tokens_ratio: float
    """Tokens of prompts that were fed, over those fed without sharing."""
    prefill_tokens_ratio: float
    """All tokens that were fed without being sampled, over those fed without sharing."""
    num_steps: int
    stock_num_steps: int
    max_logprob_error: float
    num_route_flips: int
    num_routes: int


def castings() -> list[Casting]:
    """All episodes."""
    return [Casting(group, str(group), seed_of("rollout", group, one)) for group in range(GROUPS) for one in range(GROUP_SIZE)]


def timed_ours(player: Player, case: Case) -> Timed:
    """One sweep of the Mac's engine."""
    player.drop_pool()
    before = _rest()
    wall, cpu = time.monotonic(), time.process_time()
    played = player.play(case.served, castings(), lambda group, ended: None, should_stop=lambda: False, on_step=lambda done, tokens: None)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    if not played.ended:
        raise AssertionError("a sweep was broken off")
    return Timed(cpu, wall, mx.get_peak_memory() - before, played.num_prompt_tokens, played.num_steps)


def timed_stock(case: Case) -> Timed:
    """One sweep of BatchGenerator."""
    before = _rest()
    run = play_stock(case.stock, case.script)
    return Timed(run.cpu_seconds, run.seconds, mx.get_peak_memory() - before, run.num_prompt_tokens, run.num_steps)


def _rest() -> int:
    """Bytes in use with nothing going on."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def compare(case: Case, num_rounds: int, num_examined: int) -> Comparison:
    """Alternate both engines. Ours knows how long episodes are in the mean, as it does after the first sweep of a run."""
    with tempfile.TemporaryDirectory() as folder:
        write_learned(Path(folder), Learned(mean_tokens=case.script.mean_tokens))
        player = ForcedPlayer(case, Path(folder))
        ours: list[Timed] = []
        stock: list[Timed] = []
        for number in range(num_rounds):
            stock.append(timed_stock(case))
            ours.append(timed_ours(player, case))
            say(f"{case.name} round {number}: ours {ours[-1].cpu_seconds:.2f} s, BatchGenerator {stock[-1].cpu_seconds:.2f} s of CPU")
        found = examine(case, Path(folder), num_examined)
    ratios = [theirs.cpu_seconds / one.cpu_seconds for one, theirs in zip(ours, stock, strict=True)]
    num = GROUPS * GROUP_SIZE
    prompts = [len(prompt) - 1 for prompt in case.script.prompts]
    replies = ours[0].num_prompt_tokens - sum(prompts)
    unshared = GROUP_SIZE * sum(prompts)
    kv_bytes, stock_kv_bytes = (max(run.kv_bytes for run in runs) for runs in (ours, stock))
    return Comparison(
        num_weights=case.num_weights,
        num_episodes=num,
        num_sampled_tokens=case.script.num_sampled_tokens,
        episodes_per_second=num / statistics.median(run.cpu_seconds for run in ours),
        stock_episodes_per_second=num / statistics.median(run.cpu_seconds for run in stock),
        episodes_per_second_ratio=statistics.median(ratios),
        episodes_per_second_ratio_least=min(ratios),
        peak_kv_bytes=kv_bytes,
        stock_peak_kv_bytes=stock_kv_bytes,
        peak_kv_bytes_ratio=kv_bytes / stock_kv_bytes,
        prompt_prefill_tokens_ratio=sum(prompts) / unshared,
        prefill_tokens_ratio=(sum(prompts) + replies) / (unshared + replies),
        num_steps=ours[-1].num_steps,
        stock_num_steps=stock[-1].num_steps,
        **found,
    )


def examine(case: Case, folder: Path, num_examined: int) -> dict[str, Any]:
    """Logprobs of episodes that our engine draws by itself, against the float64 forward pass with the same experts."""
    ended: dict[int, list[Episode]] = {}
    ForcedPlayer(case, folder, forced=False).play(
        case.served, castings(), ended.__setitem__, should_stop=lambda: False, on_step=lambda done, tokens: None, record_routing=True
    )
    episodes = [episode for group in sorted(ended) for episode in ended[group]]
    forward, error, flips, routes = Forward64(case.config, case.state), 0.0, 0, 0
    for episode in episodes[:: max(1, len(episodes) // num_examined)][:num_examined]:
        if episode.routing is None:
            raise AssertionError("routing was not recorded")
        exact = forward.logprobs(episode.ids[:-1], episode.routing[:-1])
        places = np.flatnonzero(episode.mask)
        error = max(error, float(np.abs(episode.logprobs - exact[places - 1, episode.ids[places]]).max()))
        flips += num_route_flips(forward.chosen, episode.routing[:-1])
        routes += (len(episode.ids) - 1) * episode.routing.shape[1]
    return {"max_logprob_error": error, "num_route_flips": flips, "num_routes": routes}


def concurrent() -> dict[str, int]:
    """Episodes at once on Macs of two sizes at LFM2.5-8B-A1B's size in bf16, by the memory planner."""
    shapes = {**LFM25, "norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e6}}
    model = model_bytes(read_model_config(shapes), full_layout(), item_bytes=2, activation_bytes=2)
    found: dict[str, int] = {}
    for size, limit in MEMORY_BYTES.items():
        for kind in ("paged", "dense"):
            suffix = "" if kind == "paged" else "_dense"
            found[f"max_concurrent_episodes_{size}{suffix}"] = most_episodes(model, REAL_PLAY, limit, paged=kind == "paged")
    return found


def run(*, rounds: dict[str, int], upload_blocks: int) -> dict[str, Any]:
    """Everything."""
    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(CACHE_BYTES)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores:
        os.sched_setaffinity(0, {cores[0]})
    demo, large = (compare(make(), rounds[name], NUM_EXAMINED[name]) for name, make in (("demo", demo_case), ("large", large_case)))
    uploading = decode_slowdown(demo_case(), cores, upload_blocks)
    return {
        "episodes_per_second_ratio": demo.episodes_per_second_ratio,
        "episodes_per_second_ratio_100m": large.episodes_per_second_ratio,
        "peak_kv_bytes_ratio": max(demo.peak_kv_bytes_ratio, large.peak_kv_bytes_ratio),
        "max_logprob_error": max(demo.max_logprob_error, large.max_logprob_error),
        "num_route_flips": demo.num_route_flips + large.num_route_flips,
        "prompt_prefill_tokens_ratio": max(demo.prompt_prefill_tokens_ratio, large.prompt_prefill_tokens_ratio),
        "prefill_tokens_ratio": max(demo.prefill_tokens_ratio, large.prefill_tokens_ratio),
        "decode_slowdown_while_uploading": uploading.slowdown,
        **concurrent(),
        "demo": asdict(demo),
        "large": asdict(large),
        "uploading": asdict(uploading),
        "conditions": {
            "device": "cpu, one core",
            "mlx": metadata.version("mlx"),
            "timing": "CPU seconds of the process, engines alternating",
            "weights": "int8 on both sides, activations and keys and values fp32",
            "concurrent": f"LFM2.5-8B-A1B, bf16, GPU memory {MEMORY_BYTES}, {asdict(REAL_PLAY)}",
        },
    }


def say(text: str) -> None:
    """A line for whoever watches."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--rounds", type=int, default=0, help="rounds on the demo's policy; as many on the large one at most")
    parser.add_argument("--upload-blocks", type=int, default=10)
    asked = parser.parse_args(arguments)
    rounds = {name: asked.rounds or number for name, number in NUM_ROUNDS.items()}
    found = run(rounds=rounds, upload_blocks=asked.upload_blocks)
    if not asked.json:
        for key, value in found.items():
            print(f"{key:40} {value}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
