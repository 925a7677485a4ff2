"""The torch twin of the int8 grid against the golden file and the numpy reference, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stoa.contracts.errors import NonFiniteError
from stoa.weights import grid
from trainer_gpu import publish

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "grid.npz")


def apply(scan: grid.Scan, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes, scales, biases = codes.copy(), scales.copy(), biases.copy()
    codes.reshape(-1)[scan.positions] = scan.codes
    codes.reshape(-1, 64)[scan.groups] = scan.group_codes
    scales.reshape(-1)[scan.groups] = scan.scales
    biases.reshape(-1)[scan.groups] = scan.biases
    return codes, scales, biases


def test_fresh_grid_of_the_golden_file() -> None:
    weights = torch.from_numpy(GOLDEN["weights"])
    scales, biases = publish.make_grid(weights)
    assert np.array_equal(publish.bits(scales), GOLDEN["scales"][:, 0])
    assert np.array_equal(publish.bits(biases), GOLDEN["biases"][:, 0])
    codes = publish.codes_of(publish.place(weights, scales, biases))
    assert np.array_equal(codes.numpy(), GOLDEN["codes"])


@pytest.mark.parametrize("hysteresis", [0, 0.02])
def test_scan_of_the_golden_file(hysteresis: float) -> None:
    before = GOLDEN["codes"], GOLDEN["scales"], GOLDEN["biases"]
    found = publish.scan(GOLDEN["masters"], *before, hysteresis)
    codes, scales, biases = apply(found, *before)
    assert np.array_equal(codes, GOLDEN[f"codes_next_{hysteresis}"])
    assert np.array_equal(scales, GOLDEN["scales_next"])
    assert np.array_equal(biases, GOLDEN["biases_next"])


@pytest.mark.parametrize("hysteresis", [0.0, 0.02, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_scan_equals_the_reference_in_every_field(seed: int, hysteresis: float) -> None:
    draw = np.random.default_rng(seed)
    weights = draw.normal(0, 0.02, (4, 64, 128)).astype(np.float32)
    codes, scales, biases = grid.quantise(weights)
    masters = (weights + draw.normal(0, 2e-4, weights.shape)).astype(np.float32)
    masters[0, :3] *= 4  # off the grid: made anew
    masters[1, 0] = 0.25
    expected = grid.scan(masters, codes, scales, biases, hysteresis)
    found = publish.scan(masters, codes, scales, biases, hysteresis, block_groups=100)  # the last block is short
    assert len(expected.positions) > 100
    assert len(expected.groups) > 3
    for name in grid.Scan.__slots__:
        ours, theirs = getattr(found, name), getattr(expected, name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, name
            assert np.array_equal(ours, theirs), name
        else:
            assert ours == theirs, name


def test_masters_that_are_not_finite_are_refused() -> None:
    weights = np.zeros((1, 64), np.float32)
    codes, scales, biases = grid.quantise(weights)
    weights[0, 5] = np.nan
    with pytest.raises(NonFiniteError):
        publish.scan(weights, codes, scales, biases, 0.02)
