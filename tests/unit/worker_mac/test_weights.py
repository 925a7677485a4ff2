from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from stoa.contracts.errors import WeightsError
from stoa.weights import grid
from stoa.weights.container import DeltaHeader, decode_delta
from stoa.weights.layout import ArraySpec
from stoa.weights.pulse import Change, Counts
from stoa.weights.state import WeightState
from tests.unit.weights.changes import GOLDEN, golden_arrays, golden_layout
from tests.unit.worker_mac.policies import TINY, random_state
from worker_mac.forced import Forced
from worker_mac.model import Model
from worker_mac.model_config import read_model_config
from worker_mac.weights import LiveWeights, adopt, dequantise

IDS = np.random.default_rng(5).integers(0, 256, 20).astype(np.int32)


def logits(model: Model) -> np.ndarray:
    return Forced(model, 2, 32).feed([IDS, IDS[::-1]])


GRID = np.load(Path(__file__).parents[2] / "golden" / "grid.npz")


def test_golden_grid_is_dequantised_bit_for_bit() -> None:
    num_rows = len(GRID["codes"])
    arrays, views = {}, {}
    for name, part, shape, dtype in (
        ("weight", "codes", (num_rows, 64), "uint8"),
        ("scales", "scales", (num_rows, 1), "bfloat16"),
        ("biases", "biases", (num_rows, 1), "bfloat16"),
    ):
        arrays[f"x.{name}"], views[name] = adopt(ArraySpec(f"x.{name}", shape, dtype), GRID[part].reshape(shape))
    assert np.array(dequantise(arrays, "x")).tobytes() == GRID["dequantised"].tobytes()


def test_golden_delta_applied_in_place_gives_the_golden_next_state_in_mlx() -> None:
    base_id, next_id = (str(value) for value in GOLDEN["state_ids"])
    layout = golden_layout()
    live = LiveWeights.of(WeightState(layout, golden_arrays("base")))
    assert live.state.state_id() == base_id
    header = DeltaHeader("golden", 6, 7, base_id, next_id, layout.layout_id, "pco-8")
    live.state.apply(decode_delta(GOLDEN["delta"].tobytes(), header, Counts(9, 2, 1), layout))
    for name, wanted in golden_arrays("next").items():
        assert np.array(live.arrays[name].view(mx.uint8)).tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("spread", [1e-6, 0.02, 30.0])
def test_mlx_dequantises_as_numpy_does_bit_for_bit(spread: float) -> None:
    state = random_state(TINY, seed=3, spread=spread)
    live = LiveWeights.of(state)
    for spec in state.layout.quantised:
        np.testing.assert_array_equal(np.array(dequantise(live.arrays, spec.module)), state.dequantise(spec.name))


def test_codes_are_packed_as_stock_mlx_packs_them() -> None:
    values = np.random.default_rng(0).normal(0, 1, (3, 128)).astype(np.float32)
    packed, scales, biases = mx.quantize(mx.array(values), group_size=64, bits=8)
    codes = np.array(packed).view(np.uint8)
    adopted, view = adopt(ArraySpec("x.weight", (3, 128), "uint8"), codes)
    np.testing.assert_array_equal(np.array(adopted), np.array(packed))
    np.testing.assert_array_equal(view, codes)
    plain = np.array(scales)[:, :, None] * codes.reshape(3, 2, 64) + np.array(biases)[:, :, None]
    np.testing.assert_allclose(plain.reshape(3, 128), values, atol=0.05)


@pytest.mark.parametrize("raw_dtype", ["float32", "bfloat16"])
def test_views_and_arrays_are_one_memory(raw_dtype: str) -> None:
    state = random_state(TINY, raw_dtype=raw_dtype)
    live = LiveWeights.of(state)
    assert live.state.state_id() == state.state_id()
    for spec in state.layout.arrays:
        before = np.array(live.arrays[spec.name].view(mx.uint8))
        live.state.arrays[spec.name].reshape(-1).view(np.uint8)[-1] ^= 0x41
        after = np.array(live.arrays[spec.name].view(mx.uint8))
        assert np.count_nonzero(before != after) == 1
    assert live.num_bytes == state.layout.num_bytes


def random_change(state: object, seed: int) -> Change:
    """A change of 3 % of the codes by one step, some raw values, and one new grid."""
    layout = state.layout
    numbers = np.random.default_rng(seed)
    codes = np.concatenate([state.arrays[spec.name].reshape(-1) for spec in layout.quantised])
    group = 17
    free = np.flatnonzero((codes > 0) & (codes < 255) & (np.arange(len(codes)) // 64 != group))
    positions = np.sort(numbers.choice(free, len(codes) // 33, replace=False)).astype(np.int64)
    differences = numbers.choice(np.array([-1, 1], np.int16), len(positions))
    raw_positions = np.sort(numbers.choice(layout.num_raw, 50, replace=False)).astype(np.int64)
    raw_values = numbers.normal(0, 1, 50).astype(np.float32).view(np.uint32)
    new_codes, scales, biases = grid.quantise(numbers.normal(0, 0.1, (1, 64)).astype(np.float32))
    return Change(positions, differences, raw_positions, raw_values, np.array([group]), scales.reshape(-1), biases.reshape(-1), new_codes)


def test_update_in_place_serves_what_a_fresh_load_serves_bit_for_bit() -> None:
    state = random_state(TINY)
    live = LiveWeights.of(state)
    model = Model(read_model_config(TINY), live.arrays)
    before = logits(model)
    active = mx.get_active_memory()
    for seed in range(3):
        change = random_change(state, seed)
        live.settle()
        live.state.apply(change)
        state.apply(change)
        fresh = LiveWeights.of(state.copy())
        np.testing.assert_array_equal(logits(model), logits(Model(read_model_config(TINY), fresh.arrays)))
        assert live.state.state_id() == fresh.state.state_id()
        del fresh
    assert np.abs(logits(model) - before).max() > 1e-3
    mx.clear_cache()
    assert mx.get_active_memory() <= active


def test_array_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match=r"x\.weight"):
        adopt(ArraySpec("x.weight", (2, 64), "uint8"), np.zeros((2, 128), np.uint8))
