"""Frozen dataclasses that cross Temporal: what Macs, their sessions and the run say to each other.

The rules of `messages.py` hold here too: standard-library types, small fields, new ones with defaults.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from stoa.contracts.messages import RunState

Purpose = Literal["train", "eval"]
SweepStatus = Literal["done", "partial", "draining", "paused", "stopped"]
SessionState = Literal["live", "resting", "away", "quarantined", "drained", "refused", "ended"]
"""live: plays. resting: its owner lets it not play now. away: lost, or said goodbye. refused: may not join."""
StandingState = Literal["free", "quarantined", "drained"]
WaitsFor = Literal["", "room", "turn", "version", "run"]
"""What a grant waits for: the trainer to use groups, other Macs' turn, a first version, a paused or ended run."""


@dataclass(frozen=True)
class GrantRequest:
    """A session asks what its Mac may generate next. The same (host, sweep) always gets the same grant."""

    run: str
    host: str
    sweep: int
    num_groups: int
    wait_seconds: float = 10.0
    ended_before: int = 0
    """Sweeps of this host with a lower number are over: groups they did not bring are lost."""
    invite: str = ""
    """Id of the Mac's invitation; "" for one of the owner's own, which writes with a key of its own and needs no tickets."""
    unsent: tuple[str, ...] = ()
    """Keys of finished objects that the Mac has no valid ticket for."""
    evaluation: str = ""
    """With `version` and `part`: only the ticket for this part of an evaluation is asked for, and no questions."""
    version: int = -1
    part: int = 0


@dataclass(frozen=True)
class Grant:
    """What a sweep generates: one question a group. Empty `question_ids` means wait, for `reason`."""

    run: str
    host: str
    sweep: int
    question_ids: tuple[str, ...]
    min_version: int = 0
    reason: str = ""
    run_state: RunState = "running"
    newest_sweep: int = -1
    """Set when `sweep` is long over: the sweep to go on with. A session that was started anew asks from 0."""
    tickets: str = ""
    """What lets an invited Mac create its objects, and no others (see `stoa.bucket.tickets`); sealed in history."""
    shipped: tuple[int, ...] = ()
    """Groups of this sweep that are in the bucket already."""
    waits_for: WaitsFor = ""
    refused: bool = False
    """The Mac may take part no longer, for `reason`: its owner is told, and its session ends."""


@dataclass(frozen=True)
class SweepRequest:
    """One sweep: `train` has one question a group of `group_size`; `eval` `group_size` samples of each question on a pinned version."""

    run: str
    host: str
    sweep: int
    purpose: Purpose
    question_ids: tuple[str, ...]
    group_size: int
    min_version: int = 0
    version: int = -1
    """Pinned version of an evaluation; -1: the newest."""
    evaluation: str = ""
    part: int = 0
    tickets: str = ""
    """See `Grant`; also for the objects of earlier sweeps that the Mac said it has none for."""
    shipped: tuple[int, ...] = ()
    """Groups of this sweep that are in the bucket already."""
    ahead: tuple[Grant, ...] = ()
    """Grants of the next sweeps: to be played without being asked while the control plane is silent."""


@dataclass(frozen=True)
class SweepResult:
    """What a sweep did; keys of its objects are implied by host and sweep, so only counts and times pass here."""

    status: SweepStatus
    sweep: int
    purpose: Purpose = "train"
    version: int = -1
    num_groups: int = 0
    num_episodes: int = 0
    num_sampled_tokens: int = 0
    num_prompt_tokens: int = 0
    reward_mean: float = 0.0
    decode_seconds: float = 0.0
    pull_seconds: float = 0.0
    pull_latency_seconds: float = 0.0
    """From HEAD.published_at of the version, or the Mac's first look at HEAD if that was later, to serving it."""
    apply_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Since the end of the previous sweep on this Mac."""
    bytes_up: int = 0
    bytes_down: int = 0
    keys: tuple[str, ...] = ()
    """Only for evaluations, at most a few keys."""
    reason: str = ""
    unsent: tuple[str, ...] = ()
    """Keys of finished objects that wait on the Mac for a ticket, oldest first, at most a few."""
    resting: bool = False
    """Status paused because this Mac's owner lets it not play now."""
    unasked: bool = False
    """Played from a grant held ahead, before it was asked for."""
    groups: int = 0
    """Groups the Mac asks for from now on; 0: as before."""
    heat: str = ""
    """How hot the Mac called itself at the end: nominal, fair, serious or critical; "" where it does not say."""


@dataclass(frozen=True)
class SessionInput:
    """Input of MacSessionWorkflow; the counters are carried when it continues as new."""

    run: str
    host: str
    groups: int = 8
    group_size: int = 8
    sweep_timeout_seconds: float = 900.0
    heartbeat_seconds: float = 30.0
    away_expiry_seconds: float = 1800.0
    place: str = ""
    next_sweep: int = 0
    nonce: str = ""
    totals: str = ""
    """JSON of the carried state and totals (see `workflows.state`)."""
    continue_after_events: int = 2000


@dataclass(frozen=True)
class Hello:
    """A Mac says it is here. `nonce` is its worker's start's; another one waits until the first is away or silent."""

    host: str
    nonce: str
    build: str = ""
    reason: str = "start"
    invite: str = ""
    """Id of the Mac's invitation; "" for one of the owner's own."""
    groups: int = 0
    """Groups it asks for at a time; 0: as before."""


@dataclass(frozen=True)
class Goodbye:
    """A Mac says it leaves."""

    host: str
    nonce: str
    reason: str = ""


@dataclass(frozen=True)
class FleetEvent:
    """A session tells the run that its Mac joined or left."""

    run: str
    host: str
    session: str
    event: Literal["joined", "left"]
    sweep: int = 0
    reason: str = ""
    place: str = ""


@dataclass(frozen=True)
class SessionStatus:
    """Answer of a session's query: state and totals since it began."""

    host: str
    state: SessionState
    sweep: int
    version: int
    reason: str = ""
    place: str = ""
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
    """Sweeps played before they were asked for."""
    tokens_per_second: float = 0.0
    """Of the last training sweep, over all its time since the sweep before."""
    slow_because: str = ""
    """What took most of the last training sweep's time beside decoding."""
    waits: dict[str, float] = field(default_factory=dict)
    """What it waited for between sweeps -> seconds."""
    heat: str = ""
    """As of the last sweep, see `SweepResult`."""


@dataclass(frozen=True)
class AdmitRequest:
    """May this Mac join? Asked once for each start of its worker."""

    run: str
    host: str
    build: str
    nonce: str = ""


@dataclass(frozen=True)
class Admitted:
    """Whether a Mac may play, and as what."""

    ok: bool = True
    reason: str = ""
    """Why not, with what its owner can do."""
    standing: StandingState = "free"


@dataclass(frozen=True)
class Standing:
    """The run decides about a Mac; also the argument of the signal its session gets."""

    run: str
    host: str
    state: StandingState
    reason: str = ""


MAX_ASKED: Final = 40
"""Macs in one question: their answers fit into one message."""


@dataclass(frozen=True)
class StandingsQuery:
    """How do these Macs stand? A query of RunWorkflow, for at most MAX_ASKED hosts."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Standings:
    """Of the Macs asked for, those that are not free."""

    not_free: tuple[Standing, ...] = ()


@dataclass(frozen=True)
class Notice:
    """What a Mac's owner is told. `ends`: the worker ends, with a failure unless `kind` is drained."""

    run: str
    host: str
    kind: Literal["free", "quarantined", "drained", "too_old", "revoked", "name_taken"]
    text: str
    ends: bool = False


@dataclass(frozen=True)
class ReleaseRequest:
    """Tell sessions and evaluations that the run has ended; also the argument of the signal they get."""

    run: str
    reason: str


@dataclass(frozen=True)
class Released:
    """How many sessions and evaluations were told that the run has ended."""

    num_released: int = 0


@dataclass(frozen=True)
class MacFacts:
    """One Mac as a census finds it; by its session, at most a minute old."""

    host: str
    state: SessionState = "live"
    sweep: int = 0
    version: int = -1
    tokens_per_second: float = 0.0
    place: str = ""
    slow_because: str = ""


@dataclass(frozen=True)
class CensusRequest:
    """Which Macs are here, and what is on the way? The page after `after_host`, by name."""

    run: str
    after_host: str = ""


@dataclass(frozen=True)
class Census:
    """One page of the fleet; `num_macs` counts all that can play, `next_host` is empty on the last page."""

    macs: tuple[MacFacts, ...] = ()
    num_macs: int = 0
    next_host: str = ""
    num_groups_running: int = 0
    """Granted and not in the bucket yet."""
    num_groups_waiting: int = 0
    """In the bucket and not settled yet."""


@dataclass(frozen=True)
class FleetMember:
    """One Mac of the fleet, as of the last census or its last event."""

    host: str
    session: str
    """Id of its session's workflow."""
    sweep: int = 0
    state: SessionState = "live"
    version: int = -1
    tokens_per_second: float = 0.0
    place: str = ""
    slow_because: str = ""


@dataclass(frozen=True)
class FleetPage:
    """Answer of RunWorkflow's fleet query: one page of members by name, and in one sentence the slowest of all."""

    members: tuple[FleetMember, ...] = ()
    num_macs: int = 0
    next_host: str = ""
    slowest: str = ""


@dataclass(frozen=True)
class FleetQuery:
    """Page of the fleet after `after_host`."""

    after_host: str = ""
    limit: int = 50
