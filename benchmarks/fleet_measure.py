"""What a fleet costs the control plane, read from the servers themselves: histories, sizes of messages, processor time.

Snapshots are taken at the two ends of a window; what is reported is their difference.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import psutil
from google.protobuf.message import Message
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle
from temporalio.converter import DefaultPayloadConverter
from temporalio.service import RPCError

from activities.connection import connect
from benchmarks.fleet_plant import RUN
from stoa.bucket.keys import GroupKey
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationPlan
from stoa.contracts.fleet_messages import FleetEvent, SessionStatus
from stoa.contracts.messages import RunInput, StopConditions
from stoa.learning.ledger import AdmissionRule, GrantRecord, Ledger, QuestionOrder
from workflows.apply import apply
from workflows.state import RunProgress, dump

QUERY: Final = timedelta(seconds=20)
AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class History:
    """Of one workflow: which run of it, events and bytes so far, those of runs that continued as new included for the run's."""

    run_id: str
    events: int
    size: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One end of a window."""

    at: float
    histories: Mapping[str, History]
    sessions: Mapping[str, SessionStatus]
    cpu: Mapping[str, float]
    """Process -> seconds of processor time."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How much histories grew; workflows that continued as new are left out, and counted."""

    events: int = 0
    size: int = 0
    num_workflows: int = 0
    num_continued: int = 0
    hosts: frozenset[str] = field(default_factory=frozenset)


class Observer:
    """Asks Temporal. One event loop."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @classmethod
    async def at(cls, address: str) -> "Observer":
        """An observer of the default namespace."""
        return cls(await connect(address, "default"))

    async def snapshot(self, at: float, hosts: Sequence[str], processes: Mapping[str, Sequence[int]]) -> Snapshot:
        """Histories and sessions of `hosts` and of the run; processor time of process ids, by name."""
        ids = [names.run_workflow_id(RUN), *(names.session_workflow_id(RUN, host) for host in hosts)]
        histories = dict(zip(ids, await _gather(self._history(one) for one in ids), strict=True))
        histories[ids[0]] = await self._whole(ids[0], histories[ids[0]])
        sessions = dict(zip(hosts, await _gather(self._session(host) for host in hosts), strict=True))
        cpu = {name: sum(map(cpu_seconds, pids)) for name, pids in processes.items()}
        return Snapshot(
            at, {k: v for k, v in histories.items() if v is not None}, {k: v for k, v in sessions.items() if v is not None}, cpu
        )

    async def _history(self, workflow_id: str) -> History | None:
        try:
            found = await self._client.get_workflow_handle(workflow_id).describe(rpc_timeout=QUERY)
        except RPCError:
            return None
        info = found.raw_description.workflow_execution_info
        return History(found.run_id, info.history_length, info.history_size_bytes)

    async def _whole(self, workflow_id: str, present: History | None) -> History | None:
        """With the runs before the present one, which continued as new."""
        if present is None:
            return None
        events, size = present.events, present.size
        async for found in self._client.list_workflows(f"WorkflowId = '{workflow_id}' AND ExecutionStatus = 'ContinuedAsNew'"):
            info = found.raw_info
            events, size = events + info.history_length, size + info.history_size_bytes
        return History("all", events, size)

    async def _session(self, host: str) -> SessionStatus | None:
        handle = self._client.get_workflow_handle(names.session_workflow_id(RUN, host))
        try:
            return await handle.query(names.SESSION_QUERY, result_type=SessionStatus, rpc_timeout=QUERY)
        except RPCError:
            return None

    async def is_sweeping(self, host: str) -> bool:
        """True while a sweep of this Mac has begun and not ended."""
        try:
            found = await self._client.get_workflow_handle(names.session_workflow_id(RUN, host)).describe(rpc_timeout=QUERY)
        except RPCError:
            return False
        return any(
            one.activity_type.name == names.SWEEP and one.HasField("last_heartbeat_time")
            for one in found.raw_description.pending_activities
        )

    async def lost_at(self, host: str, since: float) -> float | None:
        """Unix seconds at which the server gave up a sweep of this Mac after `since`; None if it has not."""
        async for event in self._handle(host).fetch_history_events(rpc_timeout=QUERY):
            at = event.event_time.seconds + event.event_time.nanos / 1e9
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT and at > since:
                return at
        return None

    def _handle(self, host: str) -> WorkflowHandle[Any, Any]:
        return self._client.get_workflow_handle(names.session_workflow_id(RUN, host))

    async def largest_message(self, hosts: Sequence[str]) -> tuple[int, str]:
        """The largest payload in the present histories of the run and of these Macs, and where it is."""
        largest, where = 0, ""
        for workflow_id in (names.run_workflow_id(RUN), *(names.session_workflow_id(RUN, host) for host in hosts)):
            async for event in self._client.get_workflow_handle(workflow_id).fetch_history_events(rpc_timeout=QUERY):
                size = max((len(payload.data) for payload in payloads(event)), default=0)
                if size > largest:
                    largest, where = size, f"{workflow_id.partition('-')[0]}: {EventType.Name(event.event_type)}"
        return largest, where


def payloads(message: Message) -> Iterable[Payload]:
    """Every payload inside a protobuf message."""
    if isinstance(message, Payload):
        yield message
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        if descriptor.message_type.GetOptions().map_entry:
            inner = [one for one in value.values() if isinstance(one, Message)]
        else:
            inner = list(value) if not isinstance(value, Message) else [value]
        for one in inner:
            yield from payloads(one)


def growth(before: Snapshot, after: Snapshot, workflow_ids: Iterable[str]) -> Growth:
    """Between two snapshots, over these workflows."""
    found = Growth()
    for workflow_id in workflow_ids:
        old, new = before.histories.get(workflow_id), after.histories.get(workflow_id)
        if old is None or new is None:
            continue
        if old.run_id != new.run_id:
            found = replace(found, num_continued=found.num_continued + 1)
            continue
        found = Growth(
            found.events + new.events - old.events,
            found.size + new.size - old.size,
            found.num_workflows + 1,
            found.num_continued,
            found.hosts | {workflow_id},
        )
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def run_state_bytes(num_macs: int, *, host_characters: int = 12, place_characters: int = 10) -> int:
    """What RunWorkflow carries when it continues as new with so many Macs, with names and places so long, as one message."""
    given = RunInput("r" * 48, StopConditions(max_steps=1), EvaluationPlan())
    state = RunProgress(started_at=1.0e9)
    for number in range(num_macs):
        host = f"{number:0{host_characters}d}"
        event = FleetEvent(given.run, host, names.session_workflow_id(given.run, host), "joined", 10_000_000, place="p" * place_characters)
        state = apply(event, state, given, 1.0e9 + number)
    return len(DefaultPayloadConverter().to_payloads([replace(given, carried=dump(state))])[0].data)


@dataclass(frozen=True, slots=True)
class Admission:
    """What the ledger of a fleet takes: to be told everything anew, as after a restart, and for one answer and one group's news."""

    restart_seconds: float
    answer_seconds: float
    arrival_seconds: float


def admission(num_macs: int, groups: int = 8, num_asks: int = 1000) -> Admission:
    """For so many Macs with 3 sweeps granted each and a window of 10 versions; processor time. Reading the bucket is not in it."""
    groups_per_version = max(num_asks, num_macs * groups * 128 // 112 // 4)
    rule = AdmissionRule(3, 8, groups_per_version, 1e9, 6)
    grants = [GrantRecord(f"m{host}", sweep, 0, ("q",) * groups, 0.0) for host in range(num_macs) for sweep in range(3)]
    keys = [GroupKey(RUN, version, f"m{i % num_macs}", 1000 + i, 0) for version in range(10) for i in range(groups_per_version)]
    started = time.process_time()
    ledger = Ledger(rule)
    ledger.see(9, 0)
    for grant in grants:
        ledger.grant(grant)
    for key in keys[:-num_asks]:
        ledger.arrive(key)
    for key in keys[: len(keys) * 8 // 10]:
        ledger.settle(key)
    told = time.process_time()
    for key in keys[-num_asks:]:
        ledger.arrive(key)
    arrived = time.process_time()
    order = QuestionOrder(("q", "r"), 0)
    for number in range(num_asks):
        ledger.pass_time(0.0)
        ledger.decide(order, host=f"m{number % num_macs}", sweep=5, num_groups=groups, now=0.0)
    ended = time.process_time()
    return Admission(told - started, (ended - arrived) / num_asks, (arrived - told) / num_asks)


async def _gather(work: Iterable[Any]) -> list[Any]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(item: Any) -> Any:
        async with gate:
            return await item

    return list(await asyncio.gather(*map(one, work)))
