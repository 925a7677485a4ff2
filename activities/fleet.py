"""Control activities about the fleet: who may join, who is there, who joined or left, HEAD.state, and what Macs are told.

They run on the control queue of a run, beside the workflows; engines (`Granter`, `HeadKeeper`) are injected.
Sessions live in the namespace `mac` and the run in `core`: crossing from one to the other happens here only.
"""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

from temporalio import activity
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from activities.connection import RPC_TIMEOUT
from activities.edge import application_error, run_engine
from activities.standings import Desk
from stoa.contracts import names
from stoa.contracts.errors import FormatError
from stoa.contracts.evaluation_messages import ListMacsRequest, MacList
from stoa.contracts.fleet_messages import (
    AdmitRequest,
    Admitted,
    Census,
    CensusRequest,
    FleetEvent,
    MacFacts,
    Released,
    ReleaseRequest,
    Standing,
    Standings,
    StandingsQuery,
)
from stoa.contracts.ids import is_name
from stoa.contracts.messages import Beat, HeadStateRequest, HeadStateResult, LeaseFound, LeaseQuestion
from stoa.contracts.ports import Granter, HeadKeeper, Progress

MAX_SIGNALLED_MACS: Final = 200
"""In a larger fleet Macs come and go too often to signal the run each time: it learns of them by its census."""
PAGE_BYTES: Final = 12 * 1024
QUERY_TIMEOUT: Final = timedelta(seconds=8)

_HOST: Final = SearchAttributeKey.for_keyword("RlHost")
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class FleetActivities:
    """Messages between the run and the Macs, and the control side's only write to HEAD."""

    def __init__(self, core: Client, mac: Client, granter: Granter, keeper: HeadKeeper) -> None:
        self._core = core
        self._mac = mac
        self._granter = granter
        self._keeper = keeper
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="fleet")
        self._num_macs = 0
        self._desks: dict[str, Desk] = {}

    def served(self) -> list[Callable[..., Any]]:
        """All of them, for the worker."""
        return [
            self.notify_run,
            self.admit_mac,
            self.tell_mac,
            self.census,
            self.set_head_state,
            self.find_lease,
            self.list_macs,
            self.release_macs,
        ]

    @activity.defn(name=names.NOTIFY_RUN, no_thread_cancel_exception=True)
    async def notify_run(self, event: FleetEvent) -> None:
        """Tell the run that a Mac joined or left; what a lost Mac owed leaves the ledger."""
        activity.heartbeat(Beat(sweep=event.sweep, progress=f"{event.host} {event.event}"))
        if event.event == "left":
            await run_engine(self._threads, self._forget, event)
        if self._num_macs <= MAX_SIGNALLED_MACS:
            await signal_run(self._core, event.run, names.FLEET_EVENT, event)

    @activity.defn(name=names.ADMIT_MAC, no_thread_cancel_exception=True)
    async def admit_mac(self, request: AdmitRequest) -> Admitted:
        """Whether a Mac may play: its build is new enough, and the run has nothing against it."""
        activity.heartbeat(Beat(progress=f"{request.host}, build {request.build}"))
        if is_older(request.build, names.OLDEST_MAC_BUILD):
            reason = f"build {request.build} is too old for this run: `pip install -U 'stoa>={names.OLDEST_MAC_BUILD}'`"
            return Admitted(ok=False, reason=reason)
        desk = self._desks.setdefault(request.run, Desk(request.run, partial(self._ask_standings, request.run)))
        try:
            standing = await desk.standing(request.host)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:  # the run has no workflow now: HEAD says what that means
                return Admitted()
            raise
        return Admitted(ok=standing.state == "free", reason=standing.reason, standing=standing.state)

    async def _ask_standings(self, run: str, hosts: tuple[str, ...]) -> Standings:
        handle = self._core.get_workflow_handle(names.run_workflow_id(run))
        return await handle.query(names.STANDINGS_QUERY, StandingsQuery(hosts), result_type=Standings, rpc_timeout=QUERY_TIMEOUT)

    @activity.defn(name=names.TELL_MAC, no_thread_cancel_exception=True)
    async def tell_mac(self, standing: Standing) -> None:
        """Tell a Mac's session how the run thinks of it now; one that is not here is told when it joins."""
        activity.heartbeat(Beat(progress=f"{standing.host} is {standing.state}"))
        await _signal(self._mac, names.session_workflow_id(standing.run, standing.host), names.STANDING, standing)

    @activity.defn(name=names.CENSUS, no_thread_cancel_exception=True)
    async def census(self, request: CensusRequest) -> Census:
        """Which Macs are here and how each does, one page; and how many groups are on the way."""
        activity.heartbeat(Beat(progress="asking for live sessions"))
        found: list[MacFacts] = []
        async for execution in self._mac.list_workflows(
            f"{_sessions(request.run)} AND RlState IN ('live', 'resting')", rpc_timeout=RPC_TIMEOUT
        ):
            host = execution.typed_search_attributes.get(_HOST)
            if host is not None:
                found.append(await execution.memo_value(names.MEMO, MacFacts(host), type_hint=MacFacts))
        running, waiting = await run_engine(self._threads, self._count, request)
        answer = replace(census_page(found, request.after_host), num_groups_running=running, num_groups_waiting=waiting)
        self._num_macs = answer.num_macs
        return answer

    def _count(self, _: CensusRequest, __: Progress) -> tuple[int, int]:
        return self._granter.on_the_way()

    def _forget(self, event: FleetEvent, _: Progress) -> None:
        self._granter.host_left(event.host)

    @activity.defn(name=names.SET_HEAD_STATE, no_thread_cancel_exception=True)
    async def set_head_state(self, request: HeadStateRequest) -> HeadStateResult:
        """Set HEAD.state."""
        return await run_engine(self._threads, self._keeper.set_state, request)

    @activity.defn(name=names.FIND_LEASE, no_thread_cancel_exception=True)
    async def find_lease(self, request: LeaseQuestion) -> LeaseFound:
        """Which lease HEAD names."""
        return await run_engine(self._threads, self._keeper.find_lease, request)

    @activity.defn(name=names.LIST_MACS, no_thread_cancel_exception=True)
    async def list_macs(self, request: ListMacsRequest) -> MacList:
        """Hosts of live sessions, by name, one page."""
        activity.heartbeat(Beat(progress="asking for live sessions"))
        query = f"{_sessions(request.run)} AND RlState = 'live'"
        found: set[str] = set()
        async for execution in self._mac.list_workflows(query, rpc_timeout=RPC_TIMEOUT):
            host = execution.typed_search_attributes.get(_HOST)
            if host is not None:
                found.add(host)
        return page(found, request)

    @activity.defn(name=names.RELEASE_MACS, no_thread_cancel_exception=True)
    async def release_macs(self, request: ReleaseRequest) -> Released:
        """Tell every session and evaluation of the run that it has ended."""
        query = f"{_running(request.run)} AND WorkflowType IN ('{names.MAC_SESSION}', '{names.EVALUATION}')"
        activity.heartbeat(Beat(progress="telling sessions and evaluations"))
        num_released = 0
        async for execution in self._mac.list_workflows(query, rpc_timeout=RPC_TIMEOUT):
            num_released += await _signal(self._mac, execution.id, names.RUN_STOPPED, request)
        return Released(num_released)


def page(hosts: set[str], request: ListMacsRequest) -> MacList:
    """The page of `hosts` after `request.after_host`, in the order of names."""
    rest = sorted(host for host in hosts if host > request.after_host)
    shown = tuple(rest[: request.limit])
    return replace(MacList(shown), next_host=shown[-1] if len(rest) > len(shown) else "")


def census_page(found: list[MacFacts], after_host: str) -> Census:
    """The page of `found` after `after_host`, in the order of names, as long as one message may be."""
    rest = sorted((one for one in found if one.host > after_host), key=lambda one: one.host)
    num_bytes, shown = 0, 0
    for facts in rest:
        num_bytes += len(json.dumps(asdict(facts), ensure_ascii=False).encode(errors="replace")) + 1
        if num_bytes > PAGE_BYTES:
            break
        shown += 1
    next_host = rest[shown - 1].host if shown < len(rest) else ""
    return Census(tuple(rest[:shown]), sum(one.state == "live" for one in found), next_host)


def is_older(build: str, oldest: str) -> bool:
    """True if version `build` (like 0.3.1, whatever follows) is below `oldest`; never for one that runs from source."""
    mine = _VERSION.match(build)
    return mine is not None and tuple(map(int, mine.groups())) < tuple(map(int, oldest.split(".")))


async def signal_run(core: Client, run: str, signal: str, message: object) -> bool:
    """Signal the RunWorkflow of `run`; False if there is none, or it has ended."""
    return await _signal(core, names.run_workflow_id(run), signal, message)


async def _signal(client: Client, workflow_id: str, signal: str, message: object) -> bool:
    try:
        await client.get_workflow_handle(workflow_id).signal(signal, message, rpc_timeout=RPC_TIMEOUT)
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return False
        raise
    return True


def _sessions(run: str) -> str:
    return f"{_running(run)} AND WorkflowType = '{names.MAC_SESSION}'"


def _running(run: str) -> str:
    if not is_name(run):  # it stands in a query
        raise application_error(FormatError(f"run name {run!r} is not lower case letters, digits and dashes (1 to 48)"))
    return f"RlRun = '{run}' AND ExecutionStatus = 'Running'"
