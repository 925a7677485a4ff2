"""What workflows remember, as frozen dataclasses, and how it is carried through continue-as-new.

No decisions are taken here (`plan`, `session_plan`) and no event changes it here (`apply`). Everything is small and
of standard-library types, because it crosses Temporal as JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Final, Literal, TypeVar

from temporalio.converter import value_to_type

from stoa.contracts.evaluation_messages import EvaluationResult
from stoa.contracts.fleet_messages import SessionInput, SessionState, StandingState, WaitsFor
from stoa.contracts.messages import RunInput, RunState, VersionFacts

Role = Literal["first", "every", "last"]
Carried = TypeVar("Carried")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation the run wants (opened_at 0) or waits for."""

    name: str
    version: int
    num_questions: int
    opened_at: float = 0.0
    num_samples: int = 1


@dataclass(frozen=True)
class Member:
    """A Mac that has joined, as of its last event or the last census. Carried as a row of values: keep it short."""

    host: str
    sweep: int = 0
    place: str = ""
    state: SessionState = "live"
    version: int = -1
    tokens_per_second: float = 0.0
    slow_because: str = ""
    seen_at: int = 0
    """Unix seconds."""


@dataclass(frozen=True)
class Banned:
    """A Mac that may not play, quarantined or drained by a person or the trainer."""

    host: str
    state: StandingState
    reason: str = ""
    on_trial: bool = False
    """Quarantined without knowing it: its sweeps are canaries."""
    num_clean: int = 0
    """Of them, those without a fault."""


@dataclass(frozen=True)
class RunProgress:
    """The whole memory of a RunWorkflow. Truth about data is in the bucket; this may be lost without losing any."""

    started_at: float
    lease_number: int = 0
    """Of the last lease asked for or held."""
    strict_leases: bool = False
    """The number is chosen by what HEAD says, and a task of an older one is fenced. So it is in every run begun since."""
    lease_unknown: bool = False
    """HEAD may name a later lease than ours: we begin, or somebody fenced us."""
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
    macs_go_on: bool = False
    """Paused by an alarm: the trainer takes no step, and Macs play on as far as admission lets them."""
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
    arrived_version: int = -1
    """Newest version that HEAD is known to have named: those after it are on their way, and lost with their lease."""
    anchored_version: int = -1
    """Last version that this run saw published with an anchor."""
    anchor_wanted: bool = False
    """No groups came: perhaps no Mac has a way to the newest version, because an object on it is damaged."""
    num_failures: int = 0
    """In a row, of the trainer."""
    trainer_hold_until: float = 0.0
    desk_hold_until: float = 0.0
    released: bool = False
    asked_to_stop: bool = False
    """A person ended the run, and wants it to end soon."""
    draining: bool = False
    """No sweeps are granted; the run ends when what is on the way is used up."""
    drain_until: float = 0.0
    bounded_drain: bool = False
    """The run ends at `drain_until` whatever it has heard; one that began before waited for a census to say so."""
    groups_running: int = -1
    """By the last census: granted and not in the bucket yet; -1: none was taken yet."""
    groups_waiting: int = -1
    """The same: in the bucket, and not used yet."""
    drain_look: bool = False
    """The last step found too few groups: is more on the way?"""
    num_gpus: int = 1
    gpu_seconds: float = 0.0
    """GPUs times seconds of leases that have ended."""
    gpu_since: float = 0.0
    """When the present lease was taken; 0: none is held."""
    num_missing: int = 0
    oldest_version: int = -1
    equal_rewards: tuple[tuple[str, int], ...] = ()
    """Groups that came for the present step and teach nothing: what all rewards of a group are, and how many groups."""
    starving_since: float = 0.0
    """Since when the present step has too few groups; 0: it has not, or nobody knows."""
    starved_seconds: float = 0.0
    """How long it has waited for them."""
    anchor_every: int = 0
    """Cadence that a person set; 0: the run's own."""
    anchor_by_join_cost: bool = False
    num_joins: int = 0
    """Since the last version."""
    joins_a_version: float = 0.0
    weights_bytes: int = 0
    delta_bytes: int = 0
    """Of the newest version that is known to have arrived."""
    banned: tuple[Banned, ...] = ()
    untold: tuple[str, ...] = ()
    """Hosts whose sessions must still be told how they stand."""
    left: tuple[str, ...] = ()
    """Hosts that were here and are not now, the newest ones: a person may still name them."""
    num_macs: int = -1
    """All that play, also those beyond `members`; -1: as many as members."""
    census_at: float = 0.0
    census_cursor: str = ""
    versions: tuple[VersionFacts, ...] = ()
    """The newest ones."""
    num_versions: int = 0


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
    build: str = ""
    """Of the worker with this nonce."""
    candidate: str = ""
    """Nonce that says hello while another is live."""
    candidate_build: str = ""
    """Of the worker with that nonce."""
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
    groups: int = 0
    """Groups the Mac asks for at a time; 0: it did not say."""
    sweep_seconds: float = 0.0
    """Mean of the last sweeps' time, newer ones counting more."""
    tokens_per_second: float = 0.0
    slow_because: str = ""
    heat: str = ""
    totals: Totals = Totals()


ROWS: Final = {"members": Member, "versions": VersionFacts, "banned": Banned}
"""Long lists are carried as rows of values: names of fields would be most of them."""


def dump(carried: RunProgress | SessionProgress) -> str:
    """`carried` as compact JSON."""
    tree = asdict(carried)
    for name in ROWS.keys() & tree.keys():
        tree[name] = [list(row.values()) for row in tree[name]]
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def first_run_progress(given: RunInput, now: float) -> RunProgress:
    """The carried memory, or a new run's at time `now`, with what a resumed one brings from before."""
    if given.carried:
        return _load(given.carried, RunProgress)
    tried = given.on_trial if given.canary_sweeps else ()
    banned = tuple(Banned(host, "quarantined", "since before the run was resumed", host in tried) for host in given.quarantined)
    banned += tuple(Banned(host, "drained", "drained before the run was resumed") for host in given.drained)
    return RunProgress(started_at=now, gpu_seconds=given.gpu_hours * 3600.0, banned=banned)


def first_session_progress(given: SessionInput) -> SessionProgress:
    """The carried memory, or a new session's."""
    return _load(given.totals, SessionProgress) if given.totals else SessionProgress(sweep=given.next_sweep)


def _load(text: str, kind: type[Carried]) -> Carried:
    tree: dict[str, object] = json.loads(text)
    for name, row_kind in ROWS.items():
        rows = tree.get(name)
        if isinstance(rows, list):
            tree[name] = [_named(row, row_kind) for row in rows]
    value: Mapping[str, object] = tree
    return value_to_type(kind, value)


def _named(row: object, kind: type[Member | VersionFacts | Banned]) -> object:
    """A row under the names of its fields; memory that was carried under names passes as it is."""
    return dict(zip((field.name for field in fields(kind)), row, strict=False)) if isinstance(row, list) else row
