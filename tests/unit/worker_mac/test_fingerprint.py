"""The fingerprint's expected numbers against the float64 reference, and what moves it."""

from importlib import metadata

import numpy as np

from tests.unit.worker_mac import reference
from worker_mac import fingerprint


def test_the_expected_logprobs_are_those_of_exact_arithmetic() -> None:
    ids = fingerprint.fixed_ids()
    rows = reference.logprobs(fingerprint.CONFIG, fingerprint.fixed_state(), ids)
    at = fingerprint.NUM_PROMPT_TOKENS
    exact = rows[np.arange(at, len(ids)) - 1, ids[at:]]
    np.testing.assert_allclose(np.array(fingerprint.EXPECTED), exact, atol=2e-7)
    assert len(exact) == 64


def test_this_machine_computes_them_and_names_them_the_same_each_time() -> None:
    model = fingerprint.fixed_model()
    first, again = fingerprint.logprobs(model), fingerprint.logprobs(fingerprint.fixed_model())
    assert fingerprint.difference(first) < 1e-4
    assert fingerprint.name_of(first) == fingerprint.name_of(again)
    version, _, digits = fingerprint.name_of(first).rpartition("-")
    assert (version, len(digits)) == (metadata.version("mlx"), 12)


def test_the_last_bit_of_one_logprob_is_another_fingerprint() -> None:
    values = np.array(fingerprint.EXPECTED, np.float32)
    moved = values.copy()
    moved[17] = np.nextafter(moved[17], np.float32(0))
    assert fingerprint.name_of(values) != fingerprint.name_of(moved)
    assert fingerprint.difference(moved) < 1e-6
    moved[17] = np.nan
    assert fingerprint.difference(moved) == float("inf")


def test_no_rounding_flips_an_expert_of_the_fixed_model() -> None:
    """Weights moved by far more than any rounding choose the same experts."""
    chosen = []
    for shift in (0.0, 1e-4):
        state, routes = fingerprint.fixed_state(), list[np.ndarray]()
        for name, array in state.arrays.items():
            if name.endswith("gate.weight"):
                array += np.where(np.arange(array.size).reshape(array.shape) % 2, shift, -shift).astype(np.float32)
        reference.logprobs(fingerprint.CONFIG, state, fingerprint.fixed_ids(), routes)
        chosen.append(np.sort(np.stack(routes), axis=-1))
    np.testing.assert_array_equal(*chosen)
    assert chosen[0].shape == (3, 88, 4)
