"""Scores a held-out evaluation: reads the parts Macs shipped, marks every episode from its ids, writes one summary.

A Mac's word counts for nothing but its ids. Runs in the control process, so nothing here imports torch. The question order is
fixed by the seed, so that every evaluation of a run asks the same questions.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import structlog

from environments.base import Environment
from stoa.bucket import keys
from stoa.bucket.evals import Mark, read_summary, write_summary
from stoa.bucket.store import Store
from stoa.config.run import RunConfig
from stoa.contracts.errors import FormatError, GroupRefusedError, ObjectExistsError, UnknownNameError
from stoa.contracts.evaluation_messages import EvaluationResult, SummariseRequest
from stoa.contracts.ports import Progress
from stoa.rollouts.admit import Reason, check_episode, rescore_episode
from stoa.rollouts.records import Group
from stoa.rollouts.shard import MAX_GROUP_BYTES, decode_group
from trainer_gpu.referee import Referee, rules_of

Z_95 = 1.959963984540054

log = structlog.get_logger()


def wilson_95(num_right: float, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927); (0, 1) of nothing."""
    if num == 0:
        return 0.0, 1.0
    share, z2 = num_right / num, Z_95**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2))
    return max(0.0, centre - half), min(1.0, centre + half)


class Examiner:
    """Implements `stoa.contracts.ports.Evaluator` for one run."""

    def __init__(
        self, store: Store, config: RunConfig, environment: Environment, *, vocab_size: int, known: Callable[[int], str | None]
    ) -> None:
        """`known` gives the state_id of a published version, None for any other."""
        self._store = store
        self._run = config.run
        self._environment = environment
        self._referee = Referee(environment)
        self._rules = rules_of(config, environment, vocab_size, known)

    def held_out(self, run: str, num_questions: int, seed: int) -> tuple[str, ...]:
        """The first `num_questions` of the held-out questions in the order of `seed`; all of them if there are fewer."""
        self._check_run(run)
        order = list(self._environment.question_ids("held_out"))
        random.Random(f"held out {seed}").shuffle(order)
        return tuple(order[:num_questions])

    def summarise(self, request: SummariseRequest, progress: Progress) -> EvaluationResult:
        """Mark all parts and write the summary, create-only; a second call returns the first one's result.

        Raises:
            GroupRefusedError: a part is not what it claims to be. FormatError: it cannot be read at all.
        """
        self._check_run(request.run)
        key = keys.eval_summary(request.run, request.version, request.evaluation)
        marks: dict[str, Mark] = {}
        for part in request.keys:
            for mark in self._marks(part, request):
                marks.setdefault(mark.question_id, mark)
            progress.report(f"marked {len(marks)} of {request.num_questions}")
        result = _result(request, list(marks.values()), key)
        if len(marks) < request.num_questions:
            result = replace(result, error=f"{request.num_questions - len(marks)} questions have no episode")
        try:
            write_summary(self._store, result, tuple(marks.values()))
        except ObjectExistsError:
            result = read_summary(self._store, key).result
        log.info("evaluation_summarised", evaluation=request.evaluation, version=request.version, pass_at_1=result.pass_at_1)
        return result

    def _marks(self, key: str, request: SummariseRequest) -> Iterator[Mark]:
        group = decode_group(self._store.get(key, max_bytes=MAX_GROUP_BYTES).data)
        self._check_part(group, key, request)
        for told in group.episodes:
            self._check_question(told.question_id, key)
            check_episode(told, self._referee.prompt_ids_of(told.question_id), self._rules, key)
            episode = rescore_episode(told, self._rules, self._referee.rescore, key)
            parts = episode.reward_parts
            yield Mark(
                episode.question_id,
                parts["strict_cover"],
                parts["cover"],
                parts["exact_match"],
                parts["searched"],
                len(episode.logprobs),
            )

    def _check_part(self, group: Group, key: str, request: SummariseRequest) -> None:
        if group.run != request.run or group.purpose != "eval" or group.version != request.version:
            raise GroupRefusedError(
                Reason.WRONG_OWNER,
                f"{key} is of run {group.run}, version {group.version}, purpose {group.purpose}; "
                f"wanted are {request.run}, {request.version}, eval",
            )
        if group.state_id != self._rules.known(request.version):
            raise GroupRefusedError(Reason.WRONG_STATE, f"{key} was played on weights that are not version {request.version}")

    def _check_question(self, question_id: str, key: str) -> None:
        try:
            split = self._environment.question(question_id).split
        except UnknownNameError as error:
            raise GroupRefusedError(Reason.UNKNOWN_QUESTION, f"{key}: {error.message}") from error
        if split != "held_out":
            raise GroupRefusedError(Reason.NOT_GRANTED, f"{key}: {question_id} is no held-out question")

    def _check_run(self, run: str) -> None:
        if run != self._run:
            raise FormatError(f"this control process serves run {self._run}, not {run}")


def _result(request: SummariseRequest, marks: list[Mark], key: str) -> EvaluationResult:
    num = len(marks)
    num_right = sum(mark.strict_cover for mark in marks)
    return EvaluationResult(
        run=request.run,
        evaluation=request.evaluation,
        version=request.version,
        num_questions=num,
        pass_at_1=num_right / max(1, num),
        interval_95=wilson_95(num_right, num),
        search_rate=sum(mark.searched for mark in marks) / max(1, num),
        cover=sum(mark.cover for mark in marks) / max(1, num),
        exact_match=sum(mark.exact_match for mark in marks) / max(1, num),
        mean_tokens=sum(mark.num_tokens for mark in marks) / max(1, num),
        key=key,
    )
