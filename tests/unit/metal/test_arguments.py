"""Every wrapper refuses arrays its body is not made for, before anything is compiled."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from metal.attention import AttentionKernel, Paged, PrefixKernel, Tails, share
from metal.conv import ConvKernel
from metal.experts import ExpertsKernel
from metal.head import HeadKernel
from metal.int8 import Int8
from metal.kernels import Compiled
from metal.routing import RouterKernel, RouterRule, Routing, order_plain
from stoa.contracts.errors import KernelArgumentsError


def never(*arguments: object) -> Compiled:
    raise AssertionError("a body was compiled")


def matrix(*shape: int, scale_type: mx.Dtype = mx.bfloat16) -> Int8:
    *outer, width = shape
    groups = (*outer, width // 64)
    return Int8(mx.zeros((*outer, width // 4), mx.uint32), mx.zeros(groups, scale_type), mx.zeros(groups, scale_type))


def routing(num_tokens: int, top_k: int, num_experts: int) -> Routing:
    experts = mx.zeros((num_tokens, top_k), mx.uint32)
    return Routing(experts, mx.zeros(experts.shape), experts.astype(mx.uint8), *order_plain(experts, num_experts))


def paged(num_rows: int, *, num_heads: int = 2, page: int = 32, size: int = 64, most: int = 40) -> Paged:
    pool = mx.zeros((4, num_heads, page, size))
    return Paged(pool, pool, mx.zeros((num_rows, 2), mx.int32), mx.full((num_rows,), most, mx.int32), most)


def experts(x: mx.array, *, inner: int = 64, width: int = 64, rows: int = 3, scale_type: mx.Dtype = mx.bfloat16) -> Callable[[], object]:
    up, down = matrix(4, inner, width, scale_type=scale_type), matrix(4, width, inner)
    return lambda: ExpertsKernel(never)(x, routing(rows, 2, 4), up, up, down)


def head(x: mx.array, *, key_type: mx.Dtype = mx.uint64, position_type: mx.Dtype = mx.int64) -> Callable[[], object]:
    return lambda: HeadKernel(never)(x, matrix(9, 64), mx.zeros((3,), key_type), mx.zeros((3,), position_type))


def router(x: mx.array, *, top_k: int = 2, num_experts: int = 8) -> Callable[[], object]:
    rule = RouterRule(num_experts, top_k, True, 1.0)
    return lambda: RouterKernel(never)(x, mx.zeros((num_experts, 64)), mx.zeros((num_experts,)), rule)


def conv(projected: mx.array, *, taps: int = 3, active: mx.Dtype = mx.bool_) -> Callable[[], object]:
    tails = mx.zeros((3, taps - 1, 64))
    return lambda: ConvKernel(never)(projected, tails, mx.zeros((64, taps)), mx.zeros((3,), active))


def prefix(members: int, heads: int, size: int) -> Callable[[], object]:
    groups = share([[0, 1]], [32], 3, members)
    assert groups is not None
    return lambda: PrefixKernel(never)(mx.zeros((3, 2 * heads, size)), paged(3, size=size), groups, 1.0)


CASES: list[tuple[str, Callable[[], object]]] = [
    ("x has shape", experts(mx.zeros((2, 64)))),
    ("x is .*int32", experts(mx.zeros((3, 64), mx.int32))),
    ("inner dimension 96", experts(mx.zeros((3, 96)), width=96)),
    ("scales and biases is", experts(mx.zeros((3, 64)), scale_type=mx.float16)),
    ("no rows", experts(mx.zeros((0, 64)), rows=0)),
    ("codes has shape", head(mx.zeros((3, 128)))),
    ("keys is .*int64", head(mx.zeros((3, 64)), key_type=mx.int64)),
    ("positions is .*int32", head(mx.zeros((3, 64)), position_type=mx.int32)),
    ("gate has shape", router(mx.zeros((3, 32)))),
    ("top 9 of 8", router(mx.zeros((3, 64)), top_k=9)),
    ("of at most 256", router(mx.zeros((3, 64)), num_experts=300)),
    ("no tokens", router(mx.zeros((0, 64)))),
    ("tails has shape", conv(mx.zeros((4, 192)))),
    ("active is", conv(mx.zeros((3, 192)), active=mx.int32)),
    ("1 taps", conv(mx.zeros((3, 192)), taps=1)),
    ("width 33", lambda: ConvKernel(never)(mx.zeros((3, 99)), mx.zeros((3, 2, 33)), mx.zeros((33, 3)), mx.zeros((3,), mx.bool_))),
    ("head size 48", lambda: AttentionKernel(never)(mx.zeros((3, 8, 48)), paged(3, size=48), 1.0)),
    ("keys has shape", lambda: AttentionKernel(never)(mx.zeros((3, 8, 64)), paged(3, page=16), 1.0)),
    ("7 heads over 2", lambda: AttentionKernel(never)(mx.zeros((3, 7, 64)), paged(3), 1.0)),
    ("table has shape", lambda: AttentionKernel(never)(mx.zeros((2, 8, 64)), paged(3), 1.0)),
    ("rows of up to 65 tokens", lambda: AttentionKernel(never)(mx.zeros((3, 8, 64)), paged(3, most=65), 1.0)),
    ("tail has shape", lambda: AttentionKernel(never)(mx.zeros((3, 8, 64)), paged(3), 1.0, Tails(*[mx.zeros((2, 2, 32, 64))] * 2))),
    ("9 rows of 4 query heads", prefix(9, 4, 64)),
    ("head size 128", prefix(8, 1, 128)),
]


@pytest.mark.parametrize(("words", "call"), CASES, ids=[words for words, _ in CASES])
def test_wrong_arrays_are_refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(KernelArgumentsError, match=words):
        call()


def test_a_shared_prefix_is_cut_down_to_whole_pages() -> None:
    groups = share([[2, 0], [1], [3, 4]], [70, 31, 64], 6, 4)
    assert groups is not None
    assert np.array(groups.members).tolist() == [[2, 0, -1, -1], [3, 4, -1, -1]]
    assert np.array(groups.tokens).tolist() == [64, 64]
    assert np.array(groups.starts).tolist() == [64, 0, 64, 64, 64, 0]
    assert groups.most_tokens == 64
    assert share([[0, 1]], [31], 2, 4) is None
