"""EvaluationWorkflow: held-out questions on one pinned version, in parts, played by whichever Macs are live.

Who gets which part is decided in `parts`; playing is the sessions', scoring an activity's. A result, or why there is
none, is told to the run at the end.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from stoa.contracts import names
    from stoa.contracts.evaluation_messages import (
        EvalPart,
        EvalPartDone,
        EvalPlayers,
        EvaluationInput,
        EvaluationResult,
        HeldOutPart,
        HeldOutRequest,
        ListMacsRequest,
        MacList,
        SummariseRequest,
    )
    from stoa.contracts.fleet_messages import ReleaseRequest
    from workflows import limits, parts
    from workflows.calls import call, failure_kind, failure_text
    from workflows.clock import TaskClock
    from workflows.search import upsert

MIN_POLL_SECONDS = 1.0
MAX_POLL_SECONDS = 10.0
MAX_EPISODES_A_PART = 256
"""So many episodes the object of a part may hold."""
MAX_REDEALS = 2
"""How often parts are dealt again because what came of them was no good."""
MAX_DOUBTED = 16
"""Keys of such parts that the last summary looks at once more, to say what was wrong."""


@workflow.defn(name=names.EVALUATION)
class EvaluationWorkflow:
    """One evaluation from its questions to its summary."""

    @workflow.init
    def __init__(self, given: EvaluationInput) -> None:
        self._given = given
        self._clock = TaskClock()
        self._deal = parts.Deal(0)
        self._questions: dict[int, tuple[str, ...]] = {}
        self._num_questions = 0
        self._dirty = False
        self._stopped = ""
        self._doubted: tuple[str, ...] = ()
        self._shown: dict[str, str | int | float] = {}

    @workflow.run
    async def run(self, given: EvaluationInput) -> EvaluationResult:
        """Deal, collect, score, report. Raises ApplicationError (StarvedError and others) when there is no result."""
        self._show("dealing")
        error, kind = "", ""
        result = self._empty()
        try:
            result = await self._examine()
        except TimeoutError:
            kind = "StarvedError"
            error = f"{len(self._deal.done)} of {self._deal.num_parts} parts came within {given.timeout_seconds:g} s"
        except ActivityError as failure:
            kind, error = failure_kind(failure), failure_text(failure)
        except ApplicationError as failure:
            kind, error = failure.type or ApplicationError.__name__, failure.message
        if error:
            result = replace(result, error=f"{kind}: {error}"[:300])
        self._show("failed" if error else "done")
        await self._report(result)
        if error:
            raise ApplicationError(error, type=kind, non_retryable=True)
        return result

    async def _examine(self) -> EvaluationResult:
        """Collect and mark. Parts that are no good are dealt again, to others; if those do not come in time, what there is counts."""
        ends_at = self._clock.now() + self._given.timeout_seconds
        await asyncio.wait_for(self._begin(), self._given.timeout_seconds)
        num_redeals = 0
        while True:
            self._show("scoring")
            seconds = ends_at - self._clock.now()
            result = await self._summarise(is_final=num_redeals == MAX_REDEALS or seconds <= 0)
            if not result.redeal:
                return result
            num_redeals += 1
            workflow.logger.warning("parts_dealt_again", extra={"parts": result.redeal})
            bad = [key for one in self._deal.done if one.part in result.redeal for key in one.keys]
            self._doubted = (*self._doubted, *bad)[:MAX_DOUBTED]
            self._deal = parts.redeal(self._deal, result.redeal)
            self._show("dealing")
            try:
                await asyncio.wait_for(self._collect(), seconds)
            except TimeoutError:
                workflow.logger.warning("parts_missing", extra={"parts": self._deal.num_parts - len(self._deal.done)})

    async def _begin(self) -> None:
        await self._questions_of(0)
        size = self._questions_a_part
        self._deal = parts.Deal((self._num_questions + size - 1) // size)
        await self._collect()

    async def _collect(self) -> None:
        poll_seconds = MIN_POLL_SECONDS
        hosts: tuple[str, ...] = ()
        while not self._deal.is_done and not self._stopped:
            self._dirty = False
            now = self._clock.now()
            self._deal = parts.expire(self._deal, self._given.part_timeout_seconds, now)
            if self._deal.open_parts():
                hosts = await self._live_hosts()
            handings = parts.next_handings(self._deal, hosts, self._clock.now())
            self._deal = parts.hand(self._deal, handings)
            for handing in handings:
                await self._send(handing)
            poll_seconds = MIN_POLL_SECONDS if handings else min(poll_seconds * 1.5, MAX_POLL_SECONDS)
            await self._wait(poll_seconds)
        if self._stopped:
            raise ApplicationError(f"the run has ended: {self._stopped}", type="StarvedError")

    @property
    def _questions_a_part(self) -> int:
        """As many as were asked for, while their samples fit one object."""
        return max(1, min(self._given.questions_a_part, MAX_EPISODES_A_PART // max(1, self._given.num_samples)))

    async def _wait(self, poll_seconds: float) -> None:
        """Until an answer comes; not longer than the next look at the fleet, or the limit of the oldest part."""
        if self._deal.is_done:
            return
        seconds = poll_seconds
        if not self._deal.open_parts():
            oldest = min(one.at for one in self._deal.handed)
            seconds = max(oldest + self._given.part_timeout_seconds - self._clock.now(), 0.1)
        try:
            await workflow.wait_condition(lambda: self._dirty, timeout=timedelta(seconds=seconds))
        except TimeoutError:
            return

    async def _live_hosts(self) -> tuple[str, ...]:
        hosts: tuple[str, ...] = ()
        page = MacList(next_host="")
        while not hosts or page.next_host:
            request = ListMacsRequest(self._given.run, page.next_host)
            page = await call(names.LIST_MACS, request, MacList, limits.CONTROL)
            hosts += page.hosts
            if not page.hosts:
                break
        return parts.trusted(hosts, (*self._given.suspects, *self._deal.barred))

    async def _send(self, handing: parts.Handed) -> None:
        given = self._given
        question_ids = await self._questions_of(handing.part)
        part = EvalPart(given.run, given.evaluation, given.version, handing.part, question_ids, given.num_samples)
        session = workflow.get_external_workflow_handle(names.session_workflow_id(given.run, handing.host))
        try:
            await session.signal(names.EVAL_SWEEP, part)
        except FailureError as error:
            self._take(EvalPartDone(handing.part, handing.host, ok=False, reason=str(error)))

    async def _questions_of(self, part: int) -> tuple[str, ...]:
        if part not in self._questions:
            given, size = self._given, self._questions_a_part
            request = HeldOutRequest(given.run, given.num_questions, given.sample_seed, part * size, size)
            answer = await call(names.HELD_OUT, request, HeldOutPart, limits.CONTROL)
            self._num_questions = answer.num_questions
            self._questions[part] = answer.question_ids
        return self._questions[part]

    async def _summarise(self, *, is_final: bool) -> EvaluationResult:
        given = self._given
        request = SummariseRequest(
            given.run,
            given.evaluation,
            given.version,
            (*self._deal.keys, *self._doubted),
            self._num_questions,
            given.num_samples,
            given.sample_seed,
            0 if is_final else self._questions_a_part,
        )
        return await call(names.SUMMARISE_EVALUATION, request, EvaluationResult, limits.SCORING)

    async def _report(self, result: EvaluationResult) -> None:
        try:
            await call(names.REPORT_EVALUATION, result, object, limits.CONTROL)
        except ActivityError as error:  # the run notices by its own limit
            workflow.logger.warning("run_not_told", extra={"error": failure_text(error)})

    def _empty(self) -> EvaluationResult:
        given = self._given
        return EvaluationResult(given.run, given.evaluation, given.version, 0, 0.0, (0.0, 0.0), 0.0)

    def _show(self, state: str) -> None:
        upsert({"RlRun": self._given.run, "RlState": state, "RlVersion": self._given.version}, self._shown)

    def _take(self, answer: EvalPartDone) -> None:
        self._deal = parts.on_answer(self._deal, answer, self._clock.now())
        self._dirty = True

    @workflow.signal(name=names.EVAL_PART)
    def eval_part(self, answer: EvalPartDone) -> None:
        """A session answers a part."""
        self._take(answer)

    @workflow.signal(name=names.RUN_STOPPED)
    def run_stopped(self, release: ReleaseRequest) -> None:
        """The run has ended and its Macs with it."""
        self._clock.now()
        self._stopped = release.reason or "stopped"
        self._dirty = True

    @workflow.query(name=names.STATUS_QUERY)
    def status(self) -> parts.Deal:
        """How many parts there are, and which are played and done: of long lists the newest."""
        return parts.newest(self._deal)

    @workflow.query(name=names.PLAYERS_QUERY)
    def players(self) -> EvalPlayers:
        """What each Mac has done, in questions an hour and tokens/s."""
        return EvalPlayers(parts.players(self._deal))
