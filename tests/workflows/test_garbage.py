"""Signals and updates that mean nothing, or come at the wrong time: run and session go on as if nobody had spoken."""

import asyncio

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.common import RawValue
from temporalio.service import RPCError

from stoa.contracts import names
from stoa.contracts.fleet_messages import FleetEvent, SessionStatus, SweepRequest, SweepResult
from stoa.contracts.messages import Ask, RunStatus, StopConditions
from tests.workflows.test_mac_session import given, only, session, stop
from tests.workflows.test_mac_session import until as until_session
from tests.workflows.test_on_server import Env
from tests.workflows.test_run_workflow import rules, running, until
from tests.workflows.world import World

pytestmark = pytest.mark.asyncio(loop_scope="module")
TORN = RawValue(Payload(metadata={"encoding": b"json/plain"}, data=b'{"host": "mac-1", '))
NOTHINGS: tuple[object, ...] = (5, "x", None, [], [1, 2], {}, {"host": 7}, {"run": None, "host": [], "event": "exploded"}, TORN)


async def test_run_goes_on_whatever_it_is_sent(client: Client) -> None:
    world = World(client, hosts=("mac-1",), step_gate=asyncio.Event())
    async with running(Env(client), rules(stop=StopConditions(max_steps=8)), world) as handle:  # type: ignore[arg-type]
        await until(handle, lambda status: "step 1" in status.waiting_for)
        for name in (names.FLEET_EVENT, names.EVAL_DONE, "no_such_signal"):
            for nothing in NOTHINGS:
                await handle.signal(name, nothing)
        await handle.signal(names.FLEET_EVENT)
        await handle.signal(names.FLEET_EVENT, args=[1, 2, 3])
        # Of another run, twice the same, and a Mac that leaves before it came.
        await handle.signal(names.FLEET_EVENT, FleetEvent("other", "mac-7", "s", "left", 10**12))
        for name in (names.PAUSE, names.QUARANTINE, names.SET_ANCHOR_CADENCE, names.EVALUATE, "no_such_update"):
            for nothing in (5, {"host": 7, "every_versions": "often", "version": "x", "reason": 3}):
                with pytest.raises((WorkflowUpdateFailedError, RPCError)):
                    await handle.execute_update(name, nothing)
        for name in (names.RESUME, names.RELEASE):
            with pytest.raises((WorkflowUpdateFailedError, RPCError)):
                await handle.execute_update(name, Ask() if name == names.RESUME else {"host": "mac-1"})
        status = await handle.query(names.STATUS_QUERY, result_type=RunStatus)
        assert (status.state, status.num_macs) == ("running", 1)
        world.step_gate.set()
        result = await handle.result()
    assert (result.step, [step for _, step in world.trained]) == (8, list(range(1, 9)))


async def test_session_goes_on_whatever_it_is_sent(client: Client) -> None:
    world = World(client)
    world.on_grant = only(3)
    told: list[SweepRequest] = []

    def absurd(request: SweepRequest) -> SweepResult | None:
        told.append(request)
        return SweepResult("done", 10**15, version=-99, num_groups=-5, decode_seconds=-1.0, groups=10**9, unsent=("x" * 500,) * 20)

    world.on_sweep = absurd
    async with session(Env(client), given(), world) as handle:  # type: ignore[arg-type]
        for name in (names.HELLO, names.GOODBYE, names.STANDING, names.EVAL_SWEEP, names.RUN_STOPPED, "no_such_signal"):
            for nothing in NOTHINGS:
                await handle.signal(name, nothing)
        status = await until_session(handle, lambda one: one.num_sweeps >= 4)
        assert (status.state, status.sweep) == ("live", 4)
        assert isinstance(await stop(handle), SessionStatus)
    assert [request.sweep for request in told] == [0, 1, 2, 3]
    assert [len(request.question_ids) for request in told][-1] <= 64
