"""Every wrapper refuses arrays its body is not made for, before anything is compiled."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from metal.attention import AttentionKernel, Groups, PrefixKernel, Tails, group_rows
from metal.conv import ConvKernel
from metal.experts import ExpertsKernel
from metal.head import HeadKernel
from metal.kernels import Compiled
from metal.products import Int8
from metal.router import OrderKernel, RouterKernel, RouterRule, order_plain
from stoa.contracts.errors import KernelArgumentsError


def never(*arguments: object) -> Compiled:
    raise AssertionError("a body was compiled")


def matrix(*shape: int, scale_type: mx.Dtype = mx.bfloat16) -> Int8:
    *outer, width = shape
    groups = (*outer, width // 64)
    return Int8(mx.zeros((*outer, width // 4), mx.uint32), mx.zeros(groups, scale_type), mx.zeros(groups, scale_type))


def pools(*, num_heads: int = 2, page: int = 32, size: int = 64) -> tuple[mx.array, mx.array]:
    return mx.zeros((4, num_heads, page, size)), mx.zeros((4, num_heads, page, size))


def tables(num_tiles: int, num_pages: int = 2) -> tuple[mx.array, mx.array]:
    return mx.zeros((num_tiles, num_pages), mx.int32), mx.full((num_tiles, 1), 40, mx.int32)


def inner(x: mx.array, *, wide: int = 64, width: int = 64, rows: int = 3, scale_type: mx.Dtype = mx.bfloat16) -> Callable[[], object]:
    up = matrix(4, wide, width, scale_type=scale_type)
    return lambda: ExpertsKernel(never).inner(x, 2, order_plain(mx.zeros((rows, 2), mx.uint32), 4), up, up)


def shares(weights: mx.array, *, wide: int = 64, width: int = 64) -> Callable[[], object]:
    order = order_plain(mx.zeros((3, 2), mx.uint32), 4)
    return lambda: ExpertsKernel(never).shares(mx.zeros((6, wide)), weights, order, matrix(4, width, wide))


def whole(weights: mx.array, codes: mx.array | None = None) -> Callable[[], object]:
    made = matrix(4, 64, 64)
    gate = made if codes is None else made._replace(codes=codes)
    return lambda: ExpertsKernel(ordered)(mx.zeros((3, 64)), mx.zeros((3, 2), mx.uint32), weights, gate, made, made)


def ordered(name: str, *_: object) -> Compiled:
    """Only the order of experts, of zeros, is made."""
    assert name == "stoa_expert_order", f"{name} was compiled"
    return lambda **asked: [mx.zeros(shape, mx.int32) for shape in asked["output_shapes"]]


def head(x: mx.array, uniform_type: mx.Dtype = mx.float32) -> Callable[[], object]:
    return lambda: HeadKernel(never)(x, matrix(9, 64), mx.zeros((3,), uniform_type))


def counted(key_type: mx.Dtype = mx.uint64, position_type: mx.Dtype = mx.int64) -> Callable[[], object]:
    return lambda: HeadKernel(never).counted(mx.zeros((3, 64)), matrix(9, 64), mx.zeros((3,), key_type), mx.zeros((3,), position_type))


def router(x: mx.array, *, top_k: int = 2, num_experts: int = 8) -> Callable[[], object]:
    rule = RouterRule(num_experts, top_k, True, 1.0)
    return lambda: RouterKernel(never)(x, mx.zeros((num_experts, 64)), mx.zeros((num_experts,)), rule)


def conv(x: mx.array, *, taps: int = 3, width: int = 64, kernel_type: mx.Dtype = mx.float32) -> Callable[[], object]:
    return lambda: ConvKernel(never)(x, mx.zeros((3, taps - 1, width)), mx.zeros((width, taps, 1), kernel_type))


def attention(queries: mx.array, *, num_tiles: int = 3, tails: Tails | None = None, **pool: int) -> Callable[[], object]:
    return lambda: AttentionKernel(never)(queries, *pools(**pool), *tables(num_tiles), 1.0, tails=tails)


def prefix(members: int, heads: int, size: int, *, num_pages: int = 2) -> Callable[[], object]:
    groups = group_rows(np.zeros((3, 2), np.int32), np.full((3, 1), 40, np.int32), np.full(3, 32, np.int32), members)
    assert groups is not None
    queries = mx.zeros((3, 1, 2 * heads, size))
    return lambda: PrefixKernel(never)(queries, *pools(size=size), *tables(3, num_pages), 1.0, groups)


def two_queries() -> object:
    tail, lengths = mx.zeros((3, 2, 32, 64)), mx.full((3, 2), 32, mx.int32)
    return AttentionKernel(never)(mx.zeros((3, 2, 8, 64)), *pools(), tables(3)[0], lengths, 1.0, tails=Tails(tail, tail))


def members(listed: mx.array) -> object:
    groups = Groups(listed, mx.full((1,), 32, mx.int32), mx.zeros((3,), mx.int32), 32)
    return PrefixKernel(never)(mx.zeros((3, 1, 8, 64)), *pools(), *tables(3), 1.0, groups)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("order has shape", inner(mx.zeros((2, 64)))),
    ("x is .*int32", inner(mx.zeros((3, 64), mx.int32))),
    ("inner dimension 96", inner(mx.zeros((3, 96)), width=96)),
    ("inner width 32", inner(mx.zeros((3, 64)), wide=32)),
    ("scales and biases is", inner(mx.zeros((3, 64)), scale_type=mx.float16)),
    ("no rows", inner(mx.zeros((0, 64)), rows=0)),
    ("weights is .*bfloat16", shares(mx.zeros((3, 2), mx.bfloat16))),
    ("inner has shape", shares(mx.zeros((4, 2)))),
    ("width 48", shares(mx.zeros((3, 2)), width=48)),
    ("weights has shape", whole(mx.zeros((2, 3)))),
    ("gate's codes has shape", whole(mx.zeros((3, 2)), codes=mx.zeros((), mx.uint32))),
    ("hidden has shape", head(mx.zeros(()))),
    ("codes has shape", head(mx.zeros((3, 128)))),
    ("uniform has shape", head(mx.zeros((2, 64)))),
    ("uniform is", head(mx.zeros((3, 64)), mx.bfloat16)),
    ("keys is .*int64", counted(key_type=mx.int64)),
    ("positions is .*int32", counted(position_type=mx.int32)),
    ("gate has shape", router(mx.zeros((3, 32)))),
    ("top 9 of 8", router(mx.zeros((3, 64)), top_k=9)),
    ("of at most 256", router(mx.zeros((3, 64)), num_experts=300)),
    ("x has shape", router(mx.zeros(()))),
    ("no tokens", router(mx.zeros((0, 64)))),
    ("0 places", lambda: OrderKernel(never)(mx.zeros((0, 2), mx.uint32), 4)),
    ("experts is .*int32", lambda: OrderKernel(never)(mx.zeros((1, 2), mx.int32), 4)),
    ("tails has shape", conv(mx.zeros((4, 192)))),
    ("kernel is", conv(mx.zeros((3, 192), mx.bfloat16), kernel_type=mx.float32)),
    ("1 taps", conv(mx.zeros((3, 192)), taps=1)),
    ("3 rows of width 0 / 3", conv(mx.zeros((3, 0)), width=0)),
    ("width 99 / 3", conv(mx.zeros((3, 99)), width=33)),
    ("head size 48", attention(mx.zeros((3, 1, 8, 48)), size=48)),
    ("keys has shape", attention(mx.zeros((3, 1, 8, 64)), page=16)),
    ("7 heads over 2", attention(mx.zeros((3, 1, 7, 64)))),
    ("tables has shape", attention(mx.zeros((2, 1, 8, 64)))),
    ("lengths has shape", attention(mx.zeros((3, 2, 8, 64)))),
    (r"queries \(3, 1, 0, 64\) over pools", attention(mx.zeros((3, 1, 0, 64)))),
    (r"over pools \(4, 0, 32, 64\)", attention(mx.zeros((3, 1, 8, 64)), num_heads=0)),
    ("tails for 2 queries", two_queries),
    ("tail has shape", attention(mx.zeros((3, 1, 8, 64)), tails=Tails(*[mx.zeros((2, 2, 32, 64))] * 2))),
    ("9 rows of 4 query heads", prefix(9, 4, 64)),
    ("members has shape", lambda: members(mx.zeros((8,), mx.int32))),
    ("no group or no rows", lambda: members(mx.zeros((1, 0), mx.int32))),
    ("head size 128", prefix(8, 1, 128)),
    ("a table of no pages", prefix(8, 1, 64, num_pages=0)),
]


@pytest.mark.parametrize(("words", "call"), CASES, ids=[words for words, _ in CASES])
def test_wrong_arrays_are_refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(KernelArgumentsError, match=words):
        call()


def test_rows_are_grouped_by_the_whole_pages_of_their_prompts() -> None:
    tables = np.array([[7, 9, 1], [7, 9, 2], [5, 0, 0], [7, 9, 3], [6, 8, 4]], np.int32)
    lengths = np.array([[70, 71], [64, 65], [20, 21], [90, 91], [66, 67]], np.int32)
    prompts = np.array([70, 70, 31, 70, 64], np.int32)
    groups = group_rows(tables, lengths, prompts, 4)
    assert groups is not None
    # Row 2 of tile 1 sees 64 tokens, all of them in the prompt's whole pages; tile 2 has no whole page.
    assert np.array(groups.starts).tolist() == [64, 64, 0, 64, 0, 0, 64, 64, 64, 64]
    assert np.array(groups.members).tolist() == [[0, 1, 3, 6], [7, -1, -1, -1], [8, 9, -1, -1]]
    assert np.array(groups.tokens).tolist() == [64, 64, 64]
    assert groups.most_tokens == 64
    assert group_rows(tables[2:3], lengths[2:3], prompts[2:3], 4) is None
