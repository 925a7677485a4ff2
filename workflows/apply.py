"""How events change a run's memory: `apply(state, event, rules, now) -> state`, pure, one function an event.

Events say what has happened (an activity's result or failure, a signal, an update); what follows from the new state is
decided in `plan`.
"""

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Final

from stoa.contracts.evaluation_messages import EvaluationResult, MacList
from stoa.contracts.fleet_messages import FleetEvent, Released
from stoa.contracts.messages import Acquired, Checkpointed, HeadStateResult, Published, RunInput, StepResult
from workflows.plan import MAX_OPEN_EVALUATIONS, end_reason
from workflows.state import Evaluation, Member, RunProgress

MAX_FAILURES: Final = 5
"""Trainer failures in a row after which the run pauses and waits for a person."""
MAX_HOLD_SECONDS: Final = 60.0
DESK_HOLD_SECONDS: Final = 10.0
SHORT_WAIT_SECONDS: Final = 1.0
STARVED_HOLD_SECONDS: Final = 5.0
MAX_RESULTS: Final = 20
MAX_MEMBERS: Final = 2000
MAX_TEXT: Final = 300
LEASE_ERRORS: Final = frozenset({"FencedError", "LostStateError"})


@dataclass(frozen=True)
class TrainerFailed:
    """A trainer activity failed for good: by an error of type `kind` (`timeout` for a lost one)."""

    command: str
    kind: str
    message: str
    hopeless: bool
    """Trying again cannot help."""


@dataclass(frozen=True)
class Interrupted:
    """A trainer activity was cancelled and gave up, with nothing done."""


@dataclass(frozen=True)
class DeskFailed:
    """A control activity failed after all its attempts."""

    command: str
    message: str


@dataclass(frozen=True)
class EvaluationOpened:
    """An evaluation runs now."""

    evaluation: Evaluation


@dataclass(frozen=True)
class EvaluationLost:
    """An evaluation will bring no result."""

    evaluation: Evaluation
    reason: str


@dataclass(frozen=True)
class VersionPublished:
    """The trainer published; `checkpoint` tells whether it saved itself with it."""

    published: Published
    checkpoint: bool


@dataclass(frozen=True)
class Asked:
    """A person asks."""

    what: str
    """pause, resume or stop."""
    reason: str


Event = (
    Acquired
    | StepResult
    | VersionPublished
    | Checkpointed
    | TrainerFailed
    | Interrupted
    | HeadStateResult
    | MacList
    | FleetEvent
    | EvaluationOpened
    | EvaluationLost
    | EvaluationResult
    | Released
    | DeskFailed
    | Asked
)


@singledispatch
def apply(event: Event, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    """The memory after `event` at time `now`. Raises TypeError for an event nobody handles."""
    raise TypeError(f"no rule for {type(event).__name__}")


@apply.register
def _(event: Acquired, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    after = replace(
        state,
        token=event.token,
        lease_number=max(state.lease_number, event.token // 1000),
        owner=event.owner,
        queue=event.queue,
        step=event.step,
        published_step=event.step,
        checkpoint_step=event.step,
        version=event.version,
        head_state=event.head_state,
        starved_reason="",
    )
    # Step 0 means that nothing was trained yet: these weights are the base that the run is measured against.
    if event.step == 0 and state.full_version < 0 and rules.evaluation.num_questions_final and not state.hurried:
        first = Evaluation(f"v{event.version}-first", event.version, rules.evaluation.num_questions_final)
        after = replace(after, wanted=(*after.wanted, first), full_version=event.version)
    return after


@apply.register
def _(event: StepResult, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    if event.status != "done":
        # A trainer that did not wait by itself would otherwise be asked in a tight loop.
        hold_seconds = STARVED_HOLD_SECONDS if event.wait_seconds < SHORT_WAIT_SECONDS else 0.0
        # Once a version: a fleet that is merely gone for hours must not cost an anchor each time the wait ends.
        anchor_wanted = event.status == "starved" and state.anchored_version < state.version
        return replace(state, starved_reason=event.reason[:MAX_TEXT], anchor_wanted=anchor_wanted, trainer_hold_until=now + hold_seconds)
    after = replace(
        state,
        step=event.step,
        reward_mean=event.reward_mean,
        starved_reason="",
        anchor_wanted=False,
        num_failures=0,
        trainer_hold_until=0.0,
    )
    return _paused(after, f"alarm at step {event.step}: {event.alarm}") if event.alarm else after


@apply.register
def _(event: VersionPublished, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    version = event.published.version
    after = replace(
        state,
        version=version,
        published_step=event.published.step,
        checkpoint_step=event.published.step if event.checkpoint else state.checkpoint_step,
        reward_published=state.reward_mean,
        anchored_version=version if event.published.anchor_bytes else state.anchored_version,
        anchor_wanted=False,
        num_failures=0,
    )
    plan = rules.evaluation
    is_due = plan.every_versions > 0 and version % plan.every_versions == 0
    has_room = len(after.wanted) + len(after.opened) < MAX_OPEN_EVALUATIONS
    if is_due and has_room and not end_reason(after, rules, now):
        wanted = Evaluation(f"v{version}-every", version, plan.num_questions)
        after = replace(after, wanted=(*after.wanted, wanted))
    return after


@apply.register
def _(event: Checkpointed, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, checkpoint_step=event.step, num_failures=0)


@apply.register
def _(event: TrainerFailed, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    num_failures = state.num_failures + 1
    text = f"{event.command} failed: {event.kind}: {event.message}"[:MAX_TEXT]
    hold_seconds = 0.0 if num_failures == 1 else min(2.0 ** (num_failures - 1), MAX_HOLD_SECONDS)
    # Whoever held the lease may be gone or hold other weights: what counts again is what HEAD names.
    after = replace(
        state,
        token=0,
        owner="",
        queue="",
        step=state.published_step,
        num_failures=num_failures,
        lease_number=state.lease_number + 1 if event.command == "Acquire" else state.lease_number,
        trainer_hold_until=now + hold_seconds,
        reason=state.reason if state.ending or state.paused else text,
    )
    if event.hopeless and event.kind not in LEASE_ERRORS:
        if state.version < 0:
            return replace(after, ending=True, failure_type=event.kind, reason=text)
        return _paused(after, text)
    return _paused(after, f"{num_failures} times in a row {text}") if num_failures >= MAX_FAILURES else after


@apply.register
def _(event: Interrupted, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, trainer_hold_until=now + SHORT_WAIT_SECONDS)


@apply.register
def _(event: HeadStateResult, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, head_state=event.state, num_head_writes=state.num_head_writes + 1)


@apply.register
def _(event: MacList, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    known = {member.host for member in state.members}
    found = tuple(Member(host) for host in event.hosts if host not in known)
    after = _with_members(state, (*state.members, *found), now)
    return replace(after, fleet_known=not event.next_host, fleet_cursor=event.next_host)


@apply.register
def _(event: FleetEvent, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    others = tuple(member for member in state.members if member.host != event.host)
    if event.event == "joined":
        others = (*others, Member(event.host, event.sweep, event.place[:48]))
    return _with_members(state, others, now)


def _with_members(state: RunProgress, members: tuple[Member, ...], now: float) -> RunProgress:
    members = members[-MAX_MEMBERS:]
    emptied = bool(state.members) and not members
    return replace(
        state,
        members=tuple(sorted(members, key=lambda member: member.host)),
        empty_since=now if emptied else state.empty_since,
    )


@apply.register
def _(event: EvaluationOpened, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    wanted = tuple(evaluation for evaluation in state.wanted if evaluation.name != event.evaluation.name)
    if any(evaluation.name == event.evaluation.name for evaluation in state.opened):
        return replace(state, wanted=wanted)
    is_full = event.evaluation.name.endswith("-last")
    # An answer may come before we know that the evaluation has started: then it is not waited for again.
    answered = any(result.evaluation == event.evaluation.name for result in state.results)
    opened = state.opened if answered else (*state.opened, replace(event.evaluation, opened_at=now))
    return replace(state, wanted=wanted, opened=opened, full_version=event.evaluation.version if is_full else state.full_version)


@apply.register
def _(event: EvaluationLost, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    lost = event.evaluation
    result = EvaluationResult(
        run=rules.run,
        evaluation=lost.name,
        version=lost.version,
        num_questions=0,
        pass_at_1=0.0,
        interval_95=(0.0, 0.0),
        search_rate=0.0,
        error=event.reason[:MAX_TEXT],
    )
    is_full = not lost.name.endswith("-every")
    return _with_result(replace(state, full_version=lost.version) if is_full else state, result)


@apply.register
def _(event: EvaluationResult, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    after = _with_result(state, event)
    target = rules.stop.target_pass_at_1
    if target and not event.error and event.pass_at_1 >= target and not state.ending:
        return replace(after, ending=True, reason=f"pass@1 has reached {target:g}")
    return after


def _with_result(state: RunProgress, result: EvaluationResult) -> RunProgress:
    others = tuple(known for known in state.results if known.evaluation != result.evaluation)
    results = tuple(sorted((*others, result), key=lambda known: (known.version, known.num_questions)))
    return replace(
        state,
        wanted=tuple(evaluation for evaluation in state.wanted if evaluation.name != result.evaluation),
        opened=tuple(evaluation for evaluation in state.opened if evaluation.name != result.evaluation),
        results=(*results[:1], *results[1:][-(MAX_RESULTS - 1) :]),  # the first is what all others are compared with
    )


@apply.register
def _(event: Released, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, released=True)


@apply.register
def _(event: DeskFailed, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    # It was tried for minutes. An ending run must end: what could not be told is written down and let go.
    after = replace(state, desk_hold_until=now + DESK_HOLD_SECONDS)
    ends = bool(end_reason(state, rules, now))
    match event.command:
        case "FindMacs":
            return replace(after, fleet_known=True)
        case "Release" if ends:
            return replace(after, released=True)
        case "SetHead" if ends:
            return replace(after, head_state="stopped")
        case _:
            return after


@apply.register
def _(event: Asked, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    match event.what:
        case "pause":
            return _paused(state, event.reason or "asked to")
        case "resume":
            return replace(state, paused=False, reason="", num_failures=0, trainer_hold_until=0.0)
        case _:
            hurried = state.hurried or bool(end_reason(state, rules, now))
            wanted = () if hurried else state.wanted
            return replace(state, ending=True, reason=event.reason or "asked to stop", hurried=hurried, wanted=wanted)


def _paused(state: RunProgress, reason: str) -> RunProgress:
    return replace(state, paused=True, reason=reason[:MAX_TEXT])
