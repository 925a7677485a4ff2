"""Each kernel's body on the emulator: a few random cases, rows alone and in 64, and a planted fault of each sort.

Many more cases and every planted fault are run by `python -m benchmarks.metal`.
"""

import pytest

from tests.metal_emulator.emulator import Emulator, can_emulate
from tests.metal_emulator.proof import Mutant, Proof, finding, fuzz, mutants_of
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
