"""What the activities expect of the engines behind them: Protocols only, standard library only.

The engines live in `worker_mac` and `trainer_gpu` and are injected by their worker mains; tests inject fakes. All
methods are synchronous, run on one engine thread, and raise errors of `stoa.contracts.errors`.
"""

from typing import Protocol

from stoa.contracts.evaluation_messages import EvaluationResult, SummariseRequest
from stoa.contracts.fleet_messages import Grant, GrantRequest, SweepRequest, SweepResult
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


class Progress(Protocol):
    """How an engine shows that it moves, and learns that it should stop. Safe to call from any thread."""

    def report(self, detail: str, *, version: int = -1, key: str = "") -> None:
        """Say what has just been done, in a few words: shown as heartbeat details. Not calling it stops the heartbeat.

        version, key: weights in use and newest object, where known; they stay until others are told.
        """
        ...

    @property
    def cancelled(self) -> bool:
        """True once the activity was cancelled: give up at the next safe point.

        What is nearly done may be finished and returned, and counts. A wait (for groups, for a grant) ends at once.
        """
        ...

    @property
    def stopping(self) -> bool:
        """True once this process was asked to end: finish what is in hand, ship it, return."""
        ...


class RolloutEngine(Protocol):
    """A Mac's side: plays one sweep and ships its groups."""

    def sweep(self, request: SweepRequest, progress: Progress) -> SweepResult:
        """Bring weights up to date, play all groups in one batch, ship each as it ends."""
        ...


class PolicyTrainer(Protocol):
    """The GPU box's side: holds the run's lease and trains."""

    def acquire(self, request: AcquireRequest, attempt: int, progress: Progress) -> Acquired:
        """Take the run with a new fencing token, load its newest state, publish it."""
        ...

    def train_step(self, request: StepRequest, progress: Progress) -> StepResult:
        """Do one optimizer step, waiting for groups at most the configured time."""
        ...

    def publish(self, request: PublishRequest, progress: Progress) -> Published:
        """Publish the present weights as the next version."""
        ...

    def checkpoint(self, request: CheckpointRequest, progress: Progress) -> Checkpointed:
        """Save the trainer's state and name it in HEAD."""
        ...


class Granter(Protocol):
    """Admission: who may generate what."""

    def grant(self, request: GrantRequest, progress: Progress) -> Grant:
        """The grant of (host, sweep), the same one each time, or an empty one with what it waits for. Does not wait itself."""
        ...

    def on_the_way(self) -> tuple[int, int]:
        """Groups granted and not in the bucket yet, and groups there and not settled yet."""
        ...

    def host_left(self, host: str) -> None:
        """Groups a lost Mac still owed leave the ledger until it asks again."""
        ...


class HeadKeeper(Protocol):
    """The control side's only write to HEAD."""

    def find_lease(self, request: LeaseQuestion, progress: Progress) -> LeaseFound:
        """The fencing token in HEAD."""
        ...

    def set_state(self, request: HeadStateRequest, progress: Progress) -> HeadStateResult:
        """Set HEAD.state by compare-and-swap; idempotent by nonce."""
        ...


class Evaluator(Protocol):
    """Scores an evaluation's parts."""

    def summarise(self, request: SummariseRequest, progress: Progress) -> EvaluationResult:
        """Read the parts, score them from ids, write the summary object, return it."""
        ...

    def held_out(self, run: str, num_questions: int, seed: int) -> tuple[str, ...]:
        """The fixed seeded choice of held-out question ids."""
        ...
