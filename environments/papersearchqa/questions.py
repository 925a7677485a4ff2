"""Built questions: a folder with one JSON-lines file a split and a report, checked for leaks again whenever it is opened.

A line is `{"id", "question", "answers", "pmid", "title", "category", "paraphrased"}`. The shipped small folder also holds
its corpus. Building a folder from the published data is `cleaning.py`'s.
"""

import atexit
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final, cast, get_args

from environments.base import Question, Split
from environments.search.building import build_index
from environments.search.reward import says_something
from environments.search.terms import terms_of
from stoa.contracts.errors import ConfigError, FormatError

SMALL: Final = Path(__file__).parent / "small"
SMALL_CORPUS: Final = SMALL / "corpus.jsonl.gz"
REPORT: Final = "report.json"
SPLITS: Final[tuple[Split, ...]] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Row:
    """One question as it is built. `pmid` and `title` name the paper it was made from, "" where that is not known."""

    id: str
    question: str
    answers: tuple[str, ...]
    pmid: str = ""
    title: str = ""
    category: str = ""
    paraphrased: bool = False


PINNED: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)@([0-9a-f]{40})")
Built = Mapping[Split, Sequence[Row]]


def plain(text: str) -> str:
    """A text by its words alone: what two wordings that differ in case, punctuation or accents share."""
    return " ".join(terms_of(text))


def pinned(source: str) -> tuple[str, str]:
    """Name and commit of a data set, OWNER/NAME@COMMIT. Raises ConfigError, which says how a commit is found, for anything else."""
    found = PINNED.fullmatch(source)
    if found is not None:
        return found[1], found[2]
    name = source.partition("@")[0]
    raise ConfigError(
        f"{source}: no data set with its commit pinned",
        hint=f"give {name}@COMMIT; `git ls-remote https://huggingface.co/datasets/{name} HEAD` prints the newest, of 40 characters",
    )


def leaks(built: Built) -> list[str]:
    """Everything that a held-out or transfer question shares with training, and every answer that says nothing.

    Each is one sentence; an empty list is a sound data set.
    """
    found: list[str] = []
    trained = {plain(row.question) for row in built["train"]}
    papers = {row.pmid for row in built["train"]} - {""}
    titles = {plain(row.title) for row in built["train"]} - {""}
    for split in ("held_out", "transfer"):
        for row in built[split]:
            if plain(row.question) in trained:
                found.append(f"{split} question {row.id} is a training question")
            if row.pmid in papers or plain(row.title) in titles:
                found.append(f"{split} question {row.id} is about paper {row.pmid or row.title!r} of a training question")
    for split in SPLITS:
        asked = [plain(row.question) for row in built[split]]
        if len(set(asked)) < len(asked):
            found.append(f"{split} holds a question twice")
        for row in built[split]:
            if not row.answers or not all(says_something(answer) for answer in row.answers):
                found.append(f"{split} question {row.id} has an accepted answer that says nothing")
    return found


def write_questions(folder: Path, built: Built, report: Mapping[str, object]) -> str:
    """Write a folder of questions; returns its id. Raises ConfigError, and writes nothing, if there is a leak."""
    _refuse_leaks(str(folder), built)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = (json.dumps(asdict(row), ensure_ascii=False, sort_keys=True) + "\n" for row in built[split])
        _write(folder / f"{split}.jsonl", "".join(lines))
    questions_id = folder_id(folder)
    _write(folder / REPORT, json.dumps({"questions_id": questions_id, **report}, indent=2, sort_keys=True) + "\n")
    return questions_id


def folder_id(folder: Path) -> str:
    """What tells these questions from others: a hash of the bytes of all splits. Raises FormatError if one is missing."""
    digest = hashlib.sha256()
    for split in SPLITS:
        try:
            content = (folder / f"{split}.jsonl").read_bytes()
        except OSError as error:
            raise FormatError(
                f"{folder} holds no built questions: {error}", hint="build them: stoa search questions SOURCE FOLDER"
            ) from error
        digest.update(f"{split} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def load_questions(folder: Path, questions_id: str = "", source: str = "") -> dict[str, Question]:
    """All questions of a folder by id, train first. source: data set with its commit that they must have been built from.

    Raises FormatError for a folder that is none, ConfigError for one with leaks or of another id or source than wanted.
    """
    if source:
        pinned(source)
    found = folder_id(folder)
    if questions_id and found != questions_id:
        raise ConfigError(
            f"{folder}: questions {found}, but the run was set up for {questions_id}", hint="use a copy of the run's questions"
        )
    if source and (said := _source(folder)) != source:
        raise ConfigError(
            f"{folder}: built from {said or 'files of unknown origin'}, but the run was set up for {source}",
            hint=f"stoa search fetch {source} SOURCE, then stoa search questions SOURCE FOLDER",
        )
    built: Built = {split: tuple(_read(folder / f"{split}.jsonl")) for split in SPLITS}
    _refuse_leaks(str(folder), built)
    questions = {
        row.id: Question(row.id, row.question, row.answers, split, row.pmid or row.title) for split, rows in built.items() for row in rows
    }
    if len(questions) != sum(map(len, built.values())):
        raise FormatError(f"{folder}: a question id stands twice", hint="build the questions again")
    if not built["train"] or not built["held_out"]:
        raise FormatError(f"{folder}: there is no question to train on, or none held out", hint="build the questions again")
    return questions


@cache
def small_index() -> Path:
    """An index of the shipped corpus, built once a process in a folder that goes when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="stoa-small-index-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build_index(SMALL_CORPUS, folder / "index")
    return folder / "index"


def _source(folder: Path) -> str:
    try:
        report = cast("object", json.loads((folder / REPORT).read_text("utf-8")))
    except (OSError, ValueError):
        return ""
    return str(cast("dict[str, object]", report).get("source", "")) if isinstance(report, dict) else ""


def _read(path: Path) -> Iterable[Row]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            fields = cast("dict[str, object]", json.loads(line))
            yield Row(**{**fields, "answers": tuple(cast("list[str]", fields["answers"]))})  # pyright: ignore[reportArgumentType]
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{path}, line {number}: not a question: {error}", hint="build the questions again") from error


def _refuse_leaks(where: str, built: Built) -> None:
    found = leaks(built)
    if found:
        raise ConfigError(f"{where}: {len(found)} leaks are left, the first: {found[0]}", hint="build the questions again from the source")


def _write(path: Path, content: str) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(content, "utf-8")
    partial.replace(path)
