"""The activities of the trainer: take the run, do one step; and the workers that serve them.

A candidate serves the run's GPU queue with `acquire_trainer` alone. What belongs to a lease is served on the lease's
own queue, by a worker made after each acquisition, so that a task for one lease can never reach another's holder.
"""

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from activities.connection import make_worker
from activities.edge import EngineThread
from activities.publish import PublishActivities
from stoa.contracts import names
from stoa.contracts.messages import Acquired, AcquireRequest, StepRequest, StepResult
from stoa.contracts.ports import PolicyTrainer, Progress


class TrainActivities:
    """All trainer activities over one engine and one thread."""

    def __init__(self, engine: PolicyTrainer, thread: EngineThread | None = None) -> None:
        self._engine = engine
        self.thread = thread or EngineThread("trainer")
        self.publishing = PublishActivities(engine, self.thread)

    @activity.defn(name=names.ACQUIRE_TRAINER, no_thread_cancel_exception=True)
    async def acquire(self, request: AcquireRequest) -> Acquired:
        """Take the run with a new fencing token."""
        attempt = activity.info().attempt

        def take(request: AcquireRequest, progress: Progress) -> Acquired:
            return self._engine.acquire(request, attempt, progress)

        return await self.thread.call(take, request)

    @activity.defn(name=names.TRAIN_STEP, no_thread_cancel_exception=True)
    async def train_step(self, request: StepRequest) -> StepResult:
        """Do one optimizer step."""
        return await self.thread.call(self._engine.train_step, request)


def acquire_worker(client: Client, run: str, activities: TrainActivities) -> Worker:
    """Worker of a trainer candidate: polls the run's GPU queue for one acquisition at a time."""
    return make_worker(client, names.gpu_queue(run), activities=[activities.acquire], max_concurrent_activities=1)


def lease_worker(client: Client, queue: str, activities: TrainActivities) -> Worker:
    """Worker of a lease's holder on `queue` (`Acquired.queue`): steps, publishes and checkpoints, one at a time."""
    publishing = activities.publishing
    return make_worker(
        client,
        queue,
        activities=[activities.train_step, publishing.publish, publishing.checkpoint],
        max_concurrent_activities=1,
    )
