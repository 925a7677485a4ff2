"""The activities that make a trainer's work durable: publish a version, save a checkpoint.

They run on the thread of the trainer that `activities.train` shares, and only on the queue of a held lease.
"""

from temporalio import activity

from activities.edge import EngineThread
from stoa.contracts import names
from stoa.contracts.messages import Checkpointed, CheckpointRequest, Published, PublishRequest
from stoa.contracts.ports import PolicyTrainer


class PublishActivities:
    """Serve `names.lease_queue(run, token)` beside the training steps."""

    def __init__(self, engine: PolicyTrainer, thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread

    @activity.defn(name=names.PUBLISH, no_thread_cancel_exception=True)
    async def publish(self, request: PublishRequest) -> Published:
        """Publish the present weights as the next version."""
        return await self._thread.call(self._engine.publish, request)

    @activity.defn(name=names.CHECKPOINT, no_thread_cancel_exception=True)
    async def checkpoint(self, request: CheckpointRequest) -> Checkpointed:
        """Save the trainer's state and name it in HEAD."""
        return await self._thread.call(self._engine.checkpoint, request)
