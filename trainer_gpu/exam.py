"""Scores a held-out evaluation: reads the parts Macs shipped, marks every episode from its ids, writes one summary.

A Mac's word counts for nothing but its ids. Runs in the control process, so nothing here imports torch. The question order is
fixed by the seed, so that every evaluation of a run asks the same questions.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

import structlog

from environments.base import Environment, Split
from stoa.bucket import keys
from stoa.bucket.evals import Mark, read_summary, write_summary
from stoa.bucket.store import Store
from stoa.config.run import RunConfig
from stoa.contracts.errors import BucketError, FormatError, GroupRefusedError, ObjectExistsError, UnknownNameError
from stoa.contracts.evaluation_messages import EvaluationResult, SummariseRequest
from stoa.contracts.ports import Progress
from stoa.learning.marks import measures
from stoa.rollouts.admit import Reason, Rules, check_episode, rescore_episode
from stoa.rollouts.records import Episode, Group
from stoa.rollouts.shard import MAX_GROUP_BYTES, decode_group
from trainer_gpu.referee import Referee, rules_of

log = structlog.get_logger()

MAX_ERROR_CHARS = 300
MAX_REDEALT = 400
"""Parts that one answer names to be dealt again."""


def marks_of(
    group: Group, where: str, *, environment: Environment, rules: Rules, num_samples: int, split: Split = "held_out"
) -> tuple[Mark, ...]:
    """One mark an episode of a part, worked out from its ids.

    Raises GroupRefusedError: an episode is not what it claims to be, is of no question of `split`, or a question has
    more than `num_samples`.
    """
    referee = Referee(environment)
    marks: list[Mark] = []
    samples: Counter[str] = Counter()
    for told in group.episodes:
        _check_question(environment, told.question_id, where, split)
        check_episode(told, referee.prompt_ids_of(told.question_id), rules, where)
        marks.append(_mark(rescore_episode(told, rules, referee.rescore, where), samples[told.question_id]))
        samples[told.question_id] += 1
    if samples and max(samples.values()) > num_samples:
        raise GroupRefusedError(Reason.GROUP_SIZE, f"{where}: {max(samples.values())} episodes of a question, {num_samples} were asked for")
    return tuple(marks)


def _mark(episode: Episode, sample: int) -> Mark:
    parts = episode.reward_parts
    return Mark(
        episode.question_id,
        parts["strict_cover"],
        parts["cover"],
        parts["exact_match"],
        parts["searched"],
        len(episode.logprobs),
        sample=sample,
        num_turns=len(episode.turns),
        answer_words=parts.get("answer_words", 0.0),
        # From the ids: what stopped a Mac's episode is its own word.
        truncated=float(not episode.turns[-1].stopped),
        malformed=parts.get("malformed", 0.0),
    )


def _check_question(environment: Environment, question_id: str, where: str, split: Split) -> None:
    try:
        found = environment.question(question_id).split
    except UnknownNameError as error:
        raise GroupRefusedError(Reason.UNKNOWN_QUESTION, f"{where}: {error.message}") from error
    if found != split:
        raise GroupRefusedError(Reason.WRONG_QUESTION, f"{where}: {question_id} is no question of the split {split}")


def question_order(environment: Environment, num_questions: int, seed: int, split: Split = "held_out") -> tuple[str, ...]:
    """The first `num_questions` of a split in the order of `seed`; all of them if there are fewer."""
    order = list(environment.question_ids(split))
    random.Random(f"{split.replace('_', ' ')} {seed}").shuffle(order)
    return tuple(order[:num_questions])


class Examiner:
    """Implements `stoa.contracts.ports.Evaluator` for one run."""

    def __init__(
        self, store: Store, config: RunConfig, environment: Environment, *, vocab_size: int, known: Callable[[int], str | None]
    ) -> None:
        """`known` gives the state_id of a published version, None for any other."""
        self._store = store
        self._run = config.run
        self._environment = environment
        self._rules = rules_of(config, environment, vocab_size, known)

    def held_out(self, run: str, num_questions: int, seed: int) -> tuple[str, ...]:
        """The first `num_questions` of the held-out questions in the order of `seed`; all of them if there are fewer."""
        self._check_run(run)
        return question_order(self._environment, num_questions, seed)

    def summarise(self, request: SummariseRequest, progress: Progress) -> EvaluationResult:
        """Mark all parts and write the summary, create-only; a second call returns the first one's result.

        A part that is not what it claims to be costs its own questions and no others'. Of a request that may have parts dealt
        again (`questions_a_part`) the result names them and nothing is written; else it says how many questions are missing.

        Raises:
            GroupRefusedError, BucketError: no part is any good; what is wrong with the first one.
        """
        self._check_run(request.run)
        key = keys.eval_summary(request.run, request.version, request.evaluation)
        marks: list[Mark] = []
        marked: set[str] = set()
        refused: list[GroupRefusedError | BucketError] = []
        for part in request.keys:
            try:
                found = self._marks(part, request)
            except (GroupRefusedError, BucketError) as error:
                log.warning("part_refused", evaluation=request.evaluation, part=part, error=error.message)
                refused.append(error)
                continue
            fresh = [mark for mark in found if mark.question_id not in marked]
            marks += fresh
            marked.update(mark.question_id for mark in fresh)
            progress.report(f"marked {len(marked)} of {request.num_questions}")
        result = _result(request, marks, key)
        if request.questions_a_part and len(marked) < request.num_questions:
            return replace(result, redeal=self._unanswered(request, marked))
        if refused and not marks:
            raise refused[0]
        if len(marked) < request.num_questions:
            why = f"; {len(refused)} parts were refused: {refused[0].message}" if refused else ""
            result = replace(result, error=f"{request.num_questions - len(marked)} questions have no episode{why}"[:MAX_ERROR_CHARS])
        try:
            write_summary(self._store, result, marks)
        except ObjectExistsError:
            result = read_summary(self._store, key).result
        log.info("evaluation_summarised", evaluation=request.evaluation, version=request.version, pass_at_1=result.pass_at_1)
        return result

    def _unanswered(self, request: SummariseRequest, marked: Collection[str]) -> tuple[int, ...]:
        """Parts with a question that has no mark, the first ones of very many."""
        order = question_order(self._environment, request.num_questions, request.sample_seed)
        parts = sorted({place // request.questions_a_part for place, question in enumerate(order) if question not in marked})
        return tuple(parts[:MAX_REDEALT])

    def _marks(self, key: str, request: SummariseRequest) -> tuple[Mark, ...]:
        if not key.startswith(keys.eval_parts_prefix(request.run, request.version, request.evaluation)):
            raise GroupRefusedError(Reason.WRONG_OWNER, f"{key} is no part of evaluation {request.evaluation}")
        group = decode_group(self._store.get(key, max_bytes=MAX_GROUP_BYTES).data)
        self._check_part(group, key, request)
        return marks_of(group, key, environment=self._environment, rules=self._rules, num_samples=request.num_samples)

    def _check_part(self, group: Group, key: str, request: SummariseRequest) -> None:
        if group.run != request.run or group.purpose != "eval" or group.version != request.version:
            raise GroupRefusedError(
                Reason.WRONG_OWNER,
                f"{key} is of run {group.run}, version {group.version}, purpose {group.purpose}; "
                f"wanted are {request.run}, {request.version}, eval",
            )
        if group.state_id != self._rules.known(request.version):
            raise GroupRefusedError(Reason.WRONG_STATE, f"{key} was played on weights that are not version {request.version}")

    def _check_run(self, run: str) -> None:
        if run != self._run:
            raise FormatError(f"this control process serves run {self._run}, not {run}")


def _result(request: SummariseRequest, marks: list[Mark], key: str) -> EvaluationResult:
    empty = EvaluationResult(request.run, request.evaluation, request.version, 0, 0.0, (0.0, 1.0), 0.0, key=key)
    if not marks:
        return empty
    found = measures(marks)
    value = {name: estimate.value for name, estimate in found.estimates.items()}
    right = found.estimates["pass_at_1"]
    return replace(
        empty,
        num_questions=found.num_questions,
        pass_at_1=right.value,
        interval_95=(right.low, right.high),
        search_rate=value["search_rate"],
        cover=value["cover"],
        exact_match=value["exact_match"],
        mean_tokens=value["tokens_mean"],
        num_samples=request.num_samples,
        pass_at_k=value.get(f"pass_at_{request.num_samples}", -1.0) if request.num_samples > 1 else -1.0,
        mean_turns=value["turns_mean"],
        mean_answer_words=value["answer_words_mean"],
        truncated_rate=value["truncated_rate"],
        malformed_rate=value["malformed_rate"],
    )
