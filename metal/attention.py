"""K3 and K5: attention over keys and values in pages, the prompt of a group once for all its rows.

`reference.attend_plain` says what it means. Each query of a tile is a row of its own here, so that a token gets the same
bits whether it comes alone or in a stretch. A row's tokens are cut at its start (the end of its prompt, where K5 is used)
and then every 512; each piece is summed up by itself and the pieces are joined by their log-sum-exp. The cuts depend on
the row alone, and so does the result.

Legend: X tiles, W queries a tile, R = X * W rows, Q query heads, G key/value heads, H head size, P most pages of a tile,
S pieces, M most rows of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal.kernels import FLOATS, Kernel, Launcher, demand, expect, launch_on_metal
from metal.sizes import ATTENTION_BYTES, PAGE_TOKENS, RANGE_PAGES

SPLIT: Final = RANGE_PAGES * PAGE_TOKENS
"""Tokens of a piece; the bodies have this number too."""
MOST_QUERIES: Final = 32
"""Rows of a group times query heads of a key/value head, at most, in K5."""
_THREADS: Final = 128
_NAME, _PREFIX_NAME = "attention", "prefix"


class Tails(NamedTuple):
    """Each tile's last page, where pools cannot be written in place: its place in the pool is not read."""

    keys: mx.array  # [X, G, 32, H]
    values: mx.array


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows that share their first tokens."""

    members: mx.array  # int32 [groups, M], -1 for none; the first is always one
    tokens: mx.array  # int32 [groups], shared, a multiple of 32
    starts: mx.array  # int32 [R], tokens that each row shares; 0 for a row in no group
    most_tokens: int


class Pieces(NamedTuple):
    """Sums of rows' pieces; what a row does not have is undefined."""

    parts: mx.array  # float32 [R, Q, S, H], sum of exp(score - highest) * value
    stats: mx.array  # float32 [R, Q, S, 2], highest score, and sum of exp(score - highest)


def most_rows(num_pages: int, num_queries: int, head_size: int) -> int:
    """Rows over tables of so many pages whose pieces, their own and their prompts', take at most ATTENTION_BYTES."""
    row_bytes = 2 * -(-num_pages // RANGE_PAGES) * num_queries * (head_size + 2) * 4
    return max(1, ATTENTION_BYTES // row_bytes)


def group_rows(tables: NDArray[np.int32], lengths: NDArray[np.int32], prompts: NDArray[np.int32], most_rows: int) -> Groups | None:
    """Groups of at most `most_rows` rows whose prompts are in the same pages; None if no row is past a whole page of its prompt.

    Args:
        tables: int32 [X, P].
        lengths: int32 [X, W], what each row sees.
        prompts: int32 [X], tokens of each tile's prompt that others may share; only whole pages of it are.
        most_rows: M.

    A row is in a group, alone if need be, as soon as it sees more than the whole pages of its prompt: whether it is has to
    depend on the row alone.
    """
    whole_X = prompts // PAGE_TOKENS
    starts = np.where((lengths > whole_X[:, None] * PAGE_TOKENS) & (whole_X[:, None] > 0), whole_X[:, None] * PAGE_TOKENS, 0)
    starts = np.ascontiguousarray(starts, np.int32).reshape(-1)
    alike: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero(starts).tolist():
        tile, pages = row // lengths.shape[1], int(starts[row]) // PAGE_TOKENS
        alike.setdefault((int(tables[tile, pages - 1]), pages), []).append(row)
    cut = [(rows[i : i + most_rows], pages) for (_, pages), rows in alike.items() for i in range(0, len(rows), most_rows)]
    return made_groups([rows for rows, _ in cut], [pages * PAGE_TOKENS for _, pages in cut], starts, most_rows) if cut else None


def made_groups(rows: Sequence[Sequence[int]], tokens: Sequence[int], starts: NDArray[np.int32], most_rows: int) -> Groups:
    """The arrays of groups."""
    members = np.full((len(rows), most_rows), -1, np.int32)
    for group, its in enumerate(rows):
        members[group, : len(its)] = its
    return Groups(mx.array(members), mx.array(np.array(tokens, np.int32)), mx.array(starts), max(tokens))


class AttentionKernel:
    """As `attend_plain`, by paged_attention.metal and attention_merge.metal (K3)."""

    def __init__(self, launcher: Launcher = launch_on_metal) -> None:
        self._paged = Kernel(
            "paged_attention",
            inputs=("q", "keys", "values", "tail_keys", "tail_values", "table", "starts", "lengths", "scale", "width"),
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
        self, queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array, lengths: mx.array, scale: float, *,
        tails: Tails | None = None, shared: tuple[Groups, Pieces] | None = None,
    ) -> mx.array:  # fmt: skip
        """Queries [X, W, Q, H] over pools [pages, G, 32, H], tables int32 [X, P], lengths int32 [X, W]: [X, W, Q, H].

        `shared`: what K5 has summed up already. Raises KernelArgumentsError.
        """
        starts = mx.zeros((lengths.size,), mx.int32) if shared is None else shared[0].starts
        own = self.pieces(queries, keys, values, tables, lengths, starts, scale, tails)
        mixed = self.merge(own, None if shared is None else shared[1], starts, lengths.reshape(-1), queries.dtype)
        return mixed.reshape(queries.shape)

    def pieces(
        self, queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array, lengths: mx.array, starts: mx.array, scale: float,
        tails: Tails | None = None,
    ) -> Pieces:  # fmt: skip
        """The pieces of each row's own tokens, from `starts`, int32 [R], multiples of 32, below `lengths`."""
        _expect_pool(_NAME, queries, keys, values, tables, lengths)
        num_tiles, width, num_queries, size = queries.shape
        num_heads, num_rows = keys.shape[1], num_tiles * width
        demand(_NAME, size % 32 == 0, f"head size {size} is not a multiple of 32")
        expect(_NAME, "starts", starts, (num_rows,), mx.int32)
        # Queries of one tile may end in two pages, of which the tail holds one.
        demand(_NAME, tails is None or width == 1, f"tails for {width} queries of a sequence")
        for tail in tails or ():
            expect(_NAME, "tail", tail, (num_tiles, *keys.shape[1:]), keys.dtype)
        tail_keys, tail_values = (keys, values) if tails is None else tails
        num_splits = -(-tables.shape[1] // RANGE_PAGES)
        shape = (num_rows, num_queries, num_splits)
        return Pieces(
            *self._paged(
                inputs=[
                    queries, keys, values, tail_keys, tail_values, tables, starts, lengths, mx.array([scale], dtype=mx.float32),
                    mx.array([width], dtype=mx.int32),
                ],
                template=[("G", num_heads), ("HEADS", num_queries // num_heads), ("H", size), ("TAIL", tails is not None)],
                grid=(_THREADS * num_splits, num_heads, num_rows),
                threadgroup=(_THREADS, 1, 1),
                output_shapes=[(*shape, size), (*shape, 2)],
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
            inputs=("q", "keys", "values", "table", "members", "prefix", "scale", "width"),
            outputs=("parts", "stats"),
            launcher=launcher,
        )

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array, lengths: mx.array, scale: float, groups: Groups
    ) -> Pieces:
        """Pieces of every row that is in a group. Raises KernelArgumentsError."""
        _expect_pool(_PREFIX_NAME, queries, keys, values, tables, lengths)
        num_tiles, width, num_queries, size = queries.shape
        num_heads, num_rows = keys.shape[1], num_tiles * width
        expect(_PREFIX_NAME, "members", groups.members, (-1, -1), mx.int32)
        num_groups, most_members = groups.members.shape
        heads = num_queries // num_heads
        demand(_PREFIX_NAME, size % 8 == 0 and size <= 64, f"head size {size} is not a multiple of 8 up to 64")
        demand(_PREFIX_NAME, most_members * heads <= MOST_QUERIES, f"{most_members} rows of {heads} query heads, more than {MOST_QUERIES}")
        demand(_PREFIX_NAME, groups.members.size > 0, "no group or no rows in one")
        expect(_PREFIX_NAME, "tokens", groups.tokens, (num_groups,), mx.int32)
        demand(_PREFIX_NAME, 0 < groups.most_tokens <= tables.shape[1] * PAGE_TOKENS, f"a prefix of {groups.most_tokens} tokens")
        shape = (num_rows, num_queries, -(-groups.most_tokens // SPLIT))
        return Pieces(
            *self._prefix(
                inputs=[
                    queries, keys, values, tables, groups.members, groups.tokens, mx.array([scale], dtype=mx.float32),
                    mx.array([width], dtype=mx.int32),
                ],
                template=[("G", num_heads), ("HEADS", heads), ("H", size), ("M", most_members)],
                grid=(_THREADS * shape[2], num_heads, num_groups),
                threadgroup=(_THREADS, 1, 1),
                output_shapes=[(*shape, size), (*shape, 2)],
                output_dtypes=[mx.float32] * 2,
            )
        )  # fmt: skip


def _expect_pool(kernel: str, queries: mx.array, keys: mx.array, values: mx.array, tables: mx.array, lengths: mx.array) -> None:
    expect(kernel, "queries", queries, (-1, -1, -1, -1), *FLOATS)
    num_tiles, width, num_queries, size = queries.shape
    expect(kernel, "keys", keys, (-1, -1, PAGE_TOKENS, size), *FLOATS)
    expect(kernel, "values", values, tuple(keys.shape), keys.dtype)
    demand(kernel, min(queries.size, keys.size) > 0, f"queries {tuple(queries.shape)} over pools {tuple(keys.shape)}")
    demand(kernel, num_queries % keys.shape[1] == 0, f"{num_queries} heads over {keys.shape[1]}")
    expect(kernel, "tables", tables, (num_tiles, -1), mx.int32)
    demand(kernel, tables.shape[1] > 0, "a table of no pages")
    expect(kernel, "lengths", lengths, (num_tiles, width), mx.int32)
