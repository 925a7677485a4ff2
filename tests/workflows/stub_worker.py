"""A worker process for fault tests: `python -m tests.workflows.stub_worker ROLE ADDRESS RUN FOLDER NAME`.

The activities, connections and workflows are the real ones; the engines are those of `folder`.
"""

import asyncio
import contextlib
import secrets
import signal
import sys
from pathlib import Path

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.connection import connect_forever, make_runtime, make_worker, supervise
from activities.evaluate import EvaluationActivities
from activities.fleet import FleetActivities
from activities.grants import GrantActivities
from activities.rollout import RolloutActivities
from activities.train import TrainActivities, acquire_worker, lease_worker
from stoa.contracts import names
from stoa.contracts.fleet_messages import Hello, SessionInput
from stoa.contracts.messages import Acquired
from tests.workflows.folder import Folder, FolderExaminer, FolderGranter, FolderKeeper, FolderMac, FolderTrainer
from workflows.evaluation import EvaluationWorkflow
from workflows.mac_session import MacSessionWorkflow
from workflows.run import RunWorkflow

HEARTBEAT_SECONDS = 4.0


def control(client: Client, run: str, folder: Folder) -> Worker:
    granter = FolderGranter(folder)
    fleet = FleetActivities(client, client, granter, FolderKeeper(folder))
    evaluations = EvaluationActivities(client, client, FolderExaminer(folder))
    return make_worker(
        client,
        names.control_queue(run),
        workflows=[RunWorkflow, MacSessionWorkflow, EvaluationWorkflow],
        activities=[GrantActivities(granter).grant, *fleet.served(), *evaluations.served()],
        graceful_seconds=1,
    )


async def trainer(client: Client, run: str, folder: Folder, name: str, stop: asyncio.Event) -> None:
    engine = FolderTrainer(folder, name)
    activities = TrainActivities(engine)
    loop = asyncio.get_running_loop()
    leases: list[asyncio.Task[None]] = []
    ended = [asyncio.Event()]

    def serve(lease: Acquired) -> None:
        async def make() -> Worker:
            return lease_worker(client, lease.queue, activities)

        ended[0].set()
        ended[0] = asyncio.Event()
        leases.append(asyncio.create_task(supervise(make, ended[0])))

    engine.on_lease = lambda lease: loop.call_soon_threadsafe(serve, lease)

    async def make() -> Worker:
        return acquire_worker(client, run, activities)

    await supervise(make, stop)
    ended[0].set()
    await asyncio.gather(*leases)


async def mac(client: Client, run: str, folder: Folder, host: str, stop: asyncio.Event) -> None:
    activities = RolloutActivities(run, host, FolderMac(folder, host))
    nonce = secrets.token_hex(4)

    async def hello(reason: str) -> None:
        await client.start_workflow(
            names.MAC_SESSION,
            SessionInput(run, host, groups=4, heartbeat_seconds=HEARTBEAT_SECONDS, continue_after_events=150),
            id=names.session_workflow_id(run, host),
            task_queue=names.control_queue(run),
            start_signal=names.HELLO,
            start_signal_args=[Hello(host, nonce, "0.1.0", reason)],
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )

    async def watch() -> None:
        while not stop.is_set():
            await asyncio.sleep(1.0)
            if activities.take_lost() or activities.is_unasked:
                with contextlib.suppress(RPCError):
                    await hello("lost")

    async def make() -> Worker:
        return make_worker(client, names.mac_queue(run, host), activities=activities.served(), max_concurrent_activities=1)

    await hello("start")
    watching = asyncio.create_task(watch())
    await supervise(make, stop)
    watching.cancel()
    await activities.close()


async def main(role: str, address: str, run: str, root: str, name: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    client = await connect_forever(address, "default", runtime=make_runtime(10.0))
    folder = Folder(Path(root))
    if role == "control":

        async def make() -> Worker:
            return control(client, run, folder)

        await supervise(make, stop)
    else:
        await {"trainer": trainer, "mac": mac}[role](client, run, folder, name, stop)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
