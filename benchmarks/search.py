"""Searching a large corpus of papers: `python -m benchmarks.search [--documents N] [--json]`.

An invented corpus is written, indexed in a process of its own whose memory is watched, and asked for planted papers by
questions about them, one search at a time on one core and then through the search server. Before that, shards of 50,000
papers are held against one index that bm25s makes of them. The figures for 16 million abstracts (23 GB) are these ones in
proportion to bytes; their vocabulary and their disk are not ours.
"""

import argparse
import json
import logging
import multiprocessing
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from environments.papersearchqa.invented import paper, write_corpus
from environments.search.building import IndexAbout, build_index
from environments.search.paper_index import PaperIndex
from environments.search.retrieval import LocalRetriever, SearchClient
from environments.search.serve import SearchServer
from environments.search.source import read_lines
from environments.search.terms import query_terms, terms_of

NUM_DOCUMENTS = 200_000
NUM_QUESTIONS = 400
EQUALITY_DOCUMENTS, EQUALITY_SHARD, EQUALITY_QUERIES = 50_000, 7_000, 100
TOP_K = 3
CLIENTS = 4
REAL_DOCUMENTS, REAL_BYTES = 16_000_000, 23e9
SEED = 7


@dataclass(frozen=True, slots=True)
class Built:
    """One build: seconds by pass, CPU seconds of its one thread, and the most memory its process held."""

    about: IndexAbout
    seconds: float
    cpu_seconds: float
    seconds_by_pass: dict[str, float]
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Planted:
    """A question whose paper is known."""

    question: str
    source: str


def planted(num_documents: int, count: int) -> list[Planted]:
    """Questions about papers spread over the corpus, in all three wordings."""
    draw = random.Random(SEED)
    found: list[Planted] = []
    for number in draw.sample(range(num_documents), count):
        one = paper(SEED, number, num_documents)
        found.append(Planted(draw.choice(draw.choice(one.facts).wordings), one.document.id))
    return found


def _build(corpus: Path, folder: Path, sender: "multiprocessing.connection.Connection") -> None:  # pyright: ignore
    began = last = time.perf_counter()
    spent: dict[str, float] = {}

    def progress(stage: str, done: float | None, count: int) -> None:
        nonlocal last
        now = time.perf_counter()
        spent[stage] = spent.get(stage, 0.0) + now - last
        last = now
        sys.stderr.write(f"\r{stage} {count:,} {'' if done is None else f'{100 * done:.0f} %'}   ")

    about = build_index(corpus, folder, progress=progress)
    seconds = time.perf_counter() - began
    sys.stderr.write("\n")
    sender.send(Built(about, seconds, time.process_time(), spent, peak_rss_bytes()))


def peak_rss_bytes() -> int:
    """The most memory this process has held."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss of a started process counts the one that started it; the kernel's other figure does not.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def build(corpus: Path, folder: Path) -> Built:
    """Build in a fresh process, so that its memory is its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_build, args=(corpus, folder, sender))
    process.start()
    sender.close()
    built: Built = receiver.recv()
    process.join()
    return built


def equality(folder: Path, num_documents: int = EQUALITY_DOCUMENTS, shard: int = EQUALITY_SHARD) -> dict[str, object]:
    """Shards of one corpus against one index that bm25s makes of all of it: the same papers, the same scores."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    corpus = folder / "equality.jsonl"
    write_corpus(corpus, SEED, num_documents)
    about = build_index(corpus, folder / "equality", documents_a_shard=shard)
    reference = bm25s.BM25(method="lucene", k1=about.k1, b=about.b, backend="numpy", csc_backend="numpy")
    reference.index([terms_of(line.document.contents) for line in read_lines(corpus) if line.document], show_progress=False)
    index, differences, same = PaperIndex(folder / "equality"), [0.0], 0
    for one in planted(num_documents, EQUALITY_QUERIES):
        scores = reference.get_scores(query_terms(one.question))
        hits = index.search(one.question, TOP_K)
        best = np.lexsort((np.arange(len(scores)), -np.round(scores.astype(np.float64), 4)))[:TOP_K]
        same += [hit.number for hit in hits] == best.tolist()
        differences += [abs(hit.score - float(scores[hit.number])) for hit in hits]
    return {
        "merged_documents": num_documents,
        "merged_shards": about.num_shards,
        "merged_results_equal_one_index": same / EQUALITY_QUERIES,
        "merged_largest_score_difference": max(differences),
    }


def ask(index: PaperIndex, questions: Sequence[Planted]) -> tuple[float, list[float]]:
    """recall_at_3 of the planted papers, and seconds of each search with the texts of what it found."""
    found, seconds = 0, []
    for one in questions:
        began = time.perf_counter()
        documents = [index.document(hit.number) for hit in index.search(one.question, TOP_K)]
        seconds.append(time.perf_counter() - began)
        found += one.source in [document.id for document in documents]
    return found / len(questions), seconds


def ask_server(folder: Path, questions: Sequence[Planted]) -> float:
    """Queries a second through the server, CLIENTS at a time, none of them asked before."""
    with SearchServer(("127.0.0.1", 0), LocalRetriever(folder), seconds=60.0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        client = SearchClient(f"http://127.0.0.1:{server.server_address[1]}", seconds=60.0)
        began = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda one: client.search(one.question, TOP_K), questions))
        seconds = time.perf_counter() - began
        server.shutdown()
        thread.join()
    return len(questions) / seconds


def measure(num_documents: int, folder: Path, compared: dict[str, object]) -> dict[str, object]:
    """Everything the benchmark says, with what the comparison of merged shards gave."""
    corpus, index_folder = folder / "corpus.jsonl", folder / "index"
    began = time.perf_counter()
    write_corpus(corpus, SEED, num_documents)
    writing_seconds = time.perf_counter() - began
    built = build(corpus, index_folder)
    corpus_bytes = corpus.stat().st_size
    index_bytes = sum(path.stat().st_size for path in index_folder.rglob("*") if path.is_file())
    began = time.perf_counter()
    index = PaperIndex(index_folder)
    open_seconds = time.perf_counter() - began
    questions = planted(num_documents, 2 * NUM_QUESTIONS)
    cpu = time.thread_time()
    recall, seconds = ask(index, questions[:NUM_QUESTIONS])
    cpu = time.thread_time() - cpu
    served = ask_server(index_folder, questions[NUM_QUESTIONS:])
    larger = REAL_BYTES / corpus_bytes
    per_second = len(seconds) / sum(seconds)
    return {
        "num_documents": num_documents,
        "corpus_bytes": corpus_bytes,
        "mean_terms_a_document": built.about.mean_length,
        "write_corpus_seconds": writing_seconds,
        "build_seconds": built.seconds,
        "build_cpu_seconds": built.cpu_seconds,
        "build_seconds_by_pass": built.seconds_by_pass,
        "build_docs_per_second": num_documents / built.seconds,
        "peak_rss_bytes": built.peak_rss_bytes,
        "num_shards": built.about.num_shards,
        "index_bytes": index_bytes,
        "open_seconds": open_seconds,
        "num_questions": NUM_QUESTIONS,
        "recall_at_3": recall,
        "queries_per_second": per_second,
        "queries_per_cpu_second": NUM_QUESTIONS / cpu,
        "query_seconds_median": statistics.median(seconds),
        "query_seconds_p99": sorted(seconds)[int(0.99 * len(seconds))],
        "server_queries_per_second": served,
        "server_clients": CLIENTS,
        **compared,
        "extrapolated_to": {
            "num_documents": REAL_DOCUMENTS,
            "corpus_bytes": REAL_BYTES,
            "build_hours": built.seconds * larger / 3600,
            "build_cpu_hours": built.cpu_seconds * larger / 3600,
            "index_bytes": index_bytes * larger,
            "queries_per_second": per_second / (REAL_DOCUMENTS / num_documents),
            "queries_per_cpu_second": NUM_QUESTIONS / cpu / (REAL_DOCUMENTS / num_documents),
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=NUM_DOCUMENTS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoa-search-") as folder:
        found = measure(asked.documents, Path(folder), equality(Path(folder)))
    print(json.dumps(found) if asked.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
