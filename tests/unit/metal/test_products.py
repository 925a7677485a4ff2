import mlx.core as mx
import numpy as np
import pytest

from metal.products import BLOCK_WEIGHTS, LEAST_WEIGHTS, Int8, linear, unpacked_product, unpacked_rows, unpacks
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
    np.testing.assert_allclose(np.array(linear(mx.array(x), weight)), x.astype(np.float64) @ exact.T, atol=2e-4)
    np.testing.assert_allclose(np.array(unpacked_product(mx.array(x), weight)), x.astype(np.float64) @ exact.T, atol=2e-4)


@pytest.mark.parametrize("shape", [(LEAST_WEIGHTS // 64, 64), (600, 512), (65, 1792)])
def test_a_row_has_the_same_bits_alone_at_any_place_and_among_any_others(shape: tuple[int, int]) -> None:
    weight, _ = int8(*shape)
    rows = NUMBERS.normal(0, 1, (64, shape[1])).astype(np.float32)
    together = np.array(linear(mx.array(rows), weight))
    for number in (1, 2, 3, 4, 7, 31):
        order = NUMBERS.permutation(64)[:number]
        np.testing.assert_array_equal(np.array(linear(mx.array(rows[order]), weight)), together[order])


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
