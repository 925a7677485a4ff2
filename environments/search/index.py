"""BM25 over abstracts, by whole words.

Equal scores are ordered by a hash of query and document, so a vague query finds arbitrary papers and always the same
ones. Results of a query are remembered; the index itself is built once.
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from functools import lru_cache

import bm25s
import numpy as np

# This library sets its own logger to DEBUG when it is imported.
logging.getLogger("bm25s").setLevel(logging.WARNING)

_WORD = re.compile(r"\w+")
_REMEMBERED_QUERIES = 65536


class SearchIndex:
    """An index of documents, numbered as given."""

    def __init__(self, documents: Sequence[str], top_k: int) -> None:
        self._num_documents = len(documents)
        self._top_k = top_k
        # The numpy back end keeps scores the same whether or not numba is installed.
        self._bm25 = bm25s.BM25(method="lucene", backend="numpy", csc_backend="numpy")
        self._bm25.index([words_of(document) for document in documents], show_progress=False)
        self.search = lru_cache(maxsize=_REMEMBERED_QUERIES)(self._search)

    def _search(self, query: str) -> tuple[int, ...]:
        """Numbers of at most top_k documents that share a word with the query, best first."""
        words = words_of(query)
        if not words:
            return ()
        # Rounded, because the last bits depend on the order in which the library numbers its words.
        scores = np.round(self._bm25.get_scores(words).astype(np.float64), 4)
        wanted = min(self._top_k, int((scores > 0).sum()))
        if wanted == 0:
            return ()
        floor = np.partition(scores, self._num_documents - wanted)[self._num_documents - wanted]
        candidates = np.flatnonzero(scores >= floor).tolist()
        key = " ".join(words)
        return tuple(sorted(candidates, key=lambda number: (-scores[number], _tie_break(key, number)))[:wanted])


def words_of(text: str) -> list[str]:
    """The lower-case words of a text, in order."""
    return _WORD.findall(text.lower())


def _tie_break(query: str, number: int) -> bytes:
    return hashlib.blake2b(f"{query}|{number}".encode(), digest_size=8).digest()
