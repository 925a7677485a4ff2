"""The gate answers the reference vectors in both precisions, and every mode drops what its definition says."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoa.config.run import Gate
from stoa.learning.gate import MODES, GateMode, binary_kl, drop_rates, gate, keep_mask

REFERENCE = json.loads((Path(__file__).parents[2] / "golden" / "dppo.json").read_text())
ROWS = REFERENCE["rows"]
TIGHT = {"delta": 0.15, "delta_kl": 0.05, "ratio_cap": 20.0}


def run(mode: str, mu, pi, advantage, dtype=np.float64, **changes):
    """Keep and d loss / d ln pi of tokens given as probabilities."""
    log_pi, log_mu, advantages = (np.asarray(x, dtype=dtype) for x in (np.log(pi), np.log(mu), advantage))
    found = gate(log_pi, log_mu, advantages, Gate(mode=mode, **{**TIGHT, **changes}))
    assert found.coefficient.dtype == dtype
    return found.keep, -advantages * found.coefficient * found.keep


def test_every_mode_of_the_settings_is_there():
    assert set(MODES) == set(get_args(GateMode)) == set(get_args(Gate.model_fields["mode"].annotation))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mode", ["tv", "kl"])
def test_reference_vectors(mode, dtype):
    tolerance = 2e-5 if dtype == np.float32 else 1e-12
    for row in ROWS:
        keep, grad = run(mode, [row["mu"]], [row["pi"]], [row["advantage"]], dtype)
        assert keep[0] == bool(row[mode]["keep"]), row["name"]
        assert grad[0] == pytest.approx(row[mode]["dloss_dlogpi"], rel=tolerance, abs=1e-12), row["name"]
        assert float(grad[0] * np.log(row["pi"])) == pytest.approx(row[mode]["loss"], rel=tolerance, abs=1e-12), row["name"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reference_ratio_caps(dtype):
    for row in REFERENCE["ratio_cap"]:
        _, grad = run("tv", [row["mu"]], [row["pi"]], [float(row["advantage"])], dtype, ratio_cap=float(row["cap"]))
        assert grad[0] == pytest.approx(row["dloss_dlogpi"], rel=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("mode", "denominator"),
    [("token-mean", 8), ("seq-mean-token-sum", 2), ("fixed-denominator (5 tokens x 2 planned sequences)", 10)],
)
def test_reference_aggregations(mode, denominator, dtype):
    table = REFERENCE["aggregation"]
    mask = np.array(table["mask"], bool)
    advantages = np.repeat(np.array(table["advantage"], float)[:, None], 5, axis=1)
    keep, grad = run("tv", table["mu"], table["pi"], advantages, dtype)
    assert np.count_nonzero(~keep & mask) == table["num_dropped"]
    wanted = table["modes"][mode]
    np.testing.assert_allclose(grad * mask / denominator, wanted["dloss_dlogpi"], rtol=2e-5, atol=1e-9)
    assert (grad * np.log(table["pi"]) * mask).sum() / denominator == pytest.approx(wanted["loss"], rel=2e-5)


def test_the_log_ratio_is_clamped_below_as_well():
    """0.1 -> 1e-12 at A = -1: the ratio 1e-11 is held at e^-20."""
    _, grad = run("tv", [0.1], [1e-12], [-1.0])
    assert grad[0] == pytest.approx(2.0611536224385579e-09, rel=1e-12)


def test_what_the_ppo_clip_drops_and_tv_keeps_and_the_other_way_round():
    """Rare tokens that grow, and falls by less than delta, are dropped by PPO only; likely tokens that move far, by TV only."""

    def keeps(mode, mu, pi, advantage):
        return bool(run(mode, [mu], [pi], [advantage])[0][0])

    for mu, pi, advantage in [(0.001, 0.01, 1), (0.001, 0.1, 1), (0.01, 0.0001, -1), (0.3, 0.2, -1), (0.3, 0.16, -1)]:
        assert keeps("tv", mu, pi, advantage)
        assert not keeps("ppo_clip", mu, pi, advantage)
        assert not keeps("dual_clip_tv", mu, pi, advantage)
    for mu, pi, advantage in [(0.8, 0.9501, 1), (0.8, 0.6499, -1), (0.999, 0.8, -1)]:
        assert not keeps("tv", mu, pi, advantage)
        # 0.6499 / 0.8 = 0.812 and 0.8 / 0.999 = 0.801 are inside [0.8, 1.2].
        assert keeps("ppo_clip", mu, pi, advantage)
        assert not keeps("dual_clip_tv", mu, pi, advantage)
    # Dual clip: A < 0 and the ratio above 3, an inward move that the others keep.
    assert keeps("tv", 0.001, 0.1, -1)
    assert keeps("ppo_clip", 0.001, 0.1, -1)
    assert not keeps("dual_clip_tv", 0.001, 0.1, -1)


def test_symmetric_drops_inward_moves_too_and_off_drops_nothing():
    mu, pi, advantage = [0.8, 0.8, 0.8, 0.8], [0.96, 0.96, 0.64, 0.7], [1, -1, 1, 1]
    assert run("symmetric", mu, pi, advantage)[0].tolist() == [False, False, False, True]
    assert run("tv", mu, pi, advantage)[0].tolist() == [False, True, True, True]
    assert run("off", mu, pi, advantage)[0].tolist() == [True] * 4


probabilities = st.floats(1e-12, 1.0)


@settings(max_examples=300)
@given(probabilities, probabilities, st.sampled_from([-1.0, -0.25, 0.25, 1.0]), st.sampled_from([np.float32, np.float64]))
def test_tv_and_kl_never_drop_a_move_back_towards_the_sampler(mu, pi, advantage, dtype):
    outward = (advantage > 0 and pi > mu) or (advantage < 0 and pi < mu)
    for mode in ("tv", "kl"):
        keep, grad = run(mode, [mu], [pi], [advantage], dtype)
        assert keep[0] or outward
        assert np.isfinite(grad).all()
        assert abs(grad[0]) <= 20.0 * abs(advantage)


@settings(max_examples=300)
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_the_binary_kl_is_finite_and_not_negative_in_float32(log_pi, log_mu):
    divergence = binary_kl(np.array([log_pi], np.float32), np.array([log_mu], np.float32))
    assert np.isfinite(divergence).all()
    assert divergence[0] >= -1e-6


def test_a_sure_token_is_kept_by_every_mode():
    sure = np.zeros(1, np.float32)
    for mode in MODES:
        for advantage in (-1.0, 1.0):
            assert keep_mask(sure, sure, np.array([advantage], np.float32), Gate(mode=mode)).all()


def test_drop_rates_count_tokens_with_an_advantage_for_all_modes_at_once():
    mu = np.array([0.8, 0.8, 0.3, 0.2, 0.5])
    pi = np.array([0.955, 0.6, 0.2, 0.9, 0.5])
    advantages = np.array([1.0, -1.0, -1.0, 0.0, 1.0])
    rates = drop_rates(np.log(pi), np.log(mu), advantages, Gate(mode="off", **TIGHT))
    # Counted: tokens 0, 1, 2, 4. TV drops 0 and 1; KL drops 0 (0.157) and 1 (0.092) and keeps 2 (0.028); PPO drops 1
    # (ratio 0.75) and 2 (0.67) and keeps 0 (1.19); the dual clip has PPO's and TV's.
    assert rates["tv"] == 0.5
    assert rates["kl"] == 0.5
    assert rates["symmetric"] == 0.5
    assert rates["ppo_clip"] == 0.5
    assert rates["dual_clip_tv"] == 0.75
    assert rates["off"] == 0.0


def test_drop_rates_of_no_counted_token_are_zero():
    zero = np.zeros(3)
    assert set(drop_rates(zero, zero - 1.0, zero, Gate()).values()) == {0.0}
