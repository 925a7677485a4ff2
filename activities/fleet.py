"""Control activities about the fleet: grants, who joined or left, HEAD.state, and telling all that a run ended.

They run on the control queue of a run, beside the workflows; engines (`Granter`, `HeadKeeper`) are injected.
Sessions live in the namespace `mac` and the run in `core`: crossing from one to the other happens here only.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from temporalio import activity
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from activities.edge import application_error, run_engine
from stoa.contracts import names
from stoa.contracts.errors import FormatError
from stoa.contracts.evaluation_messages import ListMacsRequest, MacList
from stoa.contracts.fleet_messages import FleetEvent, Grant, GrantRequest, Released, ReleaseRequest
from stoa.contracts.ids import is_name
from stoa.contracts.messages import HeadStateRequest, HeadStateResult
from stoa.contracts.ports import Granter, HeadKeeper, Progress

NUM_GRANT_THREADS: Final = 64
"""A grant may wait for room, holding its thread: so many Macs can wait at once before others queue behind them."""

_HOST: Final = SearchAttributeKey.for_keyword("RlHost")


class GrantActivities:
    """What a Mac may generate next."""

    def __init__(self, granter: Granter) -> None:
        self._granter = granter
        self._threads = ThreadPoolExecutor(NUM_GRANT_THREADS, thread_name_prefix="grant")

    @activity.defn(name=names.GRANT_SWEEP, no_thread_cancel_exception=True)
    async def grant(self, request: GrantRequest) -> Grant:
        """The grant of (host, sweep), waiting for room a while."""
        return await run_engine(self._threads, self._granter.grant, request)


class FleetActivities:
    """Messages between the run and the Macs, and the control side's only write to HEAD."""

    def __init__(self, core: Client, mac: Client, granter: Granter, keeper: HeadKeeper) -> None:
        self._core = core
        self._mac = mac
        self._granter = granter
        self._keeper = keeper
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="fleet")

    @activity.defn(name=names.NOTIFY_RUN, no_thread_cancel_exception=True)
    async def notify_run(self, event: FleetEvent) -> None:
        """Tell the run that a Mac joined or left; what a lost Mac owed leaves the ledger."""
        if event.event == "left":
            await run_engine(self._threads, self._forget, event)
        await signal_run(self._core, event.run, names.FLEET_EVENT, event)

    def _forget(self, event: FleetEvent, _: Progress) -> None:
        self._granter.host_left(event.host)

    @activity.defn(name=names.SET_HEAD_STATE, no_thread_cancel_exception=True)
    async def set_head_state(self, request: HeadStateRequest) -> HeadStateResult:
        """Set HEAD.state."""
        return await run_engine(self._threads, self._keeper.set_state, request)

    @activity.defn(name=names.LIST_MACS, no_thread_cancel_exception=True)
    async def list_macs(self, request: ListMacsRequest) -> MacList:
        """Hosts of live sessions, by name, one page."""
        query = f"{_running(request.run)} AND WorkflowType = '{names.MAC_SESSION}' AND RlState = 'live'"
        found: set[str] = set()
        async for execution in self._mac.list_workflows(query):
            host = execution.typed_search_attributes.get(_HOST)
            if host is not None:
                found.add(host)
        return page(found, request)

    @activity.defn(name=names.RELEASE_MACS, no_thread_cancel_exception=True)
    async def release_macs(self, request: ReleaseRequest) -> Released:
        """Tell every session and evaluation of the run that it has ended."""
        query = f"{_running(request.run)} AND WorkflowType IN ('{names.MAC_SESSION}', '{names.EVALUATION}')"
        num_released = 0
        async for execution in self._mac.list_workflows(query):
            num_released += await _signal(self._mac, execution.id, names.RUN_STOPPED, request)
        return Released(num_released)


def page(hosts: set[str], request: ListMacsRequest) -> MacList:
    """The page of `hosts` after `request.after_host`, in the order of names."""
    rest = sorted(host for host in hosts if host > request.after_host)
    shown = tuple(rest[: request.limit])
    return replace(MacList(shown), next_host=shown[-1] if len(rest) > len(shown) else "")


async def signal_run(core: Client, run: str, signal: str, message: object) -> bool:
    """Signal the RunWorkflow of `run`; False if there is none, or it has ended."""
    return await _signal(core, names.run_workflow_id(run), signal, message)


async def _signal(client: Client, workflow_id: str, signal: str, message: object) -> bool:
    try:
        await client.get_workflow_handle(workflow_id).signal(signal, message)
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return False
        raise
    return True


def _running(run: str) -> str:
    if not is_name(run):  # it stands in a query
        raise application_error(FormatError(f"run name {run!r} is not lower case letters, digits and dashes (1 to 48)"))
    return f"RlRun = '{run}' AND ExecutionStatus = 'Running'"
