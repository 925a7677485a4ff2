"""What workflows remember, as frozen dataclasses, and how it is carried through continue-as-new.

No decisions are taken here (`plan`, `session_plan`) and no event changes it here (`apply`). Everything is small and
of standard-library types, because it crosses Temporal as JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from temporalio.converter import value_to_type

from stoa.contracts.evaluation_messages import EvaluationResult
from stoa.contracts.fleet_messages import SessionInput, SessionState, StandingState, WaitsFor
from stoa.contracts.messages import RunInput, RunState

Role = Literal["first", "every", "last"]
Carried = TypeVar("Carried")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation the run wants (opened_at 0) or waits for."""

    name: str
    version: int
    num_questions: int
    opened_at: float = 0.0


@dataclass(frozen=True)
class Member:
    """A Mac that has joined, as of its last event."""

    host: str
    sweep: int = 0
    place: str = ""


@dataclass(frozen=True)
class RunProgress:
    """The whole memory of a RunWorkflow. Truth about data is in the bucket; this may be lost without losing any."""

    started_at: float
    lease_number: int = 0
    """Of the last lease asked for or held."""
    token: int = 0
    """0: no lease is held."""
    owner: str = ""
    queue: str = ""
    step: int = 0
    published_step: int = 0
    checkpoint_step: int = 0
    version: int = -1
    head_state: RunState = "running"
    """HEAD.state as last seen; means nothing before the first version."""
    num_head_writes: int = 0
    paused: bool = False
    reason: str = ""
    """Why the run is paused or ends."""
    ending: bool = False
    """A person, the clock, or a target has ended the run; cannot be undone."""
    hurried: bool = False
    """Asked to stop twice: no last evaluation."""
    failure_type: str = ""
    """Set when the run cannot begin; it then fails with `reason`."""
    full_version: int = -1
    """Last version a first or last evaluation was wanted for."""
    wanted: tuple[Evaluation, ...] = ()
    opened: tuple[Evaluation, ...] = ()
    results: tuple[EvaluationResult, ...] = ()
    members: tuple[Member, ...] = ()
    fleet_known: bool = False
    fleet_cursor: str = ""
    empty_since: float = 0.0
    """When the last member left; counts while there is none."""
    reward_mean: float = 0.0
    reward_published: float = 0.0
    starved_reason: str = ""
    anchored_version: int = -1
    """Last version that this run saw published with an anchor."""
    anchor_wanted: bool = False
    """No groups came: perhaps no Mac has a way to the newest version, because an object on it is damaged."""
    num_failures: int = 0
    """In a row, of the trainer."""
    trainer_hold_until: float = 0.0
    desk_hold_until: float = 0.0
    released: bool = False


@dataclass(frozen=True)
class Totals:
    """Sums over a session's sweeps."""

    num_sweeps: int = 0
    num_groups: int = 0
    num_episodes: int = 0
    num_sampled_tokens: int = 0
    decode_seconds: float = 0.0
    pull_seconds: float = 0.0
    pull_latency_seconds_last: float = 0.0
    apply_seconds: float = 0.0
    idle_seconds: float = 0.0
    join_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    num_redone: int = 0
    num_unasked: int = 0
    waits: tuple[tuple[str, float], ...] = ()
    """What was waited for between sweeps, and for how many seconds."""


@dataclass(frozen=True)
class SessionProgress:
    """The whole memory of a MacSessionWorkflow."""

    state: SessionState = "away"
    reason: str = "not joined yet"
    nonce: str = ""
    candidate: str = ""
    """Nonce that says hello while another is live."""
    candidate_at: float = 0.0
    seen_at: float = 0.0
    """Last hello of the live nonce."""
    sweep: int = 0
    """Number of the present or next training sweep."""
    version: int = -1
    num_failures: int = 0
    """Sweeps in a row that failed."""
    num_empty: int = 0
    """Grants in a row that said wait."""
    hold_until: float = 0.0
    told: SessionState = "away"
    """What the run was told last."""
    stopped_since: float = 0.0
    """When grants began to say that the run has stopped; 0: they do not."""
    joining: bool = True
    """No sweep has ended since the Mac's worker started."""
    admitted: str = ""
    """Nonce that was found to be welcome."""
    invite: str = ""
    standing: StandingState = "free"
    """What the run decided about this Mac; a drained one ends its sweep first."""
    standing_reason: str = ""
    owed: str = ""
    """Kind of the notice that the Mac's owner has not been given yet."""
    resting: bool = False
    """Its owner lets it not play now."""
    ready_at: float = 0.0
    """Since when it could have played."""
    waits_for: WaitsFor = ""
    unsent: tuple[str, ...] = ()
    """Keys that the Mac has no valid ticket for."""
    sweep_seconds: float = 0.0
    """Mean of the last sweeps' time, newer ones counting more."""
    tokens_per_second: float = 0.0
    slow_because: str = ""
    totals: Totals = Totals()


def dump(carried: RunProgress | SessionProgress) -> str:
    """`carried` as compact JSON."""
    return json.dumps(asdict(carried), separators=(",", ":"), ensure_ascii=False)


def first_run_progress(given: RunInput, now: float) -> RunProgress:
    """The carried memory, or a new run's at time `now`."""
    return _load(given.carried, RunProgress) if given.carried else RunProgress(started_at=now)


def first_session_progress(given: SessionInput) -> SessionProgress:
    """The carried memory, or a new session's."""
    return _load(given.totals, SessionProgress) if given.totals else SessionProgress(sweep=given.next_sweep)


def _load(text: str, kind: type[Carried]) -> Carried:
    value: Mapping[str, object] = json.loads(text)
    return value_to_type(kind, value)
