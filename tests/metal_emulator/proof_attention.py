"""K3 and K5 on the emulator: rows over pages in any order, what no row holds being NaN."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal.attention import PAGE, AttentionKernel, Groups, Paged, PrefixKernel, Tails, share
from metal.kernels import Launcher
from tests.metal_emulator.proof import Array64, Errors, mutants_of, rounded, same_bits

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
MOST_MEMBERS = 8


@dataclass
class Rows:
    """A batch and what its rows hold, in float64."""

    q: mx.array
    paged: Paged
    tails: Tails | None
    groups: Groups | None
    q64: Array64
    keys64: list[Array64]  # [G, tokens, H] each
    values64: list[Array64]

    def wanted(self, scale: float) -> Array64:
        """Attention, in float64."""
        heads = self.q64.shape[1] // self.keys64[0].shape[0]
        rows: list[Array64] = []
        for q, keys, values in zip(self.q64, self.keys64, self.values64, strict=True):
            scores = np.einsum("ghd,gtd->ght", q.reshape(-1, heads, q.shape[1]), keys) * scale
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            rows.append(np.einsum("ght,gtd->ghd", weights, values).reshape(q.shape))
        return np.stack(rows)


def make_rows(
    numbers: np.random.Generator, lengths: list[int], sizes: tuple[int, int, int], dtype: mx.Dtype, *,
    groups: list[tuple[list[int], int]] | None = None, with_tails: bool = False,
) -> Rows:  # fmt: skip
    """Rows of these lengths in shuffled pages. `sizes`: key/value heads, query heads of each, head size."""
    num_heads, heads, size = sizes
    tokens = {row: [numbers.normal(0, 1, (num_heads, length, size)) for _ in "kv"] for row, length in enumerate(lengths)}
    most_pages = max(-(-length // PAGE) for length in lengths) + int(numbers.integers(0, 2))
    num_pages = sum(-(-length // PAGE) for length in lengths) + 3
    free = list(numbers.permutation(num_pages))
    pools = np.full((2, num_pages, num_heads, PAGE, size), np.nan)
    table = np.zeros((len(lengths), most_pages), np.int32)
    tails = np.full((2, len(lengths), num_heads, PAGE, size), np.nan)
    shared_with: dict[int, tuple[int, int]] = {}
    for members, count in groups or []:
        for row in members[1:]:
            shared_with[row] = (members[0], count // PAGE)
            for which in (0, 1):
                tokens[row][which][:, : count // PAGE * PAGE] = tokens[members[0]][which][:, : count // PAGE * PAGE]
    for row in sorted(range(len(lengths)), key=lambda row: row in shared_with):  # those that are shared from come first
        length = lengths[row]
        for page in range(-(-length // PAGE)):
            owner, shared = shared_with.get(row, (row, 0))
            table[row, page] = table[owner, page] if page < shared else free.pop()
            here = slice(page * PAGE, min((page + 1) * PAGE, length))
            is_tail = with_tails and page == (length - 1) // PAGE
            for which in (0, 1):
                into = tails[which, row] if is_tail else pools[which, table[row, page]]
                into[:, : here.stop - here.start] = tokens[row][which][:, here]
    q, q64 = rounded(numbers.normal(0, 1, (len(lengths), num_heads * heads, size)), dtype)
    (keys, _), (values, _) = (rounded(pool, dtype) for pool in pools)
    found = None
    if groups is not None:
        found = share([rows for rows, _ in groups], [count for _, count in groups], len(lengths), MOST_MEMBERS)
    return Rows(
        q,
        Paged(keys, values, mx.array(table), mx.array(np.array(lengths, np.int32)), max(lengths)),
        Tails(*(rounded(tail, dtype)[0] for tail in tails)) if with_tails else None,
        found,
        q64,
        *([rounded(tokens[row][which], dtype)[1] for row in range(len(lengths))] for which in (0, 1)),
    )


def ended_at(numbers: np.random.Generator, most: int) -> int:
    """A length, often at the edge of a page or split."""
    if numbers.random() < 0.5:
        return int(numbers.integers(1, most + 1))
    edge = int(numbers.choice([PAGE, 2 * PAGE, 5 * PAGE, 512]))
    return int(np.clip(edge + numbers.integers(-1, 2), 1, most))


class AttentionProof:
    """Lengths from one token to three splits, with and without tail pages."""

    sizes = ((1, 4, 64), (2, 4, 64), (2, 1, 32), (1, 2, 128))
    mutants = mutants_of("K3")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        sizes, dtype = self.sizes[numbers.integers(len(self.sizes))], DTYPES[numbers.integers(3)]
        most = int(numbers.choice([40, 100, 600, 1100], p=[0.4, 0.35, 0.15, 0.1]))
        lengths = [ended_at(numbers, most) for _ in range(numbers.integers(1, 4))]
        rows = make_rows(numbers, lengths, sizes, dtype, with_tails=bool(numbers.random() < 0.4))
        scale = sizes[2] ** -0.5
        errors.add("attention", AttentionKernel(launcher)(rows.q, rows.paged, scale, rows.tails), rows.wanted(scale))

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers, kernel = np.random.default_rng(5), AttentionKernel(launcher)
        lengths = [int(n) for n in numbers.integers(1, 70, 64)]
        lengths[31] = 600
        rows = make_rows(numbers, lengths, (1, 4, 64), mx.bfloat16)
        together = kernel(rows.q, rows.paged, 0.125)
        return all(same_bits(kernel(*_only(rows, row), 0.125), together[row : row + 1]) for row in (0, 31, 63))


class PrefixProof:
    """Groups of one to eight rows, rows in no group beside them; the pieces are joined with the rows' own by K3."""

    sizes = ((1, 4, 64), (2, 4, 64), (1, 2, 32))
    mutants = mutants_of("K5")

    def case(self, launcher: Launcher, numbers: np.random.Generator, errors: Errors) -> None:
        sizes, dtype = self.sizes[numbers.integers(len(self.sizes))], DTYPES[numbers.integers(3)]
        most = int(numbers.choice([70, 200, 700], p=[0.5, 0.35, 0.15]))
        order, groups, lengths = list(range(9)), [], {}
        numbers.shuffle(order)
        for _ in range(numbers.integers(1, 3)):
            prompt = int(numbers.integers(PAGE, most + 1))
            members = [order.pop() for _ in range(min(len(order), int(numbers.choice([1, 2, 4]))))]
            groups.append((members, prompt))
            lengths |= {row: prompt // PAGE * PAGE + ended_at(numbers, 80) for row in members}
        lengths |= {order.pop(): ended_at(numbers, 80)}
        dense = {row: place for place, row in enumerate(sorted(lengths))}
        named: list[tuple[list[int], int]] = [([dense[row] for row in members], prompt) for members, prompt in groups]
        rows = make_rows(numbers, [lengths[row] for row in sorted(lengths)], sizes, dtype, groups=named)
        scale = sizes[2] ** -0.5
        errors.add("attention", _shared_attention(launcher, rows, scale), rows.wanted(scale))

    def alone_and_in_64(self, launcher: Launcher) -> bool:
        numbers = np.random.default_rng(5)
        groups: list[tuple[list[int], int]] = [(list(range(8 * g, 8 * g + 8)), 40 + 9 * g) for g in range(8)]
        lengths = [prompt + 1 + int(numbers.integers(0, 40)) for _, prompt in groups for _ in range(8)]
        rows = make_rows(numbers, lengths, (1, 4, 64), mx.bfloat16, groups=groups)
        together = _shared_attention(launcher, rows, 0.125)
        for row in (0, 31, 63):
            q, paged = _only(rows, row)
            alone = Rows(q, paged, None, share([[0]], [groups[row // 8][1]], 1, MOST_MEMBERS), q, [], [])  # pyright: ignore[reportArgumentType]
            if not same_bits(_shared_attention(launcher, alone, 0.125), together[row : row + 1]):
                return False
        return True


def _shared_attention(launcher: Launcher, rows: Rows, scale: float) -> mx.array:
    assert rows.groups is not None
    pieces = PrefixKernel(launcher)(rows.q, rows.paged, rows.groups, scale)
    return AttentionKernel(launcher)(rows.q, rows.paged, scale, shared=(rows.groups, pieces))


def _only(rows: Rows, row: int) -> tuple[mx.array, Paged]:
    one, paged = slice(row, row + 1), rows.paged
    length = paged.lengths[one]
    return rows.q[one], Paged(paged.keys, paged.values, paged.table[one], length, int(length.item()))
