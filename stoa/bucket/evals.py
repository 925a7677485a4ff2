"""The summary of a held-out evaluation: its result and the mark of every question, create-only canonical JSON.

Marking is `trainer_gpu.exam`'s. Anyone may read a summary; it is not signed, because only the control process has
reason to believe it, and that process wrote it.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.manifest import canonical, parse_canonical, validate
from stoa.bucket.store import Store
from stoa.contracts.errors import BucketError, FormatError
from stoa.contracts.evaluation_messages import EvaluationResult

SUMMARY_FORMAT: Final = "stoa-evaluation-1"
_MAX_BYTES: Final = 16 << 20

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Mark:
    """One sample of a question, marked: each score is 0 or 1."""

    question_id: str
    strict_cover: float
    cover: float
    exact_match: float
    searched: float
    num_tokens: int
    """Sampled tokens of the episode."""
    sample: int = 0
    """Which of the question's samples."""
    num_turns: int = 0
    answer_words: float = 0.0
    truncated: float = 0.0
    """A token or turn limit ended it."""
    malformed: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One evaluation."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: str
    result: EvaluationResult
    marks: tuple[Mark, ...]


_SUMMARY = TypeAdapter(Summary)


def write_summary(store: Store, result: EvaluationResult, marks: Sequence[Mark]) -> None:
    """Write it under `result.key`. Raises ObjectExistsError if another one is there."""
    tree: dict[str, object] = _SUMMARY.dump_python(Summary(SUMMARY_FORMAT, result, tuple(marks)), mode="json")
    store.create(result.key, canonical(tree))


def read_summary(store: Store, key: str) -> Summary:
    """Raises ObjectMissingError, or FormatError if it is no summary of this key, or one with impossible numbers."""
    data = store.get(key, max_bytes=_MAX_BYTES).data
    parse_canonical(data, key)
    summary = validate(_SUMMARY, data, key)
    if summary.format != SUMMARY_FORMAT:
        raise FormatError(f"{key} is a {summary.format}, not a {SUMMARY_FORMAT}")
    result = summary.result
    if key != keys.eval_summary(result.run, result.version, result.evaluation) or result.key != key:
        raise FormatError(f"{key} is the summary of run {result.run}, version {result.version}, {result.evaluation}")
    rates = (result.pass_at_1, *result.interval_95, result.search_rate, result.cover, result.exact_match, result.truncated_rate)
    if not all(0.0 <= rate <= 1.0 for rate in rates) or not math.isfinite(result.mean_tokens) or result.num_questions < 0:
        raise FormatError(f"{key} holds rates that are none")
    return summary


def new_summaries(store: Store, run: str, known: Container[str] = ()) -> dict[str, Summary | None]:
    """Summaries of a run by key, oldest version first, without the known ones; None for one that cannot be read.

    Raises ServiceUnavailableError: the bucket is away.
    """
    found: dict[str, Summary | None] = {}
    for listed in store.list(keys.evals_prefix(run)):
        if not listed.key.endswith("/summary.json") or listed.key in known:
            continue
        try:
            found[listed.key] = read_summary(store, listed.key)
        except BucketError as error:
            log.warning("evaluation_unreadable", key=listed.key, error=error.message)
            found[listed.key] = None
    return found


def all_summaries(store: Store, run: str) -> tuple[Summary, ...]:
    """All summaries of a run that can be read, oldest version first."""
    return tuple(summary for summary in new_summaries(store, run).values() if summary is not None)
