"""An examination of one checkpoint by any number of Macs, with nothing between them but the bucket.

Its questions are cut into parts. A Mac that has nothing to do claims the first free part by a create-only object, so a
fast Mac plays more of them and none is played by two at once; a claim whose answer does not come in time may be taken
over. The answer to a part is create-only too: it counts once.

Layout of exam.json: canonical JSON of `ExamPlan`. A claim holds the name of the Mac, for people.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.manifest import canonical, parse_canonical, validate
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError, ObjectExistsError, RunMismatchError

EXAM_FORMAT: Final = "stoa-exam-plan-1"
MAX_ATTEMPTS: Final = 99
_MAX_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class ExamPlan:
    """What is asked. Equal for all Macs that take part: it names the weights by digest and every question."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: str
    exam: str
    state_id: str
    environment: str
    """Name and settings, as JSON."""
    question_ids: tuple[str, ...]
    num_samples: int
    questions_a_part: int
    seed: int
    sampling: tuple[float, int, float, float]
    """Temperature, top_k, top_p, min_p."""

    @property
    def num_parts(self) -> int:
        """Parts that the questions are cut into."""
        return -(-len(self.question_ids) // self.questions_a_part)

    def part(self, number: int) -> tuple[str, ...]:
        """Questions of a part."""
        return self.question_ids[number * self.questions_a_part : (number + 1) * self.questions_a_part]


@dataclass(frozen=True, slots=True)
class ExamTask:
    """What one process is told: where the bucket and the checkpoint are, and what is asked.

    settings: of the environment; bucket: a `stoa.config.run.Bucket` as a tree; expires_seconds: see `claim`.
    """

    exam: str
    host: str
    folder: str
    dtype: Literal["float32", "bfloat16"]
    bucket: dict[str, str | float]
    environment: str
    settings: dict[str, str | int | float | bool]
    question_ids: tuple[str, ...]
    num_samples: int
    questions_a_part: int
    seed: int
    sampling: tuple[float, int, float, float]
    expires_seconds: float


_PLAN: Final = TypeAdapter(ExamPlan)
_TASK: Final = TypeAdapter(ExamTask)


def write_task(task: ExamTask, path: Path) -> None:
    """Tell a process of this machine what to play."""
    path.write_bytes(_TASK.dump_json(task))


def read_task(path: Path) -> ExamTask:
    """What `write_task` wrote. Raises FormatError."""
    return validate(_TASK, path.read_bytes(), str(path))


def open_exam(store: Store, plan: ExamPlan) -> None:
    """Begin an examination, or take part in one that is the same. Raises RunMismatchError if one of its name differs."""
    data = canonical(_PLAN.dump_python(plan, mode="json"))
    try:
        store.create(keys.exam_document(plan.exam), data)
    except ObjectExistsError:
        found = read_exam(store, plan.exam)
        differ = [name for name in ExamPlan.__slots__ if getattr(found, name) != getattr(plan, name)]
        raise RunMismatchError(
            f"examination {plan.exam} is another one: {', '.join(differ)} differ",
            hint="use the checkpoint, task and numbers it was begun with, or another name",
        ) from None


def read_exam(store: Store, exam: str) -> ExamPlan:
    """What was asked. Raises ObjectMissingError, FormatError."""
    key = keys.exam_document(exam)
    data = store.get(key, max_bytes=_MAX_BYTES).data
    parse_canonical(data, key)
    plan = validate(_PLAN, data, key)
    if plan.format != EXAM_FORMAT or plan.exam != exam or plan.questions_a_part < 1:
        raise FormatError(f"{key} is a {plan.format} of {plan.exam}")
    return plan


def answered(store: Store, plan: ExamPlan) -> dict[int, str]:
    """Parts that are answered, with the key of each answer."""
    listed = (found.key for found in store.list(keys.exam_answers_prefix(plan.exam)))
    return {part: key for key, part in keys.ours(listed, keys.parse_exam_answer) if part < plan.num_parts}


def claim(store: Store, plan: ExamPlan, host: str, *, now: float, expires_seconds: float) -> int | None:
    """A part for this Mac to play; None if all are answered or being played.

    now: the bucket's clock as far as is known, Unix seconds. expires_seconds: a claim this old without an answer is void.
    """
    for part, attempt in _free(store, plan, now - expires_seconds):
        try:
            store.create(keys.exam_claim(plan.exam, part, attempt), canonical({"host": host, "part": part, "attempt": attempt}))
        except ObjectExistsError:  # another Mac was faster
            continue
        return part
    return None


def give_back(store: Store, plan: ExamPlan, hosts: Collection[str]) -> tuple[int, ...]:
    """Free what these Macs claimed and did not answer, so that nobody waits for it; the parts. Only once they have ended."""
    done, freed = answered(store, plan), dict[str, int]()
    for key, (part, _) in keys.ours((found.key for found in store.list(keys.exam_claims_prefix(plan.exam))), keys.parse_exam_claim):
        if part in done or part >= plan.num_parts:
            continue
        if parse_canonical(store.get(key, max_bytes=_MAX_BYTES).data, key).get("host") in hosts:
            freed[key] = part
    store.delete(freed)
    return tuple(sorted(set(freed.values())))


def _free(store: Store, plan: ExamPlan, void_before: float) -> Iterator[tuple[int, int]]:
    """Free parts, those never claimed first, each with the number of its next attempt."""
    done = answered(store, plan)
    newest: dict[int, tuple[int, float]] = {}
    for listed in store.list(keys.exam_claims_prefix(plan.exam)):
        for _, (part, attempt) in keys.ours((listed.key,), keys.parse_exam_claim):
            newest[part] = max(newest.get(part, (-1, 0.0)), (attempt, listed.modified_at))
    for part in range(plan.num_parts):
        if part not in newest:
            yield part, 0
    for part, (attempt, at) in sorted(newest.items()):
        if part not in done and part < plan.num_parts and at < void_before and attempt < MAX_ATTEMPTS:
            yield part, attempt + 1
