"""Frozen dataclasses that cross Temporal: one argument for each workflow, activity, signal, query and update.

Standard-library types only, every field small: bulk bytes go to the bucket and only keys pass here. New fields must
have defaults, so that an older peer can still read a message.
"""

from dataclasses import dataclass, field
from typing import Literal

RunState = Literal["running", "paused", "draining", "stopped"]
Purpose = Literal["train", "eval"]
SweepStatus = Literal["done", "partial", "draining", "paused", "stopped"]
SessionState = Literal["live", "away", "ended"]


@dataclass(frozen=True)
class StopConditions:
    """When a run ends by itself; 0 turns a condition off."""

    max_steps: int = 0
    max_versions: int = 0
    max_seconds: float = 0.0
    target_pass_at_1: float = 0.0


@dataclass(frozen=True)
class EvaluationPlan:
    """Held-out evaluation: every `every_versions` on `num_questions`, and at start and end on `num_questions_final`."""

    every_versions: int = 4
    num_questions: int = 128
    num_questions_final: int = 512
    """0: no evaluation at start and end."""
    questions_a_part: int = 64
    part_timeout_seconds: float = 600.0
    timeout_seconds: float = 1800.0
    """Longest evaluation; also how long the end of a run waits for its last one."""
    sample_seed: int = 0


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
class GrantRequest:
    """A session asks what its Mac may generate next. The same (host, sweep) always gets the same grant."""

    run: str
    host: str
    sweep: int
    num_groups: int
    wait_seconds: float = 10.0
    ended_before: int = 0
    """Sweeps of this host with a lower number are over: groups they did not bring are lost."""


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


@dataclass(frozen=True)
class SweepRequest:
    """One sweep: `train` has one question a group of `group_size`; `eval` one episode a question on a pinned version."""

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
    """From HEAD.published_at of the version to serving it."""
    apply_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Since the end of the previous sweep on this Mac."""
    bytes_up: int = 0
    bytes_down: int = 0
    keys: tuple[str, ...] = ()
    """Only for evaluations, at most a few keys."""
    reason: str = ""


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


@dataclass(frozen=True)
class EvaluationInput:
    """Input of EvaluationWorkflow: `num_questions` held-out questions from the fixed seeded order, one sample each."""

    run: str
    evaluation: str
    version: int
    num_questions: int
    questions_a_part: int = 64
    part_timeout_seconds: float = 600.0
    sample_seed: int = 0
    timeout_seconds: float = 1800.0


@dataclass(frozen=True)
class EvaluationStart:
    """Ask the control process to start an evaluation in the Macs' namespace."""

    input: EvaluationInput


@dataclass(frozen=True)
class EvalPart:
    """One part of an evaluation, for one Mac."""

    run: str
    evaluation: str
    version: int
    part: int
    question_ids: tuple[str, ...]


@dataclass(frozen=True)
class EvalPartDone:
    """A session's answer to an `EvalPart`; `ok` False means give it to another Mac."""

    part: int
    host: str
    ok: bool
    keys: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class HeldOutRequest:
    """Ask for one part of the fixed seeded choice of `num_questions` held-out questions."""

    run: str
    num_questions: int
    seed: int
    start: int
    limit: int


@dataclass(frozen=True)
class HeldOutPart:
    """Question ids `start` to `start + limit` of the choice; `num_questions` is what the task has, at most what was asked."""

    question_ids: tuple[str, ...]
    num_questions: int


@dataclass(frozen=True)
class ListMacsRequest:
    """Which Macs have a live session in this run: the page after `after_host`, by name."""

    run: str
    after_host: str = ""
    limit: int = 200


@dataclass(frozen=True)
class MacList:
    """Hosts of live sessions, one page; `next_host` is the `after_host` of the next, empty on the last."""

    hosts: tuple[str, ...] = ()
    next_host: str = ""


@dataclass(frozen=True)
class SummariseRequest:
    """Score the parts of an evaluation from their ids and write its summary."""

    run: str
    evaluation: str
    version: int
    keys: tuple[str, ...]
    num_questions: int


@dataclass(frozen=True)
class EvaluationResult:
    """Held-out result of one version. Rates are in [0, 1]; the interval is Wilson, 95 %."""

    run: str
    evaluation: str
    version: int
    num_questions: int
    pass_at_1: float
    interval_95: tuple[float, float]
    search_rate: float
    cover: float = 0.0
    exact_match: float = 0.0
    mean_tokens: float = 0.0
    key: str = ""
    error: str = ""


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
class FleetPage:
    """Answer of RunWorkflow's fleet query: one page of members."""

    members: tuple[FleetEvent, ...] = ()
    num_macs: int = 0
    next_host: str = ""


@dataclass(frozen=True)
class FleetQuery:
    """Page of the fleet after `after_host`."""

    after_host: str = ""
    limit: int = 50


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run: str
    end_reason: str
    step: int
    version: int
    evaluations: tuple[EvaluationResult, ...] = field(default=())
