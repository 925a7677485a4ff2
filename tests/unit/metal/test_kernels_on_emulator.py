"""Each kernel's body on the emulator: a few random cases, rows alone and in 64, and a planted fault of each sort.

Many more cases and every planted fault are run by `python -m benchmarks.metal`.
"""

import mlx.core as mx
import numpy as np
import pytest

from metal.head import HeadKernel
from metal.reference import draw_plain
from metal.router import RouterKernel, RouterRule, route_plain
from tests.metal_emulator.emulator import Emulator, can_emulate
from tests.metal_emulator.proof import Mutant, Proof, finding, fuzz, int8, mutants_of
from tests.metal_emulator.proofs import PROOFS

pytestmark = pytest.mark.skipif(not can_emulate(), reason="needs PyPI's ziglang on Linux")

PLANTED = [(kernel, mutant) for kernel in PROOFS for mutant in mutants_of(kernel)[::3]]


@pytest.mark.parametrize("kernel", PROOFS)
def test_random_cases_agree_with_float64(kernel: str) -> None:
    done = fuzz(PROOFS[kernel], 8, seed=100)
    assert done.num_cases == 8
    assert done.errors.float32 <= 1e-5
    assert done.errors.rounding <= 1.0


@pytest.mark.parametrize("kernel", PROOFS)
def test_rows_have_the_same_bits_alone_and_in_64(kernel: str) -> None:
    assert PROOFS[kernel].alone_and_in_64(Emulator(seed=1).metal_kernel)


@pytest.mark.parametrize(("kernel", "mutant"), PLANTED, ids=[f"{kernel} {mutant.kind}" for kernel, mutant in PLANTED])
def test_a_planted_fault_is_found(kernel: str, mutant: Mutant) -> None:
    proof: Proof = PROOFS[kernel]
    assert finding(proof, mutant) != ""


@pytest.mark.parametrize("strange", [np.nan, 3e38])
def test_a_row_that_is_no_number_stays_itself_and_harms_no_other(strange: float) -> None:
    """Its experts are experts and its logprob is no number, as with plain ops: a group with it is refused, nothing is overrun."""
    numbers, launcher = np.random.default_rng(0), Emulator().metal_kernel
    rows = numbers.normal(0, 1, (3, 64)).astype(np.float32)
    rows[1] = strange
    x, gate, bias = mx.array(rows), mx.array(numbers.normal(0, 0.1, (8, 64)).astype(np.float32)), mx.zeros((8,))
    rule = RouterRule(8, 2, True, 1.0)
    for ours, plain in zip(RouterKernel(launcher)(x, gate, bias, rule), route_plain(x, gate, bias, rule), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(plain), rtol=1e-5)
    embedding, _ = int8(numbers, (70, 64))
    uniform = mx.array([0.1, 0.5, 0.9])
    tokens, logprobs = HeadKernel(launcher)(x, embedding, uniform)
    assert np.isnan(np.array(logprobs)).tolist() == [False, True, False]
    wanted = draw_plain(x, embedding, uniform)
    np.testing.assert_array_equal(np.array(tokens), np.array(wanted[0]))
    np.testing.assert_allclose(np.array(logprobs), np.array(wanted[1]), rtol=1e-5)
