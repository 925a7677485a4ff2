"""Control activities about evaluations: start one, hand out its questions, score it, report it to the run.

Evaluations live in the namespace `mac`, the run in `core`. Scoring is done by an injected `Evaluator`.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from activities.connection import RPC_TIMEOUT
from activities.edge import run_engine
from activities.fleet import signal_run
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationResult, EvaluationStart, HeldOutPart, HeldOutRequest, SummariseRequest
from stoa.contracts.messages import Beat
from stoa.contracts.ports import Evaluator, Progress


class EvaluationActivities:
    """Everything an evaluation needs beside the Macs."""

    def __init__(self, core: Client, mac: Client, evaluator: Evaluator) -> None:
        self._core = core
        self._mac = mac
        self._evaluator = evaluator
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="evaluate")

    def served(self) -> list[Callable[..., Any]]:
        """All of them, for the worker."""
        return [self.start, self.held_out, self.summarise, self.report]

    @activity.defn(name=names.START_EVALUATION, no_thread_cancel_exception=True)
    async def start(self, request: EvaluationStart) -> None:
        """Start an evaluation; one that runs is left alone, one that is done reports again, one that failed starts again."""
        given = request.input
        activity.heartbeat(Beat(version=given.version, progress=f"starting {given.evaluation}"))
        workflow_id = names.evaluation_workflow_id(given.run, given.evaluation)
        try:
            await self._mac.start_workflow(
                names.EVALUATION,
                given,
                id=workflow_id,
                task_queue=names.control_queue(given.run),
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
                rpc_timeout=RPC_TIMEOUT,
            )
        except WorkflowAlreadyStartedError:
            done = self._mac.get_workflow_handle(workflow_id, result_type=EvaluationResult)
            await signal_run(self._core, given.run, names.EVAL_DONE, await done.result())

    @activity.defn(name=names.HELD_OUT, no_thread_cancel_exception=True)
    async def held_out(self, request: HeldOutRequest) -> HeldOutPart:
        """One part of the fixed choice of held-out questions."""
        return await run_engine(self._threads, self._choose, request)

    def _choose(self, request: HeldOutRequest, _: Progress) -> HeldOutPart:
        ids = self._evaluator.held_out(request.run, request.num_questions, request.seed)
        return HeldOutPart(ids[request.start : request.start + request.limit], len(ids))

    @activity.defn(name=names.SUMMARISE_EVALUATION, no_thread_cancel_exception=True)
    async def summarise(self, request: SummariseRequest) -> EvaluationResult:
        """Score the parts and write the summary."""
        return await run_engine(self._threads, self._evaluator.summarise, request)

    @activity.defn(name=names.REPORT_EVALUATION, no_thread_cancel_exception=True)
    async def report(self, result: EvaluationResult) -> None:
        """Hand a result to the run; nobody minds if the run has ended."""
        activity.heartbeat(Beat(version=result.version, last_key=result.key, progress=f"telling of {result.evaluation}"))
        await signal_run(self._core, result.run, names.EVAL_DONE, result)
