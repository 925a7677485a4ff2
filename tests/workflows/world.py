"""A small world of activities for workflow tests: a trainer, a desk and Macs that answer at once and keep books.

Everything is in memory and driven by fields that a test sets; workflows cannot tell it from the real parts.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from stoa.contracts import names
from stoa.contracts.evaluation_messages import (
    EvaluationResult,
    EvaluationStart,
    HeldOutPart,
    HeldOutRequest,
    ListMacsRequest,
    MacList,
    SummariseRequest,
)
from stoa.contracts.fleet_messages import (
    AdmitRequest,
    Admitted,
    Census,
    CensusRequest,
    FleetEvent,
    Grant,
    GrantRequest,
    MacFacts,
    Notice,
    Released,
    ReleaseRequest,
    Standing,
    SweepRequest,
    SweepResult,
)
from stoa.contracts.messages import (
    Acquired,
    AcquireRequest,
    Checkpointed,
    CheckpointRequest,
    HeadStateRequest,
    HeadStateResult,
    LeaseFound,
    LeaseQuestion,
    Published,
    PublishRequest,
    StepRequest,
    StepResult,
)


def error(kind: str, *, hopeless: bool = False) -> ApplicationError:
    return ApplicationError(f"{kind} on purpose", type=kind, non_retryable=hopeless)


@dataclass
class World:
    """Trainer, desk and Macs of one run."""

    client: Client
    epoch: int = 0
    head_state: str = "running"
    head_states: list[str] = field(default_factory=list)
    version: int = -1
    step: int = 0
    saved_step: int = 0
    trained: list[tuple[int, int]] = field(default_factory=list)  # (token, step)
    steps: list[StepRequest] = field(default_factory=list)
    published: list[tuple[int, int, bool, bool]] = field(default_factory=list)  # (version, step, anchor, checkpoint)
    acquisitions: list[AcquireRequest] = field(default_factory=list)
    evaluations: list[EvaluationStart] = field(default_factory=list)
    fleet: list[FleetEvent] = field(default_factory=list)
    released: int = 0
    hosts: tuple[str, ...] = ()
    swept: list[SweepRequest] = field(default_factory=list)
    grants: Counter[int] = field(default_factory=Counter)
    notices: list[Notice] = field(default_factory=list)
    told: list[Standing] = field(default_factory=list)
    admitted: list[AdmitRequest] = field(default_factory=list)
    censuses: list[CensusRequest] = field(default_factory=list)
    reported: list[EvaluationResult] = field(default_factory=list)
    summarised: list[SummariseRequest] = field(default_factory=list)
    # what a test changes
    on_acquire: Callable[[AcquireRequest], None] = lambda _: None
    on_step: Callable[[StepRequest], StepResult | None] = lambda _: None
    on_publish: Callable[[PublishRequest], None] = lambda _: None
    on_grant: Callable[[GrantRequest], Grant | None] = lambda _: None
    on_sweep: Callable[[SweepRequest], SweepResult | None] = lambda _: None
    on_admit: Callable[[AdmitRequest], Admitted | None] = lambda _: None
    on_census: Callable[[CensusRequest], Census | None] = lambda _: None
    on_evaluation: Callable[[EvaluationStart], EvaluationResult | None] = lambda _: None
    waits_for_versions: bool = True
    step_gate: asyncio.Event | None = None
    sweep_gate: asyncio.Event | None = None
    liar: str = ""
    """What this Mac answers of an evaluation is no good."""
    frozen_host: str = ""
    """Its sweeps begin, and then nothing is heard of them, as if its process had been killed."""
    held_from: int | None = None
    """Sweeps from this number on wait until it is raised."""
    step_seconds: float = 0.0
    cancelled_steps: int = 0

    @activity.defn(name=names.ACQUIRE_TRAINER)
    async def acquire(self, request: AcquireRequest) -> Acquired:
        self.acquisitions.append(request)
        self.on_acquire(request)
        token = request.lease_number * 1000 + activity.info().attempt
        if not request.strict:
            token = max(request.lease_number, self.epoch // 1000 + 1) * 1000 + activity.info().attempt
        elif token <= self.epoch:
            raise error("FencedError", hopeless=True)
        self.epoch, self.step, self.version = token, self.saved_step, self.version + 1
        return Acquired(token, "box", names.lease_queue(request.run, token), self.step, self.version, self.head_state)  # type: ignore[arg-type]

    @activity.defn(name=names.TRAIN_STEP)
    async def train_step(self, request: StepRequest) -> StepResult:
        self.steps.append(request)
        if self.step_gate is not None and not self.step_gate.is_set():
            try:
                while not self.step_gate.is_set():
                    activity.heartbeat(f"step {request.step}: waits")
                    await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                self.cancelled_steps += 1
                return StepResult("stopped", request.step - 1, reason="cancelled")
        await asyncio.sleep(self.step_seconds)
        answer = self.on_step(request)
        if answer is not None:
            return answer
        if request.token != self.epoch:
            raise error("FencedError", hopeless=True)
        if request.step != self.step + 1:
            raise error("LostStateError", hopeless=True)
        self.step = request.step
        self.trained.append((request.token, request.step))
        return StepResult("done", request.step, num_groups=8, reward_mean=request.step / 100)

    @activity.defn(name=names.PUBLISH)
    async def publish(self, request: PublishRequest) -> Published:
        self.on_publish(request)
        self.version += 1
        self.saved_step = request.step if request.checkpoint else self.saved_step
        self.published.append((self.version, request.step, request.anchor, request.checkpoint))
        return Published(self.version, request.step, f"manifest-{self.version}" if self.waits_for_versions else "")

    @activity.defn(name=names.CHECKPOINT)
    async def checkpoint(self, request: CheckpointRequest) -> Checkpointed:
        self.saved_step = request.step
        return Checkpointed(request.step, f"checkpoint-{request.step}")

    @activity.defn(name=names.SET_HEAD_STATE)
    async def set_head_state(self, request: HeadStateRequest) -> HeadStateResult:
        self.head_state = request.state
        self.head_states.append(request.state)
        return HeadStateResult(request.state, self.version, self.step, self.epoch)

    @activity.defn(name=names.FIND_LEASE)
    async def find_lease(self, request: LeaseQuestion) -> LeaseFound:
        return LeaseFound(self.epoch)

    @activity.defn(name=names.LIST_MACS)
    async def list_macs(self, request: ListMacsRequest) -> MacList:
        return MacList(self.hosts)

    @activity.defn(name=names.START_EVALUATION)
    async def start_evaluation(self, request: EvaluationStart) -> None:
        self.evaluations.append(request)
        answer = self.on_evaluation(request)
        if answer is not None:
            await self.client.get_workflow_handle(names.run_workflow_id(request.input.run)).signal(names.EVAL_DONE, answer)

    @activity.defn(name=names.RELEASE_MACS)
    async def release_macs(self, request: ReleaseRequest) -> Released:
        self.released += 1
        return Released(len(self.hosts))

    @activity.defn(name=names.NOTIFY_RUN)
    async def notify_run(self, event: FleetEvent) -> None:
        self.fleet.append(event)

    @activity.defn(name=names.GRANT_SWEEP)
    async def grant(self, request: GrantRequest) -> Grant:
        self.grants[request.sweep] += 1
        answer = self.on_grant(request)
        return answer or Grant(request.run, request.host, request.sweep, tuple(f"q{request.sweep}-{g}" for g in range(request.num_groups)))

    @activity.defn(name=names.SWEEP)
    async def sweep(self, request: SweepRequest) -> SweepResult:
        self.swept.append(request)
        while request.host == self.frozen_host:
            await asyncio.sleep(0.1)
        while self.sweep_gate is not None and not self.sweep_gate.is_set():
            activity.heartbeat(f"sweep {request.sweep}")
            await asyncio.sleep(0.1)
        while self.held_from is not None and request.sweep >= self.held_from:
            activity.heartbeat(f"sweep {request.sweep}")
            await asyncio.sleep(0.1)
        answer = self.on_sweep(request)
        if answer is not None:
            return answer
        if request.purpose == "eval":
            key = f"evals/{request.evaluation}/{request.part}-{request.host}"
            return SweepResult("done", request.sweep, "eval", request.version, num_episodes=len(request.question_ids), keys=(key,))
        return SweepResult("done", request.sweep, version=3, num_groups=len(request.question_ids), decode_seconds=2.0, pull_seconds=0.5)

    @activity.defn(name=names.NOTICE)
    async def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    @activity.defn(name=names.ADMIT_MAC)
    async def admit(self, request: AdmitRequest) -> Admitted:
        self.admitted.append(request)
        return self.on_admit(request) or Admitted()

    @activity.defn(name=names.TELL_MAC)
    async def tell_mac(self, standing: Standing) -> None:
        self.told.append(standing)

    @activity.defn(name=names.CENSUS)
    async def census(self, request: CensusRequest) -> Census:
        self.censuses.append(request)
        return self.on_census(request) or Census(tuple(map(MacFacts, self.hosts)), len(self.hosts))

    @activity.defn(name=names.HELD_OUT)
    async def held_out(self, request: HeldOutRequest) -> HeldOutPart:
        ids = tuple(f"held-{i}" for i in range(min(request.num_questions, 150)))
        return HeldOutPart(ids[request.start : request.start + request.limit], len(ids))

    @activity.defn(name=names.SUMMARISE_EVALUATION)
    async def summarise(self, request: SummariseRequest) -> EvaluationResult:
        self.summarised.append(request)
        result = scored(request.run, request.evaluation, request.version, num_questions=request.num_questions)
        liars = {int(key.rsplit("/", 1)[1].split("-")[0]) for key in request.keys if key.endswith(self.liar)} if self.liar else set[int]()
        told = {int(key.rsplit("/", 1)[1].split("-")[0]) for key in request.keys if not self.liar or not key.endswith(self.liar)}
        return replace(result, redeal=tuple(sorted(liars - told)) if request.questions_a_part else ())

    @activity.defn(name=names.REPORT_EVALUATION)
    async def report_evaluation(self, result: EvaluationResult) -> None:
        self.reported.append(result)

    def trainer_activities(self) -> list[Any]:
        return [self.acquire, self.train_step, self.publish, self.checkpoint]

    def mac_activities(self) -> list[Any]:
        return [self.sweep, self.notice]

    def desk_activities(self) -> list[Any]:
        return [
            self.admit,
            self.tell_mac,
            self.census,
            self.set_head_state,
            self.find_lease,
            self.list_macs,
            self.start_evaluation,
            self.release_macs,
            self.notify_run,
            self.grant,
            self.held_out,
            self.summarise,
            self.report_evaluation,
        ]


def scored(run: str, evaluation: str, version: int, *, pass_at_1: float = 0.5, num_questions: int = 64) -> EvaluationResult:
    return EvaluationResult(run, evaluation, version, num_questions, pass_at_1, (pass_at_1 - 0.1, pass_at_1 + 0.1), 0.7)
