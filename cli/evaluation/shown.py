"""Results of evaluations as text and JSON: every measure with its interval, and two of them compared.

A result is a run's, from the bucket, or a file that `stoa eval --out` wrote.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from stoa.bucket.evals import Mark, Summary
from stoa.contracts.errors import FormatError, UsageError
from stoa.contracts.evaluation_messages import EvalPlayer
from stoa.learning.marks import Compared, compare, measures

FILE_FORMAT: Final = "stoa-exam-1"
_WORDS: Final = {
    "pass_at_1": "pass@1 (strict cover)",
    "cover": "cover",
    "exact_match": "exact match",
    "search_rate": "searches",
    "truncated_rate": "cut off",
    "malformed_rate": "malformed",
    "turns_mean": "turns",
    "answer_words_mean": "words of an answer",
    "tokens_mean": "sampled tokens",
}


@dataclass(frozen=True, slots=True)
class Exam:
    """One evaluation with all marks. `of`: a run, or a checkpoint."""

    format: str
    of: str
    evaluation: str
    version: int
    marks: tuple[Mark, ...]
    players: tuple[EvalPlayer, ...] = ()
    seconds: float = 0.0
    facts: dict[str, str] = field(default_factory=dict[str, str])
    """What the numbers depend on: task, seed, sampling."""


_EXAM: Final = TypeAdapter(Exam)


def of_summary(summary: Summary, players: Sequence[EvalPlayer] = ()) -> Exam:
    """A run's."""
    result = summary.result
    return Exam(FILE_FORMAT, result.run, result.evaluation, result.version, summary.marks, tuple(players))


def as_tree(exam: Exam, *, marks: bool = False) -> dict[str, Any]:
    """What `--json` prints; with `marks` what a file holds."""
    tree: dict[str, Any] = {key: value for key, value in asdict(exam).items() if marks or key != "marks"}
    return {**tree, "measures": asdict(measures(exam.marks)) if exam.marks else None}


def write(exam: Exam, path: Path) -> None:
    """Keep an exam for `--compare`."""
    path.write_text(json.dumps(as_tree(exam, marks=True), indent=1, sort_keys=True) + "\n", "utf-8")


def read(path: Path) -> Exam:
    """An exam that `write` kept. Raises FormatError."""
    try:
        tree = json.loads(path.read_text("utf-8"))
        tree.pop("measures", None)
        exam = _EXAM.validate_python(tree)
    except (ValueError, ValidationError, AttributeError, TypeError) as error:
        raise FormatError(f"{path}: no evaluation that `stoa eval --out` wrote") from error
    if exam.format != FILE_FORMAT or not exam.marks:
        raise FormatError(f"{path}: {exam.format} with {len(exam.marks)} marks, not a {FILE_FORMAT}")
    return exam


def lines(exam: Exam) -> Iterator[str]:
    """What a person reads of one evaluation."""
    if not exam.marks:
        yield f"{exam.of} {exam.evaluation}: no question was marked"
        return
    found = measures(exam.marks)
    samples = f", {found.num_samples} samples each" if found.num_samples > 1 else ""
    title = f"{exam.of} version {exam.version}, {exam.evaluation}"
    yield f"{title}: {found.num_questions} questions{samples} (95 % intervals: {found.interval})"
    shown = [name for name in found.estimates if name.startswith("pass_at_")] + [name for name in _WORDS if name != "pass_at_1"]
    for name in shown:
        one = found.estimates[name]
        words = _WORDS.get(name, name.replace("pass_at_", "pass@"))
        yield f"  {words:<22} {one.value:7.3f}  ({one.low:.3f} to {one.high:.3f})"
    for player in exam.players:
        yield (
            f"  {player.host}: {player.num_questions} episodes in {player.num_parts} parts,"
            f" {player.questions_an_hour:,.0f} an hour, {player.tokens_per_second:,.0f} tokens/s"
        )


def pick(summaries: Sequence[Summary], name: str) -> Exam:
    """The run's evaluation of this name, or the one with most questions of this version. Raises UsageError."""
    found = [one for one in summaries if one.result.evaluation == name]
    if not found and name.removeprefix("v").isdigit():
        found = [one for one in summaries if one.result.version == int(name.removeprefix("v"))]
    if not found:
        known = ", ".join(one.result.evaluation for one in summaries) or "none"
        raise UsageError(f"there is no evaluation {name!r}", hint=f"there are: {known}")
    return of_summary(max(found, key=lambda one: len(one.marks)))


def compared(before: Exam, after: Exam) -> tuple[Compared, list[str]]:
    """Two evaluations, paired by question, and what a person reads of it."""
    found = compare(before.marks, after.marks)
    certain = "more than chance" if found.p_value < 0.05 else "no more than chance may give"
    told = [
        f"{before.of} {before.evaluation} -> {after.of} {after.evaluation}: {found.num_questions} questions in common",
        f"  pass@1 {found.before:.3f} -> {found.after:.3f}: {found.difference:+.3f} ({found.low:+.3f} to {found.high:+.3f})",
        f"  only before {found.only_before}, only after {found.only_after}; McNemar's p = {found.p_value:.2g}: {certain}",
    ]
    if found.questions_needed:
        told.append(f"  a difference this large takes {found.questions_needed} questions to be found four times in five")
    return found, told
