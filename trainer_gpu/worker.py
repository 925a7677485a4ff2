"""The trainer's main: `python -m trainer_gpu.worker [CONFIG] [--state DIR] [--no-control]`.

It waits for whatever is not there yet (the bucket, the run, Temporal, its namespace), offers to take the run, serves
each lease it wins on the lease's own queue, and keeps the control child (workflows and grants) alive beside it. It ends
when it is asked to; nothing listens on a port. What a step does is the engine's business.

On several GPUs: `python -m trainer_gpu.ranks --nproc-per-node N [CONFIG]`, or torchrun. Rank 0 does all of the above;
the other ranks follow it (`follower.py`) and end with it.
"""

import argparse
import asyncio
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import structlog
from temporalio.client import Client
from temporalio.worker import Worker

from activities.connection import connect_forever, make_runtime, supervise
from activities.train import TrainActivities, acquire_worker, lease_worker
from stoa.config.load import Launch, load_run, state_folder, temporal_access, torchrun_launch
from stoa.config.run import RunConfig
from stoa.contracts.errors import (
    MissingExtraError,
    RunMissingError,
    ServiceUnavailableError,
    SetupMissingError,
    StoaError,
    UsageError,
)
from stoa.contracts.messages import Acquired
from stoa.telemetry import log as telemetry
from trainer_gpu.child import keep_alive
from trainer_gpu.lock import StateLock
from trainer_gpu.run_handle import PATIENCE_SECONDS, RunHandle, open_run, open_store

if TYPE_CHECKING:
    from trainer_gpu.crew import Crew
    from trainer_gpu.engine import TrainerEngine

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer")
MakeEngine = Callable[..., "TrainerEngine"]

LONGEST_WAIT_SECONDS: Final = 5.0
WORKER_HEARTBEAT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    config: Path | None
    state: Path | None
    control: bool


def main(arguments: Sequence[str] | None = None, *, make_engine: "MakeEngine | None" = None) -> int:
    """Run the worker; returns the exit code: 0 we were asked to end, 1 failed, 2 wrong use.

    make_engine: what is called in place of `TrainerEngine`, with its arguments, on one rank: for rehearsals without a model.
    """
    options = read_options(arguments)
    launch = torchrun_launch()
    telemetry.configure(worker="trainer" if launch is None else f"trainer-{launch.rank}")
    _hush()
    try:
        require_extra()
        if launch is not None and launch.num_ranks > 1:
            return _one_of_many(options, launch)
        _work(options, make_engine=make_engine)
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 2 if isinstance(error, UsageError) else 1
    except Exception:  # noqa: BLE001 - a worker's main is one of the three edges
        _log.exception("worker_crashed")
        return 1
    return 0


def _hush() -> None:
    """What libraries say at length and nobody here can act on: accelerations that are not installed, names that will change."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")


def _work(options: Options, crew: "Crew | None" = None, *, make_engine: "MakeEngine | None" = None) -> None:
    """The only rank, or with `crew` the first one: train until asked to end, or until another rank is lost."""
    config = load_run(options.config)
    telemetry.bind(run=config.run)
    folder = options.state or state_folder("trainer")
    with StateLock(folder):
        telemetry.keep(folder / "events.log")
        asyncio.run(_Worker(config, options, crew, make_engine).run())


def _one_of_many(options: Options, launch: Launch) -> int:
    """This rank of several; returns the exit code."""
    from trainer_gpu import host  # noqa: PLC0415 - torch, and only where torchrun started us
    from trainer_gpu.crew import Crew, Line  # noqa: PLC0415
    from trainer_gpu.follower import follow  # noqa: PLC0415

    host.join_processes()
    line = Line()
    if launch.rank:
        return 0 if follow(line) else 1
    crew = Crew(line)
    try:
        _work(options, crew)
    finally:
        crew.end()
    return 1 if crew.is_lost else 0


def read_options(arguments: Sequence[str] | None) -> Options:
    """Parse the command line; argparse exits with 2 on wrong use."""
    parser = argparse.ArgumentParser(prog="python -m trainer_gpu.worker", description="Train a run on this machine.")
    parser.add_argument("config", nargs="?", type=Path, help="TOML of the run (default: configs/demo.toml)")
    parser.add_argument("--state", type=Path, help="folder of this worker's state; two workers need two")
    parser.add_argument("--no-control", action="store_true", help="do not run workflows here: another host does")
    found = parser.parse_args(arguments)
    return Options(found.config, found.state, not found.no_control)


def require_extra(find: Callable[[str], object] = find_spec) -> None:
    """Raise MissingExtraError if torch or Megatron is not installed."""
    for module, name in (("torch", "torch"), ("megatron", "megatron-core")):
        if find(module) is None:
            raise MissingExtraError(f"the trainer needs {name}, which is not installed", hint="run `pip install 'stoa[gpu]'`")


class _Worker:
    """One process's life."""

    def __init__(self, config: RunConfig, options: Options, crew: "Crew | None", make_engine: "MakeEngine | None" = None) -> None:
        self._config = config
        self._make = make_engine
        self._crew = crew
        self._options = options
        self._store = open_store(config, patience_seconds=0.0)
        self._stop = asyncio.Event()
        self._leases: asyncio.Queue[Acquired | None] = asyncio.Queue()
        self._said = ""

    async def run(self) -> None:
        """Wait for the run, then offer to train it until asked to end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        if self._crew is not None:
            self._crew.on_lost = lambda: loop.call_soon_threadsafe(self._stop.set)
        control = keep_alive(self._control_command(), self._stop) if self._options.control else self._stop.wait()
        beside = asyncio.ensure_future(control)
        try:
            await self._train()
        finally:
            self._stop.set()  # also when this fails: the control child must not outlive us
            await beside
        _log.info("worker_ended")

    def _control_command(self) -> list[str]:
        folder = self._options.state or state_folder("trainer")
        config = [str(self._options.config)] if self._options.config else []
        return [sys.executable, "-m", "trainer_gpu.control", "--state", str(folder), *config]

    async def _train(self) -> None:
        handle = await self._wait_for(self._open_run)
        client = await self._connected() if handle is not None else None
        if handle is not None and client is not None:
            await self._serve(handle, client)

    def _open_run(self) -> RunHandle:
        self._store.patience_seconds = 0.0  # waiting, and saying so, is done here
        self._store.check()
        handle = open_run(self._config, self._store, check_weights=True)
        self._store.patience_seconds = PATIENCE_SECONDS
        return replace(handle, folder=self._options.state or state_folder("trainer"))

    async def _serve(self, handle: RunHandle, client: Client) -> None:
        loop = asyncio.get_running_loop()

        def on_lease(lease: Acquired | None) -> None:
            loop.call_soon_threadsafe(self._leases.put_nowait, lease)

        engine = await asyncio.to_thread(self._make_engine, handle, on_lease)
        _log.info("worker_ready", owner=handle.owner)
        activities = TrainActivities(engine)
        clients = [client]

        async def make() -> Worker:
            if not clients:
                clients.append(await self._new_client())
            return acquire_worker(clients.pop(), handle.run, activities)

        leases = asyncio.ensure_future(self._serve_leases(activities))
        offering = asyncio.ensure_future(supervise(make, self._stop, silent_seconds=activities.thread.silent_seconds))
        try:
            await asyncio.wait((leases, offering), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            self._leases.put_nowait(None)
            await asyncio.gather(leases, offering)
            await asyncio.to_thread(engine.close)

    def _make_engine(self, handle: RunHandle, on_lease: Callable[[Acquired | None], None]) -> "TrainerEngine":
        from trainer_gpu.crew import alone  # noqa: PLC0415
        from trainer_gpu.engine import TrainerEngine  # noqa: PLC0415 - torch is loaded once there is a run to train

        make = self._make or TrainerEngine
        engine = make(handle, on_lease=on_lease, lead=self._crew.lead if self._crew else alone)
        engine.prepare()
        return engine

    async def _serve_leases(self, activities: TrainActivities) -> None:
        """One worker for the newest lease at a time; it ends with the lease, or when this process is asked to end."""
        ended = asyncio.Event()
        serving: asyncio.Task[None] | None = None
        while True:
            lease = await self._leases.get()
            ended.set()
            if serving is not None:
                await serving
            if self._stop.is_set():
                return
            if lease is not None:
                ended = asyncio.Event()
                serving = asyncio.create_task(self._serve_lease(lease, activities, ended))

    async def _serve_lease(self, lease: Acquired, activities: TrainActivities, ended: asyncio.Event) -> None:
        async def make() -> Worker:
            return lease_worker(await self._new_client(), lease.queue, activities)

        try:
            await supervise(make, ended, silent_seconds=activities.thread.silent_seconds)
        except StoaError as error:
            _log.error("lease_not_served", token=lease.token, error=error.message)
            self._stop.set()
            raise

    async def _new_client(self) -> Client:
        temporal = self._config.temporal
        access = temporal_access(temporal)
        return await connect_forever(temporal.address, temporal.namespace_core, access=access, on_wait=self._say, runtime=self._runtime)

    async def _connected(self) -> Client | None:
        """A client once Temporal and its namespace are there; None if asked to end first."""
        self._runtime = make_runtime(WORKER_HEARTBEAT_SECONDS)
        connecting = asyncio.ensure_future(self._new_client())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((connecting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not connecting.done():
            connecting.cancel()
            return None
        return connecting.result()

    async def _wait_for(self, attempt: Callable[[], _Answer]) -> _Answer | None:
        """What `attempt` gives once it can; None if this process is asked to end first. Says each new reason once."""
        wait_seconds = 0.3
        while not self._stop.is_set():
            try:
                return await asyncio.to_thread(attempt)
            except (ServiceUnavailableError, SetupMissingError, RunMissingError) as error:
                self._say(error)
            await self._pause(wait_seconds)
            wait_seconds = min(wait_seconds * 1.5, LONGEST_WAIT_SECONDS)
        return None

    def _say(self, error: StoaError, _wait_seconds: float = 0.0) -> None:
        reason = type(error).__name__
        if reason != self._said:
            self._said = reason
            _log.info("worker_waiting", reason=error.message, hint=error.hint)

    async def _pause(self, seconds: float) -> None:
        """Sleep, or return at once when this process is asked to end."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Everything is closed by now, and taking torch and the SDK apart object by object lasts seconds.
    os._exit(code)
