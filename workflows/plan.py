"""What a run does next: pure functions of its memory, its settings and the time. Nothing is awaited or changed here.

Two lanes work side by side. The trainer's lane holds what a trainer does, one thing at a time; the desk's lane holds
small control activities, so that neither a long step nor an evaluation keeps a pause from reaching HEAD.
"""

from dataclasses import dataclass, replace
from typing import Final

from stoa.contracts.evaluation_messages import EvalAsk
from stoa.contracts.fleet_messages import Standing
from stoa.contracts.ids import is_name
from stoa.contracts.messages import RunInput, RunResult, RunState, RunStatus
from workflows import anchors, costs, drain, fleet
from workflows.state import Evaluation, RunProgress

EMPTY_FLEET_SECONDS: Final = 60.0
"""How long an ending run waits for a Mac to come back and finish an evaluation."""
PROMPT_SECONDS: Final = 10.0
"""The same where a person asked the run to stop."""
MAX_OPEN_EVALUATIONS: Final = 2
MAX_QUESTIONS: Final = 1_000_000
MAX_SAMPLES: Final = 16
ROLES: Final = ("-first", "-every", "-last")
"""How the names of the run's own evaluations end."""
FIRST_WAIT_SECONDS: Final = 10.0
MAX_STEP_WAIT_SECONDS: Final = 60.0
DRAIN_WAIT_SECONDS: Final = 5.0


@dataclass(frozen=True)
class FindLease:
    """Ask which lease HEAD names: ours must be above it."""


@dataclass(frozen=True)
class Acquire:
    """Ask any trainer to take the run."""

    lease_number: int


@dataclass(frozen=True)
class Train:
    """Do one optimizer step."""

    step: int
    wait_seconds: float = 0.0
    """Longest wait for groups; 0: the trainer's own."""


@dataclass(frozen=True)
class PublishVersion:
    """Publish the weights at `step`."""

    step: int
    anchor: bool
    checkpoint: bool
    announce: bool = False


@dataclass(frozen=True)
class SaveCheckpoint:
    """Save the trainer at `step` without a new version."""

    step: int


@dataclass(frozen=True)
class SetHead:
    """Set HEAD.state."""

    state: RunState
    nonce: str


@dataclass(frozen=True)
class FindMacs:
    """Ask which Macs are live, page by page: a new or resumed run missed what they told the last one."""

    after_host: str


@dataclass(frozen=True)
class OpenEvaluation:
    """Start an evaluation."""

    evaluation: Evaluation


@dataclass(frozen=True)
class Release:
    """Tell all Macs that the run has ended."""


@dataclass(frozen=True)
class TakeCensus:
    """Look at one page of the fleet."""

    after_host: str


@dataclass(frozen=True)
class TellMac:
    """Tell a Mac's session how it stands."""

    standing: Standing


TrainerCommand = FindLease | Acquire | Train | PublishVersion | SaveCheckpoint
DeskCommand = SetHead | FindMacs | OpenEvaluation | Release | TakeCensus | TellMac


def end_reason(state: RunProgress, rules: RunInput, now: float) -> str:
    """Why the run ends, empty while it goes on."""
    stop = rules.stop
    if state.ending:
        return state.reason
    if stop.max_steps and state.step >= stop.max_steps:
        return f"all {stop.max_steps} steps are done"
    if stop.max_versions and state.version >= stop.max_versions:
        return f"version {stop.max_versions} is published"
    if stop.max_seconds and now >= state.started_at + stop.max_seconds:
        return f"{stop.max_seconds:g} s of wall clock are over"
    return drain.overdue_reason(state, now) or costs.spent_reason(state, rules, now)


def next_for_trainer(state: RunProgress, rules: RunInput, now: float) -> TrainerCommand | None:
    """What the trainer does next, None for nothing."""
    if end_reason(state, rules, now):
        return _closing_step(state, rules)
    if state.paused or now < state.trainer_hold_until:
        return None
    if not state.token and state.lease_unknown:
        return FindLease()
    if not state.token:
        return Acquire(state.lease_number + 1)
    if state.anchor_wanted:
        command = _publish(state, rules, checkpoint=_due(state.version + 1, rules.checkpoint_every_versions))
        return replace(command, anchor=True, announce=True)
    if state.step - state.published_step >= rules.steps_per_version:
        return _publish(state, rules, checkpoint=_due(state.version + 1, rules.checkpoint_every_versions))
    return Train(state.step + 1, _step_wait(state, rules))


def _step_wait(state: RunProgress, rules: RunInput) -> float:
    """A step is first asked for with a short wait, so that the run can say what is missing, then with longer ones."""
    if state.draining:
        return DRAIN_WAIT_SECONDS
    if not rules.groups_per_step:
        return 0.0
    left_seconds = max(rules.starved_seconds - state.starved_seconds, 1.0)
    wait_seconds = max(FIRST_WAIT_SECONDS, 2.0 * state.starved_seconds)
    return min(wait_seconds, MAX_STEP_WAIT_SECONDS, left_seconds)


def _closing_step(state: RunProgress, rules: RunInput) -> TrainerCommand | None:
    if not state.token:  # what was not published went with the lease
        return None
    if state.step > state.published_step:
        return replace(_publish(state, rules, checkpoint=True), anchor=True, announce=True)
    if state.step > state.checkpoint_step:
        return SaveCheckpoint(state.step)
    return None


def _publish(state: RunProgress, rules: RunInput, *, checkpoint: bool) -> PublishVersion:
    return PublishVersion(state.step, anchors.is_due(state, rules, state.version + 1), checkpoint)


def _due(version: int, every: int) -> bool:
    return every > 0 and version % every == 0


def interrupts(command: TrainerCommand, state: RunProgress, rules: RunInput, now: float) -> bool:
    """True if `command`, which is running, is to be cancelled: an ending run waits neither for groups nor for a trainer."""
    return isinstance(command, Train | Acquire | FindLease) and bool(end_reason(state, rules, now))


def wanted_head(state: RunProgress, rules: RunInput, now: float) -> RunState:
    """The HEAD.state that tells Macs what to do."""
    if end_reason(state, rules, now):
        return "stopped" if _nothing_left(state, rules, now) else "draining"
    if state.draining:
        return "draining"
    return "paused" if state.paused and not state.macs_go_on else "running"


def _nothing_left(state: RunProgress, rules: RunInput, now: float) -> bool:
    return _closing_step(state, rules) is None and not state.wanted and not state.opened and last_evaluation(state, rules, now) is None


def last_evaluation(state: RunProgress, rules: RunInput, now: float) -> Evaluation | None:
    """The evaluation that closes the run, once its last version is published and if it is still to be asked for."""
    num_questions = rules.evaluation.num_questions_final
    ends = end_reason(state, rules, now) and _closing_step(state, rules) is None
    if not ends or state.hurried or not num_questions or state.version < 0 or state.full_version == state.version:
        return None
    return Evaluation(f"v{state.version}-last", state.version, num_questions, num_samples=rules.evaluation.num_samples_final)


def no_evaluation(ask: EvalAsk, state: RunProgress) -> str:
    """Why a person's evaluation cannot be, "" if it can."""
    if not -1 <= ask.version <= state.version or state.version < 0:
        return f"version {ask.version} is not published, the newest is {state.version}"
    if not is_name(ask.name) or ask.name.endswith(ROLES):
        return f"{ask.name!r} is no name for an evaluation"
    names = {one.name for one in (*state.wanted, *state.opened)} | {result.evaluation for result in state.results}
    if ask.name in names:
        return f"evaluation {ask.name} was asked for before"
    if not 0 <= ask.num_questions <= MAX_QUESTIONS or not 1 <= ask.num_samples <= MAX_SAMPLES:
        return f"{ask.num_questions} questions of {ask.num_samples} samples: at most {MAX_QUESTIONS} of {MAX_SAMPLES}"
    if len(state.wanted) + len(state.opened) >= MAX_OPEN_EVALUATIONS + 1:
        return f"{len(state.wanted) + len(state.opened)} evaluations are under way: ask again later"
    return ""


def asked_evaluation(ask: EvalAsk, state: RunProgress, rules: RunInput) -> Evaluation:
    """What a person asked for, with the run's numbers where none were named."""
    version = state.version if ask.version < 0 else ask.version
    num_questions = ask.num_questions or rules.evaluation.num_questions_final or rules.evaluation.num_questions
    return Evaluation(ask.name, version, num_questions, num_samples=ask.num_samples)


def next_for_desk(state: RunProgress, rules: RunInput, now: float, *, trainer_idle: bool, takes_census: bool = True) -> DeskCommand | None:
    """Which small control activity runs next, None for none."""
    if now < state.desk_hold_until:
        return None
    if not state.fleet_known:
        return FindMacs(state.fleet_cursor)
    ends = bool(end_reason(state, rules, now))
    head = wanted_head(state, rules, now)
    if state.version >= 0 and head != state.head_state and (trainer_idle or head != "stopped"):
        return SetHead(head, f"{rules.run}-{state.lease_number}-{state.num_head_writes}-{head}")
    if state.untold:
        return TellMac(fleet.standing_of(state, rules.run, state.untold[0]))
    if state.wanted:
        return OpenEvaluation(state.wanted[0])
    last = last_evaluation(state, rules, now) if trainer_idle else None
    if last is not None:
        return OpenEvaluation(last)
    if ends and trainer_idle and head == "stopped" and not state.released:
        return Release()
    if takes_census and not ends and (state.drain_look or now >= max(state.census_at, state.started_at) + rules.census_seconds):
        return TakeCensus(state.census_cursor)
    return None


def expired(state: RunProgress, rules: RunInput, now: float) -> tuple[Evaluation, ...]:
    """Open evaluations that are no longer waited for: too old, or the run ends and no Mac is left, or in a hurry."""
    return tuple(evaluation for evaluation in state.opened if now >= _expiry(evaluation, state, rules, now))


def _expiry(evaluation: Evaluation, state: RunProgress, rules: RunInput, now: float) -> float:
    if state.hurried:
        return evaluation.opened_at
    # An evaluation keeps its own limit; what is added lets its own report of that arrive first.
    limit = evaluation.opened_at + rules.evaluation.timeout_seconds + 2 * rules.heartbeat_seconds
    if end_reason(state, rules, now) and not fleet.count(state):
        patience_seconds = PROMPT_SECONDS if state.asked_to_stop else EMPTY_FLEET_SECONDS
        limit = min(limit, max(evaluation.opened_at, state.empty_since) + patience_seconds)
    return limit


def is_finished(state: RunProgress, rules: RunInput, now: float) -> bool:
    """True once an ending run has nothing left to do. What could not be reached (HEAD, Macs) was tried for minutes."""
    head_told = state.version < 0 or state.head_state == "stopped"
    return bool(end_reason(state, rules, now)) and _nothing_left(state, rules, now) and head_told and state.released


def next_deadline(state: RunProgress, rules: RunInput, now: float) -> float | None:
    """When to look again if nothing happens before: the nearest limit in the future."""
    limits = [state.trainer_hold_until, state.desk_hold_until]
    if rules.stop.max_seconds:
        limits.append(state.started_at + rules.stop.max_seconds)
    limits += [_expiry(evaluation, state, rules, now) for evaluation in state.opened]
    if state.bounded_drain and state.draining:
        limits.append(state.drain_until)
    spent_at = costs.spent_at(state, rules)
    if spent_at is not None:
        limits.append(spent_at)
    return min((limit for limit in limits if limit > now), default=None)


def attributes(state: RunProgress, rules: RunInput, now: float) -> dict[str, str | int | float]:
    """Values of the run's search attributes; they change with versions and membership, not with every step."""
    values: dict[str, str | int | float] = {
        "RlRun": rules.run,
        "RlState": run_state(state, rules, now),
        "RlMacs": fleet.count(state),
        "RlReward": round(state.reward_published, 6),
    }
    if state.version >= 0:
        values["RlVersion"] = state.version
    return values


def run_state(state: RunProgress, rules: RunInput, now: float) -> str:
    """created, running, paused, draining, stopped or failed."""
    if state.failure_type:
        return "failed"
    if end_reason(state, rules, now):
        return "stopped" if state.released else "draining"
    if state.draining:
        return "draining"
    if state.paused:
        return "paused"
    return "running" if state.version >= 0 else "created"


def waiting_sentence(state: RunProgress, rules: RunInput, now: float, *, command: TrainerCommand | None, since: float) -> str:
    """One sentence for a person: what the run waits for, from whom, for how long."""
    lane = _lane_sentence(state, rules, now, command, since)
    if end_reason(state, rules, now):
        return lane
    if state.paused and command is not None:
        return f"{_paused_sentence(state)} once this is done: {lane}"
    return f"{drain.sentence(state, now)}; {lane}" if state.draining else lane


def _lane_sentence(state: RunProgress, rules: RunInput, now: float, command: TrainerCommand | None, since: float) -> str:
    age = f"since {max(0.0, now - since):.0f} s"
    match command:
        case FindLease():
            return f"waiting for HEAD to say which lease is the newest {age}"
        case Acquire():
            return f"waiting for a trainer on queue gpu-{rules.run} {age}"
        case Train() if state.starving_since and state.num_missing:
            waited = f"since {max(0.0, now - state.starving_since):.0f} s"
            wanted = f"waiting for {state.num_missing} groups of version >= {max(0, state.oldest_version)} {waited}"
            return f"step {command.step}: {wanted}{_equal_rewards(state)}{_no_mac(state)}"
        case Train():
            oldest = max(0, state.version - rules.max_staleness)
            starved = f"; the last wait ended because {state.starved_reason}" if state.starved_reason else ""
            return f"step {command.step}: {state.owner} trains or waits for groups of version >= {oldest} {age}{starved}"
        case PublishVersion():
            return f"waiting for {state.owner} to publish version {state.version + 1} {age}"
        case SaveCheckpoint():
            return f"waiting for {state.owner} to save step {command.step} {age}"
        case None:
            return _idle_sentence(state, rules, now)


def _equal_rewards(state: RunProgress) -> str:
    num = sum(count for _, count in state.equal_rewards)
    if not num:
        return ""
    one_kind = len(state.equal_rewards) == 1
    kinds = ", ".join(f"all {what}" if one_kind else f"{count} all {what}" for what, count in state.equal_rewards)
    return f"; {num} {'group' if num == 1 else 'groups'} had equal rewards: {kinds}"


def _no_mac(state: RunProgress) -> str:
    """Macs end with their run: who resumes one has to start them, too."""
    return "" if fleet.count(state) or not state.fleet_known else "; no Mac is here: start one with `python -m worker_mac.worker`"


def _idle_sentence(state: RunProgress, rules: RunInput, now: float) -> str:
    ends = end_reason(state, rules, now)
    if ends and state.opened:
        names = ", ".join(evaluation.name for evaluation in state.opened)
        return f"ending ({ends}): waiting for evaluation {names} by {_macs(fleet.count(state))}"
    if ends:
        return f"ending ({ends}): telling HEAD and the Macs"
    if state.paused:
        return f"{_paused_sentence(state)}: waiting for `stoa resume {rules.run}`"
    if now < state.trainer_hold_until:
        return f"trying the trainer again in {state.trainer_hold_until - now:.0f} s: {state.reason or state.starved_reason}"
    return "nothing: the next step is about to start"


def _paused_sentence(state: RunProgress) -> str:
    what = "the trainer is paused and Macs play on" if state.macs_go_on else "paused"
    return f"{what} ({state.reason})" if state.reason else what


def _macs(number: int) -> str:
    return f"{number} Mac" if number == 1 else f"{number} Macs"


def result_of(state: RunProgress, rules: RunInput, now: float) -> RunResult:
    """How a run ended that ends at time `now`."""
    return RunResult(
        run=rules.run,
        end_reason=end_reason(state, rules, now),
        step=state.step,
        version=max(state.version, 0),
        evaluations=state.results,
        gpu_hours=round(costs.gpu_hours(state, now), 4),
        started_at=state.started_at,
        ended_at=now,
        seconds_before=rules.seconds_before,
        stop=rules.stop,
        quarantined=fleet.quarantined(state),
        on_trial=fleet.on_trial(state),
        drained=fleet.drained(state),
    )


def status_of(state: RunProgress, rules: RunInput, now: float, *, command: TrainerCommand | None, since: float) -> RunStatus:
    """Answer of the status query."""
    scored = [result for result in state.results if not result.error]
    newest = max(scored, key=lambda result: (result.version, result.num_questions), default=None)
    return RunStatus(
        run=rules.run,
        state=run_state(state, rules, now),
        waiting_for=waiting_sentence(state, rules, now, command=command, since=since),
        step=state.step,
        version=max(state.version, 0),
        lease=state.lease_number,
        token=state.token,
        num_macs=fleet.count(state),
        reward_mean=state.reward_mean,
        last_pass_at_1=newest.pass_at_1 if newest else -1.0,
        last_search_rate=newest.search_rate if newest else -1.0,
        end_reason=end_reason(state, rules, now),
        started_at=state.started_at,
        reason=state.reason,
        num_evaluations_open=len(state.opened) + len(state.wanted),
        gpu_hours=round(costs.gpu_hours(state, now), 4),
        dollars=round(costs.dollars(state, rules, now), 2),
        num_quarantined=len(fleet.quarantined(state)),
        anchor_every_versions=anchors.cadence(state, rules)[0],
        anchor_by_join_cost=anchors.cadence(state, rules)[1],
        num_groups_missing=state.num_missing,
        stop=rules.stop,
        drain_until=state.drain_until if state.draining else 0.0,
        seconds_before=rules.seconds_before,
    )
