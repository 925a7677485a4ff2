"""The command line's view of Temporal: connect, start a run, ask how it is, tell it to pause, resume or stop.

Synchronous, with a limit on every call. What the workflows do is theirs; servers are started by `services.py`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import SearchAttributeKey, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import FailureError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities import connection
from stoa.config.load import temporal_access
from stoa.config.run import Temporal
from stoa.contracts import names
from stoa.contracts.access import PLAIN, Access
from stoa.contracts.errors import (
    AccessDeniedError,
    RunExistsError,
    RunMissingError,
    ServiceError,
    ServiceUnavailableError,
    SetupMissingError,
    UsageError,
)
from stoa.contracts.evaluation_messages import EvalAsk, EvalPlayer, EvalPlayers, EvaluationInput, EvaluationResult
from stoa.contracts.fleet_messages import FleetMember, FleetPage, FleetQuery, SessionStatus
from stoa.contracts.messages import AnchorCadence, Ask, MacAsk, RunInput, RunResult, RunStatus

CALL_SECONDS: Final = 10.0
QUERY_SECONDS: Final = 4.0
"""A query needs the run's control process, which may be away; then nobody answers, and nobody says so."""
QUERY_TRIES: Final = 3
UPDATE_SECONDS: Final = 30.0
"""An update waits so long for the run's control process: longer than one takes to start again."""
MOST_LISTED: Final = 1000
CONTROL_SILENT: Final = "its control process does not answer"
"""What is said of a run where Temporal is there and nobody works for the run."""
MOST_ASKED: Final = 64
"""Sessions asked at a time: each answer has to come from one control process."""
_HOW_TO_START: Final = "start one with `stoa services` or `temporal server start-dev`, or set STOA_TEMPORAL_ADDRESS"
_OF_AN_ENDED_RUN: Final = {
    **dict.fromkeys((names.STOP, names.DRAIN, names.PAUSE), "there is nothing left to do; `stoa status RUN` tells how it ended"),
    names.EVALUATE: "examine its newest weights here: `stoa export RUN DIR`, then `stoa eval DIR`",
}
"""What is left to do for who asked too late, where it is not to go on with the run."""
_RUN: Final = SearchAttributeKey.for_keyword("RlRun")
ResultT = TypeVar("ResultT")


class Control:
    """A connection to the namespaces of one configuration. Use as a context."""

    def __init__(self, settings: Temporal, *, update_seconds: float = UPDATE_SECONDS) -> None:
        self._settings = settings
        self.update_seconds = update_seconds
        self._access = temporal_access(settings)
        self._runner = asyncio.Runner()
        self._clients: dict[str, Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A question that another thread still waits for keeps the loop; it ends with the process.
        if not self._runner.get_loop().is_running():
            self._runner.close()

    def start_run(self, start: RunInput) -> None:
        """Start RunWorkflow. Raises RunExistsError if one of this name is running."""
        self._call(self._start_run(start), start.run)

    def status(self, run: str) -> RunStatus:
        """How the run is, running or ended. Raises RunMissingError if Temporal knows no such run."""
        return self._call(self._status(run), run)

    def is_running(self, run: str) -> bool:
        """True while RunWorkflow runs; False when it ended or never was."""
        try:
            return self._call(self._workflow_status(run), run) == WorkflowExecutionStatus.RUNNING
        except RunMissingError:
            return False

    def result(self, run: str) -> RunResult:
        """How an ended run ended. Raises ServiceError with the cause if its workflow failed."""
        return self._call(self._result(run), run)

    def carried_over(self, start: RunInput) -> RunInput:
        """`start` with what the run of this name has used and decided before, as far as its ended workflow tells."""
        try:
            before = self.result(start.run)
        except (ServiceError, RunMissingError):
            return start
        seconds = before.seconds_before + max(0.0, before.ended_at - before.started_at)
        return replace(
            start,
            gpu_hours=before.gpu_hours,
            quarantined=before.quarantined,
            drained=before.drained,
            on_trial=before.on_trial,
            seconds_before=seconds,
        )

    def fleet(self, run: str) -> tuple[FleetMember, ...]:
        """Members of the run's fleet that are listed, all pages."""
        return self._call(self._fleet(run), run).members

    def fleet_view(self, run: str) -> FleetPage:
        """The fleet in one: all members that are listed, how many play, and the slowest and why."""
        return self._call(self._fleet(run), run)

    def sessions(self, run: str, hosts: tuple[str, ...]) -> tuple[SessionStatus, ...]:
        """What each host's session says of itself; sessions that do not answer are left out."""
        return self._call(self._sessions(run, hosts), run)

    def ended_sessions(self, run: str) -> tuple[SessionStatus, ...]:
        """What each host's ended session said last: results, for which no worker is needed; empty where the server cannot tell."""
        try:
            return self._call(self._ended_sessions(run), run)
        except (ServiceError, RunMissingError):
            return ()

    def present(self, run: str) -> tuple[str, ...]:
        """Hosts whose sessions of this run are open, by name; empty where the server cannot tell."""
        try:
            return self._call(self._present(run), run)
        except (ServiceError, RunMissingError):
            return ()

    def live_runs(self) -> tuple[str, ...]:
        """Runs whose workflows run here, by name; empty where the server cannot tell."""
        try:
            return self._call(self._live_runs(), "")
        except (ServiceError, RunMissingError):
            return ()

    def ask(self, run: str, update: str, reason: str) -> RunStatus:
        """Send the update `pause`, `resume`, `drain` or `stop`; returns how the run is then. Raises UsageError if the run refuses it."""
        return self._call(self._update(run, update, Ask(reason), RunStatus), run)

    def ask_mac(self, run: str, update: str, host: str, reason: str, *, unseen: bool = False) -> None:
        """Send the update `quarantine`, `drain_mac` or `release`. Raises UsageError if the run refuses it.

        unseen: the host may be one that the run has not met.
        """
        self._call(self._update(run, update, MacAsk(host, reason, unseen)), run)

    def set_anchor_cadence(self, run: str, cadence: AnchorCadence) -> None:
        """Change how often anchors come. Raises UsageError if the run refuses it."""
        self._call(self._update(run, names.SET_ANCHOR_CADENCE, cadence), run)

    def examine(self, run: str, ask: EvalAsk, taken: Callable[[], None]) -> tuple[EvaluationResult, tuple[EvalPlayer, ...]]:
        """Have a run evaluate a version and wait for the result; also what each Mac did for it, if anybody still tells.

        `taken` is called once the run has agreed to it.

        Raises UsageError if the run refuses it, ServiceError if the evaluation fails.
        """
        return self._call(self._examine(run, ask, taken), run)

    async def _examine(self, run: str, ask: EvalAsk, taken: Callable[[], None]) -> tuple[EvaluationResult, tuple[EvalPlayer, ...]]:
        given: EvaluationInput = await self._update(run, names.EVALUATE, ask, EvaluationInput)
        taken()
        client = await self._client(self._settings.namespace_mac)
        handle = client.get_workflow_handle(names.evaluation_workflow_id(run, given.evaluation), result_type=EvaluationResult)
        deadline = time.monotonic() + given.timeout_seconds + 6 * CALL_SECONDS
        while True:
            try:
                result = await handle.result(rpc_timeout=timedelta(seconds=CALL_SECONDS))
                break
            except WorkflowFailureError as failure:
                raise ServiceError(f"run {run}: evaluation {given.evaluation}: {innermost(failure)}") from None
            except RPCError as problem:
                waits = problem.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED)
                if not waits or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)  # it is opened after the run's present small task
        try:
            told = await _answer(handle, names.PLAYERS_QUERY, EvalPlayers)
        except (RPCError, WorkflowQueryFailedError):
            return result, ()
        return result, told.players

    async def _client(self, namespace: str) -> Client:
        if namespace not in self._clients:
            self._clients[namespace] = await connect(self._settings.address, namespace, self._access)
        return self._clients[namespace]

    async def _start_run(self, start: RunInput) -> None:
        client = await self._client(self._settings.namespace_core)
        try:
            await client.start_workflow(
                names.RUN_WORKFLOW,
                start,
                id=names.run_workflow_id(start.run),
                task_queue=names.control_queue(start.run),
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                rpc_timeout=timedelta(seconds=CALL_SECONDS),
            )
        except WorkflowAlreadyStartedError:
            raise RunExistsError(f"run {start.run}: its workflow is running already", hint=f"see `stoa status {start.run}`") from None

    async def _status(self, run: str) -> RunStatus:
        handle = (await self._client(self._settings.namespace_core)).get_workflow_handle(names.run_workflow_id(run))
        return await _answer(handle, names.STATUS_QUERY, RunStatus)

    async def _workflow_status(self, run: str) -> WorkflowExecutionStatus | None:
        handle = (await self._client(self._settings.namespace_core)).get_workflow_handle(names.run_workflow_id(run))
        return (await handle.describe(rpc_timeout=timedelta(seconds=CALL_SECONDS))).status

    async def _result(self, run: str) -> RunResult:
        client = await self._client(self._settings.namespace_core)
        handle = client.get_workflow_handle(names.run_workflow_id(run), result_type=RunResult)
        try:
            return await handle.result(rpc_timeout=timedelta(seconds=CALL_SECONDS))
        except WorkflowFailureError as failure:
            raise ServiceError(f"run {run}: {innermost(failure)}") from None

    async def _fleet(self, run: str) -> FleetPage:
        handle = (await self._client(self._settings.namespace_core)).get_workflow_handle(names.run_workflow_id(run))
        members: list[FleetMember] = []
        after = ""
        while True:
            page = await _answer(handle, names.FLEET_QUERY, FleetPage, FleetQuery(after_host=after))
            members.extend(page.members)
            if not page.next_host or page.next_host == after:
                return FleetPage(tuple(members), page.num_macs, "", page.slowest)
            after = page.next_host

    async def _sessions(self, run: str, hosts: tuple[str, ...]) -> tuple[SessionStatus, ...]:
        client = await self._client(self._settings.namespace_mac)
        room = asyncio.Semaphore(MOST_ASKED)

        async def one(host: str) -> SessionStatus | None:
            handle = client.get_workflow_handle(names.session_workflow_id(run, host))
            try:
                async with room:
                    said = await _answer(handle, names.SESSION_QUERY, SessionStatus)
            except (RPCError, WorkflowQueryFailedError):
                return None
            # Run a-b with host c and run a with host b-c have one id: what another Mac says is no answer.
            return said if said.host == host else None

        return tuple(status for status in await asyncio.gather(*map(one, hosts)) if status is not None)

    async def _present(self, run: str) -> tuple[str, ...]:
        return await self._hosts(run, "Running")

    async def _hosts(self, run: str, status: str) -> tuple[str, ...]:
        """Hosts with a session of this run in this state of Temporal's."""
        client = await self._client(self._settings.namespace_mac)
        first = names.session_workflow_id(run, "")
        asked = f"ExecutionStatus = '{status}' AND WorkflowId STARTS_WITH '{first}'"
        found: set[str] = set()
        async for one in client.list_workflows(asked, limit=MOST_LISTED, rpc_timeout=timedelta(seconds=QUERY_SECONDS)):
            if one.typed_search_attributes.get(_RUN) in (None, run):  # run a-b has sessions that begin like those of run a
                found.add(one.id.removeprefix(first))
        return tuple(sorted(found))

    async def _live_runs(self) -> tuple[str, ...]:
        client = await self._client(self._settings.namespace_core)
        asked = f"ExecutionStatus = 'Running' AND WorkflowType = '{names.RUN_WORKFLOW}'"
        first = names.run_workflow_id("")
        found = client.list_workflows(asked, limit=MOST_LISTED, rpc_timeout=timedelta(seconds=QUERY_SECONDS))
        return tuple(sorted([one.id.removeprefix(first) async for one in found]))

    async def _ended_sessions(self, run: str) -> tuple[SessionStatus, ...]:
        client = await self._client(self._settings.namespace_mac)

        async def one(host: str) -> SessionStatus | None:
            handle = client.get_workflow_handle(names.session_workflow_id(run, host), result_type=SessionStatus)
            try:
                said = await handle.result(rpc_timeout=timedelta(seconds=QUERY_SECONDS))
            except (RPCError, WorkflowFailureError):
                return None  # the newest session of this host failed, or is open again
            return said if said.host == host else None  # as in `_sessions`

        hosts = await self._hosts(run, "Completed")
        return tuple(said for said in await asyncio.gather(*map(one, hosts)) if said is not None)

    async def _update(
        self, run: str, update: str, argument: Ask | MacAsk | AnchorCadence | EvalAsk, result_type: type[ResultT] | None = None
    ) -> ResultT:
        handle = (await self._client(self._settings.namespace_core)).get_workflow_handle(names.run_workflow_id(run))
        limit, word = timedelta(seconds=self.update_seconds), update.removesuffix("_mac").replace("_", " ")
        try:
            # The client itself would ask again and again for as long as no worker takes the update.
            asked = handle.execute_update(update, argument, result_type=result_type, rpc_timeout=limit)
            return await asyncio.wait_for(asked, self.update_seconds)
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
            raise ServiceUnavailableError(
                f"run {run}: {CONTROL_SILENT}; {word} may still be taken once it does", hint="is `python -m trainer_gpu.worker` running?"
            ) from None
        except WorkflowUpdateFailedError as failure:
            raise UsageError(f"run {run}: {word} was refused: {innermost(failure)}") from None
        except RPCError as problem:
            if problem.status == RPCStatusCode.NOT_FOUND and "already completed" in problem.message:
                hint = _OF_AN_ENDED_RUN.get(update, "go on with it: `stoa run CONFIG --resume`").replace("RUN", run)
                raise UsageError(f"run {run}: {word} was refused: the run has ended", hint=hint) from None
            raise

    def _call(self, work: Coroutine[Any, Any, ResultT], run: str) -> ResultT:
        try:
            return self._runner.run(work)
        except RPCError as problem:
            raise _typed(problem, self._settings.address, run) from None
        except WorkflowQueryFailedError as problem:
            raise ServiceError(f"run {run}: its workflow cannot answer: {problem}") from None


async def connect(address: str, namespace: str, access: Access = PLAIN) -> Client:
    """A client of a namespace that answers, or a typed error within `CALL_SECONDS`."""
    try:
        client = await asyncio.wait_for(connection.connect(address, namespace, access=access), CALL_SECONDS)
        await client.workflow_service.describe_namespace(
            DescribeNamespaceRequest(namespace=namespace), timeout=timedelta(seconds=CALL_SECONDS)
        )
    except TimeoutError:
        raise ServiceUnavailableError(f"Temporal at {address} does not answer", hint=_HOW_TO_START) from None
    except RPCError as problem:
        if problem.status == RPCStatusCode.NOT_FOUND:
            raise SetupMissingError(f"Temporal at {address} has no namespace {namespace}", hint="run `stoa setup`") from None
        raise _typed(problem, address, "") from None
    return client


async def _answer(handle: WorkflowHandle[Any, Any], query: str, kind: type[ResultT], *given: object) -> ResultT:
    """A query's answer. One that meets events without a workflow task fails (`workflows/clock.py`), and is asked again after that."""
    ask = partial(handle.query, query, args=given, result_type=kind, rpc_timeout=timedelta(seconds=QUERY_SECONDS))
    for _ in range(QUERY_TRIES - 1):
        with suppress(WorkflowQueryFailedError):
            return await ask()
        await asyncio.sleep(0.5)
    return await ask()


def check_namespace(address: str, namespace: str) -> None:
    """Return if a namespace answers real calls; raise ServiceUnavailableError or SetupMissingError otherwise."""
    asyncio.run(connect(address, namespace))


def innermost(failure: BaseException) -> str:
    """The message at the root of a chain of Temporal failures."""
    cause: BaseException = failure
    while (inner := getattr(cause, "cause", None)) is not None:
        cause = inner
    # Temporal's own text of a failure begins with the name of a class.
    return cause.message if isinstance(cause, FailureError) else str(cause)


def _typed(problem: RPCError, address: str, run: str) -> ServiceError | RunMissingError:
    if problem.status == RPCStatusCode.NOT_FOUND and run:
        return RunMissingError(f"run {run}: Temporal at {address} knows no such run", hint="start it with `stoa run CONFIG`")
    # The last of the three is how a server tells at once that no worker has asked for this run's tasks of late.
    silent = (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.FAILED_PRECONDITION)
    if problem.status in silent and run:
        return ServiceUnavailableError(f"run {run}: {CONTROL_SILENT}", hint="is `python -m trainer_gpu.worker` running?")
    if problem.status in (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNAUTHENTICATED):
        return AccessDeniedError(f"Temporal at {address} refused us: {problem.message}")
    return ServiceUnavailableError(f"Temporal at {address}: {problem.message}", hint=_HOW_TO_START)
