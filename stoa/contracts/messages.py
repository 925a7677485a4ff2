"""Frozen dataclasses that cross Temporal: what the run's workflow, its callers and the trainer say to each other.

One argument for each workflow, activity, signal, query and update. What sessions and Macs say is in
`fleet_messages.py`, what evaluations say in `evaluation_messages.py`. Standard-library types only, every field small:
bulk bytes go to the bucket and only keys pass here. New fields must have defaults, so that an older peer can still read
a message.
"""

from dataclasses import dataclass, field
from typing import Literal

from stoa.contracts.evaluation_messages import EvaluationPlan, EvaluationResult

RunState = Literal["running", "paused", "draining", "stopped"]


@dataclass(frozen=True)
class StopConditions:
    """When a run ends by itself; 0 turns a condition off."""

    max_steps: int = 0
    max_versions: int = 0
    max_seconds: float = 0.0
    target_pass_at_1: float = 0.0
    """Reached once the lower bound of a held-out result's 95 % interval is."""
    max_gpu_hours: float = 0.0
    """GPUs times hours of held leases."""
    max_dollars: float = 0.0
    """What those GPU hours cost at `dollars_per_gpu_hour`."""
    dollars_per_gpu_hour: float = 0.0
    on_alarm: bool = False
    """An alarm that would pause the run ends it."""


@dataclass(frozen=True)
class RunInput:
    """Input of RunWorkflow. `carried` is its own state when it continues as new (see `workflows.state`)."""

    run: str
    stop: StopConditions
    evaluation: EvaluationPlan
    steps_per_version: int = 4
    anchor_every_versions: int = 20
    checkpoint_every_versions: int = 1
    step_timeout_seconds: float = 3600.0
    heartbeat_seconds: float = 30.0
    mac_namespace: str = "default"
    max_staleness: int = 8
    """Hard bound of staleness: only for saying which groups a step waits for."""
    continue_after_events: int = 2000
    """Length of history at which the workflow continues as new."""
    carried: str = ""
    """JSON of the carried state, empty at the first start."""
    groups_per_step: int = 0
    """Usable groups of a step; 0: not told."""
    starved_seconds: float = 300.0
    """Longest wait of one step for groups."""
    anchor_by_join_cost: bool = False
    """Anchors come when joining Macs would fetch more beyond the last one than a new one costs; see `workflows.anchors`."""
    census_seconds: float = 60.0
    """Time between two looks at a page of the fleet."""
    gpu_hours: float = 0.0
    """Used before the run was resumed."""
    quarantined: tuple[str, ...] = ()
    """Hosts that were quarantined before the run was resumed."""
    canary_sweeps: int = 0
    """Clean sweeps after which a Mac that the trainer suspects is trusted again, unknowing; 0: it is told and stops."""
    on_trial: tuple[str, ...] = ()
    """Of the quarantined, those that did not know it; with canary_sweeps they go on not knowing it."""
    seconds_before: float = 0.0
    """Time that the run went on before it was resumed, without the time between."""
    drained: tuple[str, ...] = ()
    """Hosts that were drained before the run was resumed."""


@dataclass(frozen=True)
class AcquireRequest:
    """Ask a trainer to take the run. The token is lease_number * 1000 + attempt.

    A number that is too low is raised to HEAD.epoch // 1000 + 1; with `strict` it fences its task instead.
    """

    run: str
    lease_number: int
    min_version: int = -1
    """Newest version the run knows to be published: a HEAD below it was put back by somebody."""
    strict: bool = False


@dataclass(frozen=True)
class LeaseQuestion:
    """Which lease does HEAD name? Asked by a run that may have been reset, or begun anew, before it asks for the next."""

    run: str


@dataclass(frozen=True)
class LeaseFound:
    """The fencing token in HEAD, 0 before the first."""

    epoch: int


@dataclass(frozen=True)
class Acquired:
    """A trainer holds the run: `token` fences all others; `queue` is where only it listens."""

    token: int
    owner: str
    queue: str
    step: int
    version: int
    head_state: RunState = "running"
    num_gpus: int = 1
    anchor_version: int = -1
    """Newest version with an anchor."""


@dataclass(frozen=True)
class StepRequest:
    """Do optimizer step `step` (the one after the last done)."""

    run: str
    token: int
    step: int
    wait_seconds: float = 0.0
    """Longest wait for groups; 0: the run's setting."""
    quarantined: tuple[str, ...] = ()
    """Hosts whose groups are refused."""
    version: int = -1
    """Newest version, for whoever looks at the activity."""
    on_trial: tuple[str, ...] = ()
    """Of the quarantined, those that do not know it: their groups are judged, and not trained on."""
    groups_running: int = -1
    """By the last census: granted and not in the bucket yet; -1: none was taken yet."""


@dataclass(frozen=True)
class CanaryNews:
    """How the trial of a Mac stands: `num_clean` canary sweeps had no fault; `reason` is that of a verdict "failed"."""

    host: str
    num_clean: int
    verdict: Literal["", "clean", "failed"] = ""
    reason: str = ""


@dataclass(frozen=True)
class Suspect:
    """A host that the trainer wants to be quarantined."""

    host: str
    reason: str


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `status` starved: no step was made, for want of groups."""

    status: Literal["done", "starved", "stopped"]
    step: int
    manifest_key: str = ""
    num_groups: int = 0
    reward_mean: float = 0.0
    gate_drop_rate: float = 0.0
    wait_seconds: float = 0.0
    train_seconds: float = 0.0
    alarm: str = ""
    reason: str = ""
    num_missing: int = 0
    """Usable groups that a starved step still lacks."""
    oldest_version: int = -1
    """Groups of older versions are of no use to that step; -1: not told."""
    equal_rewards: dict[str, int] = field(default_factory=dict)
    """Groups that a starved step could not use because all their rewards are equal: all_zero, all_one or all_equal -> how many."""
    suspects: tuple[Suspect, ...] = ()
    canaries: tuple[CanaryNews, ...] = ()


@dataclass(frozen=True)
class PublishRequest:
    """Publish the trainer's weights as the next version. `announce`: its own manifest names the anchor, which is waited for."""

    run: str
    token: int
    step: int
    anchor: bool
    checkpoint: bool
    announce: bool = False
    version: int = -1
    """The version that will be, for whoever looks at the activity."""


@dataclass(frozen=True)
class Published:
    """One published version. Unless it was waited for, it is on its way: without `manifest_key` and `delta_bytes`."""

    version: int
    step: int
    manifest_key: str
    delta_bytes: int = 0
    anchor_bytes: int = 0
    changed_fraction: float = 0.0
    seconds: float = 0.0
    arrived_version: int = -1
    """Newest version that HEAD names, and the size of its delta."""
    arrived_delta_bytes: int = 0


@dataclass(frozen=True)
class CheckpointRequest:
    """Save the trainer's state at its present step."""

    run: str
    token: int
    step: int


@dataclass(frozen=True)
class Checkpointed:
    """One saved checkpoint."""

    step: int
    key: str
    num_bytes: int = 0


@dataclass(frozen=True)
class HeadStateRequest:
    """Set HEAD.state. `nonce` makes a repeated request recognisable."""

    run: str
    state: RunState
    nonce: str


@dataclass(frozen=True)
class HeadStateResult:
    """HEAD after the request."""

    state: RunState
    version: int
    step: int
    epoch: int


@dataclass(frozen=True)
class Beat:
    """Heartbeat details of every activity: what it works on and how far it is. Kept small: a server holds all of them."""

    version: int = -1
    step: int = -1
    sweep: int = -1
    last_key: str = ""
    """Newest object written or read, without the run's prefix."""
    progress: str = ""


@dataclass(frozen=True)
class Ask:
    """Argument of the updates pause, resume, stop and drain: who asks and why."""

    reason: str = ""


@dataclass(frozen=True)
class AnchorCadence:
    """Argument of the update set_anchor_cadence: an anchor at least every `every_versions`, or sooner by the cost of joins."""

    every_versions: int
    by_join_cost: bool = False


@dataclass(frozen=True)
class MacAsk:
    """Argument of the updates quarantine, drain_mac and release: which Mac and why; its owner is told."""

    host: str
    reason: str = ""
    unseen: bool = False
    """The host may be one that the run has not met."""


@dataclass(frozen=True)
class VersionsQuery:
    """Page of the run's published versions after `after_version`."""

    after_version: int = -1
    limit: int = 50


@dataclass(frozen=True)
class VersionFacts:
    """One published version as the run remembers it; everything else about it is in the bucket."""

    version: int
    step: int
    published_at: float
    """Unix seconds."""
    reward_mean: float = 0.0
    delta_bytes: int = 0
    """0 until the next version tells."""
    has_anchor: bool = False
    pass_at_1: float = -1.0
    """Held-out result, -1 for none."""


@dataclass(frozen=True)
class VersionsPage:
    """Answer of RunWorkflow's versions query, by version; the oldest are forgotten."""

    versions: tuple[VersionFacts, ...] = ()
    num_versions: int = 0
    next_version: int = -1
    """The `after_version` of the next page, -1 on the last."""


@dataclass(frozen=True)
class RunStatus:
    """Answer of RunWorkflow's status query."""

    run: str
    state: str
    """created, running, paused, draining, stopped or failed."""
    waiting_for: str
    """One sentence: what the run waits for, from whom."""
    step: int = 0
    version: int = 0
    lease: int = 0
    token: int = 0
    num_macs: int = 0
    reward_mean: float = 0.0
    last_pass_at_1: float = -1.0
    last_search_rate: float = -1.0
    end_reason: str = ""
    started_at: float = 0.0
    reason: str = ""
    """Why the run is paused or ends."""
    num_evaluations_open: int = 0
    gpu_hours: float = 0.0
    dollars: float = 0.0
    num_quarantined: int = 0
    anchor_every_versions: int = 0
    anchor_by_join_cost: bool = False
    num_groups_missing: int = 0
    """Usable groups that the present step was short of when it was last asked."""
    stop: StopConditions = StopConditions()
    """Those in force: a resumed run may have others than it was started with."""
    drain_until: float = 0.0
    """Unix seconds at which a draining run ends at the latest; 0 if it does not drain."""
    seconds_before: float = 0.0
    """Time that the run went on before it was resumed."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run: str
    end_reason: str
    step: int
    version: int
    evaluations: tuple[EvaluationResult, ...] = field(default=())
    gpu_hours: float = 0.0
    quarantined: tuple[str, ...] = ()
    on_trial: tuple[str, ...] = ()
    """Of the quarantined, those that do not know it."""
    started_at: float = 0.0
    """Unix seconds; 0: its times and limits are not told."""
    ended_at: float = 0.0
    seconds_before: float = 0.0
    """Time that the run went on before it was resumed."""
    stop: StopConditions = StopConditions()
    """The limits in force at its end."""
    drained: tuple[str, ...] = ()
