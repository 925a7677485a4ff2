"""The benchmarks that are shown, run as a person runs them: their keys are there and their bounds hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def shown(name: str, *arguments: str) -> dict:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_three_engines_agree_and_every_planted_fault_is_seen() -> None:
    found = shown("parity")
    assert found["max_abs_logit_difference"] <= 1e-5
    assert found["max_relative_gradient_difference"] <= 1e-6
    assert len(found["planted_differences"]) == 6
    assert found["smallest_planted_difference"] == min(found["planted_differences"].values()) > 1e-2
    assert found["smallest_router_margin"] >= 1e-4
    assert found["logits_std"] > 0.3, "a model without opinions agrees with anybody"


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_packed_step_is_faster_than_padding_and_the_head_stays_small() -> None:
    found = shown("trainer", "--rounds", "5")
    assert found["padding_ratio"] >= 1.8
    assert found["speedup_vs_padded_hf"] >= max(1.5, 0.85 * found["padding_ratio"])
    assert found["peak_logits_bytes"] <= 268_435_456 < found["all_logits_bytes"]
    assert all(trial["largest_weight_difference"] < 5e-5 for trial in found["trials"]), "half a step of Adam at this rate"


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_killed_trainer_repeats_nothing_skips_nothing_and_ends_bit_equal() -> None:
    found = shown("resume", "--kills", "2", "--steps", "6", "--seed", "5")
    assert (found["num_kills"], found["num_repeats"], found["num_holes"], found["bit_exact"]) == (2, 0, 0, True)
    assert found["num_groups_consumed"] == 6 * 4
    assert found["num_metrics_compared"] > 20


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_gate_study_plays_trains_examines_and_draws(tmp_path: Path) -> None:
    figure = tmp_path / "gate.png"
    found = shown("gate_study", "--seeds", "2", "--versions", "2", "--rates", "1e-4", "--figure", str(figure))
    assert [(row["gate"], row["num_seeds"]) for row in found["rows"]] == [("off", 2), ("tv", 2), ("ppo_clip", 2)]
    starts = {(run["seed"], run["points"][0]["pass_at_1"]) for run in found["runs"]}
    assert len(starts) == 2, "all arms of a seed begin alike"
    assert figure.read_bytes().startswith(b"\x89PNG")
