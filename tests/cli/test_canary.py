"""`stoa canary` with the real engines and a real bucket: nothing moves at learning rate 0, and a planted move is told."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from cli.canary import VersionSeen, judge

SEEN = VersionSeen(0, "a" * 64, 0.0, 700, 1500, 4e-4, 5e-5, True)
STILL = [replace(SEEN, version=version, mismatch_mean=4e-4 + 1e-5 * (version % 3)) for version in range(5)]


def stoa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=280)


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_nothing_moves_at_learning_rate_0() -> None:
    done = stoa("canary", "--versions", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    versions = found["versions"]
    assert (found["num_versions"], found["flat"], found["faults"]) == (3, True, [])
    assert [seen["version"] for seen in versions] == [0, 1, 2]
    assert len({seen["state_id"] for seen in versions}) == 1
    assert all(seen["changed_fraction"] == 0.0 and seen["same_groups_unmoved"] for seen in versions)
    assert all(0 < seen["mismatch_mean"] < 5e-3 for seen in versions), "int8 must show, and little"


@pytest.mark.loop
@pytest.mark.timeout(300)
def test_mismatch_is_split_by_engine_int8_and_age() -> None:
    done = stoa("canary", "--decompose", "--lags", "1", "--lags", "3", "--json")
    assert done.returncode == 0, done.stderr
    fp32, int8, young, old = json.loads(done.stdout)["arms"]
    assert [arm["name"] for arm in (fp32, int8, young, old)] == [
        "fp32, same version",
        "int8, same version",
        "int8, 1 version old",
        "int8, 3 versions old",
    ]
    assert fp32["largest"] < 1e-4, "two engines on the same fp32 weights differ by rounding only"
    assert fp32["num_tokens"] == int8["num_tokens"]
    assert fp32["mean"] * 10 < int8["mean"] < young["mean"] < old["mean"]
    assert fp32["drop_rate"] == int8["drop_rate"] == 0.0
    assert all(arm["would_drop"]["off"] == 0.0 for arm in (fp32, int8, young, old))


def test_still_versions_have_no_fault() -> None:
    assert judge(STILL).faults == ()


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ({"state_id": "b" * 64}, "digest bbbb"),
        ({"changed_fraction": 1e-6}, "delta is not empty"),
        ({"same_groups_unmoved": False}, "logprobs of the first groups have moved"),
        ({"mismatch_mean": 2e-3}, "mean |pi - mu| is 0.002"),
        ({"mismatch_error": float("nan")}, "mean |pi - mu| is"),
    ],
)
def test_each_move_is_told_with_its_version(moved: dict, words: str) -> None:
    faults = judge([*STILL[:3], replace(STILL[3], **moved), STILL[4]]).faults
    assert len([fault for fault in faults if words in fault and "version 3" in fault]) == 1


def test_comparing_one_version_is_wrong_use() -> None:
    done = stoa("canary", "--versions", "1")
    assert done.returncode == 2
    assert "nothing to compare" in done.stderr
