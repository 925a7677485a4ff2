"""Who holds which page of the key/value pool: tables of page ids, reference counts, copies on write.

Pure Python integers; the arrays are `cache.py`'s. A page holds `page_tokens` consecutive tokens of one sequence in all
attention layers at once. Sequences that begin alike share pages; a page is written by one sequence only, and one that
is shared is copied before it is written. Page 0 is nobody's: tables are filled up with it, and what is only there to
make a shape is written to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SCRAP: Final = 0
"""The page that belongs to nobody."""


@dataclass(frozen=True, slots=True)
class PoolKey:
    """What the contents of a pool depend on; contents of another key are never read."""

    version: int
    state_id: str
    page_tokens: int
    dtype: str


class Pages:
    """The accounting of one pool. Holders are integers."""

    def __init__(self, num_pages: int, key: PoolKey) -> None:
        """`num_pages` counts the scrap page."""
        if num_pages < 2:
            raise AssertionError(f"a pool of {num_pages} pages has none to give")
        self.num_pages, self.key = num_pages, key
        self._free = list(range(num_pages - 1, SCRAP, -1))  # the lowest page is given out first
        self._uses = [0] * num_pages
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds; a shared one counts once."""
        return self.num_pages - 1 - len(self._free)

    def holders(self) -> Iterable[int]:
        """Everybody with a table."""
        return self._tables.keys()

    def table(self, holder: int) -> tuple[int, ...]:
        """The pages of a holder, in the order of its tokens; none for one that holds nothing."""
        return tuple(self._tables.get(holder, ()))

    def uses(self, page: int) -> int:
        """How many tables a page is in."""
        return self._uses[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-num_tokens // self.key.page_tokens)

    def share(self, holder: int, other: int, num_tokens: int) -> None:
        """Give `holder`, which holds nothing yet, the first `num_tokens` tokens of `other`, without a copy."""
        if self._tables.get(holder):
            raise AssertionError(f"sequence {holder} holds pages already")
        pages = self._tables[other][: self.pages_for(num_tokens)]
        if len(pages) < self.pages_for(num_tokens):
            raise AssertionError(f"sequence {other} has no {num_tokens} tokens to share")
        for page in pages:
            self._uses[page] += 1
        self._tables[holder] = list(pages)

    def cost(self, holder: int, start: int, end: int) -> int:
        """Free pages it takes before `holder` may write tokens [start, end)."""
        if end <= start:
            return 0
        held = self._tables.get(holder, [])
        first, past = start // self.key.page_tokens, self.pages_for(end)
        if first > len(held):
            raise AssertionError(f"sequence {holder} has {len(held)} pages and would write from token {start}")
        return past - first - sum(self._uses[page] == 1 for page in held[first:past])

    def grow(self, holder: int, start: int, end: int) -> list[tuple[int, int]]:
        """Let `holder` write tokens [start, end): new pages, and copies of shared ones as (from, to).

        Needs `cost` free pages; with fewer it raises and changes nothing.
        """
        if self.cost(holder, start, end) > len(self._free):
            raise AssertionError(f"sequence {holder} needs more pages than are free")
        held = self._tables.setdefault(holder, [])
        copies: list[tuple[int, int]] = []
        for index in range(start // self.key.page_tokens, self.pages_for(end)):
            if index == len(held):
                held.append(self._take())
            elif self._uses[held[index]] > 1:
                self._uses[held[index]] -= 1
                copies.append((held[index], self._take()))
                held[index] = copies[-1][1]
        return copies

    def release(self, holder: int) -> int:
        """Take everything from `holder`; returns how many pages became free."""
        before = len(self._free)
        for page in reversed(self._tables.pop(holder, [])):
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)
        return len(self._free) - before

    def turn_to(self, key: PoolKey) -> bool:
        """Serve contents of `key` from now on; if they were of another, everything is let go of. True if it was."""
        if key == self.key:
            return False
        for holder in list(self._tables):
            self.release(holder)
        self.key = key
        return True

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page
