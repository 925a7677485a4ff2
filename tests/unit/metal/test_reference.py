"""The plain ops against float64 numpy, and a row's bits alone, among others, and beside longer rows."""

import mlx.core as mx
import numpy as np
import pytest

from metal import reference
from metal.reference import Int8, attend_plain, convolve_plain, draw_plain, experts_plain, linear, pick
from metal.sizes import PAGE_TOKENS, RANGE_PAGES
from stoa.weights import grid

NUMBERS = np.random.default_rng(7)
NUM_PAGES, HEADS, SIZE, QUERIES = 60, 2, 16, 6


def pools(dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    shape = (NUM_PAGES, HEADS, PAGE_TOKENS, SIZE)
    return tuple(mx.array(NUMBERS.normal(0, 1, shape).astype(np.float32)).astype(dtype) for _ in range(2))


def exact(q: np.ndarray, keys: np.ndarray, values: np.ndarray, table: np.ndarray, length: int, scale: float) -> np.ndarray:
    """Attention of one query [Q, H] in float64."""
    line_k, line_v = (pool.astype(np.float64)[table].transpose(1, 0, 2, 3).reshape(HEADS, -1, SIZE)[:, :length] for pool in (keys, values))
    out = np.zeros((QUERIES, SIZE))
    for head in range(QUERIES):
        scores = line_k[head // (QUERIES // HEADS)] @ q[head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ line_v[head // (QUERIES // HEADS)]
    return out


def case(lengths: list[list[int]]) -> tuple[mx.array, mx.array, mx.array]:
    width = -(-max(max(row) for row in lengths) // PAGE_TOKENS)
    tables = np.stack([NUMBERS.permutation(NUM_PAGES)[:width] for _ in lengths]).astype(np.int32)
    q = NUMBERS.normal(0, 2, (len(lengths), len(lengths[0]), QUERIES, SIZE)).astype(np.float32)
    return mx.array(q), mx.array(tables), mx.array(np.array(lengths, np.int32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.bfloat16, 3e-2)])
@pytest.mark.parametrize("lengths", [[[1], [32], [33]], [[5, 6, 7]], [[511], [512], [513], [1300]], [[1290, 1291], [3, 4]]])
def test_attention_is_that_of_float64(lengths: list[list[int]], dtype: mx.Dtype, tolerance: float) -> None:
    keys, values = pools(dtype)
    q, tables, places = case(lengths)
    found = np.array(attend_plain(q.astype(dtype), keys, values, tables, places, SIZE**-0.5).astype(mx.float32))
    wide = [np.array(pool.astype(mx.float32)) for pool in (keys, values)]
    for tile, row in enumerate(lengths):
        for query, length in enumerate(row):
            wanted = exact(np.array(q.astype(dtype).astype(mx.float32))[tile, query], *wide, np.array(tables)[tile], length, SIZE**-0.5)
            np.testing.assert_allclose(found[tile, query], wanted, rtol=0, atol=tolerance)


def test_a_querys_bits_do_not_depend_on_tiles_tables_blocks_or_company(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = pools()
    q, tables, places = case([[40], [700], [33], [1400], [512]])
    whole = np.array(attend_plain(q, keys, values, tables, places, 0.25))
    for tile in range(5):
        pages = -(-int(places[tile, 0].item()) // PAGE_TOKENS)
        for width in (pages, pages + 1, -(-pages // RANGE_PAGES) * RANGE_PAGES):
            if width <= tables.shape[1]:
                alone = attend_plain(q[tile : tile + 1], keys, values, tables[tile : tile + 1, :width], places[tile : tile + 1], 0.25)
                np.testing.assert_array_equal(np.array(alone)[0], whole[tile])
    # The same queries as a tile of five that look ever further.
    longest = mx.array([[40, 700, 33, 1400, 512]])
    together = attend_plain(q.transpose(1, 0, 2, 3), keys, values, tables[3:4], longest, 0.25)
    np.testing.assert_array_equal(np.array(together)[0, 3], whole[3, 0])
    monkeypatch.setattr(reference, "ATTENTION_BYTES", 1)  # a tile a block
    np.testing.assert_array_equal(np.array(attend_plain(q, keys, values, tables, places, 0.25)), whole)


def test_pages_beyond_a_rows_end_may_hold_anything_finite() -> None:
    keys, values = pools()
    q, tables, places = case([[40, 41], [90, 95]])
    first = np.array(attend_plain(q, keys, values, tables, places, 0.25))
    junk = mx.full((HEADS, PAGE_TOKENS, SIZE), 3e30)
    past = int(tables[0, 2].item())
    if past not in np.array(tables)[1]:
        keys[past], values[past] = junk, junk
    np.testing.assert_array_equal(np.array(attend_plain(q, keys, values, tables, places, 0.25))[0], first[0])
    with pytest.raises(ValueError, match="no pages"):
        attend_plain(q, keys, values, tables[:, :0], places, 0.25)


def int8(*shape: int) -> tuple[Int8, np.ndarray]:
    codes, scales, biases = grid.quantise(NUMBERS.normal(0, 0.2, shape).astype(np.float32))
    weight = Int8(mx.array(np.ascontiguousarray(codes).view("<u4")), mx.array(scales).view(mx.bfloat16), mx.array(biases).view(mx.bfloat16))
    return weight, grid.dequantise(codes, scales, biases).astype(np.float64)


def test_experts_are_the_weighed_sum_of_those_chosen() -> None:
    (gate, wide_gate), (up, wide_up), (down, wide_down) = int8(6, 64, 128), int8(6, 64, 128), int8(6, 128, 64)
    x = NUMBERS.normal(0, 1, (40, 128)).astype(np.float32)
    experts = np.stack([NUMBERS.permutation(6)[:3] for _ in range(40)]).astype(np.uint32)
    weights = NUMBERS.random((40, 3)).astype(np.float32)
    wanted = np.zeros((40, 128))
    for token in range(40):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            inner = wide_gate[expert] @ x[token]
            wanted[token] += weight * (wide_down[expert] @ (inner / (1 + np.exp(-inner)) * (wide_up[expert] @ x[token])))
    for sort in (False, True):
        found = experts_plain(mx.array(x), mx.array(experts), mx.array(weights), gate, up, down, sort=sort)
        np.testing.assert_allclose(np.array(found), wanted, rtol=0, atol=1e-4)


def test_a_convolution_is_its_kernel_over_the_last_values() -> None:
    x, tails = NUMBERS.normal(0, 1, (3, 3 * 64)).astype(np.float32), NUMBERS.normal(0, 1, (3, 3, 64)).astype(np.float32)
    kernel = NUMBERS.normal(0, 1, (64, 4, 1)).astype(np.float32)
    out, kept = convolve_plain(mx.array(x), mx.array(tails), mx.array(kernel))
    gate, carry, value = np.split(x.astype(np.float64), 3, axis=-1)
    line = np.concatenate([tails, (gate * value)[:, None]], axis=1)
    np.testing.assert_allclose(np.array(out), carry * np.einsum("rld,dl->rd", line, kernel[:, :, 0]), rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.array(kept), line[:, 1:], rtol=0, atol=1e-6)


def test_the_head_draws_from_its_logits() -> None:
    embedding, wide = int8(300, 64)
    hidden, uniform = NUMBERS.normal(0, 1, (9, 64)).astype(np.float32), (NUMBERS.integers(0, 2**23, 9) / 2**23).astype(np.float32)
    tokens, logprobs = draw_plain(mx.array(hidden), embedding, mx.array(uniform))
    logits = hidden.astype(np.float64) @ wide.T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    cumulative = weights.cumsum(axis=1)
    wanted = (cumulative > uniform[:, None] * cumulative[:, -1:]).argmax(axis=1)
    np.testing.assert_array_equal(np.array(tokens), wanted)
    np.testing.assert_allclose(np.array(logprobs), np.log(weights[np.arange(9), wanted] / weights.sum(axis=1)), rtol=0, atol=1e-5)


def test_logprobs_of_a_large_vocabulary_are_exact_to_a_millionth_and_their_exps_sum_to_one() -> None:
    """128,000 logits of a wide range: sums in fp32 must not wander off."""
    logits = NUMBERS.normal(0, 4, (2, 128_000)).astype(np.float32)
    wide = logits.astype(np.float64)
    normaliser = np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1)) + wide.max(axis=1)
    uniform = mx.array(np.array([0.1, 0.9], np.float32))
    tokens, logprobs = (np.array(part) for part in pick(mx.array(logits), uniform))
    np.testing.assert_allclose(logprobs, wide[[0, 1], tokens] - normaliser, rtol=0, atol=1e-5)
    ours = logits - (wide[[0, 1], tokens] - logprobs)[:, None]
    np.testing.assert_allclose(np.exp(ours).sum(axis=1), 1.0, rtol=0, atol=1e-5)


def test_tokens_of_a_large_vocabulary_are_those_of_exact_sums() -> None:
    """Where a uniform number is not within rounding of a boundary, the token is that of float64."""
    logits = NUMBERS.normal(0, 3, (60, 40_000)).astype(np.float32)
    logits[:, ::3] = -np.inf
    uniform = (NUMBERS.integers(0, 2**23, 60) / 2**23).astype(np.float32)
    tokens, _ = pick(mx.array(logits), mx.array(uniform))
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    cumulative = weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)
    wanted = (cumulative > uniform[:, None]).argmax(axis=1)
    found = np.array(tokens)
    assert (np.isfinite(logits[np.arange(60), found])).all()
    far = np.abs(
        np.take_along_axis(cumulative, found[:, None], axis=1)[:, 0] - np.take_along_axis(cumulative, wanted[:, None], axis=1)[:, 0]
    )
    assert (found == wanted).mean() > 0.95
    assert far.max() < 2e-6


def test_extreme_uniform_numbers_draw_tokens_that_may_be_drawn() -> None:
    logits = np.full((4, 1000), -np.inf, np.float32)
    for row, places in enumerate(([0], [999], [127, 128], [3, 500, 501])):
        logits[row, places] = NUMBERS.normal(0, 1, len(places)).astype(np.float32)
    for uniform, wanted in ((0.0, [0, 999, 127, 3]), (1 - 2.0**-23, [0, 999, 128, 501])):
        tokens, _ = pick(mx.array(logits), mx.full((4,), uniform))
        assert np.array(tokens).tolist() == wanted


def test_rows_of_a_product_are_the_same_in_any_number() -> None:
    weight, _ = int8(64, 192)
    x = mx.array(NUMBERS.normal(0, 1, (64, 192)).astype(np.float32))
    whole = np.array(linear(x, weight))
    for row in (0, 31, 63):
        np.testing.assert_array_equal(np.array(linear(x[row : row + 1], weight))[0], whole[row])
