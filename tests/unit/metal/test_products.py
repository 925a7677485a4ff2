import mlx.core as mx
import numpy as np
import pytest

from metal.products import (
    BLOCK_WEIGHTS,
    LEAST_WEIGHTS,
    Int8,
    chosen_gated,
    gated,
    linear,
    linears,
    unpacked_product,
    unpacked_rows,
    unpacks,
)
from metal.reference import pick

NUMBERS = np.random.default_rng(3)


def int8(num_outputs: int, num_inputs: int) -> tuple[Int8, np.ndarray]:
    """A matrix, and the same in float64 by `scale * code + bias` of its group."""
    codes = NUMBERS.integers(0, 256, (num_outputs, num_inputs), np.uint8)
    scales, biases = (mx.array(NUMBERS.normal(0, 0.01, (num_outputs, num_inputs // 64))).astype(mx.bfloat16) for _ in range(2))
    exact = codes.reshape(num_outputs, -1, 64) * np.array(scales.astype(mx.float32), np.float64)[..., None]
    exact = exact + np.array(biases.astype(mx.float32), np.float64)[..., None]
    return Int8(mx.array(codes).view(mx.uint32), scales, biases), exact.reshape(num_outputs, num_inputs)


def test_this_cpu_treats_rows_alike() -> None:
    """Else the engine is right still, but decodes slower on a CPU."""
    assert unpacks()


@pytest.mark.parametrize("shape", [(192, 64), (3, 64), (BLOCK_WEIGHTS // 512 * 2 + 7, 512)])
def test_products_are_those_of_float64_in_one_block_and_in_several(shape: tuple[int, int]) -> None:
    weight, exact = int8(*shape)
    x = NUMBERS.normal(0, 1, (33, shape[1])).astype(np.float32)
    wanted, bound = x.astype(np.float64) @ exact.T, 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(exact).T)
    for product in (linear, unpacked_product):
        assert (np.abs(np.array(product(mx.array(x), weight)) - wanted) <= bound).all(), product


@pytest.mark.parametrize("shape", [(LEAST_WEIGHTS // 64, 64), (600, 512), (65, 1792)])
def test_a_row_has_the_same_bits_alone_at_any_place_and_among_any_others(shape: tuple[int, int]) -> None:
    weight, _ = int8(*shape)
    rows = NUMBERS.normal(0, 1, (64, shape[1])).astype(np.float32)
    together = np.array(linear(mx.array(rows), weight))
    for number in (1, 2, 3, 4, 7, 31):
        order = NUMBERS.permutation(64)[:number]
        np.testing.assert_array_equal(np.array(linear(mx.array(rows[order]), weight)), together[order])


def exact_gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """In float64."""
    inner = x @ gate.T
    return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T


def stack(num: int, num_outputs: int, num_inputs: int) -> tuple[Int8, np.ndarray]:
    """Several of `int8`."""
    parts = [int8(num_outputs, num_inputs) for _ in range(num)]
    return Int8(*(mx.stack(list(same)) for same in zip(*(part for part, _ in parts), strict=True))), np.stack([exact for _, exact in parts])


ODD_ROWS = (1, 2, 3, 4, 7, 31)


@pytest.mark.parametrize("outputs", [(64, 32, 32), (8, 8, 8), (600, 512, 1000)])
def test_matrices_of_the_same_inputs_are_multiplied_in_one_go(outputs: tuple[int, ...]) -> None:
    """The last are too large to be unpacked as one, those in the middle too small."""
    matrices = [int8(num, 256) for num in outputs]
    weights = [weight for weight, _ in matrices]
    x = NUMBERS.normal(0, 1, (64, 256)).astype(np.float32)
    found = [np.array(part) for part in linears(mx.array(x), weights)]
    for part, (_, exact) in zip(found, matrices, strict=True):
        np.testing.assert_allclose(part, x.astype(np.float64) @ exact.T, atol=2e-4)
    for number in ODD_ROWS:
        order = NUMBERS.permutation(64)[:number]
        for part, alone in zip(found, linears(mx.array(x[order]), weights), strict=True):
            np.testing.assert_array_equal(np.array(alone), part[order])


@pytest.mark.parametrize("size", [128, 1600])
def test_a_gated_block_is_that_of_float64_and_a_row_has_the_same_bits_alone(size: int) -> None:
    """The larger one's matrices are not unpacked as one."""
    (gate, wide_gate), (up, wide_up), (down, wide_down) = int8(size, 128), int8(size, 128), int8(128, size)
    x = NUMBERS.normal(0, 1, (64, 128)).astype(np.float32)
    found = np.array(gated(mx.array(x), gate, up, down))
    exact = exact_gated(x.astype(np.float64), wide_gate, wide_up, wide_down)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * np.abs(exact).max())
    for number in ODD_ROWS:
        order = NUMBERS.permutation(64)[:number]
        np.testing.assert_array_equal(np.array(gated(mx.array(x[order]), gate, up, down)), found[order])


def test_blocks_chosen_of_a_small_stack_are_those_of_float64_and_a_row_has_the_same_bits_alone() -> None:
    (gate, wide_gate), (up, wide_up), (down, wide_down) = stack(5, 64, 128), stack(5, 64, 128), stack(5, 128, 64)
    x = NUMBERS.normal(0, 1, (64, 128)).astype(np.float32)
    chosen = np.stack([NUMBERS.permutation(5)[:2] for _ in range(64)]).astype(np.uint32)
    found = chosen_gated(mx.array(x), mx.array(chosen), gate, up, down)
    assert found is not None
    for row in range(64):
        for place, expert in enumerate(chosen[row]):
            exact = exact_gated(x[row].astype(np.float64), wide_gate[expert], wide_up[expert], wide_down[expert])
            np.testing.assert_allclose(np.array(found[row, place]), exact, rtol=0, atol=2e-6 * np.abs(exact).max())
    for number in ODD_ROWS:
        order = NUMBERS.permutation(64)[:number]
        alone = chosen_gated(mx.array(x[order]), mx.array(chosen[order]), gate, up, down)
        assert alone is not None
        np.testing.assert_array_equal(np.array(alone), np.array(found)[order])


def test_a_large_stack_is_left_packed() -> None:
    """Nobody unpacks all experts of a large model for the few that a step needs."""
    small = stack(2, 64, 64)[0]
    large = Int8(*(mx.zeros((4096, *part.shape[1:]), part.dtype) for part in small))
    x, chosen = mx.zeros((3, 64)), mx.zeros((3, 2), mx.uint32)
    assert chosen_gated(x, chosen, large, large, large) is None
    assert chosen_gated(x.astype(mx.bfloat16), chosen, small, small, small) is None


def test_rows_are_unpacked_as_mlx_does() -> None:
    weight, _ = int8(50, 128)
    places = mx.array([7, 0, 7, 49])
    wide = [part.astype(mx.float32) for part in weight[1:]]
    whole = np.array(mx.dequantize(weight.codes, *wide, group_size=64, bits=8))
    np.testing.assert_array_equal(np.array(unpacked_rows(weight, places, mx.float32)), whole[[7, 0, 7, 49]])
    assert unpacked_rows(weight, places, mx.bfloat16).dtype == mx.bfloat16


@pytest.mark.parametrize("num_words", [2, 256, 1024])
def test_a_small_vocabulary_is_summed_in_one_go(num_words: int) -> None:
    logits = NUMBERS.normal(0, 2, (200, num_words)).astype(np.float32)
    logits[:, 1::3] = -np.inf  # never drawn
    uniform = (NUMBERS.integers(0, 1 << 23, 200) / 2**23).astype(np.float32)
    uniform[:2] = 0.0, 1 - 2.0**-23
    tokens, logprobs = (np.array(part) for part in pick(mx.array(logits), mx.array(uniform)))
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    exact /= exact.sum(axis=-1, keepdims=True)
    after = np.take_along_axis(exact.cumsum(axis=-1), tokens[:, None], axis=-1)[:, 0]
    chosen = np.take_along_axis(exact, tokens[:, None], axis=-1)[:, 0]
    assert (chosen > 0).all()
    assert (after > uniform - 2e-6).all()
    assert (after - chosen < uniform + 2e-6).all()
    np.testing.assert_allclose(logprobs, np.log(chosen), atol=2e-6)
