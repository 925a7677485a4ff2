import mlx.core as mx
import numpy as np
import pytest

from metal.exponents import exp, silu

NUMBERS = np.random.default_rng(5)


def test_exponentials_are_those_of_float64() -> None:
    x = np.concatenate([NUMBERS.uniform(-80, 20, 5000), [0.0, -0.0]]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(np.array(exp(mx.array(x))) - exact) <= exact * (3e-7 + 1e-7 * np.abs(x))).all()
    assert np.array(exp(mx.array([-np.inf, -3e30, -200.0]))).tolist() == [0.0, 0.0, 0.0]


def test_silu_is_that_of_float64_and_keeps_to_its_ends() -> None:
    x = NUMBERS.uniform(-30, 30, 5000).astype(np.float32)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(np.array(silu(mx.array(x))), wide / (1 + np.exp(-wide)), rtol=4e-6, atol=1e-30)
    found = np.array(silu(mx.array([-200.0, 200.0, 0.0])))
    assert found.tolist() == [0.0, 200.0, 0.0]


@pytest.mark.parametrize("op", [exp, silu])
def test_a_number_has_the_same_bits_wherever_it_stands(op: object) -> None:
    x = NUMBERS.normal(0, 4, 257).astype(np.float32)
    together = np.array(op(mx.array(x)))  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues]
    for start, stop in ((0, 1), (1, 8), (3, 64), (200, 257)):
        np.testing.assert_array_equal(np.array(op(mx.array(x[start:stop]))), together[start:stop])  # pyright: ignore
