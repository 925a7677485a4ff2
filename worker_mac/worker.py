"""The Mac worker's main: `python -m worker_mac.worker [CONFIG] [--state DIR] [--host NAME] [--place TEXT] [--allow FILE]`.

It waits for whatever is not there yet (Temporal, its namespace, the bucket, the run), starts this Mac's session, serves
its queue with one sweep at a time, says hello again after sleep or silence, and ends when the run has stopped. What a
sweep does is the engine's business. Nothing listens on a port.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import structlog
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.connection import connect_forever, make_runtime, make_worker, supervise
from activities.rollout import RolloutActivities
from environments import registry
from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument, fetch_model_files, read_run
from stoa.bucket.store import Store
from stoa.config.host import MacHost
from stoa.config.load import bucket_credentials, load_mac_host, load_run, state_folder
from stoa.config.run import RunConfig
from stoa.contracts import names
from stoa.contracts.errors import (
    MissingExtraError,
    ObjectMissingError,
    RunMissingError,
    ServiceUnavailableError,
    SetupMissingError,
    StoaError,
    UsageError,
)
from stoa.contracts.fleet_messages import Goodbye, Hello, SessionInput
from stoa.telemetry import log as telemetry
from worker_mac.guest import Guest
from worker_mac.identity import Identity, pin_key, pinned_key, project_version
from worker_mac.limits import Budgets, CappedMeters
from worker_mac.senses import probe_here
from worker_mac.service import Attempts

if TYPE_CHECKING:
    from worker_mac.engine import MacEngine

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer")
MakeEngine = Callable[..., "MacEngine"]

BUCKET_PATIENCE_SECONDS: Final = 20.0
LONGEST_WAIT_SECONDS: Final = 5.0
TICK_SECONDS: Final = 1.0
CLOCK_JUMP_SECONDS: Final = 10.0
"""A tick that took this long by the wall clock means that the Mac slept."""
SILENCE_SECONDS: Final = 60.0
"""Without a sweep for this long the session may have lost us."""
RESUME_SECONDS: Final = 60.0
"""A worker started on a stopped run waits this long for it to be resumed."""
GRACEFUL_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    config: Path | None
    state: Path | None
    host: str
    place: str
    allow: Path | None = None
    always: bool = False
    parks: bool = False


def main(arguments: Sequence[str] | None = None, *, make_engine: "MakeEngine | None" = None) -> int:
    """Run the worker; returns the exit code: 0 the run has stopped or we were asked to end, 1 failed, 2 wrong use.

    With --parks a third quick failure, and every start after it, is 0 too, so that launchd does not start it again.
    make_engine: what is called in place of `MacEngine`, with its arguments: for rehearsals without a model.
    """
    options = read_options(arguments)
    telemetry.configure(worker="mac")
    if not options.parks:
        return _run(options, make_engine)[0]
    attempts = Attempts(options.state or state_folder("mac"))
    if parked := attempts.parked():
        _log.error("worker_parked", reason=parked)
        return 0
    code, reason = _run(options, make_engine)
    if code == 0:
        attempts.forget()
        return 0
    if parked := attempts.failed(reason):
        _log.error("worker_parked", reason=parked)
        return 0
    return code


def _run(options: Options, make_engine: "MakeEngine | None") -> tuple[int, str]:
    """Exit code, and why it is not 0."""
    try:
        require_extra()
        config = load_run(options.config)
        identity = Identity(options.state or state_folder("mac"), options.host)
        telemetry.bind(run=config.run, host=identity.host)
        try:
            allowed = load_mac_host(options.allow or _own_limits(identity.folder))
            asyncio.run(_Worker(config, identity, options.place, allowed, always=options.always, make_engine=make_engine).run())
        finally:
            identity.close()
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return (2 if isinstance(error, UsageError) else 1), error.message
    except Exception as error:  # noqa: BLE001 - a worker's main is one of the three edges
        _log.exception("worker_crashed")
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def read_options(arguments: Sequence[str] | None) -> Options:
    """Parse the command line; argparse exits with 2 on wrong use."""
    parser = argparse.ArgumentParser(prog="python -m worker_mac.worker", description="Generate rollouts for a run on this Mac.")
    parser.add_argument("config", nargs="?", type=Path, help="TOML of the run (default: configs/demo.toml)")
    parser.add_argument("--state", type=Path, help="folder of this worker's state; two workers need two")
    parser.add_argument("--host", default="", help="name of this Mac in the run (default: drawn once and kept)")
    parser.add_argument("--place", default="", help="free text shown beside the Mac, for example a city")
    parser.add_argument("--allow", type=Path, help="TOML of what this Mac's owner allows (default: mac.toml in the state folder)")
    parser.add_argument("--always", action="store_true", help="play whatever this Mac's user, power and heat are: for a demo")
    parser.add_argument("--parks", action="store_true", help="end for good after three quick failures: for launchd")
    found = parser.parse_args(arguments)
    return Options(found.config, found.state, found.host, found.place, found.allow, found.always, found.parks)


def _own_limits(folder: Path) -> Path | None:
    path = folder / "mac.toml"
    return path if path.is_file() else None


def require_extra(find: Callable[[str], object] = find_spec) -> None:
    """Raise MissingExtraError if MLX is not installed."""
    if find("mlx") is None:
        raise MissingExtraError("the Mac worker needs MLX, which is not installed", hint="run `pip install 'stoa[mac]'`")


def reason_to_greet(pending: str, *, tick_seconds: float, silent_seconds: float) -> str:
    """Why to say hello now; "" for no reason.

    pending: the reason of a hello that the server did not take. tick_seconds: wall clock since the last look, which is
    longer than a tick after sleep (the monotonic clock of a Mac stands still meanwhile). silent_seconds: without a
    sweep and without a hello.
    """
    if tick_seconds > CLOCK_JUMP_SECONDS:
        return "wake"
    return pending or ("silence" if silent_seconds > SILENCE_SECONDS else "")


class _Worker:
    """One process's life."""

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        place: str,
        allowed: MacHost,
        *,
        always: bool,
        make_engine: "MakeEngine | None" = None,
    ) -> None:
        self._config, self._identity, self._place = config, identity, place
        self._run, self._host = config.run, identity.host
        self._make = make_engine
        self._stop = asyncio.Event()
        self._said = ""
        self._run_stopped = False
        store = Store(config.bucket, bucket_credentials(config.bucket), patience_seconds=BUCKET_PATIENCE_SECONDS)
        budgets = Budgets(identity.folder / "network.json", allowed.day_bytes, allowed.month_bytes)
        store.meters = CappedMeters(allowed, budgets)
        self._store, self._budgets = store, budgets
        self._guest = Guest(allowed, None if always else probe_here(), spent_budget=budgets.spent)

    async def run(self) -> None:
        """Wait for the run, serve it, leave it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        document = await self._wait_for(self._read_run)
        if document is None:
            return
        engine = await self._wait_for(lambda: self._make_engine(document))
        if engine is None:
            return
        self._guest.start()
        try:
            if await self._wait_while_stopped(document):
                await self._serve(document, engine)
        finally:
            await asyncio.to_thread(engine.close)
            self._guest.close()
            self._budgets.close()
        _log.info("worker_ended", run_stopped=self._run_stopped)

    def _read_run(self) -> RunDocument:
        self._store.patience_seconds = 0.0  # waiting, and saying so, is done here
        self._store.check()
        return read_run(self._store, self._run, pinned_key(self._identity.run_folder(self._run)))

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

    def _make_engine(self, document: RunDocument) -> "MacEngine":
        from worker_mac.engine import MacEngine  # noqa: PLC0415 - MLX is loaded once it is known to be there

        folder = self._identity.run_folder(self._run)
        pin_key(folder, document.public_key)
        self._store.patience_seconds = BUCKET_PATIENCE_SECONDS
        model_folder = folder / "model"
        fetch_model_files(self._store, document.model_files, model_folder)
        tokenizer = (model_folder / "tokenizer.json").read_bytes()
        environment = registry.create(document.config.environment.name, document.config.environment.settings, tokenizer)
        make = self._make or MacEngine
        return make(self._store, document, environment, host=self._host, folder=folder, model_folder=model_folder, guest=self._guest)

    async def _wait_while_stopped(self, document: RunDocument) -> bool:
        """False if the run has stopped and is not resumed soon, or we are asked to end."""
        deadline = time.monotonic() + RESUME_SECONDS
        said = False
        while not self._stop.is_set():
            if await asyncio.to_thread(self._head_state, document) != "stopped":
                return True
            if time.monotonic() > deadline:
                return False
            if not said:
                _log.info("worker_waiting", reason="the run has stopped", hint="it may be resumed", seconds=RESUME_SECONDS)
                said = True
            await self._pause(TICK_SECONDS)
        return False

    def _head_state(self, document: RunDocument) -> str:
        """HEAD.state; "" before there is a HEAD or while the bucket is away."""
        try:
            return read_head(self._store, self._run, document.public_key)[0].state
        except (ObjectMissingError, ServiceUnavailableError):
            return ""

    async def _serve(self, document: RunDocument, engine: "MacEngine") -> None:
        # Endpoints are this machine's; everything else is the run's own.
        config = document.config.model_copy(update={"temporal": self._config.temporal, "bucket": self._config.bucket})
        runtime = make_runtime(10.0)

        async def connect() -> Client | None:
            connecting = asyncio.ensure_future(
                connect_forever(config.temporal.address, config.temporal.namespace_mac, on_wait=self._say, runtime=runtime)
            )
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait((connecting, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in (connecting, stopped):
                if not task.done():
                    task.cancel()
            return connecting.result() if connecting.done() and not connecting.cancelled() else None

        client = await connect()
        if client is None:
            return
        activities = RolloutActivities(engine)
        watching = asyncio.ensure_future(self._watch(client, config, document, engine))
        clients = [client]

        async def make() -> Worker:
            if not clients:
                clients.append(await connect_forever(config.temporal.address, config.temporal.namespace_mac, runtime=runtime))
            return make_worker(
                clients.pop(),
                names.mac_queue(self._run, self._host),
                activities=[activities.sweep],
                max_concurrent_activities=1,
                graceful_seconds=GRACEFUL_SECONDS,
            )

        try:
            await supervise(make, self._stop)
        finally:
            watching.cancel()
            await self._say_goodbye(client, "run stopped" if self._run_stopped else "worker ended")

    async def _watch(self, client: Client, config: RunConfig, document: RunDocument, engine: "MacEngine") -> None:
        """Say hello at the start, after sleep and after silence; end when the run has stopped."""
        ticked_at = time.time()
        greeted, looked, reason = 0.0, time.monotonic(), "start"
        while not self._stop.is_set():
            if reason and await self._say_hello(client, config, reason):
                greeted, reason = time.monotonic(), ""
            await self._pause(TICK_SECONDS)
            now, wall = time.monotonic(), time.time()
            reason = reason_to_greet(reason, tick_seconds=wall - ticked_at, silent_seconds=min(engine.idle_seconds, now - greeted))
            ticked_at = wall
            if engine.idle_seconds > config.timeouts.head_poll_seconds < now - looked:
                looked = now
                self._run_stopped = await asyncio.to_thread(self._head_state, document) == "stopped"
            if self._run_stopped or engine.run_stopped:
                self._run_stopped = True
                self._stop.set()

    async def _say_hello(self, client: Client, config: RunConfig, reason: str) -> bool:
        """Start this Mac's session, or tell the one there is that we are here; False if the server did not take it."""
        session = SessionInput(
            run=self._run,
            host=self._host,
            groups=config.rollout.groups,
            group_size=config.rollout.group_size,
            sweep_timeout_seconds=config.timeouts.sweep_seconds,
            heartbeat_seconds=config.timeouts.heartbeat_seconds,
            away_expiry_seconds=config.timeouts.away_minutes * 60.0,
            place=self._place,
        )
        hello = Hello(self._host, self._identity.nonce, build=project_version(), reason=reason)
        try:
            await client.start_workflow(
                names.MAC_SESSION,
                session,
                id=names.session_workflow_id(self._run, self._host),
                task_queue=names.control_queue(self._run),
                start_signal=names.HELLO,
                start_signal_args=[hello],
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            )
        except RPCError as error:
            _log.warning("hello_failed", reason=reason, error=error.message)
            return False
        _log.info("hello_said", reason=reason)
        return True

    async def _say_goodbye(self, client: Client, reason: str) -> None:
        handle = client.get_workflow_handle(names.session_workflow_id(self._run, self._host))
        try:
            await handle.signal(names.GOODBYE, Goodbye(self._host, self._identity.nonce, reason))
            _log.info("goodbye_said", reason=reason)
        except RPCError as error:
            _log.info("goodbye_failed", error=error.message)

    async def _pause(self, seconds: float) -> None:
        """Sleep, or return at once when this process is asked to end."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return


if __name__ == "__main__":
    sys.exit(main())
