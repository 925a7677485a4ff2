"""The summary of a held-out evaluation: its result and the mark of every question, create-only canonical JSON.

Marking is `trainer_gpu.exam`'s. Anyone may read a summary; it is not signed, because only the control process has
reason to believe it, and that process wrote it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.manifest import canonical, parse_canonical, validate
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError
from stoa.contracts.evaluation_messages import EvaluationResult

SUMMARY_FORMAT: Final = "stoa-evaluation-1"
_MAX_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Mark:
    """One question, marked: each score is 0 or 1."""

    question_id: str
    strict_cover: float
    cover: float
    exact_match: float
    searched: float
    num_tokens: int
    """Sampled tokens of the episode."""


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
    """Raises ObjectMissingError, or FormatError if it is no summary."""
    data = store.get(key, max_bytes=_MAX_BYTES).data
    parse_canonical(data, key)
    summary = validate(_SUMMARY, data, key)
    if summary.format != SUMMARY_FORMAT:
        raise FormatError(f"{key} is a {summary.format}, not a {SUMMARY_FORMAT}")
    return summary


def all_summaries(store: Store, run: str) -> tuple[Summary, ...]:
    """All summaries of a run, oldest version first."""
    found = [listed.key for listed in store.list(keys.evals_prefix(run)) if listed.key.endswith("/summary.json")]
    return tuple(read_summary(store, key) for key in found)
