"""One shard of an index of papers: its files, how they are made in two passes, how they are searched.

A shard folder holds, all little endian:

    keys.npy                uint64 [W]    hash of each term, ascending (`terms.term_keys`)
    indptr.csc.index.npy    int64 [W+1]   where a term's postings begin and end
    indices.csc.index.npy   int32 [P]     documents of the postings, ascending within a term
    data.csc.index.npy      float32 [P]   BM25 score of each posting
    params.index.json       what bm25s needs to open the three files above
    texts.zst               zstd frames of BLOCK documents, each a JSON list of [id, contents]
    blocks.npy              int64 [B+1]   where each frame begins
    lengths.npy             int32 [N]     terms of each document           } from the first pass until
    frequencies.npy         uint16 [P]    how often a document has a term  } the index is complete
    shard.json              what the shard holds, written last

The first pass counts; the second scores, when document frequencies and the mean length of the whole corpus are known. The
middle three are bm25s's own format. Searching maps files into memory and reads only the pages of a query's terms.

Legend: N documents, W terms, P postings, B blocks.
"""

import json
from array import array
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import Final

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from environments.search.source import Document
from environments.search.terms import term_keys, terms_of
from stoa.contracts.errors import FormatError

K1: Final = 0.9
B: Final = 0.4
"""Of Lucene as Anserini and pyserini run it, which the task's own retriever is."""
BLOCK: Final = 16
_CHUNK: Final = 1 << 22
_ROUNDING: Final = 1.0 + 1e-5
"""What a float32 sum of stored scores can be above the sum of their bounds, with room to spare."""
_WORTH: Final = 2
"""Looking documents up pays where the weak terms have so many times the postings of the strong ones."""
_NUMPY: Final = {"dtype": "float32", "int_dtype": "int32", "backend": "numpy"}
_ANEW: Final = "delete this shard's folder and build the index again"
_PARAMS: Final = {"k1": K1, "b": B, "delta": 0.5, "method": "lucene", "idf_method": "lucene", **_NUMPY}
SCORES, DOCUMENTS, STARTS = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
_KEYS, _TEXTS, _BLOCKS, _ABOUT = "keys.npy", "texts.zst", "blocks.npy", "shard.json"
_LENGTHS, _FREQUENCIES = "lengths.npy", "frequencies.npy"
_LASTING = (_KEYS, STARTS, DOCUMENTS, SCORES, _TEXTS, _BLOCKS)


class _Numbers(dict[str, int]):
    """Terms by number in the order they are first asked for."""

    def __missing__(self, term: str) -> int:
        number = self[term] = len(self)
        return number


@dataclass(frozen=True, slots=True)
class About:
    """shard.json: documents [first, first + num_documents), read from bytes [begin, end) of the corpus."""

    first: int
    num_documents: int
    num_terms: int
    num_skipped: int
    begin: int
    end: int
    scored: bool
    digests: dict[str, str]
    """xxh3-128 of each lasting file; empty until scored."""


class ShardWriter:
    """The first pass over one shard: documents in, counts and texts out."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._numbers = _Numbers()
        self._terms = array("i")
        self._lengths = array("i")
        self._waiting: list[tuple[str, str]] = []
        self._texts = (folder / _TEXTS).open("wb")
        self._blocks = [0]
        self._compressor = zstandard.ZstdCompressor(level=3)

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, document: Document) -> None:
        """Count one document."""
        terms = terms_of(document.contents)
        self._terms.extend(map(self._numbers.__getitem__, terms))
        self._lengths.append(len(terms))
        self._waiting.append((document.id, document.contents))
        if len(self._waiting) == BLOCK:
            self._write_block()

    def close(self, *, first: int, num_skipped: int, begin: int, end: int) -> None:
        """Write everything, shard.json last."""
        if self._waiting:
            self._write_block()
        self._texts.close()
        keys = term_keys(list(self._numbers))
        order = np.argsort(keys, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        lengths = np.frombuffer(self._lengths, np.int32)
        pairs = rank[np.frombuffer(self._terms, np.int32)] << 32
        pairs |= np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        num_terms = len(self._terms)
        self._terms, self._numbers = array("i"), _Numbers()
        pairs.sort()
        begins = np.flatnonzero(np.concatenate(([True], pairs[1:] != pairs[:-1]))) if len(pairs) else np.zeros(0, np.int64)
        frequencies = np.diff(np.append(begins, len(pairs)))
        postings = pairs[begins]
        del pairs
        starts = np.searchsorted(postings, np.arange(len(keys) + 1, dtype=np.int64) << 32)
        _save(self._folder / _KEYS, keys[order], "<u8")
        _save(self._folder / STARTS, starts, "<i8")
        _save(self._folder / DOCUMENTS, postings & 0xFFFFFFFF, "<i4")
        _save(self._folder / _FREQUENCIES, np.minimum(frequencies, 65535), "<u2")
        _save(self._folder / _LENGTHS, lengths, "<i4")
        _save(self._folder / _BLOCKS, np.array(self._blocks), "<i8")
        _write_about(self._folder, About(first, len(lengths), num_terms, num_skipped, begin, end, scored=False, digests={}))

    def _write_block(self) -> None:
        frame = self._compressor.compress(json.dumps(self._waiting, ensure_ascii=False, separators=(",", ":")).encode())
        self._texts.write(frame)
        self._blocks.append(self._blocks[-1] + len(frame))
        self._waiting.clear()


def document_frequencies(folder: Path) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Keys of a counted shard's terms, uint64 [W], and in how many of its documents each stands, int64 [W]."""
    return np.load(folder / _KEYS), np.diff(np.load(folder / STARTS))


def inverse_frequency(frequencies: NDArray[np.int64], num_documents: int) -> NDArray[np.float64]:
    """Weight of terms that stand in so many of the documents: the first factor of `score_shard`, and more than any score."""
    return np.log1p((num_documents - frequencies + 0.5) / (frequencies + 0.5))


def score_shard(folder: Path, keys: NDArray[np.uint64], frequencies: NDArray[np.int64], num_documents: int, mean_length: float) -> None:
    """The second pass: BM25 of every posting by the numbers of the whole corpus.

    `keys` uint64 [V] ascending and `frequencies` int64 [V] are those of all terms. The form is Lucene's (Kamphuis et al.
    2020, "Which BM25 do you mean?", table 1): ln(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 (1 - b + b L / mean L)).
    """
    about = read_about(folder)
    starts = np.load(folder / STARTS)
    df = frequencies[np.searchsorted(keys, np.load(folder / _KEYS))]
    weight = inverse_frequency(df, num_documents)
    norm = K1 * (1 - B + B * np.load(folder / _LENGTHS).astype(np.float64) / mean_length)
    documents = np.load(folder / DOCUMENTS, mmap_mode="r")
    counts = np.load(folder / _FREQUENCIES, mmap_mode="r")
    partial = folder / "data.part.npy"
    scores = np.lib.format.open_memmap(partial, "w+", np.dtype("<f4"), documents.shape)
    term_of = np.repeat(np.arange(len(weight), dtype=np.int32), np.diff(starts))
    for begin in range(0, len(documents), _CHUNK):
        piece = slice(begin, begin + _CHUNK)
        tf = counts[piece].astype(np.float64)
        scores[piece] = weight[term_of[piece]] * tf / (tf + norm[documents[piece]])
    scores.flush()
    del scores
    partial.replace(folder / SCORES)
    (folder / "params.index.json").write_text(json.dumps({**_PARAMS, "num_docs": about.num_documents, "version": "0.3.16"}))
    digests = {name: _digest(folder / name) for name in _LASTING}
    _write_about(folder, replace(about, scored=True, digests=digests))


def drop_counts(folder: Path) -> None:
    """Delete what only the passes needed."""
    for name in (_LENGTHS, _FREQUENCIES):
        (folder / name).unlink(missing_ok=True)


def read_about(folder: Path) -> About:
    """shard.json of a finished shard. Raises FormatError if there is none that can be read."""
    try:
        return About(**json.loads((folder / _ABOUT).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise FormatError(f"{folder}: not a shard of an index: {error}", hint="build the index again; finished shards are kept") from error


def check_digests(folder: Path) -> None:
    """Raise FormatError for a file that is not as it was written."""
    for name, digest in read_about(folder).digests.items():
        try:
            is_sound = _digest(folder / name) == digest
        except OSError as error:
            raise FormatError(f"{folder / name} cannot be read: {error}", hint=_ANEW) from error
        if not is_sound:
            raise FormatError(f"{folder / name} is damaged", hint=_ANEW)


class Shard:
    """A scored shard, mapped into memory. Safe from several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises FormatError if files are missing or do not fit together."""
        about = read_about(folder)
        try:
            self._keys, self._starts, self._documents, self._scores = (
                np.load(folder / name, mmap_mode="r") for name in (_KEYS, STARTS, DOCUMENTS, SCORES)
            )
            self._blocks = np.load(folder / _BLOCKS)
            self._texts = np.memmap(folder / _TEXTS, np.uint8, "r")
        except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:
            raise FormatError(f"{folder}: {error}", hint="build the index again; finished shards are kept") from error
        self._folder = folder
        num_postings = int(self._starts[-1])
        fits = len(self._starts) == len(self._keys) + 1 and num_postings == len(self._documents) == len(self._scores)
        if not about.scored or not fits or int(self._blocks[-1]) != len(self._texts):
            raise FormatError(f"{folder}: its files do not fit together", hint="build the index again; finished shards are kept")
        self.first, self.num_documents = about.first, about.num_documents

    def places(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """int64 [n, 2]: where the postings of each term (by key) begin and end; (0, 0) for a term that is not here."""
        found = np.searchsorted(self._keys, keys)
        known = np.zeros(len(keys), np.bool_)
        inside = found < len(self._keys)
        known[inside] = self._keys[found[inside]] == keys[inside]
        places = np.zeros((len(keys), 2), np.int64)
        places[known, 0], places[known, 1] = self._starts[found[known]], self._starts[found[known] + 1]
        return places

    def best(self, places: NDArray[np.int64], most: NDArray[np.float64], floor: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Documents whose score is above `floor`, int64 [k] ascending, and their scores, float32 [k].

        A score is the sum over terms, added in the order of `places` (int64 [n, 2]). `most` float64 [n] bounds what a term can
        add. Terms that cannot reach the floor even together are looked up for the documents of the other terms only (the
        MaxScore rule of Turtle and Flood 1995); that changes no sum and no result. Raises FormatError for a damaged file.
        """
        try:
            return self._best(places, most, floor)
        except IndexError as error:
            raise FormatError(f"{self._folder}: a posting of a document that is not there", hint=_ANEW) from error

    def _best(self, places: NDArray[np.int64], most: NDArray[np.float64], floor: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        lengths = places[:, 1] - places[:, 0]
        order = np.argsort(most, kind="stable")
        weak = order[: int(np.searchsorted(np.cumsum(most[order]) * _ROUNDING, floor, side="right"))]
        strong = np.setdiff1d(order, weak)
        if int(lengths[weak].sum()) > _WORTH * int(lengths[strong].sum()):
            marked = np.zeros(self.num_documents, np.bool_)
            for begin, end in places[strong]:
                marked[self._documents[begin:end]] = True
            documents = np.flatnonzero(marked)
            scores = self._scores_of(documents, places)
        else:
            scores = self._all_scores(places)
            documents = np.arange(self.num_documents)
        above = np.flatnonzero(scores > np.float32(floor))
        return documents[above], scores[above]

    def _all_scores(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        total = np.zeros(self.num_documents, np.float32)
        for begin, end in places:
            # A document stands once in a term's postings, so this is a plain sum.
            total[self._documents[begin:end]] += self._scores[begin:end]
        return total

    def _scores_of(self, documents: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.float32]:
        total = np.zeros(len(documents), np.float32)
        wanted = documents.astype(np.int32)
        for begin, end in places[places[:, 1] > places[:, 0]]:
            postings = self._documents[begin:end]
            found = np.minimum(np.searchsorted(postings, wanted), end - begin - 1)
            there = postings[found] == wanted
            total[there] += self._scores[begin + found[there]]
        return total

    def document(self, number: int) -> Document:
        """The document of this number within the shard. Raises FormatError for a damaged file."""
        block = number // BLOCK
        frame = self._texts[int(self._blocks[block]) : int(self._blocks[block + 1])].tobytes()
        try:
            entries = json.loads(zstandard.ZstdDecompressor().decompress(frame, max_output_size=1 << 27))
            name, contents = entries[number % BLOCK]
        except (zstandard.ZstdError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise FormatError(f"{self._folder / _TEXTS} is damaged: {error}", hint=_ANEW) from error
        return Document(name, contents)


def _save(path: Path, values: NDArray[np.generic], kind: str) -> None:
    np.save(path, np.ascontiguousarray(values, np.dtype(kind)), allow_pickle=False)


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            state.update(piece)
    return state.hexdigest()


def _write_about(folder: Path, about: About) -> None:
    partial = folder / f"{_ABOUT}.part"
    partial.write_text(json.dumps(asdict(about), sort_keys=True))
    partial.replace(folder / _ABOUT)
