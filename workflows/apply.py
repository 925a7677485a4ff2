"""How events change a run's memory: `apply(state, event, rules, now) -> state`, pure, one function an event.

Events say what has happened (an activity's result or failure, a signal, an update); what follows from the new state is
decided in `plan`.
"""

from dataclasses import replace
from functools import singledispatch
from typing import Final

from stoa.contracts.evaluation_messages import EvaluationResult, MacList
from stoa.contracts.fleet_messages import FleetEvent, Released
from stoa.contracts.messages import (
    Acquired,
    AnchorCadence,
    Checkpointed,
    HeadStateResult,
    LeaseFound,
    Published,
    RunInput,
    StepResult,
    VersionFacts,
)
from workflows import anchors, drain, fleet
from workflows.costs import lease_ended
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
from workflows.plan import MAX_OPEN_EVALUATIONS, end_reason
from workflows.state import Evaluation, RunProgress

MAX_FAILURES: Final = 5
"""Trainer failures in a row after which the run pauses and waits for a person."""
MAX_HOLD_SECONDS: Final = 60.0
DESK_HOLD_SECONDS: Final = 10.0
SHORT_WAIT_SECONDS: Final = 1.0
STARVED_HOLD_SECONDS: Final = 5.0
MAX_RESULTS: Final = 20
MAX_VERSIONS: Final = 200
MAX_TEXT: Final = 300
REWARDS: Final = {"all_zero": "0", "all_one": "1", "all_equal": "alike"}
"""Why a group gives no gradient, and what all its rewards are then."""
LEASE_ERRORS: Final = frozenset({"FencedError", "LostStateError"})


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
        arrived_version=event.version,
        head_state=event.head_state,
        starved_reason="",
        num_gpus=event.num_gpus,
        gpu_since=now,
        anchored_version=max(state.anchored_version, event.anchor_version),
    )
    after = _with_version(_fed(after), VersionFacts(event.version, event.step, now, has_anchor=event.anchor_version == event.version))
    # Step 0 means that nothing was trained yet: these weights are the base that the run is measured against.
    if event.step == 0 and state.full_version < 0 and rules.evaluation.num_questions_final and not state.hurried:
        plan = rules.evaluation
        first = Evaluation(f"v{event.version}-first", event.version, plan.num_questions_final, num_samples=plan.num_samples_final)
        after = replace(after, wanted=(*after.wanted, first), full_version=event.version)
    return after


@apply.register
def _(event: StepResult, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    for suspect in event.suspects:
        state = fleet.on_suspect(state, suspect.host, suspect.reason, rules.canary_sweeps)
    for news in event.canaries:
        state = fleet.on_canaries(state, news)
    if event.status != "done":
        return _alarmed(event, _starved(event, state, rules, now), rules)
    after = replace(
        _fed(state),
        step=event.step,
        reward_mean=event.reward_mean,
        starved_reason="",
        anchor_wanted=False,
        num_failures=0,
        trainer_hold_until=0.0,
    )
    return _alarmed(event, after, rules)


def _alarmed(event: StepResult, state: RunProgress, rules: RunInput) -> RunProgress:
    if not event.alarm:
        return state
    text = f"alarm at step {event.step}: {event.alarm}"
    if rules.stop.on_alarm and not state.ending:
        return replace(state, ending=True, reason=text[:MAX_TEXT])
    # A run that began before leases were strict told HEAD of it too, and its history must replay.
    return replace(_paused(state, text), macs_go_on=state.strict_leases)


def _fed(state: RunProgress) -> RunProgress:
    """The next step has waited for nothing yet."""
    return replace(state, num_missing=0, oldest_version=-1, equal_rewards=(), starving_since=0.0, starved_seconds=0.0, drain_look=False)


def _starved(event: StepResult, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    # A trainer that did not wait by itself would otherwise be asked in a tight loop.
    hold_seconds = STARVED_HOLD_SECONDS if event.wait_seconds < SHORT_WAIT_SECONDS else 0.0
    waited_seconds = state.starved_seconds + event.wait_seconds
    # Asked in parts, so that the run can say how many are missing: all parts together are one wait.
    is_whole = not rules.groups_per_step or waited_seconds >= rules.starved_seconds
    # Once a version: a fleet that is merely gone for hours must not cost an anchor each time the wait ends.
    anchor_wanted = event.status == "starved" and is_whole and state.anchored_version < state.version
    return replace(
        state,
        starved_reason=event.reason[:MAX_TEXT],
        anchor_wanted=anchor_wanted,
        trainer_hold_until=now + hold_seconds,
        num_missing=event.num_missing,
        oldest_version=event.oldest_version,
        equal_rewards=tuple((what, event.equal_rewards[kind]) for kind, what in REWARDS.items() if event.equal_rewards.get(kind)),
        starving_since=state.starving_since or now - event.wait_seconds,
        starved_seconds=0.0 if is_whole else waited_seconds,
        drain_look=state.draining,
    )


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
        joins_a_version=anchors.mean_joins(state),
        num_joins=0,
        weights_bytes=event.published.anchor_bytes or state.weights_bytes,
        delta_bytes=event.published.arrived_delta_bytes or event.published.delta_bytes or state.delta_bytes,
    )
    after = _with_version(_arrived(after, event.published), _facts(event.published, state.reward_mean, now))
    plan = rules.evaluation
    is_due = plan.every_versions > 0 and version % plan.every_versions == 0
    has_room = len(after.wanted) + len(after.opened) < MAX_OPEN_EVALUATIONS
    if is_due and has_room and not end_reason(after, rules, now):
        wanted = Evaluation(f"v{version}-every", version, plan.num_questions)
        after = replace(after, wanted=(*after.wanted, wanted))
    return after


def _facts(published: Published, reward_mean: float, now: float) -> VersionFacts:
    return VersionFacts(
        published.version,
        published.step,
        round(now, 3),
        reward_mean=round(reward_mean, 4),
        delta_bytes=published.delta_bytes,
        has_anchor=bool(published.anchor_bytes),
    )


def _arrived(state: RunProgress, published: Published) -> RunProgress:
    """A version's size is known once it has arrived, which the next one tells; one that was waited for has arrived."""
    newest = published.version if published.manifest_key else published.arrived_version
    return replace(
        state,
        arrived_version=max(state.arrived_version, newest),
        versions=tuple(
            replace(row, delta_bytes=published.arrived_delta_bytes) if row.version == published.arrived_version else row
            for row in state.versions
        ),
    )


def _with_version(state: RunProgress, facts: VersionFacts) -> RunProgress:
    if any(row.version == facts.version for row in state.versions):
        return state
    return replace(state, versions=(*state.versions, facts)[-MAX_VERSIONS:], num_versions=state.num_versions + 1)


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
        lease_ended(_fed(state), now),
        token=0,
        owner="",
        queue="",
        step=state.published_step,
        num_failures=num_failures,
        lease_number=state.lease_number + 1 if event.command == "Acquire" else state.lease_number,
        lease_unknown=state.lease_unknown or (state.strict_leases and event.kind == "FencedError"),
        trainer_hold_until=now + hold_seconds,
        reason=state.reason if state.ending or state.paused else text,
    )
    if event.hopeless and event.kind not in LEASE_ERRORS:
        if state.version < 0:
            return replace(after, ending=True, failure_type=event.kind, reason=text)
        return _paused(after, text)
    return _paused(after, f"{num_failures} times in a row {text}") if num_failures >= MAX_FAILURES else after


@apply.register
def _(event: LeaseFound, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, lease_number=max(state.lease_number, event.epoch // 1000), lease_unknown=False)


@apply.register
def _(event: Interrupted, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, trainer_hold_until=now + SHORT_WAIT_SECONDS)


@apply.register
def _(event: HeadStateResult, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, head_state=event.state, num_head_writes=state.num_head_writes + 1)


@apply.register
def _(event: MacList, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    after = fleet.on_found(state, event.hosts, now)
    return replace(after, fleet_known=not event.next_host, fleet_cursor=event.next_host)


@apply.register
def _(event: FleetEvent, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return fleet.on_event(state, event, now)


@apply.register
def _(event: CensusTaken, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    census = event.census
    after = replace(
        fleet.on_census(state, event, now),
        drain_look=False,
        groups_running=census.num_groups_running,
        groups_waiting=census.num_groups_waiting,
    )
    reason = drain.drained_reason(after, rules, census, now)
    return replace(after, ending=True, reason=reason) if reason else after


@apply.register
def _(event: Decided, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return fleet.on_decision(state, event)


@apply.register
def _(event: Told, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, untold=tuple(host for host in state.untold if host != event.host))


@apply.register
def _(event: AnchorCadence, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, anchor_every=event.every_versions, anchor_by_join_cost=event.by_join_cost)


@apply.register
def _(event: Evaluation, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    return replace(state, wanted=(*state.wanted, event))


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
    is_full = lost.name.endswith(("-first", "-last"))
    return _with_result(replace(state, full_version=lost.version) if is_full else state, result)


@apply.register
def _(event: EvaluationResult, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    after = _with_result(state, event)
    target, lower = rules.stop.target_pass_at_1, event.interval_95[0]
    if target and not event.error and lower >= target and not state.ending:
        return replace(after, ending=True, reason=f"pass@1 has reached {target:g}: at least {lower:.3f} at version {event.version}")
    return after


def _with_result(state: RunProgress, result: EvaluationResult) -> RunProgress:
    others = tuple(known for known in state.results if known.evaluation != result.evaluation)
    results = tuple(sorted((*others, result), key=lambda known: (known.version, known.num_questions)))
    versions = state.versions
    if not result.error:
        versions = tuple(replace(row, pass_at_1=round(result.pass_at_1, 4)) if row.version == result.version else row for row in versions)
    return replace(
        state,
        versions=versions,
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
        case "TakeCensus":
            return replace(after, census_at=now, drain_look=False)
        case "TellMac" if ends:
            return replace(after, untold=())
        case _:
            return after


@apply.register
def _(event: Asked, state: RunProgress, rules: RunInput, now: float) -> RunProgress:
    match event.what:
        case "pause":
            return _paused(state, event.reason or "asked to")
        case "resume":
            return replace(state, paused=False, macs_go_on=False, reason="", num_failures=0, trainer_hold_until=0.0)
        case "drain":
            drain_until = now + drain.bound_seconds(rules)
            # What a census counted before says nothing of a fleet that is granted no more.
            state = replace(state, groups_running=-1, groups_waiting=-1)
            return replace(state, draining=True, paused=False, reason=event.reason or "asked to drain", drain_until=drain_until)
        case _:
            hurried = state.hurried or bool(end_reason(state, rules, now))
            wanted = () if hurried else state.wanted
            reason = event.reason or "asked to stop"
            return replace(state, ending=True, asked_to_stop=True, reason=reason, hurried=hurried, wanted=wanted)


def _paused(state: RunProgress, reason: str) -> RunProgress:
    return replace(state, paused=True, macs_go_on=False, reason=reason[:MAX_TEXT])
