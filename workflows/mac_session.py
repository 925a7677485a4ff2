"""MacSessionWorkflow: one Mac in one run, one sweep after another on the Mac's own queue.

What an event means is `session_plan`'s; here is only the awaiting. The next grant is fetched while a sweep decodes;
a part of an evaluation runs as the next sweep; a sweep that was lost or failed is redone under its number.
"""

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from stoa.contracts import names
    from stoa.contracts.evaluation_messages import EvalPart, EvalPartDone
    from stoa.contracts.fleet_messages import (
        FleetEvent,
        Goodbye,
        Grant,
        GrantRequest,
        Hello,
        ReleaseRequest,
        SessionInput,
        SessionStatus,
        SweepRequest,
        SweepResult,
    )
    from workflows import limits, session_plan
    from workflows.calls import call, failure_kind, failure_text
    from workflows.search import upsert
    from workflows.state import dump, first_session_progress

GRANT_WAIT_SECONDS = 10.0
GRANT_RETRY_SECONDS = 10.0


@dataclass
class Fetch:
    """A grant on its way."""

    sweep: int
    handle: ActivityHandle[Grant]
    asked_at: float


@workflow.defn(name=names.MAC_SESSION)
class MacSessionWorkflow:
    """A Mac's membership of a run; started, and started again, by its hello."""

    @workflow.init
    def __init__(self, given: SessionInput) -> None:
        self._given = given
        self._state = first_session_progress(given)
        self._parts: list[EvalPart] = []
        self._grant: Grant | None = None
        self._fetch: Fetch | None = None
        self._teller: asyncio.Task[None] | None = None
        self._shown: dict[str, str | int | float] = {}

    @workflow.run
    async def run(self, given: SessionInput) -> SessionStatus:
        """Play until the run stops or the Mac stays away."""
        try:
            while self._state.state != "ended":
                await self._turn()
        except asyncio.CancelledError:
            self._state = session_plan.ended(self._state, "cancelled in Temporal")
            await self._close()
            raise
        await self._close()
        return self.session()

    async def _turn(self) -> None:
        self._tell()
        self._show()
        if self._state.state == "away":
            await self._wait_for_hello()
        elif self._parts:
            await self._play_part(self._parts.pop(0))
        elif self._history_is_long():
            await self._continue()
        elif await self._held():
            self._state = session_plan.take_over_if_due(self._state, self._given.heartbeat_seconds, workflow.time())
            grant = await self._granted()
            if grant is not None:
                await self._play(grant)

    async def _wait_for_hello(self) -> None:
        while self._parts:
            await self._answer(self._parts.pop(0), None, "the Mac is away")
        expiry = timedelta(seconds=self._given.away_expiry_seconds)
        try:
            await workflow.wait_condition(lambda: self._state.state != "away" or bool(self._parts), timeout=expiry)
        except TimeoutError:
            self._state = session_plan.ended(self._state, f"away for {self._given.away_expiry_seconds:g} s")

    async def _held(self) -> bool:
        """Wait out a hold; False if something else is to be done first."""
        seconds = self._state.hold_until - workflow.time()
        if seconds <= 0:
            return True
        try:
            await workflow.wait_condition(self._is_disturbed, timeout=timedelta(seconds=seconds))
        except TimeoutError:
            return True
        return False

    def _is_disturbed(self) -> bool:
        return bool(self._parts) or self._state.state != "live"

    async def _granted(self) -> Grant | None:
        """The grant of the present sweep, None if there is none yet or something else is to be done first."""
        if self._grant is not None and self._grant.sweep == self._state.sweep:
            return self._grant
        fetch = self._fetch
        if fetch is None or fetch.sweep != self._state.sweep:
            fetch = self._fetch = self._ask(self._state.sweep)
        await workflow.wait_condition(lambda: fetch.handle.done() or self._is_disturbed())
        if not fetch.handle.done():
            return None
        self._fetch = None
        now = workflow.time()
        try:
            grant = await fetch.handle
        except ActivityError as error:
            reason = f"no grant: {failure_kind(error)}: {failure_text(error)}"[: session_plan.MAX_TEXT]
            self._state = replace(self._state, reason=reason, hold_until=now + GRANT_RETRY_SECONDS)
            return None
        if session_plan.may_play(grant):
            self._grant = grant
            return grant
        self._state = session_plan.on_wait(self._state, grant, self._given, fetch.asked_at, now)
        return None

    def _ask(self, sweep: int) -> Fetch:
        given = self._given
        request = GrantRequest(given.run, given.host, sweep, given.groups, GRANT_WAIT_SECONDS, ended_before=self._state.sweep)
        bounds = limits.grant(given.heartbeat_seconds, GRANT_WAIT_SECONDS)
        return Fetch(sweep, call(names.GRANT_SWEEP, request, Grant, bounds, summary=f"sweep {sweep}"), workflow.time())

    async def _play(self, grant: Grant) -> None:
        given = self._given
        request = SweepRequest(given.run, given.host, grant.sweep, "train", grant.question_ids, given.group_size, grant.min_version)
        if self._fetch is None:
            self._fetch = self._ask(grant.sweep + 1)
        result = await self._decode(request)
        if isinstance(result, SweepResult) and result.status in ("paused", "stopped"):
            self._grant = None  # ask anew: only the grant knows when the run goes on

    async def _play_part(self, part: EvalPart) -> None:
        given = self._given
        request = SweepRequest(
            given.run,
            given.host,
            self._state.sweep,
            "eval",
            part.question_ids,
            1,
            version=part.version,
            evaluation=part.evaluation,
            part=part.part,
        )
        result = await self._decode(request)
        await self._answer(part, result, self._state.reason)

    async def _decode(self, request: SweepRequest) -> SweepResult | None:
        """Run one sweep activity; None if it was lost, failed, or given up because the Mac left."""
        given = self._given
        bounds = limits.sweep(given.heartbeat_seconds, given.sweep_timeout_seconds)
        queue = names.mac_queue(given.run, given.host)
        what = f"evaluation {request.evaluation}, part {request.part}" if request.evaluation else f"sweep {request.sweep}"
        handle = call(names.SWEEP, request, SweepResult, bounds, queue=queue, summary=what)
        await workflow.wait_condition(lambda: handle.done() or self._state.state != "live")
        if not handle.done():
            handle.cancel()
            return None
        try:
            result = await handle
        except ActivityError as error:
            self._state = session_plan.on_failure(self._state, failure_kind(error), failure_text(error), workflow.time())
            return None
        self._state = session_plan.on_result(self._state, result, workflow.time())
        return result

    async def _answer(self, part: EvalPart, result: SweepResult | None, reason: str) -> None:
        """Tell the evaluation; one that has ended does not mind."""
        ok = result is not None and result.status == "done"
        keys = result.keys if result is not None and ok else ()
        answer = EvalPartDone(part.part, self._given.host, ok, keys, "" if ok else reason or "not finished")
        workflow_id = names.evaluation_workflow_id(part.run, part.evaluation)
        try:
            await workflow.get_external_workflow_handle(workflow_id).signal(names.EVAL_PART, answer)
        except FailureError:
            workflow.logger.info("evaluation_gone", extra={"evaluation": part.evaluation})

    def _tell(self) -> None:
        """Let the run know when the Mac has joined or left; a later change overtakes an untold one."""
        if self._state.told != self._state.state and self._teller is None:
            self._teller = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        given = self._given
        while self._state.told != self._state.state:
            target = self._state.state
            joined = target == "live"
            if joined or self._state.told == "live":
                event = FleetEvent(
                    given.run,
                    given.host,
                    workflow.info().workflow_id,
                    "joined" if joined else "left",
                    self._state.sweep,
                    self._state.reason,
                    given.place,
                )
                try:
                    await call(names.NOTIFY_RUN, event, object, limits.CONTROL)
                except ActivityError as error:
                    workflow.logger.warning("run_not_told", extra={"error": failure_text(error)})
            self._state = replace(self._state, told=target)
        self._teller = None

    async def _close(self) -> None:
        # What still runs learns from its next heartbeat that nobody waits for it.
        self._show()
        self._tell()
        await workflow.wait_condition(lambda: self._teller is None)
        for part in self._parts:
            await self._answer(part, None, self._state.reason)

    def _history_is_long(self) -> bool:
        info = workflow.info()
        return info.is_continue_as_new_suggested() or info.get_current_history_length() >= self._given.continue_after_events

    async def _continue(self) -> None:
        await workflow.wait_condition(lambda: workflow.all_handlers_finished() and self._teller is None)
        # A grant on its way is let go: asked again under the same number it is the same.
        if not self._is_disturbed():
            workflow.continue_as_new(replace(self._given, next_sweep=self._state.sweep, totals=dump(self._state)))

    def _show(self) -> None:
        values: dict[str, str | int | float] = {
            "RlRun": self._given.run,
            "RlHost": self._given.host,
            "RlState": self._state.state,
        }
        if self._state.version >= 0:
            values["RlVersion"] = self._state.version
        upsert(values, self._shown)

    @workflow.signal(name=names.HELLO)
    def hello(self, hello: Hello) -> None:
        """A Mac is here."""
        self._state = session_plan.on_hello(self._state, hello, workflow.time())

    @workflow.signal(name=names.GOODBYE)
    def goodbye(self, goodbye: Goodbye) -> None:
        """A Mac leaves."""
        self._state = session_plan.on_goodbye(self._state, goodbye, workflow.time())

    @workflow.signal(name=names.EVAL_SWEEP)
    def eval_sweep(self, part: EvalPart) -> None:
        """A part of an evaluation, to be played as the next sweep."""
        if part not in self._parts:
            self._parts.append(part)

    @workflow.signal(name=names.RUN_STOPPED)
    def run_stopped(self, release: ReleaseRequest) -> None:
        """The run has ended; nobody there needs to be told that the Mac leaves."""
        self._state = replace(session_plan.ended(self._state, f"run stopped: {release.reason}"), told="ended")

    @workflow.query(name=names.SESSION_QUERY)
    def session(self) -> SessionStatus:
        """State and totals."""
        return session_plan.status_of(self._state, self._given)
