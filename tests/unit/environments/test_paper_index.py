"""The index of papers: equal to bm25s over one corpus, the same however it was cut, stopped and packed."""

import gzip
import json
import logging
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard

from environments.search.building import IndexAbout, build_index, read_index_about, shard_folder
from environments.search.paper_index import PaperIndex
from environments.search.retrieval import LocalRetriever
from environments.search.shard import Shard, inverse_frequency
from environments.search.source import read_lines
from environments.search.terms import cleaned_query, query_terms, term_keys, terms_of
from stoa.contracts.errors import ConfigError, FormatError, InfrastructureFaultError
from tests.unit.environments.papers import WORDS, texts, write_corpus

TEXTS = texts(700)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", TEXTS)


@pytest.fixture(scope="module")
def built(corpus: Path) -> tuple[Path, IndexAbout]:
    folder = corpus.parent / "index"
    return folder, build_index(corpus, folder, documents_a_shard=150)


def test_merged_shards_find_and_score_as_one_index_of_bm25s(built: tuple[Path, IndexAbout]) -> None:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    reference = bm25s.BM25(method="lucene", k1=0.9, b=0.4, backend="numpy", csc_backend="numpy")
    reference.index([terms_of(text) for text in TEXTS], show_progress=False)
    index, draw = PaperIndex(built[0], verify=True), random.Random(1)
    assert (built[1].num_shards, built[1].num_documents) == (5, 700)
    for _ in range(60):
        query = " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))
        scores = reference.get_scores(query_terms(query))
        hits = index.search(query, 10)
        best = np.sort(scores[scores > 0])[::-1][:10]
        assert [hit.score for hit in hits] == pytest.approx(best.tolist(), abs=2e-6)
        assert all(hit.score == pytest.approx(float(scores[hit.number]), abs=2e-6) for hit in hits)


def test_result_does_not_depend_on_how_the_corpus_was_cut(corpus: Path, built: tuple[Path, IndexAbout], tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "whole", documents_a_shard=10_000)
    cut, whole = PaperIndex(built[0]), PaperIndex(tmp_path / "whole")
    for query in ("w1 w2", "w0", "w399 w17 w5", "w1 w1 w1", "nothing here", ""):
        assert cut.search(query, 7) == whole.search(query, 7)
    # Equal texts score equally; the earlier document comes first.
    assert whole.search("", 3) == ()


def test_leaving_weak_terms_aside_changes_no_result(built: tuple[Path, IndexAbout], corpus: Path, tmp_path: Path) -> None:
    build_index(corpus, tmp_path / "small", documents_a_shard=40)
    build_index(corpus, tmp_path / "whole", documents_a_shard=10_000)
    small, whole, draw = PaperIndex(tmp_path / "small"), PaperIndex(tmp_path / "whole"), random.Random(5)
    one = Shard(shard_folder(built[0], 1))
    for _ in range(60):
        # A few rare words among the most frequent ones, so that most terms are weak once something was found.
        words = list(dict.fromkeys([*draw.choices(WORDS[:6], k=3), *draw.choices(WORDS[60:], k=2)]))
        assert small.search(" ".join(words), 3) == whole.search(" ".join(words), 3)
        places = one.places(term_keys(words))
        # Looser bounds than the corpus's are bounds too.
        most = inverse_frequency(np.maximum(places[:, 1] - places[:, 0], 1), 700)
        documents, scores = one.best(places, most, 0.0)
        for floor in np.quantile(scores, [0.1, 0.5, 0.9, 0.99]).tolist() if len(scores) else ():
            above = scores > np.float32(floor)
            found = one.best(places, most, floor)
            assert (found[0].tolist(), found[1].tolist()) == (documents[above].tolist(), scores[above].tolist())


def test_bm25s_itself_opens_a_shard(built: tuple[Path, IndexAbout]) -> None:
    import bm25s

    folder = shard_folder(built[0], 2)
    opened = bm25s.BM25.load(folder, load_vocab=False, mmap=True, show_progress=False)
    keys = np.load(folder / "keys.npy")
    ids = [int(np.searchsorted(keys, key)) for key in term_keys(["w1", "w5"])]
    scores = opened.get_scores_from_ids(ids)
    ours = {hit.number: hit.score for hit in PaperIndex(built[0]).search("w1 w5", 100)}
    best = int(np.argmax(scores))
    assert ours[300 + best] == float(scores[best])


def test_documents_come_back_as_they_were(built: tuple[Path, IndexAbout]) -> None:
    index = PaperIndex(built[0])
    for number in (0, 15, 16, 149, 150, 699):
        document = index.document(number)
        assert (document.id, document.contents) == (f"p{number}", TEXTS[number])
    with pytest.raises(IndexError):
        index.document(700)


class StoppedError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("stop", [("merging", 0), ("scoring", 2), ("scoring", 4)])
def test_build_goes_on_where_it_was_stopped(corpus: Path, built: tuple[Path, IndexAbout], tmp_path: Path, stop: tuple[str, int]) -> None:
    seen: list[str] = []

    def progress(stage: str, done: float | None, count: int) -> None:
        seen.append(stage)
        if (stage, seen.count(stage)) == (stop[0], stop[1] + 1):
            raise StoppedError

    with pytest.raises(StoppedError):
        build_index(corpus, tmp_path / "index", documents_a_shard=150, progress=progress)
    with pytest.raises(FormatError, match="no complete index"):
        PaperIndex(tmp_path / "index")
    kept = (shard_folder(tmp_path / "index", 1) / "keys.npy").stat().st_mtime_ns
    about = build_index(corpus, tmp_path / "index", documents_a_shard=150)
    assert about == built[1]
    assert (shard_folder(tmp_path / "index", 1) / "keys.npy").stat().st_mtime_ns == kept


def test_build_stopped_while_reading_reads_only_what_is_left(corpus: Path, built: tuple[Path, IndexAbout], tmp_path: Path) -> None:
    folder = tmp_path / "index"
    shutil.copytree(built[0], folder)
    (folder / "index.json").unlink()
    (folder / "counted").unlink()
    for number in (3, 4):
        shutil.rmtree(shard_folder(folder, number))
    (folder / "shard.part").mkdir()
    for number in range(3):
        # A killed first pass leaves counts and no scores.
        about = json.loads((shard_folder(folder, number) / "shard.json").read_text())
        (shard_folder(folder, number) / "shard.json").write_text(json.dumps({**about, "scored": True}))
    starts = [line.end for line in read_lines(corpus, about["end"])]
    assert len(starts) == 250
    assert build_index(corpus, folder, documents_a_shard=150) == built[1]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_corpus_gives_the_same_index(corpus: Path, built: tuple[Path, IndexAbout], tmp_path: Path, ending: str) -> None:
    packed = tmp_path / f"corpus.jsonl{ending}"
    content = corpus.read_bytes()
    packed.write_bytes(gzip.compress(content) if ending == ".gz" else zstandard.compress(content))
    assert build_index(packed, tmp_path / "index", documents_a_shard=150).index_id == built[1].index_id
    lines = list(read_lines(packed))
    assert [line.document for line in read_lines(packed, lines[99].end)] == [line.document for line in lines[100:]]


def test_lines_that_are_no_documents_are_counted_and_many_are_refused(tmp_path: Path) -> None:
    good = [json.dumps({"id": 7, "contents": f"liver w{number}"}) for number in range(50)]
    bad = ["{", "[]", '{"id": "x"}', '{"id": "x", "contents": 3}', '{"id": "x", "contents": " "}', "null"]
    (tmp_path / "few.jsonl").write_text("\n".join([good[0], bad[0], "", *good[1:]]))
    about = build_index(tmp_path / "few.jsonl", tmp_path / "few")
    assert (about.num_documents, about.num_skipped) == (50, 1)
    assert PaperIndex(tmp_path / "few").document(0).id == "7"
    (tmp_path / "many.jsonl").write_text("\n".join([*good, *bad]))
    with pytest.raises(ConfigError, match="6 lines are no documents"):
        build_index(tmp_path / "many.jsonl", tmp_path / "many")
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ConfigError, match="0 are"):
        build_index(tmp_path / "none.jsonl", tmp_path / "none")


def test_folder_of_another_corpus_is_refused(built: tuple[Path, IndexAbout], tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other.jsonl", TEXTS[:10])
    with pytest.raises(ConfigError, match="another corpus"):
        build_index(other, built[0], documents_a_shard=150)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="something else"):
        build_index(other, tmp_path / "full")
    with pytest.raises(ConfigError, match="no such file"):
        build_index(tmp_path / "missing.jsonl", tmp_path / "index")


@pytest.mark.parametrize("name", ["data.csc.index.npy", "texts.zst", "keys.npy", "shard.json"])
def test_damaged_index_is_refused(built: tuple[Path, IndexAbout], tmp_path: Path, name: str) -> None:
    folder = tmp_path / "index"
    shutil.copytree(built[0], folder)
    path = shard_folder(folder, 1) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(FormatError):
        PaperIndex(folder, verify=True)
    path.write_bytes(content[:-9])
    with pytest.raises(FormatError):
        PaperIndex(folder)
    path.unlink()
    with pytest.raises(FormatError):
        PaperIndex(folder)


@pytest.mark.parametrize("seed", range(2))
def test_no_damage_to_a_file_is_an_untyped_error_or_a_wrong_answer_that_verify_misses(
    built: tuple[Path, IndexAbout], tmp_path: Path, seed: int
) -> None:
    folder, chance = built[0], random.Random(seed)
    shard = next(path for path in sorted(folder.iterdir()) if path.is_dir())
    for path in sorted(path for path in shard.iterdir() if path.name != "params.index.json"):
        for damage in ("cut", "empty", "flipped", "gone", "zeros", "ones"):
            hurt = tmp_path / f"{path.name}-{damage}"
            shutil.copytree(folder, hurt)
            target, data = hurt / shard.name / path.name, bytearray(path.read_bytes())
            target.unlink()
            if damage == "flipped":
                for _ in range(1 + len(data) // 64):
                    data[chance.randrange(len(data))] ^= 1 + chance.randrange(255)
            cut = {"cut": data[: len(data) // 2], "empty": b"", "flipped": data, "zeros": bytes(len(data)), "ones": b"\xff" * len(data)}
            if damage != "gone":
                target.write_bytes(cut[damage])
            try:
                found = LocalRetriever(hurt)
                for query in ("w1", "w2 w3", "w4 w5 w6"):
                    found.search(query, 5)
            except (FormatError, InfrastructureFaultError):
                pass
            with pytest.raises(FormatError):
                PaperIndex(hurt, verify=True)
            shutil.rmtree(hurt)


def test_search_past_its_deadline_is_no_result(built: tuple[Path, IndexAbout]) -> None:
    with pytest.raises(InfrastructureFaultError):
        PaperIndex(built[0]).search("w1", 3, deadline=0.0)


def test_counts_are_dropped_and_index_says_what_it_is(built: tuple[Path, IndexAbout]) -> None:
    assert not list(built[0].rglob("frequencies.npy")) and not list(built[0].rglob("*.part*"))
    assert read_index_about(built[0]) == built[1]
    assert built[1].mean_length == pytest.approx(sum(len(text.split()) for text in TEXTS) / 700)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("IL-10 and TNF-\N{GREEK SMALL LETTER ALPHA}!", ["il", "10", "and", "tnf", "alpha"]),
        ("\N{GREEK SMALL LETTER BETA}-catenin_2", ["beta", "catenin", "2"]),
        ("Sj\N{LATIN SMALL LETTER O WITH DIAERESIS}gren", ["sjogren"]),
        ("\N{FULLWIDTH LATIN CAPITAL LETTER A}bc", ["abc"]),
        ("", []),
    ],
)
def test_terms_are_folded_words(text: str, terms: list[str]) -> None:
    assert terms_of(text) == terms


def test_query_keeps_its_telling_terms_and_any_text_is_a_query() -> None:
    assert query_terms("What is the role of the kinase kinase?") == ["role", "kinase"]
    assert query_terms("what is it") == ["what", "is", "it"]
    assert len(query_terms(" ".join(f"t{n}" for n in range(500)))) == 48
    assert cleaned_query("a\ud800b\n\0 c" + "x" * 9999)[:8] == "a?b \0 cx"
    assert query_terms("\ud800 \0 liver") == ["liver"]


def test_a_folder_without_an_index_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no complete index: there is no index\.json$"):
        read_index_about(tmp_path)
