"""The ops of a policy that a kernel may replace, as plain MLX ops: the references, which run everywhere.

Each op gives a row the same bits whatever other rows it is computed with: shapes of matrix products depend on the model
alone, and what is masked adds exact zeros at the end of a sum. The router is in `router.py`; `ops.py` is the table from
which a model takes its ops.

Legend: N tokens, R rows, X tiles of queries, W queries a tile, P pages of the pool, M pages of a table, G key/value heads,
Q query heads, H head size, D hidden size, E experts, K experts a token, V vocabulary, T taps of a short convolution.
"""

from typing import Final, NamedTuple

import mlx.core as mx

from metal.exponents import exp, silu
from metal.products import Int8, chosen_gated, linear
from metal.sizes import ATTENTION_BYTES, BITS, GROUP_SIZE, ONE_SUM_WORDS, PAGE_TOKENS, RANGE_PAGES, SORT_EXPERTS_FROM, SUM_WORDS

_NOTHING: Final = -1e30
"""Stands for the largest score of a range in which a query sees nothing; finite, so that no difference is NaN."""


def attend_plain(queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array, lengths: mx.array, scale: float) -> mx.array:
    """Attention of tiles of queries over pages; the queries of a tile are of one sequence and share its table.

    Softmax over blocks as in FlashAttention (Dao et al. 2022, section 3.1), in fp32.

    Args:
        queries: [X, W, Q, H]; query head i reads key/value head i // (Q / G).
        keys: [P, G, 32, H], the pool; a page holds 32 consecutive tokens.
        values: as keys.
        tables: int32 [X, M], the pages of each sequence in order. Pages beyond its end are read and masked, so they
            must hold finite numbers.
        lengths: int32 [X, W], how many tokens of its sequence each query sees, at least 1.
        scale: factor of the scores.

    Returns:
        [X, W, Q, H] in the type of queries.
    """
    if not tables.shape[1]:
        raise ValueError("a table of no pages")
    block = max(1, ATTENTION_BYTES // _tile_bytes(queries, keys, tables))
    outs = [
        _attend_block(queries[start : start + block], keys, values, tables[start : start + block], lengths[start : start + block], scale)
        for start in range(0, queries.shape[0], block)
    ]
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _tile_bytes(queries: mx.array, keys: mx.array, tables: mx.array) -> int:
    """What one tile takes in one range: keys and values as they are kept and in fp32, scores and their exps."""
    tokens = min(tables.shape[1], RANGE_PAGES) * PAGE_TOKENS
    return tokens * (2 * keys.shape[1] * keys.shape[3] * (keys.dtype.size + 4) + 3 * 4 * queries.shape[1] * queries.shape[2])


def _attend_block(queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array, lengths: mx.array, scale: float) -> mx.array:
    num_tiles, width, num_q, size = queries.shape
    num_kv = keys.shape[1]
    q_XW1GRH = (queries.astype(mx.float32) * scale).reshape(num_tiles, width, 1, num_kv, num_q // num_kv, size)
    found = _attend_range(q_XW1GRH, keys, values, tables[:, :RANGE_PAGES], lengths)
    for start in range(RANGE_PAGES, tables.shape[1], RANGE_PAGES):
        part = _attend_range(q_XW1GRH, keys, values, tables[:, start : start + RANGE_PAGES], lengths - start * PAGE_TOKENS)
        found = _merged(found, part)
    return (found.weighted / found.total).reshape(queries.shape).astype(queries.dtype)


class _Part(NamedTuple):
    """One range: largest score and sum of exps [X, W, G, R, 1], weighted sum of values [X, W, G, R, H]."""

    largest: mx.array
    total: mx.array
    weighted: mx.array


def _attend_range(q_XW1GRH: mx.array, keys: mx.array, values: mx.array, tables_XM: mx.array, lengths_XW: mx.array) -> _Part:
    keys_X1MGHT = keys[tables_XM].astype(mx.float32).swapaxes(-1, -2)[:, None]
    # One product a query, page and head: its shape is the model's own, however many queries and pages there are.
    scores_XWMGRT = q_XW1GRH @ keys_X1MGHT
    places_MT = mx.arange(tables_XM.shape[1] * PAGE_TOKENS, dtype=mx.int32).reshape(-1, PAGE_TOKENS)
    seen_XWMT = places_MT < lengths_XW[..., None, None]
    scores_XWMGRT = mx.where(seen_XWMT[:, :, :, None, None], scores_XWMGRT, -mx.inf)
    largest = mx.maximum(scores_XWMGRT.max(axis=(2, 5), keepdims=True), _NOTHING)
    exps_XWMGRT = exp(scores_XWMGRT - largest)
    weighted = (exps_XWMGRT @ values[tables_XM].astype(mx.float32)[:, None]).sum(axis=2)
    total = exps_XWMGRT.sum(axis=-1, keepdims=True).sum(axis=2)
    return _Part(largest.squeeze(2), total, weighted)


def _merged(one: _Part, other: _Part) -> _Part:
    largest = mx.maximum(one.largest, other.largest)
    scale_one, scale_other = exp(one.largest - largest), exp(other.largest - largest)
    return _Part(
        largest,
        one.total * scale_one + other.total * scale_other,
        one.weighted * scale_one + other.weighted * scale_other,
    )


def experts_plain(x: mx.array, experts: mx.array, weights: mx.array, gate: Int8, up: Int8, down: Int8, *, sort: bool = False) -> mx.array:
    """The chosen experts' gated MLPs, weighed and summed: sum over k of w_k * down(silu(gate x) * up x).

    Args:
        x: [N, D].
        experts: uint32 [N, K].
        weights: float32 [N, K].
        gate: int8 stack [E, inner, D].
        up: int8 stack [E, inner, D].
        down: int8 stack [E, D, inner].
        sort: sort the rows by expert where there are many; faster on a GPU.

    Returns:
        [N, D] in the type of x.
    """
    out = chosen_gated(x, experts, gate, up, down)
    if out is None:
        out = _experts_on_codes(x, experts, gate, up, down, sort=sort)
    return (out * weights[..., None].astype(out.dtype)).sum(axis=1)


def _experts_on_codes(x: mx.array, experts: mx.array, gate: Int8, up: Int8, down: Int8, *, sort: bool) -> mx.array:
    """What each of the chosen experts makes of a row: [N, K, D]."""
    rows, chosen, order = x[:, None, None], experts, None
    top_k = experts.shape[-1]
    if sort and experts.size >= SORT_EXPERTS_FROM:
        order = mx.argsort(experts.reshape(-1))
        rows, chosen = x[order // top_k][:, None], experts.reshape(-1)[order]

    def project(rows: mx.array, weight: Int8) -> mx.array:
        return mx.gather_qmm(
            rows, *weight, rhs_indices=chosen, transpose=True, group_size=GROUP_SIZE, bits=BITS,
            sorted_indices=order is not None,
        )  # fmt: skip

    inner = silu(project(rows, gate)) * project(rows, up)
    out = project(inner, down).squeeze(-2)
    if order is not None:
        out = out[mx.argsort(order)].reshape(-1, top_k, out.shape[-1])
    return out


def convolve_plain(x: mx.array, tails: mx.array, kernel: mx.array) -> tuple[mx.array, mx.array]:
    """One token a row through a gated short convolution: carry * (kernel over the last T + 1 of gate * value).

    Args:
        x: [R, 3 D], gate, carry and value side by side.
        tails: [R, T, D], the T gated values before this token, oldest first.
        kernel: [D, T + 1, 1], depthwise; its last tap is this token's.

    Returns:
        [R, D], and the tails [R, T, D] after this token.
    """
    gate_RD, carry_RD, value_RD = mx.split(x, 3, axis=-1)
    line_RLD = mx.concatenate([tails, (gate_RD * value_RD)[:, None]], axis=1)
    kernel_LD = kernel.squeeze(-1).T
    out_RD = line_RLD[:, 0] * kernel_LD[0]
    for tap in range(1, kernel_LD.shape[0]):
        out_RD = out_RD + line_RLD[:, tap] * kernel_LD[tap]
    return carry_RD * out_RD, line_RLD[:, 1:]


def draw_plain(hidden: mx.array, embedding: Int8, uniform: mx.array) -> tuple[mx.array, mx.array]:
    """The tied head and one token a row drawn from softmax(logits): temperature 1, no filters, everything in fp32.

    Args:
        hidden: [R, D], after the last norm.
        embedding: int8 [V, D].
        uniform: float32 [R] in [0, 1 - 2**-23], on a grid of 2**-23.

    Returns:
        tokens int32 [R], logprobs float32 [R].
    """
    return pick(linear(hidden.astype(mx.float32), embedding), uniform)


def pick(logits: mx.array, uniform: mx.array) -> tuple[mx.array, mx.array]:
    """Draw a token a row by inverting the cumulative distribution, and give its natural-log probability.

    Sums go over blocks of words and then over the blocks: one running sum over a large vocabulary in fp32 is off by 2e-4. A
    small vocabulary is summed in one go.

    Args:
        logits: float32 [R, V]; -inf for what may not be drawn.
        uniform: float32 [R] as in `draw_plain`.

    Returns:
        tokens int32 [R], logprobs float32 [R]. A token of probability 0 is never drawn: the block is the first whose
        cumulative sum passes uniform * total, and in it the token is one that has added something to the sum.
    """
    num_rows, num_words = logits.shape
    largest_R1 = logits.max(axis=-1, keepdims=True)
    exps_RV = exp(logits - largest_R1)
    if num_words <= ONE_SUM_WORDS:
        cumulative_RV = mx.cumsum(exps_RV, axis=-1)
        total_R1 = cumulative_RV[:, -1:]
        # Of equal sums the first, which is of a token that has added to it; the total is above what is wanted.
        tokens_R1 = mx.argmax(cumulative_RV > uniform[:, None] * total_R1, axis=-1, keepdims=True)
        return _with_logprobs(logits, tokens_R1, largest_R1, total_R1)
    if num_words % SUM_WORDS:
        exps_RV = mx.pad(exps_RV, [(0, 0), (0, -num_words % SUM_WORDS)])
    exps_RBW = exps_RV.reshape(num_rows, -1, SUM_WORDS)
    cumulative_RB = mx.cumsum(exps_RBW.sum(axis=-1), axis=-1)
    total_R1 = cumulative_RB[:, -1:]
    wanted_R1 = uniform[:, None] * total_R1
    block_R1 = mx.argmax(cumulative_RB > wanted_R1, axis=-1, keepdims=True)
    before_R1 = mx.where(block_R1 > 0, mx.take_along_axis(cumulative_RB, mx.maximum(block_R1, 1) - 1, axis=-1), 0.0)
    inner_RW = mx.cumsum(mx.take_along_axis(exps_RBW, block_R1[..., None], axis=1)[:, 0], axis=-1)
    passed_RW = inner_RW > wanted_R1 - before_R1
    # Two ways to sum up one block may differ in the last bit: who finds nothing beyond takes the last that adds to the sum.
    passed_RW = mx.where(passed_RW[:, -1:], passed_RW, inner_RW >= inner_RW[:, -1:])
    tokens_R1 = block_R1 * SUM_WORDS + mx.argmax(passed_RW, axis=-1, keepdims=True)
    return _with_logprobs(logits, tokens_R1, largest_R1, total_R1)


def _with_logprobs(logits: mx.array, tokens_R1: mx.array, largest_R1: mx.array, total_R1: mx.array) -> tuple[mx.array, mx.array]:
    logprobs_R1 = mx.take_along_axis(logits, tokens_R1, axis=-1) - (largest_R1 + mx.log(total_R1))
    # Rounding may put a near-certain token a hair above 0, which no probability is.
    return tokens_R1[:, 0].astype(mx.int32), mx.minimum(logprobs_R1[:, 0], 0.0)
