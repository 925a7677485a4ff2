"""The int8 grid against golden values made without it, numbers by hand, and properties."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from stoa.contracts.errors import LayoutError, NonFiniteError
from stoa.weights import grid
from stoa.weights.layout import TensorSpec
from stoa.weights.snapshot import stored_raw

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "grid.npz")
WEIGHTS = npst.arrays(np.float32, (3, 64), elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_nan=False, allow_infinity=False))


def test_fresh_grid_and_codes_equal_the_golden_ones_bit_for_bit():
    codes, scales, biases = grid.quantise(GOLDEN["weights"])
    for row, name in enumerate(GOLDEN["names"]):
        assert scales[row] == GOLDEN["scales"][row], name
        assert biases[row] == GOLDEN["biases"][row], name
        assert codes[row].tolist() == GOLDEN["codes"][row].tolist(), name


def test_dequantised_values_equal_the_golden_ones_bit_for_bit():
    found = grid.dequantise(GOLDEN["codes"], GOLDEN["scales"], GOLDEN["biases"])
    assert found.tobytes() == GOLDEN["dequantised"].tobytes()


@pytest.mark.parametrize("hysteresis", [0.0, 0.02])
def test_scan_moves_codes_and_regrids_groups_as_in_the_golden_file(hysteresis: float):
    codes, scales, biases = (GOLDEN[name].copy() for name in ("codes", "scales", "biases"))
    scan = grid.scan(GOLDEN["masters"], codes, scales, biases, hysteresis)
    codes.reshape(-1)[scan.positions] = scan.codes
    codes[scan.groups], scales[scan.groups, 0], biases[scan.groups, 0] = scan.group_codes, scan.scales, scan.biases
    assert codes.tolist() == GOLDEN[f"codes_next_{'0' if hysteresis == 0 else hysteresis}"].tolist()
    assert scales.tolist() == GOLDEN["scales_next"].tolist()
    assert biases.tolist() == GOLDEN["biases_next"].tolist()
    assert len(scan.groups) == np.count_nonzero(GOLDEN["scales_next"] != GOLDEN["scales"]) == 3


def test_grid_of_a_group_worked_out_by_hand():
    # range 251 / 1024, so scale = 2^-10 exactly; bias = -0.125 - 2^-10 rounds in bf16 to -0.1259765625
    group = np.full((1, 64), -0.125, dtype=np.float32)
    group[0, -1] = -0.125 + 251 / 1024
    codes, scales, biases = grid.quantise(group)
    assert grid.bf16_values(scales).item() == 2.0**-10
    assert grid.bf16_values(biases).item() == -0.1259765625
    assert codes[0, 0] == 1
    assert codes[0, -1] == 252


def test_constant_group_has_scale_one_its_value_as_bias_and_code_zero():
    codes, scales, biases = grid.quantise(np.full((2, 64), 0.5, dtype=np.float32))
    assert set(scales.ravel()) == {0x3F80}
    assert set(biases.ravel()) == {0x3F00}
    assert not codes.any()


@pytest.mark.parametrize(("value", "bits"), [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (-2.0, 0xC000), (0.0, 0)])
def test_bf16_rounds_to_nearest_and_ties_to_even(value: float, bits: int):
    assert grid.bf16_bits(np.array([value], dtype=np.float32)).item() == bits


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weight_that_is_not_finite_is_refused(bad: float):
    weights = np.zeros((2, 64), dtype=np.float32)
    codes, scales, biases = grid.quantise(weights)
    weights[1, 7] = bad
    with pytest.raises(NonFiniteError):
        grid.quantise(weights)
    with pytest.raises(NonFiniteError):
        grid.scan(weights, codes, scales, biases, 0.02)


# Rounded to bf16 as numbers are, all but the first would become zeros; the second is what CUDA makes.
NANS = [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000]


@pytest.mark.parametrize("bits", NANS)
@pytest.mark.parametrize("count", [1, 64])
def test_nan_of_any_bits_is_refused_by_int8_tensors(bits: int, count: int):
    weights = np.zeros((2, 64), dtype=np.float32)
    codes, scales, biases = grid.quantise(weights)
    weights.view(np.uint32)[1, :count] = bits
    with pytest.raises(NonFiniteError):
        grid.quantise(weights)
    with pytest.raises(NonFiniteError):
        grid.scan(weights, codes, scales, biases, 0.02)


@pytest.mark.parametrize("bits", NANS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_of_any_bits_is_refused_by_raw_tensors(bits: int, dtype: Literal["bfloat16", "float32"]):
    weights = np.ones(8, dtype=np.float32)
    weights.view(np.uint32)[3] = bits
    with pytest.raises(NonFiniteError, match=r"norm\.weight"):
        stored_raw(TensorSpec("norm.weight", (8,), "raw", dtype), weights)


def test_range_beyond_float32_is_refused():
    weights = np.zeros((1, 64), dtype=np.float32)
    weights[0, :2] = 3e38, -3e38
    with pytest.raises(NonFiniteError):
        grid.quantise(weights)


def test_ragged_columns_and_other_types_are_refused():
    with pytest.raises(LayoutError):
        grid.quantise(np.zeros((2, 65), dtype=np.float32))
    with pytest.raises(LayoutError):
        grid.quantise(np.zeros((2, 64), dtype=np.float64))


def test_rounding_error_of_normal_weights_is_a_third_less_than_a_step():
    weights = np.random.default_rng(3).normal(0, 0.02, (256, 512)).astype(np.float32)
    codes, scales, biases = grid.quantise(weights)
    steps = np.repeat(grid.bf16_values(scales), 64, axis=-1)
    rms_steps = float(np.sqrt(np.mean(((grid.dequantise(codes, scales, biases) - weights) / steps) ** 2)))
    # uniform rounding gives 1/sqrt(12) = 0.2887; codes against an unrounded scale would give 0.43
    assert 0.285 < rms_steps < 0.296
    assert np.mean((codes == 0) | (codes == 255)) < 1e-4


@given(WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_scan_of_the_weights_a_grid_was_made_from_finds_nothing(weights: np.ndarray):
    codes, scales, biases = grid.quantise(weights)
    for hysteresis in (0.0, 0.02):
        scan = grid.scan(weights, codes, scales, biases, hysteresis)
        assert len(scan.positions) == len(scan.groups) == 0


@given(WEIGHTS, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.1]))
@settings(max_examples=60, deadline=None)
def test_after_a_scan_no_code_is_further_from_its_master_than_the_dead_band(weights: np.ndarray, seed: int, hysteresis: float):
    codes, scales, biases = grid.quantise(weights)
    steps = np.repeat(grid.bf16_values(scales), 64, axis=-1)
    moved = (weights + steps * np.random.default_rng(seed).normal(0, 1.0, weights.shape)).astype(np.float32)
    scan = grid.scan(moved, codes, scales, biases, hysteresis)
    flat = codes.reshape(-1)
    assert (flat[scan.positions] != scan.codes).all()
    flat[scan.positions] = scan.codes
    codes.reshape(-1, 64)[scan.groups] = scan.group_codes
    scales.reshape(-1)[scan.groups], biases.reshape(-1)[scan.groups] = scan.scales, scan.biases
    places = grid.place(moved, scales, biases)
    inside = (places > -0.5) & (places < 255.5)
    lag = np.abs(places - codes.reshape(-1, 64))[inside]
    assert lag.max(initial=0) <= np.float32(0.5 + hysteresis)
    assert scan.lag_steps == pytest.approx(lag.max(initial=0))
    assert scan.num_clipped == np.count_nonzero((places < -0.5) | (places > 255.5))


def test_blocks_of_a_large_tensor_give_what_one_block_gives():
    weights = np.random.default_rng(5).normal(0, 0.02, (20000, 64)).astype(np.float32)
    codes, scales, biases = grid.quantise(weights)
    moved = (weights + np.random.default_rng(6).normal(0, 1e-4, weights.shape)).astype(np.float32)
    whole = grid.scan(moved, codes, scales, biases, 0.02)
    for first in (0, 16384):
        part = slice(first, first + 3000)
        alone = grid.scan(moved[part], codes[part], scales[part], biases[part], 0.02)
        within = (whole.positions >= first * 64) & (whole.positions < (first + 3000) * 64)
        assert (whole.positions[within] - first * 64).tolist() == alone.positions.tolist()
        assert whole.codes[within].tolist() == alone.codes.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, (1 << 20) + 3, 3 << 20])
def test_positions_that_differ_are_found_wherever_they_are(size: int, dtype: type):
    chance = np.random.default_rng(size)
    left = chance.integers(0, 255, size).astype(dtype)
    right = left.copy()
    changed = np.unique(np.append(chance.integers(0, size, size // 50), [0, size - 1])) if size else np.empty(0, np.int64)
    right[changed] ^= dtype(1 << 4)
    assert grid.differing(left, right).tolist() == changed.tolist()


@pytest.mark.parametrize("far", [False, True], ids=["quick", "with a clipped group"])
def test_code_moves_only_beyond_the_threshold_and_not_at_it(far: bool):
    edge = np.float32(0.5 + 0.02)
    weights = np.zeros((2, 64), dtype=np.float32)
    weights[0, :2] = edge, np.nextafter(edge, np.float32(1))
    weights[1, 0] = 255.75 if far else 255
    codes = np.zeros((2, 64), dtype=np.uint8)
    codes[1, 0] = 255
    scales, biases = np.full((2, 1), 0x3F80, np.uint16), np.zeros((2, 1), np.uint16)
    found = grid.scan(weights, codes, scales, biases, 0.02)
    assert (found.positions.tolist(), found.codes.tolist()) == ([1], [1])
    assert found.num_clipped == far
