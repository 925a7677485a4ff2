"""How small, fast and cheap a version of the weights is: our delta beside Shannon's bound and other encodings.

    python -m benchmarks.pulse [--json] [--experts 8]
    python -m benchmarks.pulse --full [--folder DIR] [--json]

Masters with LFM2.5's row lengths move as under Adam at lr 1e-6, four steps a version. One change is thinned to exactly
0.5 % of the codes; sizes and CPU seconds of one core for it are scaled to 8.3e9 codes from the number measured, which is
printed. `--full` rehearses all 8.47e9 codes through the real S3 server (`pulse_full.py`). The last line of stdout is JSON.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from benchmarks import pulse_full, pulse_join
from benchmarks.pulse_baselines import flat_sign_zstd, public_pulse, read_public_pulse, sign_zstd
from benchmarks.pulse_masters import RATIOS, Masters, scaled_layout
from stoa.weights import grid
from stoa.weights.container import DeltaHeader, pack_delta, read_delta
from stoa.weights.layout import TensorSpec, make_layout
from stoa.weights.pulse import PCO, Change, counts_of, encode_segments, segments_of
from stoa.weights.snapshot import first_weights, take_snapshot
from stoa.weights.state import WeightState

SCALED_CODES: Final = 8.3e9
RATE: Final = 0.005
LEARNING_RATE: Final = 1e-6
STEPS: Final = 4
"""Optimizer steps a version."""
_Answer = TypeVar("_Answer")


def cpu(call: Callable[[], _Answer], *, tries: int = 3) -> tuple[_Answer, float]:
    """The answer, and the fewest CPU seconds of this process that it took."""
    answers: list[_Answer] = []
    best = math.inf
    for _ in range(tries):
        answers.clear()
        started = time.process_time()
        answers.append(call())
        best = min(best, time.process_time() - started)
    return answers[0], best


def bound_bits(num_codes: int, num_changed: int) -> float:
    """Shannon's bound for independent changes: positions, and one bit of sign each."""
    rate = num_changed / num_codes
    return num_codes * (-rate * math.log2(rate) - (1 - rate) * math.log2(1 - rate)) + num_changed


def thinned(change: Change, num_codes: int, seed: int = 0) -> Change:
    """A random part of a change of exactly 0.5 % of the codes, every one by one step."""
    unit = np.flatnonzero(np.abs(change.differences) == 1)
    kept = np.sort(np.random.default_rng(seed).choice(unit, round(num_codes * RATE), replace=False))
    return Change(change.positions[kept], change.differences[kept])


def change_of(state: WeightState, masters: Masters) -> Change:
    """A change of more than 0.5 %: as many steps as it takes from the published state, without hysteresis."""
    while True:
        for _ in range(STEPS):
            masters.step()
        change = take_snapshot(state, masters.tensors(), 0.0).change
        if len(change.positions) > 1.05 * RATE * state.layout.num_codes:
            return change


def measure_codec(state: WeightState, change: Change) -> dict[str, float]:
    """Size and CPU seconds of every stage for one delta."""
    layout = state.layout
    scale = SCALED_CODES / layout.num_codes
    header = DeltaHeader("benchmark", 0, 1, "0" * 64, "1" * 64, layout.layout_id, PCO)
    counts = counts_of(change)
    data, encode_seconds = cpu(lambda: pack_delta(header, encode_segments(segments_of(change))[0], counts))
    decoded, decode_seconds = cpu(lambda: list(read_delta(data, header, counts, layout)))
    started = time.process_time()
    undo = state.apply(change)
    apply_seconds = time.process_time() - started
    values = np.concatenate([state.quantised(spec)[0].reshape(-1) for spec in layout.quantised])[change.positions]
    state.undo(undo)
    assert sum(len(part.positions) for part in decoded) == len(change.positions)
    _, verify_seconds = cpu(state.tensor_digests)
    baseline, baseline_encode = cpu(lambda: public_pulse(change.positions, values), tries=2)
    _, baseline_decode = cpu(lambda: read_public_pulse(baseline, len(values)), tries=2)
    signs = sign_zstd(layout, change.positions, change.differences)
    full_bytes = layout.num_bytes
    bound = bound_bits(layout.num_codes, len(change.positions))
    return {
        "bytes_per_version": len(data) * scale,
        "bits_per_change": 8 * len(data) / len(change.positions),
        "shannon_bytes": bound / 8 * scale,
        "ratio_to_shannon": 8 * len(data) / bound,
        "compression_vs_full": full_bytes / len(data),
        "full_checkpoint_bytes": full_bytes * scale,
        "public_pulse_bytes": len(baseline) * scale,
        "ratio_to_public_pulse_bytes": len(data) / len(baseline),
        "sign_zstd_bytes": len(signs) * scale,
        "ratio_to_sign_zstd_bytes": len(data) / len(signs),
        "shannon_to_sign_zstd_bytes": bound / 8 / len(signs),
        "up_fraction": float(np.mean(change.differences > 0)),
        "ratio_to_flat_sign_zstd_bytes": len(data) / len(flat_sign_zstd(change.positions, change.differences)),
        "encode_seconds": encode_seconds * scale,
        "decode_seconds": decode_seconds * scale,
        "apply_seconds": apply_seconds * scale,
        "verify_seconds": verify_seconds * scale,
        "public_pulse_encode_seconds": baseline_encode * scale,
        "public_pulse_decode_seconds": baseline_decode * scale,
    }


def measure_scan(state: WeightState, masters: Masters, change: Change) -> dict[str, float]:
    """Speed of finding changes: between two sets of codes, and from float32 masters."""
    after = state.copy()
    after.apply(change)
    pairs = [(state.quantised(spec)[0], after.quantised(spec)[0]) for spec in state.layout.quantised]
    found, seconds = cpu(lambda: sum(len(grid.differing(*pair)) for pair in pairs))
    assert found == len(change.positions)
    _, masters_seconds = cpu(lambda: take_snapshot(state, masters.tensors(), 0.02), tries=2)
    return {
        "scan_gcodes_per_second": state.layout.num_codes / seconds / 1e9,
        "quantise_and_scan_gcodes_per_second": state.layout.num_codes / masters_seconds / 1e9,
        "torch_quantise_and_scan_gcodes_per_second": torch_scan_rate(state, masters),
    }


def torch_scan_rate(state: WeightState, masters: Masters) -> float:
    """Gcodes/s of the trainer's twin of the scan on one CPU thread; 0 where torch is not installed."""
    try:
        import torch

        from trainer_gpu.publish import scan
    except ImportError:
        return 0.0
    torch.set_num_threads(1)
    _, seconds = cpu(lambda: take_snapshot(state, masters.tensors(), 0.02, scan), tries=2)
    return state.layout.num_codes / seconds / 1e9


def measure_rate(num_versions: int) -> dict[str, dict[str, float]]:
    """Changed fraction a version in steady state, with and without hysteresis, on a small model over many versions."""
    specs = [TensorSpec(f"ratio{number}.weight", (256, 2048), "int8", "uint8") for number in range(len(RATIOS))]
    layout = make_layout([*specs, TensorSpec("norm.weight", (64,), "raw", "bfloat16")], "bfloat16")
    found: dict[str, dict[str, float]] = {}
    for label, hysteresis in (("without_hysteresis", 0.0), ("with_hysteresis", 0.02)):
        masters = Masters(layout, learning_rate=LEARNING_RATE, seed=3)
        state, _ = first_weights(layout, masters.tensors())
        changed: list[float] = []
        unit: list[float] = []
        for version in range(num_versions):
            for _ in range(STEPS):
                masters.step()
            change = take_snapshot(state, masters.tensors(), hysteresis).change
            state.apply(change)
            if version >= num_versions // 2:
                changed.append(len(change.positions) / layout.num_codes)
                unit.append(float(np.mean(np.abs(change.differences) == 1)) if len(change.positions) else 1.0)
        found[label] = {"changed_fraction": float(np.mean(changed)), "unit_fraction": float(np.mean(unit))}
    return found


def measure(num_experts: int, num_versions: int) -> dict[str, object]:
    """Everything but the rehearsal."""
    rates = measure_rate(num_versions)
    layout = scaled_layout(num_experts)
    masters = Masters(layout, learning_rate=LEARNING_RATE)
    state, _ = first_weights(layout, masters.tensors())
    change = thinned(change_of(state, masters), layout.num_codes)
    return {
        **measure_codec(state, change),
        **measure_scan(state, masters, change),
        "changed_fraction": {name: rate["changed_fraction"] for name, rate in rates.items()},
        "unit_fraction": {name: rate["unit_fraction"] for name, rate in rates.items()},
        "measured_codes": layout.num_codes,
        "scaled_to_codes": SCALED_CODES,
        "rate": RATE,
        **pulse_join.measure(),
    }


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--experts", type=int, default=8, help="experts a layer of the measured model (32 in the real one)")
    parser.add_argument("--versions", type=int, default=40, help="versions over which the changed fraction settles")
    parser.add_argument("--full", action="store_true", help="rehearse all 8.47e9 codes through the real S3 server; needs 40 GB of disk")
    parser.add_argument("--folder", type=Path, default=None, help="where the rehearsal keeps its files")
    parser.add_argument("--deltas", type=int, default=20, help="versions of the rehearsal after the anchor")
    options = parser.parse_args()
    found = pulse_full.rehearse(options.folder, options.deltas) if options.full else measure(options.experts, options.versions)
    rounded = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.6g}"))
    if not options.json:
        for name, value in rounded.items():
            print(f"{name:44} {value}")
    print(json.dumps(rounded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
