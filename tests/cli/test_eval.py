"""`stoa eval CHECKPOINT` without a run: two processes share the questions, and results of two samples can be compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

POLICY = str(Path(__file__).parents[2] / "environments" / "search" / "policy")


def stoa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=200)


@pytest.mark.loop
@pytest.mark.timeout(240)
def test_checkpoint_is_examined_by_two_processes_and_compared_with_itself(tmp_path: Path) -> None:
    out = tmp_path / "base.json"
    small = ["--questions", "24", "--samples", "2", "--set", "evaluation.questions_a_part=4", "--workers", "2"]
    done = stoa("eval", POLICY, *small, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    (exam,) = json.loads(done.stdout)
    found = exam["measures"]
    assert (found["num_questions"], found["num_samples"]) == (24, 2)
    for name in ("pass_at_1", "pass_at_2", "cover", "exact_match", "search_rate", "turns_mean", "tokens_mean", "truncated_rate"):
        one = found["estimates"][name]
        assert one["low"] <= one["value"] <= one["high"]
    assert sum(player["num_parts"] for player in exam["players"]) == 6
    assert sum(player["num_questions"] for player in exam["players"]) == 48
    assert all(player["questions_an_hour"] > 0 and player["tokens_per_second"] > 0 for player in exam["players"])
    compared = stoa("eval", "--compare", str(out), str(out), "--json")
    assert compared.returncode == 0, compared.stderr
    same = json.loads(compared.stdout)
    assert (same["num_questions"], same["difference"], same["p_value"]) == (24, 0.0, 1.0)
    refused = stoa("eval", str(tmp_path), "--questions", "4")
    assert refused.returncode == 2
    assert "no folder of that name holds a config.json" in refused.stderr
