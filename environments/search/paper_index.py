"""Searches an index of papers on disk: the best documents over all its shards, the same on every machine.

Scores are sums of stored float32 numbers in the order of the query's terms, and equal scores are ordered by document
number, so merged results are those of one large index.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from environments.search.building import read_index_about, shard_folder
from environments.search.shard import Shard, check_digests, inverse_frequency
from environments.search.source import Document
from environments.search.terms import query_terms, term_keys
from stoa.contracts.errors import InfrastructureFaultError


@dataclass(frozen=True, slots=True)
class Hit:
    """A found document by its number in the corpus, with its BM25 score."""

    number: int
    score: float


class PaperIndex:
    """An index folder, mapped into memory. Safe from several threads."""

    def __init__(self, folder: Path, *, verify: bool = False) -> None:
        """With `verify` every byte is checked first. Raises FormatError for a folder that is no sound, complete index."""
        self.about = read_index_about(folder)
        folders = [shard_folder(folder, number) for number in range(self.about.num_shards)]
        if verify:
            for one in folders:
                check_digests(one)
        self._shards = [Shard(one) for one in folders]
        self._firsts = np.array([shard.first for shard in self._shards], np.int64)

    def search(self, query: str, top_k: int, *, deadline: float = float("inf")) -> tuple[Hit, ...]:
        """At most `top_k` documents that share a telling word with the query, best first.

        Raises InfrastructureFaultError if `time.monotonic()` passes the deadline on the way.
        """
        keys = term_keys(query_terms(query))
        places = [shard.places(keys) for shard in self._shards]
        frequencies = sum((place[:, 1] - place[:, 0] for place in places), np.zeros(len(keys), np.int64))
        most = inverse_frequency(frequencies, self.about.num_documents)
        best: list[tuple[float, int]] = []
        for shard, place in zip(self._shards, places, strict=True):
            if time.monotonic() > deadline:
                raise InfrastructureFaultError("a search ran out of time", hint="give the server more time a request or fewer requests")
            # A later document with an equal score comes after, so only larger ones can displace what was found.
            found, scores = shard.best(place, most, best[-1][0] if len(best) == top_k else 0.0)
            if len(found) > top_k:
                kept = scores >= np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
                found, scores = found[kept], scores[kept]
            best += [(score, shard.first + number) for score, number in zip(scores.tolist(), found.tolist(), strict=True)]
            best = sorted(best, key=lambda pair: (-pair[0], pair[1]))[:top_k]
        return tuple(Hit(number, score) for score, number in best)

    def document(self, number: int) -> Document:
        """The document of this number in the corpus, [0, num_documents)."""
        if not 0 <= number < self.about.num_documents:
            raise IndexError(number)
        shard = self._shards[int(np.searchsorted(self._firsts, number, side="right")) - 1]
        return shard.document(number - shard.first)
