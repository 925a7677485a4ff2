from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker_mac.pages import SCRAP, Pages, PoolKey

KEY = PoolKey(3, "ab", 4, "float32")


def pages(num_pages: int = 10) -> Pages:
    return Pages(num_pages, KEY)


def test_a_sequence_grows_by_a_page_when_the_last_is_full() -> None:
    pool = pages()
    assert pool.grow(7, 0, 3) == []
    assert pool.table(7) == (1,)
    assert pool.cost(7, 3, 4) == 0
    assert pool.grow(7, 3, 4) == []
    assert pool.cost(7, 4, 9) == 2
    assert pool.grow(7, 4, 9) == []
    assert pool.table(7) == (1, 2, 3)
    assert (pool.num_free, pool.num_used) == (6, 3)


def test_a_shared_tail_page_is_copied_by_whoever_writes_it_and_full_pages_never() -> None:
    pool = pages()
    pool.grow(0, 0, 6)  # pages 1 and 2, the second half full
    pool.share(1, 0, 6)
    pool.share(2, 0, 6)
    assert [pool.uses(page) for page in (1, 2)] == [3, 3]
    assert pool.cost(1, 6, 7) == 1
    assert pool.grow(1, 6, 7) == [(2, 3)]
    assert pool.table(1) == (1, 3)
    pool.release(0)
    # Nobody else has page 2 now, so it is written where it lies.
    assert pool.grow(2, 6, 8) == []
    assert pool.table(2) == (1, 2)
    assert pool.release(1) == 1
    assert pool.release(2) == 2
    assert pool.num_used == 0


def test_a_prompt_that_fills_its_pages_is_shared_without_a_copy() -> None:
    pool = pages()
    pool.grow(0, 0, 8)
    pool.share(1, 0, 8)
    assert pool.grow(1, 8, 9) == []
    assert pool.table(1) == (1, 2, 3)


def test_only_the_pages_of_the_shared_part_are_shared() -> None:
    pool = pages()
    pool.grow(0, 0, 12)
    pool.share(1, 0, 5)
    assert pool.table(1) == (1, 2)
    with pytest.raises(AssertionError, match="no 13 tokens"):
        pool.share(2, 0, 13)
    with pytest.raises(AssertionError, match="holds pages already"):
        pool.share(1, 0, 4)


def test_too_few_free_pages_change_nothing() -> None:
    pool = pages(4)
    pool.grow(0, 0, 8)
    with pytest.raises(AssertionError, match="more pages than are free"):
        pool.grow(0, 8, 17)
    assert (pool.table(0), pool.num_free) == ((1, 2), 1)


def test_a_gap_cannot_be_written() -> None:
    pool = pages()
    with pytest.raises(AssertionError, match="from token 4"):
        pool.grow(0, 4, 5)


@pytest.mark.parametrize(
    "other",
    [PoolKey(4, "ab", 4, "float32"), PoolKey(3, "cd", 4, "float32"), PoolKey(3, "ab", 4, "bfloat16"), PoolKey(3, "ab", 8, "float32")],
)
def test_another_version_page_size_or_type_finds_an_empty_pool(other: PoolKey) -> None:
    pool = pages()
    pool.grow(0, 0, 9)
    assert not pool.turn_to(KEY)
    assert pool.table(0) == (1, 2, 3)
    assert pool.turn_to(other)
    assert (pool.key, list(pool.holders()), pool.num_free) == (other, [], 9)


class Accounting(RuleBasedStateMachine):
    """Random use beside a model of it: what each holder wrote where, as a dictionary from page to its writer."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pages(13)
        self.lengths: dict[int, int] = {}
        self.contents: dict[int, list[object]] = {}
        """What is in each page, as far as anybody may read it."""
        self.sequences: dict[int, list[object]] = {}
        self.number = 0

    @rule(holder=st.integers(0, 5), num_tokens=st.integers(1, 9))
    def write(self, holder: int, num_tokens: int) -> None:
        start = self.lengths.get(holder, 0)
        cost = self.pool.cost(holder, start, start + num_tokens)
        if cost > self.pool.num_free:
            return
        free = self.pool.num_free
        for source, target in self.pool.grow(holder, start, start + num_tokens):
            self.contents[target] = list(self.contents[source])
        assert free - self.pool.num_free == cost
        self.lengths[holder] = start + num_tokens
        for place in range(start, start + num_tokens):
            page = self.pool.table(holder)[place // 4]
            assert self.pool.uses(page) == 1  # one writer
            self.number += 1
            cells = self.contents.setdefault(page, [None] * 4)
            cells[place % 4] = self.number
            self.sequences.setdefault(holder, []).append(self.number)

    @rule(holder=st.integers(0, 5), other=st.integers(0, 5), data=st.data())
    def share(self, holder: int, other: int, data: st.DataObject) -> None:
        if holder in self.lengths or not self.lengths.get(other):
            return
        num_tokens = data.draw(st.integers(1, self.lengths[other]))
        self.pool.share(holder, other, num_tokens)
        self.lengths[holder] = num_tokens
        self.sequences[holder] = self.sequences[other][:num_tokens]

    @rule(holder=st.integers(0, 5))
    def release(self, holder: int) -> None:
        self.pool.release(holder)
        self.lengths.pop(holder, None)
        self.sequences.pop(holder, None)

    @precondition(lambda self: self.pool.num_used > 6)
    @rule(version=st.integers(4, 9))
    def update(self, version: int) -> None:
        cleared = self.pool.turn_to(PoolKey(version, "ab", 4, "float32"))
        if cleared:
            self.lengths, self.sequences = {}, {}

    @invariant()
    def uses_sum_to_tables_and_nothing_is_lost(self) -> None:
        held = Counter(page for holder in self.pool.holders() for page in self.pool.table(holder))
        assert SCRAP not in held
        assert all(self.pool.uses(page) == held.get(page, 0) for page in range(1, 13))
        assert self.pool.num_used == len(held)
        assert self.pool.num_used + self.pool.num_free == 12

    @invariant()
    def everybody_reads_what_it_wrote_or_was_given(self) -> None:
        for holder, wanted in self.sequences.items():
            table = self.pool.table(holder)
            assert len(set(table)) == len(table) == -(-len(wanted) // 4)
            assert [self.contents[table[place // 4]][place % 4] for place in range(len(wanted))] == wanted


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 200), st.integers(1, 64))
def test_pages_for_tokens_is_the_rounded_up_quotient(num_tokens: int, size: int) -> None:
    pool = Pages(4, PoolKey(0, "", size, "float32"))
    num = pool.pages_for(num_tokens)
    assert (num - 1) * size < num_tokens <= num * size
