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


@dataclass(frozen=True)
class AcquireRequest:
    """Ask a trainer to take the run. The token is lease_number * 1000 + attempt, at least (HEAD.epoch // 1000 + 1) * 1000."""

    run: str
    lease_number: int
    min_version: int = -1
    """Newest version the run knows to be published: a HEAD below it was put back by somebody."""


@dataclass(frozen=True)
class Acquired:
    """A trainer holds the run: `token` fences all others; `queue` is where only it listens."""

    token: int
    owner: str
    queue: str
    step: int
    version: int
    head_state: RunState = "running"


@dataclass(frozen=True)
class StepRequest:
    """Do optimizer step `step` (the one after the last done)."""

    run: str
    token: int
    step: int


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


@dataclass(frozen=True)
class PublishRequest:
    """Publish the trainer's weights as the next version. `announce`: its own manifest names the anchor, which is waited for."""

    run: str
    token: int
    step: int
    anchor: bool
    checkpoint: bool
    announce: bool = False


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
class Ask:
    """Argument of the updates pause, resume and stop: who asks and why."""

    reason: str = ""


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


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run: str
    end_reason: str
    step: int
    version: int
    evaluations: tuple[EvaluationResult, ...] = field(default=())
