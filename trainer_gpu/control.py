"""The control process of a run: `python -m trainer_gpu.control [CONFIG] [--state DIR]`.

Hosts the three workflows and the small activities that serve them (grants, HEAD.state, fleet, evaluations). A child of
`trainer_gpu.worker`, apart from the training process because a step that holds the interpreter would stall workflows.
It ends when its standard input reaches end of file: then its parent is gone. No torch here.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog
from temporalio.client import Client
from temporalio.worker import Worker

from activities.codec import TicketCodec
from activities.connection import connect_forever, make_runtime, make_worker, supervise
from activities.evaluate import EvaluationActivities
from activities.fleet import FleetActivities
from activities.grants import GrantActivities
from stoa.config.load import load_run, temporal_access
from stoa.config.run import RunConfig
from stoa.contracts import names
from stoa.contracts.errors import RunMissingError, ServiceUnavailableError, SetupMissingError, StoaError, UsageError
from stoa.telemetry import log as telemetry
from trainer_gpu.desk import Desk, open_desk
from trainer_gpu.run_handle import PATIENCE_SECONDS, open_run, open_store
from workflows.evaluation import EvaluationWorkflow
from workflows.mac_session import MacSessionWorkflow
from workflows.run import RunWorkflow

_log = structlog.get_logger(__name__)

POLL_SECONDS: Final = 0.5
WORKER_HEARTBEAT_SECONDS: Final = 10.0
GRACEFUL_SECONDS: Final = 5.0
MAX_CONTROL_ACTIVITIES: Final = 5000
EVENTS: Final = "control-events.log"
"""Beside the trainer's own events, which another process writes and cuts."""
END_SECONDS: Final = 12.0
"""Without a parent this process is gone after so long, whatever its threads wait for: a bucket may be away for minutes."""


class _Control:
    """One control process's life."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._said = ""

    async def run(self) -> None:
        """Wait for the run, then host its workflows until asked to end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        _on_end_of_input(lambda: loop.call_soon_threadsafe(self._stop.set))
        serving = asyncio.ensure_future(self._serve())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        self._stop.set()
        try:
            await asyncio.wait_for(serving, 2 * GRACEFUL_SECONDS)
        except TimeoutError:
            _log.warning("control_cut_short")
        _log.info("control_ended")

    async def _serve(self) -> None:
        desk = await self._open_desk()
        if desk is None:
            return
        temporal = self._config.temporal
        runtime = make_runtime(WORKER_HEARTBEAT_SECONDS)
        access, codec = temporal_access(temporal), TicketCodec(desk.seal_key_of, opens=False)

        async def connected(namespace: str) -> Client:
            return await connect_forever(temporal.address, namespace, access=access, codec=codec, on_wait=self._say, runtime=runtime)

        core = await connected(temporal.namespace_core)
        mac = core if temporal.namespace_mac == temporal.namespace_core else await connected(temporal.namespace_mac)
        fleet = FleetActivities(core, mac, desk.granter, desk.keeper)
        evaluations = EvaluationActivities(core, mac, desk.examiner)
        activities = [GrantActivities(desk.granter).grant, *fleet.served(), *evaluations.served()]
        workflows = [RunWorkflow, MacSessionWorkflow, EvaluationWorkflow]
        queue = names.control_queue(self._config.run)

        async def host(client: Client) -> None:
            async def make() -> Worker:
                return make_worker(
                    client,
                    queue,
                    activities=activities,
                    workflows=workflows,
                    # Each Mac that waits for room holds one.
                    max_concurrent_activities=MAX_CONTROL_ACTIVITIES,
                    graceful_seconds=GRACEFUL_SECONDS,
                )

            await supervise(make, self._stop)

        _log.info("control_ready", queue=queue)
        await asyncio.gather(*(host(client) for client in ([core] if mac is core else [core, mac])))

    async def _open_desk(self) -> Desk | None:
        """The engines once the bucket and the run are there; None if asked to end first."""
        store = open_store(self._config, patience_seconds=0.0)
        while not self._stop.is_set():
            try:
                await asyncio.to_thread(store.check)
                handle = await asyncio.to_thread(open_run, self._config, store)
            except (ServiceUnavailableError, SetupMissingError, RunMissingError) as error:
                self._say(error, POLL_SECONDS)
                await asyncio.sleep(POLL_SECONDS)
                continue
            store.patience_seconds = PATIENCE_SECONDS
            return await asyncio.to_thread(open_desk, handle, self._config)
        return None

    def _say(self, error: StoaError, _wait_seconds: float) -> None:
        reason = type(error).__name__
        if reason != self._said:
            self._said = reason
            _log.info("control_waiting", reason=error.message)


def _on_end_of_input(tell: Callable[[], object]) -> None:
    """Call `tell` once standard input ends, and end the process if that does not within `END_SECONDS`.

    A daemon thread, since a pipe's read cannot be awaited on every system.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        tell()
        time.sleep(END_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the control process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer_gpu.control", description="Host the workflows of a run.")
    parser.add_argument("config", nargs="?", type=Path, help="TOML of the run (default: configs/demo.toml)")
    parser.add_argument("--state", type=Path, help=f"folder in which its newest events are kept, as {EVENTS}")
    options = parser.parse_args(arguments)
    telemetry.configure(worker="control")
    try:
        config = load_run(options.config)
        telemetry.bind(run=config.run)
        if options.state is not None:
            telemetry.keep(options.state / EVENTS)
        asyncio.run(_Control(config).run())
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Where Temporal went first, taking its runtime apart waits for calls that nobody answers any more.
    os._exit(code)
