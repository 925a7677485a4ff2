import mlx.core as mx
import numpy as np
import pytest

from stoa.contracts.errors import CheckpointError, LayoutError
from tests.unit.worker_mac.policies import DENSE, TINY, WIDE, model_of, oracle_of, random_state
from tests.unit.worker_mac.reference import logprobs as reference_logprobs
from worker_mac.forced import Forced
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.weights import LiveWeights

IDS = np.random.default_rng(1).integers(0, 120, 40).astype(np.int32)


def walk(model: Model, ids: np.ndarray, prefix: int) -> np.ndarray:
    """Logits after each token from `prefix` on: a prefix is fed at once, the rest token by token."""
    rows = Forced(model, 1, len(ids))
    rows.feed([ids[:prefix]])
    return rows.walk(ids[None, prefix:])[:, 0]


@pytest.mark.parametrize("config", [TINY, WIDE, DENSE], ids=["tiny", "wide", "dense"])
@pytest.mark.parametrize("quantised", [False, True], ids=["dequantised", "stock quantised load"])
def test_logits_equal_those_of_mlx_lm(config: dict, quantised: bool) -> None:
    state = random_state(config, spread=0.08)
    wanted = np.array(oracle_of(config, state, quantised=quantised)(mx.array(IDS)[None])[0])
    found = walk(model_of(config, state), IDS, 9)
    assert np.abs(wanted).max() > 1.0
    np.testing.assert_allclose(found, wanted[9:], rtol=0, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("config", [TINY, WIDE], ids=["tiny", "wide"])
def test_logprobs_are_within_1e_4_of_a_float64_forward_pass(config: dict) -> None:
    state = random_state(config, spread=0.08)
    logits = walk(model_of(config, state), IDS, 5).astype(np.float64)
    found = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    wanted = reference_logprobs(config, state, IDS)[5:]
    assert np.abs(found - wanted).max() < 1e-4


def test_bf16_weights_run_in_bf16_and_give_fp32_logits_near_the_fp32_ones() -> None:
    state = random_state(TINY, raw_dtype="bfloat16")
    model = model_of(TINY, state)
    found = walk(model, IDS, 9)
    wanted = np.array(oracle_of(TINY, state, quantised=False)(mx.array(IDS)[None])[0])[9:]
    assert model.dtype == mx.bfloat16
    assert found.dtype == np.float32
    # bf16 has 8 bits of mantissa, and a few tokens cross a router boundary; the rest is near.
    assert np.median(np.abs(found - wanted)) < 0.05 * np.abs(wanted).max()


def test_sorting_rows_by_expert_changes_nothing() -> None:
    state = random_state(WIDE, spread=0.08)
    prompts = [IDS[:23], IDS[3:40], IDS[10:12]]
    outs = []
    for sort_experts in (False, True):
        rows = Forced(model_of(WIDE, state, sort_experts=sort_experts), 24, 64)
        rows.feed([prompts[row // 8] for row in range(24)])
        outs.append(rows.walk(np.repeat(IDS[:3], 8)[:, None]))
    np.testing.assert_allclose(outs[0], outs[1], rtol=0, atol=1e-4)


def test_expert_bias_moves_the_choice_but_not_the_weights() -> None:
    state = random_state(TINY)
    biased = state.copy()
    name = next(n for n in biased.arrays if n.endswith("layers.1.feed_forward.expert_bias"))
    biased.arrays[name][:] = 0.0
    plain = biased.copy()
    plain_logits = walk(model_of(TINY, plain), IDS, 9)
    biased.arrays[name][:] = 7.0  # the same for all: no choice changes, so nothing may
    np.testing.assert_array_equal(walk(model_of(TINY, biased), IDS, 9), plain_logits)
    biased.arrays[name][:] = np.linspace(0, 9, 8)
    assert np.abs(walk(model_of(TINY, biased), IDS, 9) - plain_logits).max() > 1e-2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"conv_bias": True}, "conv_bias"),
        ({"layer_types": ["conv"]}, "layer_types"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_type"),
        ({"norm_eps": None}, "norm_eps"),
    ],
)
def test_config_that_cannot_be_run_is_refused_by_field(change: dict, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_model_config(TINY | change)


def test_weights_of_another_model_are_refused_by_name() -> None:
    arrays = LiveWeights.of(random_state(TINY)).arrays
    del arrays["model.layers.1.self_attn.k_proj.scales"]
    with pytest.raises(LayoutError, match=r"model\.layers\.1\.self_attn\.k_proj\.scales"):
        Model(read_model_config(TINY), arrays)
