"""K3 and K5 on the emulator: tiles of queries over pages in any order, what no sequence holds being NaN."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal.attention import AttentionKernel, Groups, PrefixKernel, Tails, group_rows
from metal.kernels import Launcher
from metal.sizes import PAGE_TOKENS as PAGE
from tests.metal_emulator.proof import Array64, Errors, mutants_of, rounded, same_bits

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
MOST_MEMBERS = 8


@dataclass
class Tiles:
    """A batch: tile x has W queries of one sequence, and query w sees its first lengths[x][w] tokens."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    tables: mx.array
    lengths: mx.array
    tails: Tails | None
    prompts: list[int]
    queries64: Array64
    tokens64: list[tuple[Array64, Array64]]  # keys and values of each sequence, [G, tokens, H]

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """What both kernels take first."""
        return self.queries, self.keys, self.values, self.tables, self.lengths

    @property
    def groups(self) -> Groups | None:
        """Rows past the whole pages of their prompts, by the pages they share."""
        prompts = np.array(self.prompts, np.int32)
        return group_rows(np.array(self.tables), np.array(self.lengths), prompts, MOST_MEMBERS)

    def wanted(self, scale: float) -> Array64:
        """Attention, in float64: [X, W, Q, H]."""
        out = np.empty(self.queries64.shape)
        heads = out.shape[2] // self.tokens64[0][0].shape[0]
        for (tile, query), length in np.ndenumerate(np.array(self.lengths)):
            keys, values = (what[:, :length] for what in self.tokens64[tile])
            scores = np.einsum("ghd,gtd->ght", self.queries64[tile, query].reshape(-1, heads, out.shape[3]), keys) * scale
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            out[tile, query] = np.einsum("ght,gtd->ghd", weights, values).reshape(out.shape[2:])
        return out

    def only(self, tile: int) -> "Tiles":
        """One tile by itself, in the same pools."""
        one = slice(tile, tile + 1)
        return Tiles(
            self.queries[one], self.keys, self.values, self.tables[one], self.lengths[one], None, self.prompts[one], self.queries64[one],
            self.tokens64[one],
        )  # fmt: skip


def make_tiles(
    numbers: np.random.Generator, lengths: list[int], sizes: tuple[int, int, int], dtype: mx.Dtype, *, width: int = 1,
    prompts: list[tuple[int, int]] | None = None, with_tails: bool = False, pool_dtype: mx.Dtype | None = None,
    far: bool = False,
) -> Tiles:  # fmt: skip
    """Sequences of these lengths in shuffled pages. `sizes`: key/value heads, query heads of each, head size.

    prompts: (number of the prompt, its tokens) of each sequence; whole pages of one prompt are shared. far: scores of some
    pages are far from those of others.
    """
    num_heads, heads, size = sizes
    prompts = prompts or [(-1 - row, 0) for row in range(len(lengths))]
    tokens = [[numbers.normal(0, 1, (num_heads, length, size)) for _ in "kv"] for length in lengths]
    queries64 = numbers.normal(0, 1, (len(lengths), width, num_heads * heads, size))
    if far:  # the last element, added last, puts whole pages 112 above or below the others: exp of that is no float
        queries64[..., -1] = 28.0
        for keys, _ in tokens:
            pages = numbers.choice([-4.0, 0.0, 4.0], -(-keys.shape[1] // PAGE)) * size**0.5
            keys[..., -1] = np.repeat(pages, PAGE)[: keys.shape[1]]
    most_pages = max(-(-length // PAGE) for length in lengths) + int(numbers.integers(0, 2))
    num_pages = sum(-(-length // PAGE) for length in lengths) + 3
    free = list(numbers.permutation(num_pages))
    pools = np.full((2, num_pages, num_heads, PAGE, size), np.nan)
    table = np.zeros((len(lengths), most_pages), np.int32)
    tails = np.full((2, len(lengths), num_heads, PAGE, size), np.nan)
    owners: dict[int, int] = {}
    for row, length in enumerate(lengths):
        number, count = prompts[row]
        shared = count // PAGE if length >= count else 0
        owner = owners.setdefault(number, row) if shared else row
        for page in range(-(-length // PAGE)):
            here = slice(page * PAGE, min((page + 1) * PAGE, length))
            if page < shared and owner != row:
                table[row, page] = table[owner, page]
                for which in (0, 1):
                    tokens[row][which][:, here] = tokens[owner][which][:, here]
                continue
            table[row, page] = free.pop()
            is_tail = with_tails and page == (length - 1) // PAGE
            for which in (0, 1):
                into = tails[which, row] if is_tail else pools[which, table[row, page]]
                into[:, : here.stop - here.start] = tokens[row][which][:, here]
    queries, queries64 = rounded(queries64, dtype)
    seen = np.array([[max(1, length - width + 1 + query) for query in range(width)] for length in lengths], np.int32)
    pool_dtype = pool_dtype or dtype
    (keys, _), (values, _) = (rounded(pool, pool_dtype) for pool in pools)
    return Tiles(
        queries,
        keys,
        values,
        mx.array(table),
        mx.array(seen),
        Tails(*(rounded(tail, pool_dtype)[0] for tail in tails)) if with_tails else None,
        [count for _, count in prompts],
        queries64,
        [(rounded(its[0], pool_dtype)[1], rounded(its[1], pool_dtype)[1]) for its in tokens],
    )


def ended_at(numbers: np.random.Generator, most: int) -> int:
    """A length, often at the edge of a page or piece."""
    if numbers.random() < 0.5:
        return int(numbers.integers(1, most + 1))
    edge = int(numbers.choice([PAGE, 2 * PAGE, 5 * PAGE, 512]))
    return int(np.clip(edge + numbers.integers(-1, 2), 1, most))


class AttentionProof:
    """Lengths from one token to three pieces; tiles of one and of several queries, with and without tail pages."""

    sizes = ((1, 4, 64), (2, 4, 64), (2, 1, 32), (1, 2, 128))
    mutants = mutants_of("K3")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        sizes, dtype = self.sizes[numbers.integers(len(self.sizes))], DTYPES[numbers.integers(3)]
        most = int(numbers.choice([40, 100, 600, 1100], p=[0.4, 0.35, 0.15, 0.1]))
        lengths = [ended_at(numbers, most) for _ in range(numbers.integers(1, 4))]
        with_tails = bool(numbers.random() < 0.4)
        width = 1 if with_tails else int(numbers.choice([1, 1, 2, 3]))
        pool_dtype = mx.bfloat16 if dtype == mx.float32 and numbers.random() < 0.3 else dtype
        far = bool(numbers.random() < (0.7 if most > 512 else 0.3))
        tiles = make_tiles(numbers, lengths, sizes, dtype, width=width, with_tails=with_tails, pool_dtype=pool_dtype, far=far)
        scale = sizes[2] ** -0.5
        errors.add("attention", AttentionKernel(launcher)(*tiles.arrays, scale, tails=tiles.tails), tiles.wanted(scale))

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers, kernel = np.random.default_rng(5), AttentionKernel(launcher)
        lengths = [int(n) for n in numbers.integers(1, 70, 64)]
        lengths[31] = 600
        tiles = make_tiles(numbers, lengths, (1, 4, 64), mx.bfloat16)
        together = kernel(*tiles.arrays, 0.125)
        return all(same_bits(kernel(*tiles.only(row).arrays, 0.125), together[row : row + 1]) for row in (0, 31, 63))


class PrefixProof:
    """Groups of one to eight rows, rows in no group beside them; the pieces are joined with the rows' own by K3."""

    sizes = ((1, 4, 64), (2, 4, 64), (1, 2, 32))
    mutants = mutants_of("K5")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        sizes, dtype = self.sizes[numbers.integers(len(self.sizes))], DTYPES[numbers.integers(3)]
        most = int(numbers.choice([70, 200, 700], p=[0.5, 0.35, 0.15]))
        rows: list[tuple[int, tuple[int, int]]] = [(ended_at(numbers, 80), (-1, 0))]
        for number in range(numbers.integers(1, 3)):
            prompt = int(numbers.integers(PAGE, most + 1))
            rows += [(prompt + ended_at(numbers, 80), (number, prompt)) for _ in range(int(numbers.choice([1, 2, 4])))]
        numbers.shuffle(rows)
        tiles = make_tiles(
            numbers, [length for length, _ in rows], sizes, dtype, width=int(numbers.choice([1, 1, 2])), prompts=[p for _, p in rows],
            far=bool(numbers.random() < 0.3),
        )  # fmt: skip
        scale = sizes[2] ** -0.5
        errors.add("attention", _shared_attention(launcher, tiles, scale), tiles.wanted(scale))

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers = np.random.default_rng(5)
        prompts = [(row // 8, 40 + 9 * (row // 8)) for row in range(64)]
        lengths = [prompt + 1 + int(numbers.integers(0, 40)) for _, prompt in prompts]
        tiles = make_tiles(numbers, lengths, (1, 4, 64), mx.bfloat16, prompts=prompts)
        together = _shared_attention(launcher, tiles, 0.125)
        return all(same_bits(_shared_attention(launcher, tiles.only(row), 0.125), together[row : row + 1]) for row in (0, 31, 63))


def _shared_attention(launcher: Launcher, tiles: Tiles, scale: float) -> mx.array:
    groups, own = tiles.groups, AttentionKernel(launcher)
    if groups is None:
        return own(*tiles.arrays, scale)
    return own(*tiles.arrays, scale, shared=(groups, PrefixKernel(launcher)(*tiles.arrays, scale, groups)))
