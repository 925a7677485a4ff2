"""K3 and K5: attention of one new token a row over keys and values in pages, the prompt of a group once for all its rows.

A row's tokens are cut at its start (what its group shares) and then every 512; each piece is summed up by itself and the
pieces are joined by their log-sum-exp. The cuts depend on the row alone, and so does the result. Without a shared prefix
all of a row's tokens are its own; that is K3. K5 makes the pieces of shared prefixes.

Legend: R rows, Q query heads, G key/value heads, H head size, P most pages of a row, S splits, M most rows of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx

from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, launch_on_metal

PAGE: Final = 32
"""Tokens of a page: one for each lane of a simdgroup."""
SPLIT: Final = 512
"""Tokens of a piece."""
MOST_QUERIES: Final = 32
"""Rows of a group times query heads of a key/value head, at most, in K5."""
_THREADS: Final = 128
_NAME, _PREFIX_NAME = "attention", "prefix"


class Paged(NamedTuple):
    """Where rows' keys and values are."""

    keys: mx.array  # [pages, G, 32, H]
    values: mx.array  # the same
    table: mx.array  # int32 [R, P], pages of each row; any valid id past its end
    lengths: mx.array  # int32 [R], tokens of each row, the new one included
    most_tokens: int  # the longest row's, known to the host


class Tails(NamedTuple):
    """Each row's last page, where pools cannot be written in place: its place in the pool is not read."""

    keys: mx.array  # [R, G, 32, H]
    values: mx.array


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows that share their first tokens, as arrays; made by `share`."""

    members: mx.array  # int32 [groups, M], -1 for none; the first is always one
    tokens: mx.array  # int32 [groups], shared, a multiple of 32
    starts: mx.array  # int32 [R], tokens that each row shares; 0 for a row in no group
    most_tokens: int


class Pieces(NamedTuple):
    """Sums of a row's pieces; what a row does not have is undefined."""

    parts: mx.array  # float32 [R, Q, S, H], sum of exp(score - highest) * value
    stats: mx.array  # float32 [R, Q, S, 2], highest score, and sum of exp(score - highest)


def share(groups: Sequence[Sequence[int]], tokens: Sequence[int], num_rows: int, most_members: int) -> Groups | None:
    """Groups of these rows, cut down to whole pages; None if none shares one. `most_members` is one number for a process.

    Each row must hold more tokens than it shares.
    """
    kept = [(list(rows), count // PAGE * PAGE) for rows, count in zip(groups, tokens, strict=True) if rows and count >= PAGE]
    if not kept:
        return None
    starts = [0] * num_rows
    for rows, count in kept:
        for row in rows:
            starts[row] = count
    padded = [rows + [-1] * (most_members - len(rows)) for rows, _ in kept]
    counts = [count for _, count in kept]
    return Groups(*(mx.array(what, dtype=mx.int32) for what in (padded, counts, starts)), most_tokens=max(counts))


def attend_plain(q: mx.array, paged: Paged, scale: float, tails: Tails | None = None) -> mx.array:
    """Attention of q [R, Q, H] over each row's tokens: [R, Q, H] in the type of q; by gathering the pages into rows."""
    num_rows, num_heads, size = q.shape[0], paged.keys.shape[1], q.shape[2]
    places_T = mx.arange(paged.table.shape[1] * PAGE, dtype=mx.int32)

    def row_of(pool: mx.array, tail: mx.array | None) -> mx.array:
        pages = pool[paged.table]  # [R, P, G, 32, H]
        if tail is not None:
            last_R = (paged.lengths - 1) // PAGE
            is_last = mx.arange(paged.table.shape[1], dtype=mx.int32)[None] == last_R[:, None]
            pages = mx.where(is_last[..., None, None, None], tail[:, None], pages)
        return pages.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_heads, -1, size)

    keys = row_of(paged.keys, None if tails is None else tails.keys)
    values = row_of(paged.values, None if tails is None else tails.values)
    seen = (places_T < paged.lengths[:, None])[:, None, None]
    values = mx.where(seen[:, :, 0, :, None], values, 0)  # what nobody has written may be anything, also no number
    return mx.fast.scaled_dot_product_attention(q[:, :, None], keys, values, scale=scale, mask=seen)[:, :, 0]


class AttentionKernel:
    """As `attend_plain`, by paged_attention.metal and attention_merge.metal (K3)."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        self._paged = Kernel(
            "paged_attention",
            inputs=("q", "keys", "values", "tail_keys", "tail_values", "table", "starts", "lengths", "scale"),
            outputs=("parts", "stats"),
            launcher=launcher,
        )
        self._merge = Kernel(
            "attention_merge",
            inputs=("own_parts", "own_stats", "prefix_parts", "prefix_stats", "starts", "lengths", "sizes"),
            outputs=("mixed",),
            launcher=launcher,
        )

    def __call__(
        self, q: mx.array, paged: Paged, scale: float, tails: Tails | None = None, *, shared: tuple[Groups, Pieces] | None = None
    ) -> mx.array:
        """As `attend_plain`. `shared`: what K5 has summed up already. Raises KernelArgumentsError."""
        starts = mx.zeros_like(paged.lengths) if shared is None else shared[0].starts
        own = self.pieces(q, paged, starts, scale, tails)
        return self.merge(own, None if shared is None else shared[1], starts, paged.lengths, q.dtype)

    def pieces(self, q: mx.array, paged: Paged, starts: mx.array, scale: float, tails: Tails | None = None) -> Pieces:
        """The pieces of each row's own tokens, from `starts`, int32 [R], multiples of 32, below `lengths`."""
        _expect_pool(_NAME, q, paged)
        num_rows, num_queries, size = q.shape
        num_heads, shape = paged.keys.shape[1], (q.shape[0], *paged.keys.shape[1:])
        demand(_NAME, size % 32 == 0, f"head size {size} is not a multiple of 32")
        expect(_NAME, "starts", starts, (num_rows,), mx.int32)
        for tail in tails or ():
            expect(_NAME, "tail", tail, shape, paged.keys.dtype)
        tail_keys, tail_values = (paged.keys, paged.values) if tails is None else tails
        num_splits = max(1, -(-paged.most_tokens // SPLIT))
        return Pieces(
            *self._paged(
                inputs=[
                    q, paged.keys, paged.values, tail_keys, tail_values, paged.table, starts, paged.lengths,
                    mx.array([scale], dtype=mx.float32),
                ],
                template=[("G", num_heads), ("HEADS", num_queries // num_heads), ("H", size), ("TAIL", tails is not None)],
                grid=(_THREADS * num_splits, num_heads, num_rows),
                threadgroup=(_THREADS, 1, 1),
                output_shapes=[(num_rows, num_queries, num_splits, size), (num_rows, num_queries, num_splits, 2)],
                output_dtypes=[mx.float32] * 2,
            )
        )  # fmt: skip

    def merge(self, own: Pieces, prefix: Pieces | None, starts: mx.array, lengths: mx.array, dtype: mx.Dtype) -> mx.array:
        """Join pieces of the prefix and a row's own: [R, Q, H]."""
        num_rows, num_queries, num_splits, size = own.parts.shape
        shared = own if prefix is None else prefix
        expect(_NAME, "prefix parts", shared.parts, (num_rows, num_queries, -1, size), mx.float32)
        return self._merge(
            inputs=[*own, *shared, starts, lengths, mx.array([num_splits, shared.parts.shape[2]], dtype=mx.int32)],
            template=[("T", dtype), ("H", size), ("PREFIX", prefix is not None)],
            grid=(32, num_queries, num_rows),
            threadgroup=(32, 1, 1),
            output_shapes=[(num_rows, num_queries, size)],
            output_dtypes=[dtype],
        )[0]


class PrefixKernel:
    """The pieces of prefixes that groups share, by prefix_attention.metal (K5)."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        self._prefix = Kernel(
            "prefix_attention",
            inputs=("q", "keys", "values", "table", "members", "prefix", "scale"),
            outputs=("parts", "stats"),
            launcher=launcher,
        )

    def __call__(self, q: mx.array, paged: Paged, groups: Groups, scale: float) -> Pieces:
        """Pieces of every row that is in a group. Raises KernelArgumentsError."""
        _expect_pool(_PREFIX_NAME, q, paged)
        num_rows, num_queries, size = q.shape
        num_heads = paged.keys.shape[1]
        num_groups, most_members = groups.members.shape
        heads = num_queries // num_heads
        demand(_PREFIX_NAME, size % 8 == 0 and size <= 64, f"head size {size} is not a multiple of 8 up to 64")
        demand(_PREFIX_NAME, most_members * heads <= MOST_QUERIES, f"{most_members} rows of {heads} query heads, more than {MOST_QUERIES}")
        expect(_PREFIX_NAME, "members", groups.members, (num_groups, most_members), mx.int32)
        expect(_PREFIX_NAME, "tokens", groups.tokens, (num_groups,), mx.int32)
        demand(_PREFIX_NAME, 0 < groups.most_tokens <= paged.table.shape[1] * PAGE, f"a prefix of {groups.most_tokens} tokens")
        num_splits = -(-groups.most_tokens // SPLIT)
        return Pieces(
            *self._prefix(
                inputs=[
                    q, paged.keys, paged.values, paged.table, groups.members, groups.tokens, mx.array([scale], dtype=mx.float32)
                ],
                template=[("G", num_heads), ("HEADS", heads), ("H", size), ("M", most_members)],
                grid=(_THREADS * num_splits, num_heads, num_groups),
                threadgroup=(_THREADS, 1, 1),
                output_shapes=[(num_rows, num_queries, num_splits, size), (num_rows, num_queries, num_splits, 2)],
                output_dtypes=[mx.float32] * 2,
            )
        )  # fmt: skip


def _expect_pool(kernel: str, q: mx.array, paged: Paged) -> None:
    expect(kernel, "q", q, (-1, -1, -1), *FLOATS)
    num_rows, num_queries, size = q.shape
    expect(kernel, "keys", paged.keys, (-1, -1, PAGE, size), *FLOATS)
    expect(kernel, "values", paged.values, tuple(paged.keys.shape), paged.keys.dtype)
    demand(kernel, num_rows > 0 and num_queries % paged.keys.shape[1] == 0, f"{num_queries} heads over {paged.keys.shape[1]}")
    expect(kernel, "table", paged.table, (num_rows, -1), mx.int32)
    expect(kernel, "lengths", paged.lengths, (num_rows,), mx.int32)
    demand(kernel, 0 < paged.most_tokens <= paged.table.shape[1] * PAGE, f"rows of up to {paged.most_tokens} tokens in the table")
