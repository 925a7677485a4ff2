"""`stoa search` on the invented set: data to questions and an index, then a question to papers; and its bar."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cli.live.bar import Bar
from cli.main import run
from cli.say import Exit
from environments import registry
from environments.papersearchqa.cleaning import build_questions
from environments.papersearchqa.invented import papers, questions, write_corpus

TOKENIZER = Path(__file__).parents[3] / "environments/search/policy/tokenizer.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_corpus(folder / "corpus.jsonl", 0, 2000)
    for split, rows in questions(0, 2000).items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: object, expect: Exit = Exit.DONE) -> tuple[str, str]:
    assert run([str(word) for word in ("search", *words)]) == expect
    seen = capsys.readouterr()
    return seen.out, seen.err


def test_data_become_questions_and_an_index_that_a_run_names(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leaky = tmp_path / "source"
    leaky.mkdir()
    for split in ("train", "test"):
        (leaky / f"{split}.jsonl").write_bytes((source / f"{split}.jsonl").read_bytes())
    exam = json.loads((source / "test.jsonl").read_text().splitlines()[0])
    with (leaky / "train.jsonl").open("a") as file:
        file.write(json.dumps({**exam, "question": "Another?", "question_original": ""}) + "\n")
    _, said = told(capsys, "questions", leaky, tmp_path / "questions", "--transfer", source / "transfer.jsonl")
    assert "train: 301 read, 300 kept" in said and "removed 1 of train: paper is in the exam" in said
    out, _ = told(capsys, "questions", leaky, tmp_path / "again", "--transfer", source / "transfer.jsonl", "--json")
    questions_id = json.loads(out)["questions_id"]
    assert f'questions_id = "{questions_id}"' in said
    _, said = told(capsys, "index", source / "corpus.jsonl", tmp_path / "index", "--shard", 600)
    assert "2,000 documents in 4 shards" in said and "counting: 100 %" in said
    out, _ = told(capsys, "index", source / "corpus.jsonl", tmp_path / "index", "--shard", 600, "--json")
    index_id = json.loads(out)["index_id"]
    assert f'index_id = "{index_id}"' in said
    places = {"questions": str(tmp_path / "questions"), "index": str(tmp_path / "index")}
    environment = registry.create("papersearchqa", {**places, "questions_id": questions_id, "index_id": index_id}, TOKENIZER.read_bytes())
    assert len(environment.question_ids("held_out")) == 200


def test_asking_shows_the_papers(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "index", source / "corpus.jsonl", tmp_path / "index")
    one = next(papers(0, 2000))
    _, said = told(capsys, "ask", tmp_path / "index", one.facts[0].wordings[0], "--verify")
    assert said.startswith("[1] ") and one.document.id in said
    out, _ = told(capsys, "ask", tmp_path / "index", one.title, "--top", 1, "--json")
    assert json.loads(out)["passages"][0]["contents"] == one.document.contents
    assert "nothing was found" in told(capsys, "ask", tmp_path / "index", "?")[1]


def test_wrong_use_says_what_to_do(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in (
        (("index", source / "none.jsonl", tmp_path / "index"), ".jsonl.zst"),
        (("index", source / "corpus.jsonl", source), "empty folder"),
        (("index", source / "corpus.jsonl", tmp_path / "index", "--shard", -1), "0 for the default"),
        (("ask", tmp_path, "liver", "--top", 0), ""),
        (("questions", tmp_path / "none", tmp_path / "out"), "stoa search fetch"),
        (("fetch", "jmhb/PaperSearchQA", tmp_path / "out"), "COMMIT"),
    ):
        assert hint in told(capsys, *words, expect=Exit.WRONG_USE)[1]
    told(capsys, "ask", tmp_path, "liver", expect=Exit.FAILED)
    told(capsys, "ask", "http://127.0.0.1:9", "liver", expect=Exit.FAILED)


def test_questions_are_not_written_while_a_leak_is_left(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"question": "a?", "golden_answers": ["x"], "pmid": "1"}\n{"question": "b?", "golden_answers": ["x"], "pmid": "3"}\n'
    )
    (tmp_path / "test.jsonl").write_text('{"question": "A", "golden_answers": ["x"], "pmid": "2"}\n')
    _, report = build_questions(tmp_path, tmp_path / "out")
    assert report.kept == {"train": 1, "held_out": 1, "transfer": 0}


def test_bar_is_a_line_each_ten_percent_without_a_terminal_and_one_line_on_one() -> None:
    plain = io.StringIO()
    with Bar(Console(file=plain, width=200)) as bar:
        for percent in range(0, 101, 2):
            bar.show("counting", percent / 100, 10 * percent)
        bar.show("merging", None, 5)
    lines = plain.getvalue().splitlines()
    assert len(lines) == 11 and lines[1].startswith("counting: 10 %, 100 documents")
    screen = io.StringIO()
    with Bar(Console(file=screen, force_terminal=True, width=100)) as bar:
        bar.show("counting", None, 7)
        bar.show("counting", 0.5, 1234)
    assert "1,234" in screen.getvalue()
