"""Builds the index of a corpus of any size: bounded memory, two passes, goes on where it was stopped.

The first pass reads the corpus once, shard by shard; a shard appears under its name when it is whole. The second scores
every shard by the document frequencies and the mean length of all. index.json is written last and names what every byte
must be, so two hosts can tell that they search the same index.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from environments.search.shard import K1, About, B, ShardWriter, document_frequencies, drop_counts, read_about, score_shard
from environments.search.source import fingerprint, open_stream, read_lines
from stoa.contracts.errors import ConfigError, FormatError

FORMAT: Final = 1
DOCUMENTS_A_SHARD: Final = 131_072
"""A shard of abstracts takes about 1 GB of memory while it is counted."""
MOST_SKIPPED_FRACTION: Final = 0.001
ABOUT: Final = "index.json"
_SOURCE: Final = "source.json"
Progress: TypeAlias = Callable[[str, float | None, int], None]
"""Called with the pass (counting, merging, scoring), the fraction of it that is done (None: not known, which is so while
a compressed corpus is counted) and the number of documents counted so far."""


@dataclass(frozen=True, slots=True)
class IndexAbout:
    """index.json. `index_id` follows from the bytes of all shards."""

    format: int
    index_id: str
    num_documents: int
    num_shards: int
    num_skipped: int
    mean_length: float
    k1: float
    b: float
    source: str


def build_index(
    corpus: Path, folder: Path, *, documents_a_shard: int = DOCUMENTS_A_SHARD, progress: Progress = lambda stage, done, count: None
) -> IndexAbout:
    """Index a corpus into a folder, or finish what is there of it; what is complete is left as it is.

    Raises ConfigError if the folder is another corpus's, or too many lines of the corpus are no documents.
    """
    open_stream(corpus).close()
    source: dict[str, object] = {"fingerprint": fingerprint(corpus), "documents_a_shard": documents_a_shard}
    _claim(folder, source)
    if (folder / ABOUT).is_file():
        return read_index_about(folder)
    abouts = _count(corpus, folder, documents_a_shard, progress)
    num_documents = sum(about.num_documents for about in abouts)
    num_skipped = sum(about.num_skipped for about in abouts)
    if num_documents == 0 or num_skipped > MOST_SKIPPED_FRACTION * num_documents + 1:
        raise ConfigError(
            f"{corpus}: {num_skipped} lines are no documents and {num_documents} are",
            hint='each line must be {"id": ..., "contents": ...}',
        )
    mean_length = sum(about.num_terms for about in abouts) / num_documents
    shards = [shard_folder(folder, number) for number in range(len(abouts))]
    if not all(about.scored for about in abouts):
        keys, frequencies = _merge(shards, lambda done: progress("merging", done, num_documents))
        for number, (shard, about) in enumerate(zip(shards, abouts, strict=True)):
            if not about.scored:
                score_shard(shard, keys, frequencies, num_documents, mean_length)
            progress("scoring", (number + 1) / len(shards), num_documents)
    digests = [sorted(read_about(shard).digests.items()) for shard in shards]
    index_id = hashlib.sha256(json.dumps([FORMAT, K1, B, digests]).encode()).hexdigest()[:32]
    about = IndexAbout(FORMAT, index_id, num_documents, len(shards), num_skipped, mean_length, K1, B, str(source["fingerprint"]))
    _write(folder / ABOUT, asdict(about))
    for shard in shards:
        drop_counts(shard)
    return about


def read_index_about(folder: Path) -> IndexAbout:
    """index.json of a complete index. Raises FormatError if there is none, or one of another format."""
    try:
        about = IndexAbout(**json.loads((folder / ABOUT).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        why = f"there is no {ABOUT}" if isinstance(error, FileNotFoundError) else str(error)
        raise FormatError(f"{folder}: no complete index: {why}", hint="build it: stoa search index CORPUS FOLDER") from error
    if about.format != FORMAT:
        raise FormatError(f"{folder}: an index of format {about.format}", hint=f"this build reads format {FORMAT}; build it again")
    return about


def shard_folder(folder: Path, number: int) -> Path:
    """Where a shard of an index is."""
    return folder / f"shard-{number:05d}"


def _claim(folder: Path, source: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _SOURCE
    if not path.is_file():
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} holds something else", hint="give an empty folder")
        _write(path, source)
    elif json.loads(path.read_text("utf-8")) != source:
        raise ConfigError(
            f"{folder}: begun for another corpus, or with another shard size",
            hint="give an empty folder, or the same corpus and shard size",
        )


def _count(corpus: Path, folder: Path, documents_a_shard: int, progress: Progress) -> list[About]:
    """The first pass: every shard that is not there yet. Returns what all hold."""
    abouts: list[About] = []
    while shard_folder(folder, len(abouts)).is_dir():
        abouts.append(read_about(shard_folder(folder, len(abouts))))
    whole = folder / "counted"
    if whole.is_file():
        return abouts
    partial = folder / "shard.part"
    shutil.rmtree(partial, ignore_errors=True)
    begin = end = abouts[-1].end if abouts else 0
    first = abouts[-1].first + abouts[-1].num_documents if abouts else 0
    size = corpus.stat().st_size
    compressed = corpus.suffix != ".jsonl"
    writer, num_skipped = ShardWriter(partial), 0

    def finish() -> About:
        writer.close(first=first, num_skipped=num_skipped, begin=begin, end=end)
        partial.replace(shard_folder(folder, len(abouts)))
        return read_about(shard_folder(folder, len(abouts)))

    for line in read_lines(corpus, begin):
        end = line.end
        if line.document is None:
            num_skipped += 1
            continue
        writer.add(line.document)
        if len(writer) % 4096 == 0:
            progress("counting", None if compressed else min(end / size, 1.0), first + len(writer))
        if len(writer) >= documents_a_shard:
            abouts.append(finish())
            begin, first, num_skipped = end, first + abouts[-1].num_documents, 0
            writer = ShardWriter(partial)
    if len(writer) or num_skipped:
        abouts.append(finish())
    else:
        shutil.rmtree(partial)
    whole.touch()
    progress("counting", 1.0, sum(about.num_documents for about in abouts))
    return abouts


def _merge(shards: list[Path], progress: Callable[[float], None]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Keys and document frequencies over all shards; merged like the digits of a binary counter, so few are held at once."""
    held: list[tuple[int, NDArray[np.uint64], NDArray[np.int64]]] = []
    for number, shard in enumerate(shards):
        held.append((1, *document_frequencies(shard)))
        last = number == len(shards) - 1
        while len(held) > 1 and (last or held[-1][0] == held[-2][0]):
            (size, keys, counts), (other, more_keys, more_counts) = held.pop(), held.pop()
            held.append((size + other, *_summed(np.concatenate((keys, more_keys)), np.concatenate((counts, more_counts)))))
        progress((number + 1) / len(shards))
    _, keys, frequencies = held[0]
    return keys, frequencies


def _summed(keys: NDArray[np.uint64], counts: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else np.zeros(0, np.int64)
    return keys[begins], np.add.reduceat(counts[order], begins) if len(keys) else counts


def _write(path: Path, fields: dict[str, object]) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    partial.replace(path)
