"""Builds questions from the published data set: read, clean, report, and refuse to write while a leak is left.

The published columns are `question`, `answer`, `golden_answers` (a list, at times nested or written as text), `cat_num` and
`cat`, `pmid`, `paper_title`, `is_paraphrased` and, in some versions, `question_original`. Its split is by row number, so
the paper at the border can stand on both sides. Files are JSON lines or parquet, from a folder or a hub.
"""

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final, cast

from environments.base import Split
from environments.papersearchqa.questions import PINNED, Built, Row, pinned, plain, write_questions
from environments.search.reward import says_something
from stoa.contracts.errors import ConfigError, MissingExtraError, ModelMissingError

PAPERSEARCHQA: Final = "jmhb/PaperSearchQA"
FETCHED: Final = "fetched.txt"
"""In a fetched folder: the name and commit of the data set in it."""
_WANTED: Final = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst")
_COLUMNS: Final = "the columns are question, golden_answers (or answer), pmid, paper_title, ..."
_EXAMPLES: Final = 5
_MARKS: Final[Mapping[Split, str]] = {"train": "q", "held_out": "h", "transfer": "x"}
"""How the ids of a split begin."""
Fields = Mapping[str, object]


@dataclass(slots=True)
class Report:
    """What became of the rows: how many were read, kept, removed for which reason, and the first few of each."""

    read: Counter[str] = field(default_factory=Counter[str])
    kept: Counter[str] = field(default_factory=Counter[str])
    removed: Counter[str] = field(default_factory=Counter[str])
    answers_removed: int = 0
    source: str = ""
    """OWNER/NAME@COMMIT of the data set, "" where files came another way."""
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def remove(self, split: Split, reason: str, row: Row) -> None:
        """Note one removed row."""
        key = f"{split}: {reason}"
        self.removed[key] += 1
        examples = self.examples.setdefault(key, [])
        if len(examples) < _EXAMPLES:
            examples.append(row.question)

    def as_json(self) -> dict[str, object]:
        """For report.json."""
        return {
            "read": dict(self.read),
            "kept": dict(self.kept),
            "removed": dict(self.removed),
            "answers_removed": self.answers_removed,
            "examples": self.examples,
            **({"source": self.source} if self.source else {}),
        }


def build_questions(source: Path, folder: Path, transfer: Path | None = None) -> tuple[str, Report]:
    """Build `folder` from the files of `source` and, for the transfer set, of `transfer`. Returns its id and the report.

    Raises ConfigError if files or columns are missing, no question is left, or a leak is left after cleaning.
    """
    report = Report(source=source_of(source))
    raw: dict[Split, Iterable[Fields]] = {
        "train": read_split(source, "train"),
        "held_out": read_split(source, "test"),
        "transfer": [] if transfer is None else read_split(transfer, ""),
    }
    built = clean({split: list(rows) for split, rows in raw.items()}, report)
    for split in ("train", "held_out"):
        if not built[split]:
            raise ConfigError(f"{source}: no {split} question is left of {report.read[split]} rows{_removed(report, split)}", hint=_COLUMNS)
    return write_questions(folder, built, report.as_json()), report


def _removed(report: Report, split: Split) -> str:
    reasons = [f"{num} {key.partition(': ')[2]}" for key, num in report.removed.items() if key.startswith(f"{split}: ")]
    return f": {', '.join(reasons)}" if reasons else ""


def clean(raw: Mapping[Split, list[Fields]], report: Report) -> Built:
    """Rows fit for training and examination. Held-out rows win over training rows, for an exam must not shrink to fit."""
    rows: dict[Split, list[tuple[Row, str]]] = {}
    for split, entries in raw.items():
        report.read[split] = len(entries)
        rows[split] = list(_distinct(split, _with_answers(split, entries, report), report))
    examined = rows["held_out"] + rows["transfer"]
    questions = {wording for row, original in examined for wording in (plain(row.question), plain(original))} - {""}
    papers = {row.pmid for row, _ in examined} - {""}
    titles = {plain(row.title) for row, _ in examined} - {""}
    reasons: dict[str, Callable[[Row, str], bool]] = {
        "question is in the exam": lambda row, original: plain(row.question) in questions or plain(original) in questions,
        "paper is in the exam": lambda row, original: row.pmid in papers or plain(row.title) in titles,
    }
    trained: list[Row] = []
    for row, original in rows["train"]:
        reason = next((name for name, holds in reasons.items() if holds(row, original)), None)
        if reason is None:
            trained.append(row)
        else:
            report.remove("train", reason, row)
    built: Built = {
        "train": trained,
        "held_out": [row for row, _ in rows["held_out"]],
        "transfer": [row for row, _ in rows["transfer"]],
    }
    report.kept.update({split: len(kept) for split, kept in built.items()})
    return built


def read_split(place: Path, split: str) -> Iterator[Fields]:
    """The rows of one split: a file, or all files of a folder whose name has the split's in it. Raises ConfigError if none is."""
    if not place.exists():
        raise ConfigError(
            f"{place}: there is no such file or folder", hint=f"fetch the data first: stoa search fetch {PAPERSEARCHQA}@COMMIT FOLDER"
        )
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    found = [path for path in files if path.suffix in (".parquet", ".jsonl") and split in path.name]
    if not found:
        raise ConfigError(f"{place}: no .parquet or .jsonl file has {split!r} in its name", hint="name the files after their split")
    for path in found:
        yield from _parquet(path) if path.suffix == ".parquet" else _json_lines(path)


def fetch(name: str, folder: Path, *, endpoint: str | None = None) -> None:
    """Fetch the files of a hub's data set, `owner/name@COMMIT`, into a folder; a fetch that was cut short goes on.

    Raises ConfigError for a name without a pinned commit, or a folder that holds another one's files, ModelMissingError if
    the hub cannot be reached or lacks it.
    """
    owner_name, revision = pinned(name)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only where data are fetched
        from huggingface_hub.errors import HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("a hub's data are fetched with huggingface_hub", hint="run `pip install 'stoa[papers]'`") from error
    folder.mkdir(parents=True, exist_ok=True)
    if (there := source_of(folder)) not in ("", name):
        raise ConfigError(f"{folder} holds {there}: files of two data sets would be mixed", hint="fetch into another folder")
    try:
        snapshot_download(
            owner_name, repo_type="dataset", revision=revision, local_dir=folder, allow_patterns=list(_WANTED), endpoint=endpoint
        )
    except (HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelMissingError(
            f"{name} is not on this host and cannot be fetched: {reason}",
            hint=f"where there is a network run `hf download {owner_name} --repo-type dataset --revision {revision} --local-dir DIR`",
        ) from error
    # Not before: the hub's client takes a folder that holds anything for a data set that is there.
    (folder / FETCHED).write_text(f"{name}\n", "utf-8")


def source_of(place: Path) -> str:
    """The data set that was fetched into a folder, OWNER/NAME@COMMIT; "" if nobody says so."""
    try:
        said = (place / FETCHED).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return said if PINNED.fullmatch(said) else ""


def _with_answers(split: Split, entries: Iterable[Fields], report: Report) -> Iterator[tuple[Row, str]]:
    """Rows with at least one accepted answer that says something, beside their wording before any paraphrase."""
    for entry in entries:
        question = _text(entry.get("question"))
        golden = list(dict.fromkeys(_texts(entry.get("golden_answers")))) or list(_texts(entry.get("answer")))
        answers = tuple(answer for answer in golden if says_something(answer))
        report.answers_removed += len(golden) - len(answers)
        pmid = _text(entry.get("pmid"))
        category = " ".join(filter(None, (_text(entry.get("cat_num")), _text(entry.get("cat")))))
        row = Row(
            id=f"{_MARKS[split]}{blake2b(f'{question}|{pmid}'.encode(), digest_size=8).hexdigest()}",
            question=question,
            answers=answers,
            pmid=pmid,
            title=_text(entry.get("paper_title")),
            category=category,
            paraphrased=bool(entry.get("is_paraphrased", False)),
        )
        if not plain(question):
            report.remove(split, "no question", row)
        elif not answers:
            report.remove(split, "no answer that says something", row)
        else:
            yield row, _text(entry.get("question_original"))


def _distinct(split: Split, rows: Iterable[tuple[Row, str]], report: Report) -> Iterator[tuple[Row, str]]:
    asked: set[str] = set()
    for row, original in rows:
        if plain(row.question) in asked:
            report.remove(split, "asked twice", row)
            continue
        asked.add(plain(row.question))
        yield row, original


def _text(value: object) -> str:
    """A cell as one line of well-formed text; "" for none, nan and what is no text or number."""
    if not isinstance(value, str | int | float) or isinstance(value, bool) or value != value:
        return ""
    written = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return " ".join(written.encode("utf-8", "replace").decode("utf-8").split())


def _texts(value: object) -> Iterator[str]:
    """All texts in a cell of answers: a text, a list, a nested list, or a list that was written as text."""
    if isinstance(value, Mapping):
        value = cast("Mapping[str, object]", value).get("target", [])
    if isinstance(value, list | tuple):
        for one in cast("list[object]", value):
            yield from _texts(one)
        return
    text = _text(value)
    if text.startswith("[") and text.endswith("]"):
        for read in (json.loads, ast.literal_eval):
            try:
                inside = read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(inside, list):
                yield from _texts(cast("list[object]", inside))
                return
    if text:
        yield text


def _json_lines(path: Path) -> Iterator[Fields]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}", hint="fetch the file again") from error
            if not isinstance(entry, dict) or "question" not in entry:
                raise ConfigError(f"{path}, line {number}: no question in it", hint=_COLUMNS)
            yield cast("Fields", entry)


def _parquet(path: Path) -> Iterator[Fields]:
    try:
        import pyarrow  # noqa: PLC0415 - only where parquet is read
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(f"{path}: parquet is read with pyarrow", hint="run `pip install 'stoa[papers]'`") from error
    try:
        with parquet.ParquetFile(path) as file:
            if "question" not in file.schema_arrow.names:
                raise ConfigError(f"{path}: no column called question", hint=f"its columns are {', '.join(file.schema_arrow.names)}")
            for batch in file.iter_batches(batch_size=4096):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="fetch the file again") from error
