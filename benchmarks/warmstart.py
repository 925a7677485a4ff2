"""What several processes give a warm start, against one, side by side: real processes over MLX's ring on this machine.

    python -m benchmarks.warmstart --json

`warmstart_update_difference`: largest distance of a trained number after 3 steps of two ranks of unlike speed from those of
one, adapters and every weight. `warmstart_tensor_difference`: the same with the matrices split, 4 and 8 bits, experts without
adapters. `warmstart_tensor_gradient_difference`: with them, of the gradient of one step, as a share of its largest number: Adam
divides by gradients that are smaller than their rounding, and few experts see many tokens.
`warmstart_speedup_2_ranks`: tokens a second of two ranks, a core each, over those of one on one core; medians over the
steps of alternating starts. `warmstart_bytes_reduced_a_step`: what one rank gives into sums. Memory: of one gradient, layers
computed twice against once.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import lfm2_moe
from safetensors.numpy import load_file

from cli.warmstart import Processes, ring
from environments.demonstrations import Demonstration
from stoa.config.load import PROJECT_ROOT
from worker_mac.warmstart import policy
from worker_mac.warmstart.batches import Batch
from worker_mac.warmstart.export import hub_names
from worker_mac.warmstart.settings import Settings

POLICY: Final = PROJECT_ROOT / "environments" / "search" / "policy"
NUM_STEPS: Final = 3
SPEED_STEPS: Final = 12
SPEED_STARTS: Final = 3
SKIPPED_STEPS: Final = 2
"""At the beginning of each start, while buffers are first made."""
Found = dict[str, Any]


def measure() -> Found:
    """All of it; the keys begin with `warmstart_`."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        usual = Settings(model=str(POLICY), out="", state="", batch_rows=16, num_steps=NUM_STEPS, learning_rate=1e-3, num_warmup_steps=1)
        rows = {mode: _difference(folder / mode, replace(usual, mode=mode), shares=(3.0, 1.0)) for mode in ("lora", "full")}
        wide = write_wide(folder / "wide")
        split = replace(usual, model=str(wide), batch_rows=4)
        plain = replace(split, experts=False)
        matrices = {bits: _difference(folder / f"split-{bits}", replace(plain, bits=bits), split="tensor") for bits in (4, 8)}
        gradients = [_gradient_difference(folder / f"gradient-{bits}", replace(split, bits=bits, num_steps=1)) for bits in (4, 8)]
        speeds = _speeds(folder / "speed", usual)
    return {
        "warmstart_update_difference": max(found["difference"] for found in rows.values()),
        "warmstart_tensor_difference": max(found["difference"] for found in matrices.values()),
        "warmstart_tensor_gradient_difference": max(gradients),
        "warmstart_bytes_reduced_a_step": rows["lora"]["bytes_a_step"],
        "warmstart_bytes_reduced_a_step_full": rows["full"]["bytes_a_step"],
        **speeds,
        **_computed_twice(),
        "warmstart_conditions": f"demo policy, 16 rows a step, adapters over 4 bits; split: hidden 128; load {os.getloadavg()[0]:.0f} on "
        f"{os.cpu_count()} cores",
    }


def _difference(folder: Path, settings: Settings, **two: object) -> Found:
    """Largest distance between what two ranks and one have learned."""
    alone, _ = _start(folder / "one", settings, 1)
    together, steps = _start(folder / "two", replace(settings, **two), 2)  # pyright: ignore[reportArgumentType] - fields by name
    if set(alone) != set(together):
        raise SystemExit("two ranks trained other tensors than one")
    return {
        "difference": max(float(np.abs(alone[name] - together[name]).max()) for name in alone),
        "bytes_a_step": int(steps[-1]["bytes_summed"]) // len(steps),
    }


def _gradient_difference(folder: Path, settings: Settings) -> float:
    """Largest distance between the first moments of two ranks and of one after a step, over the largest of them."""
    _start(folder / "one", settings, 1)
    _start(folder / "two", replace(settings, split="tensor"), 2)
    one, two = (load_file(folder / name / "state" / f"step-{settings.num_steps:08d}" / "first.safetensors") for name in ("one", "two"))
    if set(one) != set(two) or not any(".switch_mlp." in name for name in one):
        raise SystemExit("two ranks trained other tensors than one")
    return max(float(np.abs(one[name] - two[name]).max()) for name in one) / max(float(np.abs(array).max()) for array in one.values())


def _start(folder: Path, settings: Settings, num_ranks: int, cores: Sequence[int] = ()) -> tuple[dict[str, np.ndarray], list[Found]]:
    """Run a warm start; what it has learned, and what its steps said. cores: of each rank, where they can be pinned."""
    asked = replace(settings, num_ranks=num_ranks, out=str(folder / "out"), state=str(folder / "state"))
    line = [sys.executable, "-m", "worker_mac.warmstart", asked.to_json()]
    pinned = [["taskset", "-c", str(core), *line] for core in cores] if cores else [line] * num_ranks
    with ring(num_ranks) as environments, Processes(pinned, environments) as processes:
        events = [dict(event) for event in processes.events()]
    if faults := [event for event in events if event["event"] == "fault"]:
        raise SystemExit(f"a rank failed: {faults[0]['message']}")
    saved = Path(asked.state) / f"step-{asked.num_steps:08d}" / "trained.safetensors"
    return load_file(saved), [event for event in events if event["event"] == "step"]


def _speeds(folder: Path, usual: Settings) -> Found:
    """Tokens a second of one rank and of two, alternating."""
    settings = replace(usual, mode="full", batch_rows=64, num_steps=SPEED_STEPS, shares=())
    can_pin = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= 2
    cores = sorted(os.sched_getaffinity(0))[:2] if can_pin else []
    seen: dict[int, list[float]] = {1: [], 2: []}
    for start in range(SPEED_STARTS):
        for num_ranks in seen:
            shares = () if num_ranks == 1 else (1.0, 1.0)
            _, steps = _start(folder / f"{start}-{num_ranks}", replace(settings, shares=shares), num_ranks, cores[:num_ranks])
            seen[num_ranks] += [step["num_tokens"] / step["seconds"] for step in steps[SKIPPED_STEPS:]]
    one, two = (statistics.median(values) for values in seen.values())
    return {
        "warmstart_speedup_2_ranks": two / one,
        "warmstart_tokens_per_second_1_rank": one,
        "warmstart_tokens_per_second_2_ranks": two,
        "warmstart_one_core_a_rank": bool(cores),
    }


def _computed_twice() -> Found:
    """Gradient and peak memory of 16 rows of 256 tokens with layers computed twice, against once; adapters over 4 bits."""
    settings = Settings(model=str(POLICY), out="", state="", bits=4)
    rows = [Demonstration([1 + (7 * place + row) % 250 for place in range(256)], [0.0] * 240 + [1.0] * 16) for row in range(16)]
    peaks, gradients = [], []
    for twice in (False, True):
        model = policy.load(POLICY, settings)
        policy.add_adapters(model, settings)
        policy.settle(model)
        if twice:
            policy.checkpoint_layers(model)
        learning = policy.Policy(model)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gradients.append(learning.gradient(Batch.of(rows)).arrays)
        peaks.append(mx.get_peak_memory() - before)
    norm = sum(policy.number(mx.square(array).sum()) for array in gradients[0].values()) ** 0.5
    far = max(policy.number(mx.abs(array - gradients[1][name]).max()) for name, array in gradients[0].items())
    return {
        "warmstart_checkpoint_gradient_difference": far / norm,
        "warmstart_checkpoint_peak_bytes": peaks[1],
        "warmstart_checkpoint_peak_fraction": peaks[1] / peaks[0],
    }


def write_wide(folder: Path) -> Path:
    """A random LFM2-MoE whose matrices divide by two in whole groups, with the demo's tokenizer."""
    config = json.loads((POLICY / "config.json").read_text("utf-8"))
    config |= {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    mx.random.seed(0)
    model: nn.Module = lfm2_moe.Model(lfm2_moe.ModelArgs.from_dict(config))
    folder.mkdir(parents=True)
    tensors: dict[str, mx.array] = {}
    for name, array in policy.flat(dict(tree_flatten(model.parameters()))).items():
        path = name.removesuffix(".weight")
        stacked = array.shape[0] if "switch_mlp" in name else 0
        for hub, source in hub_names("lfm2_moe", path, stacked):
            tensors[hub if name.endswith(".weight") else name] = array if source.expert < 0 else array[source.expert]
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "tokenizer.json").write_bytes((POLICY / "tokenizer.json").read_bytes())
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warmstart", description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    asked = parser.parse_args(arguments)
    found = measure()
    if not asked.json:
        for key, value in found.items():
            print(f"{key:44} {value}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
