"""Questions from the published data: every way a row can be unfit, every leak, both file kinds, and a hub on this machine."""

import gzip
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from environments.papersearchqa.cleaning import Report, build_questions, clean, fetch, read_split
from environments.papersearchqa.invented import paper, papers, write_corpus, write_small
from environments.papersearchqa.questions import SMALL, SMALL_CORPUS, Row, leaks, load_questions, small_index, write_questions
from environments.search.paper_index import PaperIndex
from stoa.contracts.errors import ConfigError, FormatError, ModelMissingError, UsageError

Fields = dict[str, object]


def row(question: str, gold: object = ("insulin",), pmid: object = "1", **more: object) -> Fields:
    return {"question": question, "golden_answers": list(gold) if isinstance(gold, tuple) else gold, "pmid": pmid, **more}


def kept(train: Sequence[Fields], held_out: Sequence[Fields] = (), transfer: Sequence[Fields] = ()) -> tuple[list[str], Report]:
    report = Report()
    built = clean({"train": list(train), "held_out": list(held_out), "transfer": list(transfer)}, report)
    assert leaks(built) == []
    return [one.question for one in built["train"]], report


def test_answers_that_say_nothing_are_removed_and_so_are_rows_without_any() -> None:
    questions, report = kept([row("q1?", ("A", "the", "--", "IL-6")), row("q2?", ("A", " ")), row("q3?", ()), row("", ("x",)), row("?!")])
    assert questions == ["q1?"]
    assert report.removed == {"train: no answer that says something": 2, "train: no question": 2}
    assert report.answers_removed == 4


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        (["a b", "c"], ("a b", "c")),
        ([["JNK", "SAPK1"], "MAPK8"], ("JNK", "SAPK1", "MAPK8")),
        ('["JNK", "SAPK1"]', ("JNK", "SAPK1")),
        ("['c-Jun kinase', \"5' cap\"]", ("c-Jun kinase", "5' cap")),
        ("[not a list", ("[not a list",)),
        ({"target": ["JNK"]}, ("JNK",)),
        (["JNK", "JNK"], ("JNK",)),
        ([17, 2.0, None, float("nan"), True], ("17", "2")),
        (None, ("from the answer",)),
        ([], ("from the answer",)),
    ],
)
def test_cell_of_answers_is_read_in_every_form_it_was_published_in(gold: object, answers: tuple[str, ...]) -> None:
    built = clean({"train": [row("q?", gold, answer="from the answer")], "held_out": [], "transfer": []}, Report())
    assert built["train"][0].answers == answers


def test_training_rows_that_share_a_question_or_paper_with_an_exam_are_removed() -> None:
    exam = [row("What is X?", pmid="9", paper_title="On X", question_original="Say what X is?")]
    other = [row("What is Y?", pmid=None, paper_title="")]
    train = [
        row("what is x", pmid="1"),
        row("Tell me X", pmid="2", question_original="What is X?"),
        row("say what X is", pmid="3"),
        row("Another?", pmid=9),
        row("Third?", pmid=9.0),
        row("Fourth?", pmid="5", paper_title="ON X."),
        row("What is  Y ?", pmid="6"),
        row("Kept?", pmid="7", paper_title=""),
        row("KEPT", pmid="8"),
    ]
    questions, report = kept(train, exam, other)
    assert questions == ["Kept?"]
    assert report.removed == {"train: question is in the exam": 4, "train: paper is in the exam": 3, "train: asked twice": 1}
    assert report.examples["train: paper is in the exam"] == ["Another?", "Third?", "Fourth?"]
    assert (report.read, report.kept) == ({"train": 9, "held_out": 1, "transfer": 1}, {"train": 1, "held_out": 1, "transfer": 1})


@pytest.mark.parametrize(
    ("train", "what"),
    [
        (Row("a", "What is X?", ("x",), "1"), "is a training question"),
        (Row("a", "Other?", ("x",), "9"), "is about paper '9'"),
        (Row("a", "Other?", ("x",), "1", "on x"), "is about paper '9'"),
        (Row("a", "Other?", ("x", "the"), "1"), "says nothing"),
        (Row("a", "Other?", (), "1"), "says nothing"),
    ],
)
def test_a_leak_that_is_left_stops_the_build(tmp_path: Path, train: Row, what: str) -> None:
    built = {"train": [train], "held_out": [Row("b", "what is x", ("x",), "9", "On X")], "transfer": []}
    with pytest.raises(ConfigError, match=what):
        write_questions(tmp_path / "out", built, {})  # pyright: ignore
    assert not (tmp_path / "out").exists()


def write_source(folder: Path, kind: str, splits: dict[str, list[Fields]]) -> Path:
    folder.mkdir()
    for split, rows in splits.items():
        if kind == "jsonl":
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        else:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    return folder


SPLITS = {
    "train": [row("Kept?", ("leptin", "b12"), "1", cat_num="1", cat="Genes", is_paraphrased=True), row("Gone?", pmid="2")],
    "test": [row("Exam?", pmid="2", paper_title="T")],
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_built_folder_reads_back_and_has_one_id_for_one_content(tmp_path: Path, kind: str) -> None:
    source = write_source(tmp_path / "source", kind, SPLITS)
    other = write_source(tmp_path / "other", kind, {"bioasq": [row("Transfer?", pmid=None)]})
    questions_id, report = build_questions(source, tmp_path / "built", other)
    assert report.removed == {"train: paper is in the exam": 1}
    read = load_questions(tmp_path / "built", questions_id)
    assert [(q.text, q.answers, q.split, q.source) for q in read.values()] == [
        ("Kept?", ("leptin", "b12"), "train", "1"),
        ("Exam?", ("insulin",), "held_out", "2"),
        ("Transfer?", ("insulin",), "transfer", ""),
    ]
    line = json.loads((tmp_path / "built/train.jsonl").read_text())
    assert (line["category"], line["paraphrased"]) == ("1 Genes", True)
    assert json.loads((tmp_path / "built/report.json").read_text())["questions_id"] == questions_id
    assert build_questions(source, tmp_path / "again", other)[0] == questions_id


def test_unfit_files_are_refused_by_name(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    with pytest.raises(ConfigError, match="no such file"):
        list(read_split(tmp_path / "missing", "train"))
    with pytest.raises(ConfigError, match="'train' in its name"):
        list(read_split(tmp_path, "train"))
    (tmp_path / "train.jsonl").write_text('{"question": "a"}\n\n{"query": "a"}\n')
    with pytest.raises(ConfigError, match="line 3"):
        list(read_split(tmp_path, "train"))
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        list(read_split(tmp_path, "train"))
    (tmp_path / "train.jsonl").write_text('{"question": "a", "golden_answers": ' + "[" * 99_999 + "]" * 99_999 + "}")
    with pytest.raises(ConfigError, match="not JSON"):
        list(read_split(tmp_path, "train"))
    parquet.write_table(pyarrow.table({"query": ["a"]}), tmp_path / "train2.parquet")
    with pytest.raises(ConfigError, match="no column called question"):
        list(read_split(tmp_path / "train2.parquet", "train"))
    (tmp_path / "train3.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_split(tmp_path / "train3.parquet", "train"))


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "a"}', '{"id": "a", "question": "q", "answers": ["x"], "more": 1}'])
def test_damaged_question_folder_is_refused(tmp_path: Path, line: str) -> None:
    for split in ("train", "held_out", "transfer"):
        (tmp_path / f"{split}.jsonl").write_text(line if split == "train" else "")
    with pytest.raises(FormatError, match="line 1"):
        load_questions(tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(FormatError, match="no question to train on"):
        load_questions(tmp_path)


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ([], "of 0 rows"),
        ([{"question": "Which gene?", "gold": "ABC"}] * 2, "of 2 rows: 2 no answer that says something"),
        (
            [{"question": "", "answer": "ABC"}, {"question": "Which gene?", "answer": "the"}],
            "1 no question, 1 no answer that says something",
        ),
        ([{"question": "Which drug?", "answer": "ABC", "pmid": "9"}], "1 paper is in the exam"),
    ],
)
def test_a_build_that_leaves_no_question_says_what_became_of_the_rows(tmp_path: Path, train: list[dict[str, str]], why: str) -> None:
    exam = {"question": "Which disease?", "answer": "DEF", "pmid": "9"}
    for split, rows in (("train", train), ("test", [exam])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=why) as caught:
        build_questions(tmp_path, tmp_path / "built")
    assert "golden_answers" in caught.value.hint and not (tmp_path / "built").exists()


def test_a_source_without_its_commit_is_refused_with_the_way_to_find_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jmhb/PaperSearchQA: no data set with its commit pinned") as caught:
        load_questions(tmp_path, source="jmhb/PaperSearchQA")
    assert "git ls-remote https://huggingface.co/datasets/jmhb/PaperSearchQA HEAD" in caught.value.hint


REVISION = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    """The calls of a data hub that a fetch makes, over the files of its server's folder."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        path, folder = self.path.split("?")[0], self.server.folder  # pyright: ignore
        names = sorted(one.name for one in folder.iterdir())
        if path.startswith("/api/datasets/someone/papers/tree/"):
            content = json.dumps(
                [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "0" * 40} for n in names]
            ).encode()
        elif path.startswith("/api/datasets/someone/papers"):
            content = json.dumps({"id": "someone/papers", "sha": REVISION, "siblings": [{"rfilename": n} for n in names]}).encode()
        elif path.startswith(f"/datasets/someone/papers/resolve/{REVISION}/"):
            content = (folder / path.rsplit("/", 1)[1]).read_bytes()
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{len(content):040x}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if send:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        server.folder = write_source(tmp_path / "hub", "parquet", SPLITS)  # pyright: ignore
        (tmp_path / "hub/README.md").write_text("not wanted")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_data_are_fetched_from_a_hub_by_name_and_commit(hub: str, tmp_path: Path) -> None:
    fetch(f"someone/papers@{REVISION}", tmp_path / "fetched", endpoint=hub)
    assert not (tmp_path / "fetched/README.md").exists()
    _, report = build_questions(tmp_path / "fetched", tmp_path / "built")
    assert report.kept == {"train": 1, "held_out": 1, "transfer": 0}
    pinned = f"someone/papers@{REVISION}"
    assert json.loads((tmp_path / "built/report.json").read_text())["source"] == pinned
    assert load_questions(tmp_path / "built", source=pinned)
    with pytest.raises(ConfigError, match="set up for someone/papers@f"):
        load_questions(tmp_path / "built", source="someone/papers@" + "f" * 40)
    with pytest.raises(ConfigError, match="would be mixed"):
        fetch("someone/papers@" + "f" * 40, tmp_path / "fetched", endpoint=hub)
    build_questions(tmp_path / "hub", tmp_path / "unknown")
    with pytest.raises(ConfigError, match="files of unknown origin"):
        load_questions(tmp_path / "unknown", source=pinned)
    with pytest.raises(ModelMissingError, match="cannot be fetched") as caught:
        fetch(f"someone/other@{REVISION}", tmp_path / "other", endpoint=hub)
    assert "--repo-type dataset" in caught.value.hint
    for name in ("someone/papers", "someone/papers@main", "papers"):
        with pytest.raises(UsageError, match="pinned"):
            fetch(name, tmp_path / "other", endpoint=hub)


def test_shipped_set_is_what_the_script_writes(tmp_path: Path) -> None:
    write_small(tmp_path)
    assert gzip.decompress((tmp_path / "corpus.jsonl.gz").read_bytes()) == gzip.decompress(SMALL_CORPUS.read_bytes())
    for name in ("train.jsonl", "held_out.jsonl", "transfer.jsonl", "report.json"):
        assert (tmp_path / name).read_bytes() == (SMALL / name).read_bytes()


def test_shipped_corpus_has_the_answer_of_every_question_in_its_paper_and_finds_it() -> None:
    index = PaperIndex(small_index())
    assert index.about.num_documents == 2000
    by_id = {index.document(number).id: index.document(number).contents for number in range(2000)}
    questions = load_questions(SMALL).values()
    found = 0
    for question in questions:
        assert question.answers[0].split()[0] in by_id[question.source]
        hits = index.search(question.text, 3)
        found += question.source in [index.document(hit.number).id for hit in hits]
    assert len(questions) == 540
    assert found >= 0.9 * len(questions)


def test_invented_papers_follow_from_seed_and_number_and_share_no_pair(tmp_path: Path) -> None:
    whole = list(papers(3, 400))
    assert whole[123] == paper(3, 123, 400) != paper(4, 123, 400)
    titles = [one.title.split(":")[0] for one in whole]
    assert len(set(titles)) == 400
    assert len({title.split(" in ")[0] for title in titles}) == 50
    write_corpus(tmp_path / "corpus.jsonl", 3, 400)
    assert sum(1 for _ in (tmp_path / "corpus.jsonl").open()) == 400
