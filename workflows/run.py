"""RunWorkflow: the owner of one run. It only awaits: what to do is `plan`'s, what an event means is `apply`'s.

It keeps two lanes busy (the trainer, and small control activities), takes signals and updates, and continues as new
between steps. It never schedules sweeps; Macs have sessions of their own.
"""

import asyncio
import math
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from stoa.contracts import names
    from stoa.contracts.evaluation_messages import EvalAsk, EvaluationInput, EvaluationResult, EvaluationStart, ListMacsRequest, MacList
    from stoa.contracts.fleet_messages import (
        MAX_ASKED,
        Census,
        CensusRequest,
        FleetEvent,
        FleetPage,
        FleetQuery,
        Released,
        ReleaseRequest,
        Standings,
        StandingsQuery,
        StandingState,
    )
    from stoa.contracts.ids import is_name
    from stoa.contracts.messages import (
        Acquired,
        AcquireRequest,
        AnchorCadence,
        Ask,
        Checkpointed,
        CheckpointRequest,
        HeadStateRequest,
        HeadStateResult,
        LeaseFound,
        LeaseQuestion,
        MacAsk,
        Published,
        PublishRequest,
        RunInput,
        RunResult,
        RunStatus,
        StepRequest,
        StepResult,
        VersionsPage,
        VersionsQuery,
    )
    from workflows import fleet, limits, plan
    from workflows.apply import apply
    from workflows.calls import call, failure_kind, failure_text, is_hopeless
    from workflows.clock import TaskClock
    from workflows.events import (
        Asked,
        CensusTaken,
        Decided,
        DeskFailed,
        EvaluationLost,
        EvaluationOpened,
        Event,
        Interrupted,
        Told,
        TrainerFailed,
        VersionPublished,
    )
    from workflows.search import upsert
    from workflows.state import Evaluation, dump, first_run_progress

MAX_PAGE = 50
MAX_CADENCE = 99_999_999
FLEET_PATCH = "fleet-and-leases"
"""Since: the fleet is counted by censuses, leases are numbered by what HEAD says, and a long history lets go of a lease
that nobody takes."""
DRAIN_PATCH = "drain-bound"
"""Since: a drain ends by its bound whatever is heard meanwhile."""
Result = TypeVar("Result")


@workflow.defn(name=names.RUN_WORKFLOW)
class RunWorkflow:
    """One run from its first lease to its last evaluation."""

    @workflow.init
    def __init__(self, given: RunInput) -> None:
        self._rules = given
        self._clock = TaskClock()
        self._state = first_run_progress(given, self._clock.now())
        self._command: plan.TrainerCommand | None = None
        self._since = self._clock.now()
        self._ended_at = math.inf
        self._call: ActivityHandle[object] | None = None
        self._desk: plan.DeskCommand | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._dirty = False
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = 0.0
        self._shown: dict[str, str | int | float] = {}
        self._takes_census = workflow.patched(FLEET_PATCH)
        if self._takes_census and not given.carried:
            self._state = replace(self._state, strict_leases=True, lease_unknown=True)
        if workflow.patched(DRAIN_PATCH):
            self._state = replace(self._state, bounded_drain=True)

    @workflow.run
    async def run(self, given: RunInput) -> RunResult:
        """Drive both lanes until the run has ended."""
        while True:
            if self._fault is not None:
                raise self._fault
            self._drop_expired()
            self._show()
            idle = self._command is None and self._desk is None
            if idle and plan.is_finished(self._state, self._rules, self._clock.now()):
                break
            if idle and self._history_is_long():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(replace(self._rules, carried=dump(self._state)))
            if not self._history_is_long():
                self._start_lanes()
            self._interrupt()
            await self._wait()
        self._ended_at = self._clock.now()
        return self._result()

    def _result(self) -> RunResult:
        state = self._state
        if state.failure_type:
            raise ApplicationError(state.reason, type=state.failure_type, non_retryable=True)
        return plan.result_of(state, self._rules, self._clock.now())

    def _start_lanes(self) -> None:
        now = self._clock.now()
        if self._command is None:
            command = plan.next_for_trainer(self._state, self._rules, now)
            if command is not None:
                self._command, self._since = command, now
                self._spawn(self._drive_trainer(command))
        if self._desk is None:
            idle = self._command is None
            self._desk = plan.next_for_desk(self._state, self._rules, now, trainer_idle=idle, takes_census=self._takes_census)
            if self._desk is not None:
                self._spawn(self._drive_desk(self._desk))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._lane_ended)

    def _lane_ended(self, task: asyncio.Task[None]) -> None:
        """A lane that ends by a fault of the program would otherwise leave the run waiting for it in silence."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault, self._dirty = task.exception(), True

    async def _drive_trainer(self, command: plan.TrainerCommand) -> None:
        try:
            event = await self._do(command)
        except ActivityError as error:
            if is_cancelled_exception(error):
                event = Interrupted()
            else:
                event = TrainerFailed(type(command).__name__, failure_kind(error), failure_text(error), is_hopeless(error))
                workflow.logger.warning("trainer_failed", extra={"command": event.command, "kind": event.kind})
        self._command, self._call, self._since = None, None, self._clock.now()
        self._take(event)

    async def _do(self, command: plan.TrainerCommand) -> Event:
        rules, state = self._rules, self._state
        silence = rules.heartbeat_seconds
        match command:
            case plan.FindLease():
                return await call(names.FIND_LEASE, LeaseQuestion(rules.run), LeaseFound, limits.CONTROL)
            case plan.Acquire():
                request = AcquireRequest(rules.run, command.lease_number, state.arrived_version, state.strict_leases)
                queue = names.gpu_queue(rules.run)
                return await self._trainer(
                    names.ACQUIRE_TRAINER, request, Acquired, limits.acquire(silence), queue, f"lease {command.lease_number}"
                )
            case plan.Train():
                shut, tried = fleet.quarantined(state), fleet.on_trial(state)
                request = StepRequest(
                    rules.run, state.token, command.step, command.wait_seconds, shut, state.version, tried, state.groups_running
                )
                bounds = limits.train_step(silence, rules.step_timeout_seconds)
                return await self._trainer(names.TRAIN_STEP, request, StepResult, bounds, state.queue, f"step {command.step}")
            case plan.PublishVersion():
                version = state.version + 1
                request = PublishRequest(
                    rules.run, state.token, command.step, command.anchor, command.checkpoint, command.announce, version
                )
                bounds = limits.publish(silence, anchor=command.anchor)
                what = f"version {version}, step {command.step}"
                published = await self._trainer(names.PUBLISH, request, Published, bounds, state.queue, what)
                return VersionPublished(published, command.checkpoint)
            case plan.SaveCheckpoint():
                request = CheckpointRequest(rules.run, state.token, command.step)
                bounds = limits.publish(silence, anchor=True)
                return await self._trainer(names.CHECKPOINT, request, Checkpointed, bounds, state.queue, f"step {command.step}")

    async def _trainer(self, name: str, request: object, kind: type[Result], bounds: limits.Limits, queue: str, what: str) -> Result:
        handle = call(name, request, kind, bounds, queue=queue, summary=what, wait_when_cancelled=True)
        self._call = handle
        return await handle

    async def _drive_desk(self, command: plan.DeskCommand) -> None:
        try:
            event = await self._ask(command)
        except ActivityError as error:
            text = f"{failure_kind(error)}: {failure_text(error)}"
            workflow.logger.warning("control_failed", extra={"command": type(command).__name__, "error": text})
            if isinstance(command, plan.OpenEvaluation):
                self._take(EvaluationLost(command.evaluation, text))
            event = DeskFailed(type(command).__name__, text)
        self._desk = None
        self._take(event)

    async def _ask(self, command: plan.DeskCommand) -> Event:
        run = self._rules.run
        match command:
            case plan.SetHead():
                request = HeadStateRequest(run, command.state, command.nonce)
                return await call(names.SET_HEAD_STATE, request, HeadStateResult, limits.CONTROL, summary=command.state)
            case plan.FindMacs():
                return await call(names.LIST_MACS, ListMacsRequest(run, command.after_host), MacList, limits.CONTROL)
            case plan.OpenEvaluation():
                request = EvaluationStart(self._evaluation_input(command.evaluation))
                await call(names.START_EVALUATION, request, object, limits.CONTROL)
                return EvaluationOpened(command.evaluation)
            case plan.Release():
                reason = plan.end_reason(self._state, self._rules, self._clock.now())
                return await call(names.RELEASE_MACS, ReleaseRequest(run, reason), Released, limits.CONTROL)
            case plan.TakeCensus():
                asked_at = self._clock.now()
                census = await call(names.CENSUS, CensusRequest(run, command.after_host), Census, limits.CONTROL)
                return CensusTaken(command.after_host, asked_at, census)
            case plan.TellMac():
                standing = command.standing
                await call(names.TELL_MAC, standing, object, limits.CONTROL, summary=f"{standing.host} is {standing.state}")
                return Told(standing.host)

    def _evaluation_input(self, evaluation: Evaluation) -> EvaluationInput:
        rules = self._rules.evaluation
        return EvaluationInput(
            run=self._rules.run,
            evaluation=evaluation.name,
            version=evaluation.version,
            num_questions=evaluation.num_questions,
            questions_a_part=rules.questions_a_part,
            part_timeout_seconds=rules.part_timeout_seconds,
            sample_seed=rules.sample_seed,
            timeout_seconds=rules.timeout_seconds,
            num_samples=evaluation.num_samples,
            suspects=fleet.on_trial(self._state)[:MAX_PAGE],
        )

    def _take(self, event: Event) -> None:
        self._state = apply(event, self._state, self._rules, self._clock.now())
        self._dirty = True

    def _drop_expired(self) -> None:
        for evaluation in plan.expired(self._state, self._rules, self._clock.now()):
            self._take(EvaluationLost(evaluation, "it brought no result in time"))

    def _interrupt(self) -> None:
        ends = self._command is not None and plan.interrupts(self._command, self._state, self._rules, self._clock.now())
        # A lease that nobody takes for weeks must not hold a history that grows with every Mac that comes and goes.
        ends = ends or (self._takes_census and isinstance(self._command, plan.Acquire) and self._history_is_long())
        if ends and self._call is not None:
            self._call.cancel()
            self._call = None

    def _history_is_long(self) -> bool:
        info = workflow.info()
        return info.is_continue_as_new_suggested() or info.get_current_history_length() >= self._rules.continue_after_events

    async def _wait(self) -> None:
        self._set_timer()
        try:
            await workflow.wait_condition(lambda: self._dirty)
        except asyncio.CancelledError:  # somebody cancelled the workflow: end in good order, as if asked to stop
            self._take(Asked("stop", "cancelled in Temporal"))
        self._dirty = False

    def _set_timer(self) -> None:
        """Keep one timer at the next deadline; a new one for each wait would fill the history."""
        deadline = plan.next_deadline(self._state, self._rules, self._clock.now())
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = asyncio.create_task(self._ring(deadline))

    async def _ring(self, deadline: float) -> None:
        await asyncio.sleep(max(deadline - workflow.time(), 0.001))
        self._timer = None
        self._dirty = True

    def _show(self) -> None:
        upsert(plan.attributes(self._state, self._rules, self._clock.now()), self._shown)

    @workflow.signal(name=names.FLEET_EVENT)
    def fleet_event(self, event: FleetEvent) -> None:
        """A Mac joined or left."""
        self._take(event)

    @workflow.signal(name=names.EVAL_DONE)
    def eval_done(self, result: EvaluationResult) -> None:
        """An evaluation has its result."""
        self._take(result)

    @workflow.update(name=names.PAUSE)
    def pause(self, ask: Ask | None = None) -> RunStatus:
        """Take no new steps and let the Macs pause; what runs is finished."""
        self._take(Asked("pause", ask.reason if ask else ""))
        return self._status(self._clock.now())

    @pause.validator
    def check_pause(self, ask: Ask | None = None) -> None:
        """Refuse what cannot be paused."""
        self._refuse_if_ending("pause")
        if self._state.paused and not self._state.macs_go_on:
            raise _refusal(f"run {self._rules.run} is paused already: {self._state.reason}")
        if self._state.draining:
            raise _refusal(f"run {self._rules.run} is draining: {self._state.reason}")

    @workflow.update(name=names.RESUME)
    def resume(self, ask: Ask | None = None) -> RunStatus:
        """Undo a pause."""
        self._take(Asked("resume", ask.reason if ask else ""))
        return self._status(self._clock.now())

    @resume.validator
    def check_resume(self, ask: Ask | None = None) -> None:
        """Refuse what is not paused."""
        self._refuse_if_ending("resume")
        if not self._state.paused:
            raise _refusal(f"run {self._rules.run} is not paused")

    @workflow.update(name=names.DRAIN)
    def drain(self, ask: Ask | None = None) -> RunStatus:
        """Grant no more sweeps, train on what is on the way, then end."""
        self._take(Asked("drain", ask.reason if ask else ""))
        return self._status(self._clock.now())

    @drain.validator
    def check_drain(self, ask: Ask | None = None) -> None:
        """Refuse what drains or ends already."""
        self._refuse_if_ending("drain")
        if self._state.draining:
            raise _refusal(f"run {self._rules.run} drains already: {self._state.reason}")

    @workflow.update(name=names.SET_ANCHOR_CADENCE)
    def set_anchor_cadence(self, cadence: AnchorCadence) -> RunStatus:
        """From the next version on, anchors come this often."""
        self._take(cadence)
        return self._status(self._clock.now())

    @set_anchor_cadence.validator
    def check_anchor_cadence(self, cadence: AnchorCadence) -> None:
        """Refuse a number that is none."""
        self._refuse_if_ending("change its anchors")
        _refuse_nothing(cadence)
        if not 1 <= cadence.every_versions <= MAX_CADENCE:
            raise _refusal(f"an anchor every {cadence.every_versions} versions: it must be 1 to {MAX_CADENCE}")

    @workflow.update(name=names.EVALUATE)
    def evaluate(self, ask: EvalAsk) -> EvaluationInput:
        """Examine a version; the run does not end before it has its result. Answers what will be examined."""
        evaluation = plan.asked_evaluation(ask, self._state, self._rules)
        self._take(evaluation)
        return self._evaluation_input(evaluation)

    @evaluate.validator
    def check_evaluate(self, ask: EvalAsk) -> None:
        """Refuse a version that is not there, a name that is taken, and more than can be played at once."""
        self._refuse_if_ending("evaluate")
        _refuse_nothing(ask)
        reason = plan.no_evaluation(ask, self._state)
        if reason:
            raise _refusal(f"run {self._rules.run}: {reason}")

    @workflow.update(name=names.QUARANTINE)
    def quarantine(self, ask: MacAsk) -> RunStatus:
        """Train on nothing more of a Mac, and let it stop; its owner is told why."""
        return self._decide(ask, "quarantined")

    @quarantine.validator
    def check_quarantine(self, ask: MacAsk) -> None:
        """Refuse what changes nothing."""
        self._check_decision(ask, "quarantined")

    @workflow.update(name=names.DRAIN_MAC)
    def drain_mac(self, ask: MacAsk) -> RunStatus:
        """Let a Mac finish its sweep and leave."""
        return self._decide(ask, "drained")

    @drain_mac.validator
    def check_drain_mac(self, ask: MacAsk) -> None:
        """Refuse what changes nothing."""
        self._check_decision(ask, "drained")

    @workflow.update(name=names.RELEASE)
    def release(self, ask: MacAsk) -> RunStatus:
        """Undo a quarantine or a drain."""
        return self._decide(ask, "free")

    @release.validator
    def check_release(self, ask: MacAsk) -> None:
        """Refuse what changes nothing."""
        self._check_decision(ask, "free")

    def _decide(self, ask: MacAsk, state: StandingState) -> RunStatus:
        self._take(Decided(ask.host, state, ask.reason))
        return self._status(self._clock.now())

    def _check_decision(self, ask: MacAsk, state: StandingState) -> None:
        run = self._rules.run
        _refuse_nothing(ask)
        if not is_name(ask.host):
            raise _refusal(f"{ask.host!r} is no name of a Mac")
        tried = ask.host in fleet.on_trial(self._state)
        if fleet.standing_of(self._state, run, ask.host).state == state and not (tried and state == "free"):
            now = "neither quarantined nor drained" if state == "free" else f"{state} already"
            raise _refusal(f"{ask.host} is {now} in run {run}")
        if state != "free" and not ask.unseen and (reason := fleet.stranger_reason(self._state, run, ask.host)):
            raise _refusal(reason)
        if state != "free" and len(self._state.banned) >= fleet.MAX_BANNED:
            raise _refusal(f"{fleet.MAX_BANNED} Macs of run {run} are quarantined or drained: release some first")

    @workflow.update(name=names.STOP)
    def stop(self, ask: Ask | None = None) -> RunStatus:
        """End the run: finish the step, publish, save, evaluate. A second time: without the evaluation."""
        self._take(Asked("stop", ask.reason if ask else ""))
        return self._status(self._clock.now())

    def _refuse_if_ending(self, what: str) -> None:
        reason = plan.end_reason(self._state, self._rules, workflow.time())
        if reason:
            raise _refusal(f"run {self._rules.run} cannot {what}, it is ending: {reason}")

    @workflow.query(name=names.STATUS_QUERY)
    def status(self) -> RunStatus:
        """Where the run stands, and in one sentence what it waits for."""
        return self._status(min(query_time(), self._ended_at))

    def _status(self, now: float) -> RunStatus:
        return plan.status_of(self._state, self._rules, now, command=self._command, since=self._since)

    @workflow.query(name=names.FLEET_QUERY)
    def fleet(self, query: FleetQuery) -> FleetPage:
        """One page of Macs, each with its session's id and its sweep as of the last census; and the slowest, and why."""
        return fleet.page(self._state, self._rules, query)

    @workflow.query(name=names.VERSIONS_QUERY)
    def versions(self, query: VersionsQuery) -> VersionsPage:
        """One page of the published versions, oldest first; the run remembers the newest few hundred."""
        rest = [row for row in self._state.versions if row.version > query.after_version]
        shown = tuple(rest[: min(query.limit, MAX_PAGE)])
        return VersionsPage(shown, self._state.num_versions, shown[-1].version if len(rest) > len(shown) else -1)

    @workflow.query(name=names.STANDINGS_QUERY)
    def standings(self, query: StandingsQuery) -> Standings:
        """Which of these Macs may not play."""
        asked = (fleet.standing_of(self._state, self._rules.run, host) for host in query.hosts[:MAX_ASKED])
        return Standings(tuple(one for one in asked if one.state != "free"))


def _refuse_nothing(argument: object) -> None:
    """Null passes for any argument, whatever its type says."""
    if argument is None:
        raise _refusal("the update needs an argument, as JSON")


def _refusal(text: str) -> ApplicationError:
    return ApplicationError(text, type="UsageError")


def query_time() -> float:
    """The time for an answer to a person: workflow time stands still while nothing happens. Never for a decision."""
    with workflow.unsafe.sandbox_unrestricted():
        return max(workflow.time(), time.time())
