"""The rollout benchmark's own parts: its float64 oracle, its scripts, and a round of each comparison."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.forward64 import Forward64, num_route_flips
from benchmarks.rollout import compare, concurrent
from benchmarks.rollout_cases import demo_case
from benchmarks.scripted import CALL, END, Script, Shape
from benchmarks.soak import soak
from stoa.config.load import PROJECT_ROOT
from tests.unit.worker_mac.policies import TINY, WIDE, random_state
from tests.unit.worker_mac.reference import logprobs as token_by_token

IDS = np.random.default_rng(3).integers(0, 250, 30).astype(np.int32)


@pytest.mark.parametrize("config", [TINY, WIDE], ids=["tiny", "wide"])
def test_the_float64_forward_pass_equals_one_written_token_by_token(config: dict) -> None:
    state, routes = random_state(config, spread=0.08), []
    wanted = token_by_token(config, state, IDS, routes)
    forward = Forward64(config, state)
    np.testing.assert_allclose(forward.logprobs(IDS), wanted, rtol=0, atol=1e-12)
    record = np.stack(routes, axis=1).astype(np.uint8)
    assert num_route_flips(forward.chosen, record) == 0
    np.testing.assert_allclose(forward.logprobs(IDS, record), wanted, rtol=0, atol=1e-12)


def test_replayed_experts_are_used_and_what_differs_is_counted() -> None:
    state, routes = random_state(TINY, spread=0.08), []
    wanted = token_by_token(TINY, state, IDS, routes)
    record = np.stack(routes, axis=1).astype(np.uint8)
    record[4, 1] = record[4, 1][::-1]  # another order is the same choice
    record[-1, 1] = [7, 0] if set(record[-1, 1]) != {0, 7} else [1, 2]  # of the last layer: nothing else is chosen otherwise for it
    forward = Forward64(TINY, state)
    found = forward.logprobs(IDS, record)
    assert num_route_flips(forward.chosen, record) == 1
    np.testing.assert_allclose(found[:-1], wanted[:-1], rtol=0, atol=1e-12)
    assert np.abs(found[-1] - wanted[-1]).max() > 1e-6


def test_a_script_says_every_token_at_its_place() -> None:
    script = Script(Shape((3, 5), (2, 4), (1, 3), (1, 3)), 64, 3, 2, seed=1)
    for episode, turns in enumerate(script.turns):
        prompt = script.prompts[episode // 2]
        ids = dict(enumerate(prompt))
        for number, turn in enumerate(turns):
            assert turn[-1] == (CALL if number + 1 < len(turns) else END)
            assert not {CALL, END} & set(turn[:-1])
            ids |= {len(ids) + place: token for place, token in enumerate(turn)}
            reply = script.reply_of(episode, number + 1)
            assert (reply is None) == (number + 1 == len(turns))
            ids |= {len(ids) + place: token for place, token in enumerate(reply or ())}
        assert {place: ids[place] for place in script.forced[episode]} == script.forced[episode]
        assert len(script.forced[episode]) == sum(map(len, turns))
        assert len(ids) <= script.limits.max_episode_tokens


def test_one_round_on_the_demos_policy_has_what_the_benchmark_promises() -> None:
    found = compare(demo_case(), 1, 3)
    assert found.prompt_prefill_tokens_ratio == 0.125
    assert found.peak_kv_bytes_ratio < 0.5
    assert found.max_logprob_error < 1e-4
    assert found.num_steps < found.stock_num_steps
    assert found.episodes_per_second_ratio > 0.8  # what it is, a busy machine does not tell


def test_a_mac_holds_twice_the_episodes_with_pages() -> None:
    found = concurrent()
    for size in ("16gb", "24gb"):
        assert found[f"max_concurrent_episodes_{size}"] >= 2 * found[f"max_concurrent_episodes_{size}_dense"] > 0


def test_nothing_grows_over_a_few_hundred_steps() -> None:
    found = soak(400)
    assert found["num_steps"] >= 400
    assert found["num_parked"] > 0
    assert found["active_memory_growth"] == 0


def test_it_prints_one_json_line_for_soak() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--json", "--steps", "50"], capture_output=True, text=True, timeout=55, cwd=PROJECT_ROOT,
        env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().rpartition("\n")[2])["num_steps"] >= 50
