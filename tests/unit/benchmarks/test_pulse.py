"""The measuring of weight sync: baselines that can be read back, masters that move as Adam moves them, honest counts."""

import math

import numpy as np
import pytest
import zstandard

from benchmarks.pulse import bound_bits, thinned
from benchmarks.pulse_baselines import flat_sign_zstd, public_pulse, read_public_pulse, sign_zstd
from benchmarks.pulse_masters import BETA1, Masters, full_layout
from stoa.weights.layout import TensorSpec, make_layout
from stoa.weights.pulse import Change

EXPERTS = make_layout([TensorSpec(f"{n}.weight", (4, 256, 64 << n), "int8", "uint8") for n in range(5)], "float32")
LAYOUT = make_layout([TensorSpec(f"t{n}.weight", (64, 2048), "int8", "uint8") for n in range(4)], "float32")


def test_published_encoding_comes_back_also_over_gaps_beyond_16_bits():
    positions = np.array([0, 5, 65539, 65540, 200_000, 900_000])
    values = np.arange(6, dtype=np.uint8)
    found, read = read_public_pulse(public_pulse(positions, values), 6)
    assert (found.tolist(), read.tolist()) == (positions.tolist(), values.tolist())


def changes(chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Half a percent of the codes of EXPERTS, each one step up or down."""
    positions = np.flatnonzero(chance.random(EXPERTS.num_codes) < 0.005)
    return positions, chance.choice(np.array([-1, 1], dtype=np.int16), len(positions))


def test_signs_cost_less_than_values_and_the_row_order_more_than_flat_gaps():
    chance = np.random.default_rng(0)
    positions, signs = changes(chance)
    values = chance.normal(128, 40, len(positions)).clip(0, 255).astype(np.uint8)
    flat, absolute = len(flat_sign_zstd(positions, signs)), len(public_pulse(positions, values))
    assert flat < len(sign_zstd(EXPERTS, positions, signs)) < absolute


def test_row_order_of_each_matrix_says_all_there_is_to_know():
    positions, signs = changes(np.random.default_rng(2))
    raw = zstandard.ZstdDecompressor().decompress(sign_zstd(EXPERTS, positions, signs))
    found: list[int] = []
    at = matrix = 0
    for spec in EXPERTS.quantised:
        for _ in range(spec.shape[0]):
            rows, columns = spec.shape[1:]
            count = int(((positions >= matrix) & (positions < matrix + rows * columns)).sum())
            row_gaps, column_gaps = raw[at : at + count], np.frombuffer(raw, "<u2", count, at + count)
            row = column = 0
            for gap, step in zip(row_gaps, column_gaps.tolist(), strict=True):
                row, column = row + gap, step if gap else column + step
                found.append(matrix + row * columns + column)
            at, matrix = at + 4 * count, matrix + rows * columns
    assert at == len(raw) == 4 * len(positions)
    assert found == positions.tolist()


def test_bound_is_shannons():
    assert bound_bits(1000, 500) == pytest.approx(1000 + 500)
    assert bound_bits(8_300_000_000, 41_500_000) / 8e6 == pytest.approx(52.3, abs=0.05)


def test_thinned_change_is_half_a_percent_of_single_steps():
    chance = np.random.default_rng(1)
    positions = np.flatnonzero(chance.random(100_000) < 0.02)
    differences = chance.choice(np.array([-1, 1, 2], dtype=np.int16), len(positions))
    found = thinned(Change(positions, differences), 100_000)
    assert len(found.positions) == 500
    assert np.abs(found.differences).max() == 1
    assert (np.diff(found.positions) > 0).all()


def test_masters_begin_in_adams_stationary_state():
    masters = Masters(LAYOUT, learning_rate=1e-3)
    before = {name: value.copy() for name, value in masters.tensors()}
    masters.step()
    for (name, after), ratio in zip(masters.tensors(), (0.0, 0.1, 0.3, 1.0), strict=True):
        moved = (before[name] - after) / 1e-3
        scale = math.sqrt(1 + ratio**2)
        way = np.sign(moved.mean(axis=0))  # each column drifts its own way
        assert abs(float(way.mean())) < 0.1
        assert float((moved * way).mean()) == pytest.approx(ratio / scale, abs=0.05 if ratio < 0.3 else 0.01)
        assert float((moved - moved.mean(axis=0)).std()) == pytest.approx(math.sqrt((1 - BETA1) / (1 + BETA1)) / scale, rel=0.05)


def test_rehearsed_layout_is_the_whole_model():
    layout = full_layout()
    assert layout.num_codes == 8_466_202_624
    assert sum(spec.num_elements for spec in layout.tensors if not spec.frozen) == 8_467_856_128
