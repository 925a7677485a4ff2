"""The activity of a Mac: one sweep. Played by a `RolloutEngine`, one at a time, on the engine's own thread."""

from temporalio import activity

from activities.edge import EngineThread
from stoa.contracts import names
from stoa.contracts.fleet_messages import SweepRequest, SweepResult
from stoa.contracts.ports import RolloutEngine


class RolloutActivities:
    """Serve `names.mac_queue(run, host)` with at most one activity at a time."""

    def __init__(self, engine: RolloutEngine, thread: EngineThread | None = None) -> None:
        self._engine = engine
        self._thread = thread or EngineThread("rollout")

    @activity.defn(name=names.SWEEP, no_thread_cancel_exception=True)
    async def sweep(self, request: SweepRequest) -> SweepResult:
        """Play one sweep and ship its groups."""
        return await self._thread.call(self._engine.sweep, request)
