import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_mac.sampler import Sampling, draw, filtered, seed_of, uniforms

WORD = 2**64


def splitmix64(state: int) -> int:
    """The published generator's output function, in Python integers."""
    z = state % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def test_splitmix64_itself_gives_its_published_first_outputs() -> None:
    # Outputs of the reference C code for seed 1234567.
    assert [splitmix64(1234567 + n * 0x9E3779B97F4A7C15) for n in (1, 2)] == [6457827717110365317, 3203168211198807973]


@given(st.integers(0, WORD - 1), st.integers(0, 2**31))
def test_uniform_number_is_the_top_23_bits_of_splitmix64(key: int, position: int) -> None:
    found = uniforms(np.array([key], np.uint64), np.array([position]))
    wanted = (splitmix64(key + (position + 1) * 0x9E3779B97F4A7C15) >> 41) / 2**23
    assert float(found[0]) == wanted
    assert 0.0 <= wanted < 1.0


def test_seed_depends_on_every_part_and_fits_a_signed_integer() -> None:
    parts = ("run", 3, 5)
    seeds = {seed_of(*parts), seed_of("run", 35), seed_of("run", 3, 6), seed_of("ru", "n", 3, 5)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_logprob_is_that_of_a_float64_log_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 6, (64, 1000)).astype(np.float32)
    tokens, logprobs = draw(mx.array(logits), mx.array(np.random.default_rng(1).random(64, np.float32)))
    wide = logits.astype(np.float64)
    wanted = wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)
    assert logprobs.dtype == mx.float32
    np.testing.assert_allclose(np.array(logprobs), wanted[np.arange(64), np.array(tokens)], rtol=0, atol=1e-5)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    probabilities = np.array([0.5, 0.25, 0.0, 0.2, 0.05])
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities).astype(np.float32)
    num = 40_000
    u = uniforms(np.full(num, 99, np.uint64), np.arange(num))
    tokens, _ = draw(mx.array(np.tile(logits, (num, 1))), mx.array(u))
    counts = np.bincount(np.array(tokens), minlength=5)
    assert counts[2] == 0
    expected = probabilities * num
    chi2 = float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())
    assert chi2 < 16.3  # 3 degrees of freedom, p = 0.001


def test_largest_uniform_number_never_runs_past_the_last_likely_token() -> None:
    numbers = np.random.default_rng(3)
    logits = numbers.normal(0, 3, (512, 300)).astype(np.float32)
    logits[:, 200:] = -np.inf
    tokens, logprobs = draw(mx.array(logits), mx.full((512,), 1 - 2.0**-23))
    assert np.array(tokens).max() < 200
    assert np.isfinite(np.array(logprobs)).all()


def test_logprob_is_never_positive() -> None:
    logits = np.full((4, 256), -60.0, np.float32)
    logits[:, 7] = 30.0 + np.arange(4)
    tokens, logprobs = draw(mx.array(logits), mx.full((4,), 0.3))
    assert np.array(tokens).tolist() == [7] * 4
    assert (np.array(logprobs) <= 0).all()


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    logits = np.random.default_rng(4).normal(0, 3, (64, 256)).astype(np.float32)
    u = uniforms(np.arange(64, dtype=np.uint64), np.arange(64))
    tokens, logprobs = draw(mx.array(logits), mx.array(u))
    for row in (0, 13, 63):
        alone, its_logprob = draw(mx.array(logits[row : row + 1]), mx.array(u[row : row + 1]))
        assert alone[0].item() == tokens[row].item()
        assert its_logprob[0].item() == logprobs[row].item()


def test_the_smallest_set_that_reaches_top_p_is_kept() -> None:
    kept = filtered(mx.zeros((1, 4)), Sampling(top_p=0.5))  # four of a quarter each: two reach a half
    np.testing.assert_array_equal(np.isfinite(np.array(kept)), [[True, True, False, False]])
