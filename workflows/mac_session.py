"""MacSessionWorkflow: one Mac in one run, one sweep after another on the Mac's own queue.

What an event means is `session_plan`'s; here is only the awaiting. Grants are fetched while a sweep decodes, and go to
the Mac ahead of their sweeps, so that it can play on while nobody here answers; a part of an evaluation runs as the
next sweep; a sweep that was lost or failed is redone under its number.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from stoa.contracts import names
    from stoa.contracts.evaluation_messages import EvalPart, EvalPartDone
    from stoa.contracts.fleet_messages import (
        AdmitRequest,
        Admitted,
        FleetEvent,
        Goodbye,
        Grant,
        GrantRequest,
        Hello,
        ReleaseRequest,
        SessionInput,
        SessionStatus,
        Standing,
        SweepRequest,
        SweepResult,
    )
    from workflows import limits, session_plan
    from workflows.calls import call, failure_kind, failure_text, forget
    from workflows.clock import TaskClock
    from workflows.namesakes import Namesakes
    from workflows.search import upsert
    from workflows.shelf import Shelf
    from workflows.state import dump, first_session_progress

GRANT_RETRY_SECONDS = 10.0
MEMO_SECONDS = 60.0
STANDING_BY = ("quarantined", "drained", "refused")
AHEAD_PATCH = "grants-ahead"
"""Since: admission by the run, grants held ahead, a memo for the census."""


@workflow.defn(name=names.MAC_SESSION)
class MacSessionWorkflow:
    """A Mac's membership of a run; started, and started again, by its hello."""

    @workflow.init
    def __init__(self, given: SessionInput) -> None:
        self._given = session_plan.within_bounds(given)
        self._clock = TaskClock()
        self._state = first_session_progress(given)
        self._parts: list[EvalPart] = []
        self._ahead = workflow.patched(AHEAD_PATCH)
        self._shelf = Shelf(self._ask)
        self._namesakes = Namesakes(self._given)
        self._sweep: ActivityHandle[SweepResult] | None = None
        self._teller: asyncio.Task[None] | None = None
        self._shown: dict[str, str | int | float] = {}
        self._num_standings = 0
        self._memo_at = 0.0
        self._memo_state = ""

    @workflow.run
    async def run(self, given: SessionInput) -> SessionStatus:
        """Play until the run stops or the Mac stays away."""
        try:
            while self._state.state != "ended":
                await self._turn()
        except asyncio.CancelledError:
            self._state = session_plan.ended(self._state, "cancelled in Temporal")
            await self._let_go()
            await self._close()
            raise
        await self._close()
        return self.session()

    async def _turn(self) -> None:
        self._clock.now()
        self._state = session_plan.take_standing(self._state)
        if self._state.state == "live" and self._ahead and self._state.admitted != self._state.nonce:
            await self._admit()
            return
        self._tell()
        self._show()
        if self._state.state == "away":
            await self._wait_for_hello()
        elif self._state.owed:
            await self._tell_owner()
        elif self._state.state in STANDING_BY:
            await self._stand_by()
        elif self._parts:
            await self._play_part(self._parts.pop(0))
        elif self._history_is_long():
            await self._continue()
        elif await self._held():
            self._state = session_plan.take_over_if_due(self._state, self._given.heartbeat_seconds, self._clock.now())
            grant = await self._granted()
            if grant is not None:
                await self._play(grant)

    async def _admit(self) -> None:
        """Ask whether the worker that said hello may play. Nobody to ask: it may; the trainer looks at all it sends."""
        given, nonce = self._given, self._state.nonce
        request = AdmitRequest(given.run, given.host, self._state.build, nonce)
        num_standings = self._num_standings
        try:
            answer = await call(names.ADMIT_MAC, request, Admitted, limits.CONTROL)
        except ActivityError as error:
            workflow.logger.warning("admission_failed", extra={"error": failure_text(error)})
            answer = Admitted()
        if self._num_standings != num_standings and answer.standing != "free":
            answer = Admitted()  # what the run has said since is newer
        self._state = session_plan.on_admission(self._state, answer, nonce)

    async def _tell_owner(self) -> None:
        """Give the Mac's owner the notice that is due; one whose worker is gone gets it at its next start."""
        kind = self._state.owed
        self._state = replace(self._state, owed="")
        notice = session_plan.notice_of(self._state, kind, self._given)
        queue = names.mac_queue(self._given.run, self._given.host)
        try:
            await call(names.NOTICE, notice, object, limits.notice(self._given.heartbeat_seconds), queue=queue, summary=kind)
        except ActivityError as error:
            workflow.logger.warning("owner_not_told", extra={"error": failure_text(error)})

    async def _stand_by(self) -> None:
        """A Mac that may not play: wait for the run to think otherwise, or for the Mac to go."""
        await self._refuse_parts("it may not play")
        if self._state.state == "refused":
            self._state = session_plan.ended(self._state, f"refused: {self._state.reason}")
            return
        if self._history_is_long():
            await self._continue()
        seen_at, expiry = self._state.seen_at, timedelta(seconds=self._given.away_expiry_seconds)
        try:
            await workflow.wait_condition(self._stirs, timeout=expiry)
        except TimeoutError:
            if self._state.seen_at == seen_at:
                self._state = session_plan.ended(self._state, f"{self._state.state}, and silent for {self._given.away_expiry_seconds:g} s")

    def _stirs(self) -> bool:
        state = self._state
        return state.state not in STANDING_BY or bool(state.owed) or bool(self._parts) or self._history_is_long()

    async def _refuse_parts(self, reason: str) -> None:
        while self._parts:
            await self._answer(self._parts.pop(0), None, reason)

    async def _wait_for_hello(self) -> None:
        await self._refuse_parts("the Mac is away")
        expiry = timedelta(seconds=self._given.away_expiry_seconds)
        try:
            await workflow.wait_condition(lambda: self._state.state != "away" or bool(self._parts), timeout=expiry)
        except TimeoutError:
            self._state = session_plan.ended(self._state, f"away for {self._given.away_expiry_seconds:g} s")

    async def _held(self) -> bool:
        """Wait out a hold; False if something else is to be done first."""
        seconds = self._state.hold_until - self._clock.now()
        if seconds <= 0:
            return True
        try:
            await workflow.wait_condition(self._is_disturbed, timeout=timedelta(seconds=seconds))
        except TimeoutError:
            return True
        return False

    def _is_disturbed(self) -> bool:
        state = self._state
        return bool(self._parts) or state.state != "live" or state.standing != "free" or bool(state.owed)

    async def _granted(self) -> Grant | None:
        """The grant of the present sweep, None if there is none yet or something else is to be done first."""
        sweep = self._state.sweep
        if (grant := self._shelf.find(sweep)) is not None:
            return grant
        self._shelf.want(sweep, session_plan.grant_wait(self._state))
        await workflow.wait_condition(lambda: self._shelf.has_answer or self._is_disturbed())
        if not self._shelf.has_answer:
            return None
        fetched = await self._shelf.take()
        now = self._clock.now()
        if fetched.error is not None:
            reason = f"no grant: {failure_kind(fetched.error)}: {failure_text(fetched.error)}"[: session_plan.MAX_TEXT]
            self._state = replace(self._state, reason=reason, hold_until=now + GRANT_RETRY_SECONDS)
        elif fetched.grant is not None and not session_plan.may_play(fetched.grant):
            self._state = session_plan.on_wait(self._state, fetched.grant, self._given, fetched.asked_at, now)
            self._shelf.move_to(self._state.sweep)
        elif fetched.grant is not None:
            self._state = session_plan.on_grant(self._state, fetched.grant)
        return self._shelf.find(sweep)

    def _ask(self, sweep: int, wait_seconds: float) -> ActivityHandle[Grant]:
        given, state = self._given, self._state
        request = GrantRequest(
            given.run,
            given.host,
            sweep,
            state.groups or given.groups,
            wait_seconds,
            ended_before=state.sweep,
            invite=state.invite,
            unsent=state.unsent,
        )
        return call(names.GRANT_SWEEP, request, Grant, limits.grant(given.heartbeat_seconds, wait_seconds), summary=f"sweep {sweep}")

    async def _play(self, grant: Grant) -> None:
        given = self._given
        ahead = session_plan.fitting_ahead(grant, self._shelf.after(grant.sweep)) if self._ahead else ()
        request = SweepRequest(
            given.run,
            given.host,
            grant.sweep,
            "train",
            grant.question_ids,
            given.group_size,
            grant.min_version,
            tickets=grant.tickets,
            shipped=grant.shipped,
            ahead=ahead[: session_plan.wanted_ahead(self._state)],
        )
        self._shelf.prefetch(grant.sweep, session_plan.wanted_ahead(self._state) if self._ahead else 0)
        result = await self._decode(request)
        if result is None and self._ahead:
            self._shelf.drop(grant.sweep)  # what came with it may have been what failed
        elif result is not None and result.status in ("paused", "stopped"):
            self._shelf.clear()  # ask anew: only the grant knows when the run goes on
        self._shelf.move_to(self._state.sweep)

    async def _play_part(self, part: EvalPart) -> None:
        given = self._given
        if self._namesakes.is_other(part.run, given.host):
            await self._answer(part, None, f"this session is of run {given.run}")
            return
        request = SweepRequest(
            given.run,
            given.host,
            self._state.sweep,
            "eval",
            part.question_ids,
            part.num_samples,
            version=part.version,
            evaluation=part.evaluation,
            part=part.part,
            tickets=await self._part_tickets(part) if self._state.invite else "",
        )
        result = await self._decode(request)
        await self._answer(part, result, self._state.reason)

    async def _part_tickets(self, part: EvalPart) -> str:
        """What lets an invited Mac ship a part; nothing if nobody answers, and then the part fails there."""
        given, state = self._given, self._state
        request = GrantRequest(
            given.run,
            given.host,
            state.sweep,
            0,
            0.0,
            ended_before=state.sweep,
            invite=state.invite,
            unsent=state.unsent,
            evaluation=part.evaluation,
            version=part.version,
            part=part.part,
        )
        bounds = limits.grant(given.heartbeat_seconds, 0.0)
        try:
            return (await call(names.GRANT_SWEEP, request, Grant, bounds, summary=f"part {part.part}")).tickets
        except ActivityError as error:
            workflow.logger.warning("no_ticket", extra={"error": failure_text(error)})
            return ""

    async def _decode(self, request: SweepRequest) -> SweepResult | None:
        """Run one sweep activity; None if it was lost, failed, or given up because the Mac left."""
        given = self._given
        bounds = limits.sweep(given.heartbeat_seconds, given.sweep_timeout_seconds)
        queue = names.mac_queue(given.run, given.host)
        what = f"evaluation {request.evaluation}, part {request.part}" if request.evaluation else f"sweep {request.sweep}"
        self._state = session_plan.on_start(self._state, self._clock.now())
        handle = forget(call(names.SWEEP, request, SweepResult, bounds, queue=queue, summary=what, wait_when_cancelled=self._ahead))
        self._sweep = handle
        await self._fetch_until(lambda: handle.done() or self._state.state != "live", request.sweep)
        if not handle.done():
            await self._let_go()
            return None
        try:
            result = await handle
        except ActivityError as error:
            self._state = session_plan.on_failure(self._state, failure_kind(error), failure_text(error), self._clock.now())
            return None
        self._state = session_plan.on_result(self._state, result, self._clock.now())
        return result

    async def _let_go(self) -> None:
        """Cancel the sweep that is played. A Mac that is there hears it from us, before we are gone: else it would think
        that it was lost, play on, and say hello.
        """
        handle = self._sweep
        if handle is None or handle.done():
            return
        handle.cancel()
        if self._ahead and self._state.state != "away":
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(handle.done, timeout=timedelta(seconds=self._given.heartbeat_seconds))

    async def _fetch_until(self, is_over: Callable[[], bool], sweep: int) -> None:
        """Wait for the end of `sweep`, and meanwhile fetch the grants that follow it."""
        num_ahead = session_plan.wanted_ahead(self._state)
        while True:
            await workflow.wait_condition(lambda: is_over() or (self._ahead and self._shelf.has_answer))
            if is_over():
                return
            await self._shelf.take()
            self._shelf.prefetch(sweep, num_ahead)

    async def _answer(self, part: EvalPart, result: SweepResult | None, reason: str) -> None:
        """Tell the evaluation; one that has ended does not mind."""
        ok = result is not None and result.status == "done"
        keys = result.keys if result is not None and ok else ()
        answer = EvalPartDone(part.part, self._given.host, ok, keys, "" if ok else reason or "not finished")
        if result is not None and ok:
            answer = replace(
                answer,
                num_episodes=result.num_episodes,
                num_sampled_tokens=result.num_sampled_tokens,
                decode_seconds=result.decode_seconds,
            )
        workflow_id = names.evaluation_workflow_id(part.run, part.evaluation)
        try:
            await workflow.get_external_workflow_handle(workflow_id).signal(names.EVAL_PART, answer)
        except FailureError:
            workflow.logger.info("evaluation_gone", extra={"evaluation": part.evaluation})

    def _tell(self) -> None:
        """Let the run know when the Mac has joined or left; a later change overtakes an untold one."""
        if self._state.told != session_plan.presence(self._state) and self._teller is None:
            self._teller = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        given = self._given
        while self._state.told != session_plan.presence(self._state):
            target = session_plan.presence(self._state)
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
        if not (self._parts or self._state.owed or self._state.state in ("away", "ended")):
            workflow.continue_as_new(replace(self._given, next_sweep=self._state.sweep, totals=dump(self._state)))

    def _show(self) -> None:
        values: dict[str, str | int | float] = {
            "RlRun": self._given.run,
            "RlHost": self._given.host,
            "RlState": session_plan.presence(self._state),
        }
        if self._state.version >= 0:
            values["RlVersion"] = self._state.version
        upsert(values, self._shown)
        self._show_facts()

    def _show_facts(self) -> None:
        """Let the next census know how the Mac does, at most once a minute."""
        state, now = session_plan.presence(self._state), self._clock.now()
        if self._ahead and (state != self._memo_state or now >= self._memo_at + MEMO_SECONDS):
            self._memo_state, self._memo_at = state, now
            workflow.upsert_memo({names.MEMO: session_plan.facts_of(self._state, self._given)})

    @workflow.signal(name=names.HELLO)
    def hello(self, hello: Hello) -> None:
        """A Mac is here."""
        now = self._clock.now()
        if self._namesakes.is_other("", hello.host):
            self._namesakes.turn_away(hello.host)
        else:
            self._state = session_plan.on_hello(self._state, hello, now)

    @workflow.signal(name=names.GOODBYE)
    def goodbye(self, goodbye: Goodbye) -> None:
        """A Mac leaves."""
        now = self._clock.now()
        if not self._namesakes.is_other("", goodbye.host):
            self._state = session_plan.on_goodbye(self._state, goodbye, now)

    @workflow.signal(name=names.EVAL_SWEEP)
    def eval_sweep(self, part: EvalPart) -> None:
        """A part of an evaluation, to be played as the next sweep."""
        self._clock.now()
        if part not in self._parts:
            self._parts.append(part)

    @workflow.signal(name=names.STANDING)
    def standing(self, standing: Standing) -> None:
        """The run decided about this Mac."""
        self._clock.now()
        if not self._namesakes.is_other("", standing.host):
            self._num_standings += 1
            self._state = session_plan.on_standing(self._state, standing)

    @workflow.signal(name=names.RUN_STOPPED)
    def run_stopped(self, release: ReleaseRequest) -> None:
        """The run has ended; nobody there needs to be told that the Mac leaves."""
        self._clock.now()
        if not self._namesakes.is_other(release.run, self._given.host):
            self._state = replace(session_plan.ended(self._state, f"run stopped: {release.reason}"), told="ended")

    @workflow.query(name=names.SESSION_QUERY)
    def session(self) -> SessionStatus:
        """State and totals."""
        return session_plan.status_of(self._state, self._given)
