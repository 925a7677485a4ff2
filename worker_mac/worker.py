"""The Mac worker's main: `python -m worker_mac.worker [CONFIG] [--state DIR] [--host NAME] [--place TEXT] [--allow FILE]`.

It waits for whatever is not there yet (Temporal, its namespace, the bucket, the run), starts this Mac's session, serves
its queue with one sweep at a time, says hello again after sleep or silence, and ends when the run has stopped. What a
sweep does is the engine's business. Nothing listens on a port. After sleep and after a long pause it begins anew: only
a new process gives back all that a GPU driver holds.
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
from temporalio.worker import Worker

from activities.connection import connect_forever, make_runtime, make_worker, require_namespace, supervise
from activities.rollout import RolloutActivities
from environments import known
from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument, fetch_model_files, read_run
from stoa.bucket.store import Store
from stoa.config.host import MacHost
from stoa.config.load import load_mac_host, state_folder
from stoa.config.run import RunConfig
from stoa.contracts import names
from stoa.contracts.errors import (
    AccessDeniedError,
    MacCrashedError,
    MissingExtraError,
    ObjectMissingError,
    RunMissingError,
    ServiceUnavailableError,
    SetupMissingError,
    StoaError,
    UsageError,
)
from stoa.contracts.fleet_messages import Notice
from stoa.telemetry import log as telemetry
from worker_mac import stopped
from worker_mac.ending import ANEW_SECONDS, FINISH_SECONDS, LEAVE_SECONDS, LastCall, begin_anew, cut_short, heed, leave
from worker_mac.guest import GUEST_FILE, Guest
from worker_mac.identity import Identity, pin_key
from worker_mac.invited import Entry, enter
from worker_mac.limits import Budgets, CappedMeters
from worker_mac.membership import Greeter, Membership
from worker_mac.panics import Caution, PanicLog
from worker_mac.senses import probe_here
from worker_mac.service import QUICK_SECONDS, Attempts
from worker_mac.sleeps import Sleeps, sleeps_here
from worker_mac.window import line_of

if TYPE_CHECKING:
    from worker_mac.engine import MacEngine

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer")
MakeEngine = Callable[..., "MacEngine"]

BUCKET_PATIENCE_SECONDS: Final = 20.0
LONGEST_WAIT_SECONDS: Final = 5.0
TICK_SECONDS: Final = 1.0
"""After sweeps that nobody asked for, and until somebody asks, the session is told so often that we are here."""
GRACEFUL_SECONDS: Final = 30.0
CRASH_SECONDS: Final = 60.0
"""macOS may report a crash minutes after the Mac is up again: looked for this often."""
STILL_SECONDS: Final = 20.0
"""A system that will sleep waits 30 s for us at most."""


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
    kept: bool = False
    quiet: bool = False

    @property
    def folder(self) -> Path:
        """This worker's state folder."""
        return self.state or state_folder("mac")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker's life ended: exit code, why it is not 0, whether never to try again, and why to begin anew."""

    code: int = 0
    reason: str = ""
    stays_off: bool = False
    anew: str = ""


def main(
    arguments: Sequence[str] | None = None,
    *,
    make_engine: "MakeEngine | None" = None,
    sleeps: Sleeps | None = None,
    anew: Callable[[], None] = begin_anew,
) -> int:
    """Run the worker; returns the exit code: 0 the run has stopped or we were asked to end, 1 failed, 2 wrong use.

    With --parks a third quick failure, and every start after it, is 0 too, so that launchd does not start it again.
    make_engine: what is called in place of `MacEngine`, with its arguments: for rehearsals without a model. sleeps: what
    tells of this machine's sleep. anew: ends this process and begins it again.
    """
    options = read_options(arguments)
    telemetry.configure(level="warning" if options.quiet else "info", line_of=line_of, worker="mac")
    attempts = Attempts(options.folder) if options.parks else None
    if attempts is not None and (parked := attempts.begin()):
        _log.error("worker_parked", reason=parked)
        return 0
    if attempts is not None:
        LastCall(attempts.forget, QUICK_SECONDS).start()
    ended = _run(options, make_engine, sleeps or sleeps_here(), anew)
    if attempts is not None and ended.code == 0:
        attempts.forget()
    if ended.anew:
        _log.info("worker_begins_anew", reason=ended.anew)
        anew()
    if attempts is None or ended.code == 0:
        return ended.code
    parked = ended.reason if ended.stays_off else attempts.failed(ended.reason)
    if parked:
        _log.error("worker_parked", reason=parked)
    return 0 if parked else ended.code


def _run(options: Options, make_engine: "MakeEngine | None", sleeps: Sleeps, anew: Callable[[], None]) -> Ended:
    """One life of the worker."""
    try:
        require_extra()
        entry = enter(options.config, options.folder, kept=options.kept)
        config = entry.config
        identity = Identity(options.folder, entry.host(options.host))
        telemetry.bind(run=config.run, host=identity.host)
        telemetry.keep(identity.folder / "events.log")
        try:
            allowed = load_mac_host(options.allow or _own_limits(identity.folder))
            store = Store(config.bucket, entry.credentials, patience_seconds=BUCKET_PATIENCE_SECONDS)
            panics = PanicLog(identity.folder)
            _check(panics.begin())
            worker = _Worker(entry, identity, options, allowed, store, panics, sleeps, make_engine, anew)
            try:
                asyncio.run(worker.run())
            finally:
                panics.end()
        finally:
            identity.close()
    except StoaError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        code = 2 if isinstance(error, UsageError) else 1
        return Ended(code, error.message, stays_off=isinstance(error, MacCrashedError))
    except Exception as error:  # noqa: BLE001 - a worker's main is one of the three edges
        _log.exception("worker_crashed")
        return Ended(1, f"{type(error).__name__}: {error}")
    return Ended(anew=worker.anew)


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
    parser.add_argument("--kept", action="store_true", help="take endpoints and the bucket's key from the state folder: for launchd")
    parser.add_argument("--quiet", action="store_true", help="say only what needs somebody: no bar, no events of ordinary work")
    return Options(**vars(parser.parse_args(arguments)))


def _check(caution: Caution) -> None:
    if caution.stays_off:
        raise MacCrashedError(f"{caution.stays_off}: it plays no more", hint="to try again: `stoa leave`, then join again")


def _own_limits(folder: Path) -> Path | None:
    path = folder / "mac.toml"
    return path if path.is_file() else None


def require_extra(find: Callable[[str], object] = find_spec) -> None:
    """Raise MissingExtraError if MLX is not installed."""
    if find("mlx") is None:
        raise MissingExtraError("the Mac worker needs MLX, which is not installed", hint="run `pip install 'stoa[mac]'`")


class _Worker:
    """One process's life."""

    def __init__(
        self,
        entry: Entry,
        identity: Identity,
        options: Options,
        allowed: MacHost,
        store: Store,
        panics: PanicLog,
        sleeps: Sleeps,
        make_engine: "MakeEngine | None" = None,
        anew: Callable[[], None] = begin_anew,
    ) -> None:
        config = entry.config
        self._entry, self._config, self._identity = entry, config, identity
        self._membership = Membership(config.run, identity, options.place, entry.invite_id)
        self._run, self._host = config.run, identity.host
        self._store, self._panics, self._sleeps, self._make = store, panics, sleeps, make_engine
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_call = LastCall(cut_short, LEAVE_SECONDS)
        self._anew_call = LastCall(lambda: (self._guest.let_sleep(), anew()), ANEW_SECONDS)
        self._said = ""
        self._run_stopped = False
        self._notice: Notice | None = None
        self._refused: AccessDeniedError | None = None
        self.anew = ""
        """Why this process is to begin anew once it has ended; "" if it is not."""
        self._budgets = Budgets(identity.folder / "network.json", allowed.day_bytes, allowed.month_bytes)
        store.meters = CappedMeters(allowed, self._budgets)
        self._guest = Guest(
            allowed,
            None if options.always else probe_here(),
            spent_budget=self._budgets.spent,
            memory=identity.folder / GUEST_FILE,
        )
        self._guest.caution = panics.look()
        self._looked_for_crashes = time.monotonic()

    async def run(self) -> None:
        """Wait for the run, serve it, leave it."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._leave)
        document = await self._wait_for(self._read_run)
        if document is None:
            return
        engine = await self._wait_for(lambda: self._make_engine(document))
        if engine is None:
            return
        self._guest.start()
        self._sleeps.start(self._before_sleep, lambda: self._after_wake(engine))
        try:
            if await self._wait_while_stopped(document):
                await self._serve(document, engine)
        finally:
            self._sleeps.close()
            await asyncio.to_thread(engine.close)
            self._guest.close()
            self._budgets.close()
            self._anew_call.cancel()
        _log.info("worker_ended", run_stopped=self._run_stopped, anew=self.anew)
        _check(self._guest.caution)
        if self._refused is not None:
            raise self._refused
        heed(self._notice)

    def _leave(self) -> None:
        """We were asked to end."""
        self._last_call.start()
        self.anew = ""
        self._anew_call.cancel()
        self._stop.set()

    def _before_sleep(self) -> None:
        """On the thread that tells of sleep: the system sleeps once this returns."""
        still = self._guest.be_still(STILL_SECONDS)
        _log.info("sleep_awaited", still=still)

    def _after_wake(self, engine: "MacEngine") -> None:
        """On the same thread."""
        self._guest.wake()
        if engine.holds_weights and self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_anew, "the Mac has slept")

    def _begin_anew(self, reason: str) -> None:
        if not self._stop.is_set():
            self.anew = reason
            self._anew_call.start()
            self._stop.set()

    def _read_run(self) -> RunDocument:
        self._store.patience_seconds = 0.0  # waiting, and saying so, is done here
        if self._entry.invite is None:  # an invited Mac's key reads objects, and lists none
            self._store.check()
        return read_run(self._store, self._run, self._entry.pinned(self._identity.run_folder(self._run)))

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
        from worker_mac.engine import MacEngine, Waits  # noqa: PLC0415 - MLX is loaded once it is known to be there
        from worker_mac.fingerprint import fixed_model  # noqa: PLC0415
        from worker_mac.selftest import require  # noqa: PLC0415
        from worker_mac.selftest import run as run_selftest  # noqa: PLC0415

        folder = self._identity.run_folder(self._run)
        pin_key(folder, document.public_key)
        self._store.patience_seconds = BUCKET_PATIENCE_SECONDS
        model_folder = folder / "model"
        fetch_model_files(self._store, document.model_files, model_folder)
        tokenizer = (model_folder / "tokenizer.json").read_bytes()
        environment = known.create(document.config.environment.name, document.config.environment.settings, tokenizer)
        make, fingerprint = self._make, ""
        if make is None:
            verdict = run_selftest(lambda: fixed_model(self._guest.allowed.plain_ops))
            make, fingerprint = MacEngine, require(verdict)
            _log.info("selftest_passed", fingerprint=fingerprint, difference=verdict.difference, device=verdict.device)
        return make(
            self._store, document, environment, host=self._host, folder=folder, model_folder=model_folder, guest=self._guest,
            waits=Waits(grace=FINISH_SECONDS), fingerprint=fingerprint, tickets=self._entry.tickets(folder),
            state_folder=self._identity.folder,
        )  # fmt: skip

    async def _wait_while_stopped(self, document: RunDocument) -> bool:
        """False if the run has stopped and is not resumed soon, or we are asked to end."""

        async def goes_on() -> bool:
            # The proxy answers an invited Mac nothing about the run.
            is_near = self._entry.invite is None
            return is_near and await stopped.goes_on(self._config.temporal, self._entry.access, self._run)

        return await stopped.begins(lambda: self._head_state(document), goes_on, self._stop.is_set, self._pause)

    def _head_state(self, document: RunDocument) -> str:
        """HEAD.state; "" before there is a HEAD or while the bucket is away."""
        try:
            return read_head(self._store, self._run, document.public_key)[0].state
        except (ObjectMissingError, ServiceUnavailableError):
            return ""

    def _is_stopped(self, document: RunDocument) -> bool:
        """True if the run has stopped; False too while nobody can tell: a HEAD that is damaged now must not end the watching."""
        try:
            return self._head_state(document) == "stopped"
        except StoaError as error:
            self._say(error)
            return False

    async def _serve(self, document: RunDocument, engine: "MacEngine") -> None:
        # Endpoints are this machine's; everything else is the run's own.
        config = document.config.model_copy(update={"temporal": self._config.temporal, "bucket": self._config.bucket})
        runtime = make_runtime(10.0)

        async def new_client() -> Client:
            return await connect_forever(
                config.temporal.address,
                config.temporal.namespace_mac,
                access=self._entry.access,
                codec=self._entry.codec,
                on_wait=self._say,
                runtime=runtime,
            )

        async def connect() -> Client | None:
            connecting = asyncio.ensure_future(new_client())
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait((connecting, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in (connecting, stopped):
                if not task.done():
                    task.cancel()
            return connecting.result() if connecting.done() and not connecting.cancelled() else None

        client = await connect()
        if client is None:
            return
        activities = RolloutActivities(self._run, self._host, engine, on_notice=self._on_notice)
        watching = asyncio.ensure_future(self._watch(client, config, document, engine, activities))
        clients = [client]

        async def make() -> Worker:
            if not clients:
                clients.append(await new_client())
            return make_worker(
                clients.pop(),
                names.mac_queue(self._run, self._host),
                activities=activities.served(),
                max_concurrent_activities=1,
                graceful_seconds=GRACEFUL_SECONDS,
            )

        try:
            await supervise(make, self._stop, silent_seconds=activities.silent_seconds)
        finally:
            watching.cancel()
            goodbye = self._membership.goodbye(client, "run stopped" if self._run_stopped else self.anew or "worker ended")
            await asyncio.gather(activities.close(), goodbye)

    def _on_notice(self, notice: Notice) -> None:
        """The run has something to say to this Mac's owner."""
        _log.warning("run_says", kind=notice.kind, text=notice.text)
        if notice.ends:
            self._notice = notice
            self._stop.set()

    async def _watch(
        self, client: Client, config: RunConfig, document: RunDocument, engine: "MacEngine", activities: RolloutActivities
    ) -> None:
        """Say hello at the start, after sleep and after silence; end when the run has stopped; look after the Mac."""
        ticked_at, looked, greeter = time.time(), time.monotonic(), Greeter()
        reason = greeter.reason(time.monotonic())
        while not self._stop.is_set():
            try:
                if reason:
                    greeter.said(time.monotonic(), await self._membership.hello(client, config, reason, groups=engine.groups))
            except AccessDeniedError as error:
                self._refused = error
                self._stop.set()
            await self._pause(TICK_SECONDS)
            now, wall = time.monotonic(), time.time()
            reason = greeter.reason(
                now,
                tick_seconds=wall - ticked_at,
                idle_seconds=engine.idle_seconds,
                lost=activities.take_lost(),
                unasked=activities.is_unasked,
            )
            ticked_at = wall
            if engine.idle_seconds > config.timeouts.head_poll_seconds < now - looked:
                looked = now
                self._run_stopped = await asyncio.to_thread(self._is_stopped, document)
                await self._look_for_refusal(client)
            if self._run_stopped or engine.run_stopped:
                self._run_stopped = True
                self._stop.set()
            self._look_after(engine)

    async def _look_for_refusal(self, client: Client) -> None:
        """A Mac whose invitation has ended or was revoked gets no task any more, and nobody tells it: it asks."""
        if self._entry.invite is not None:
            try:
                await require_namespace(client)
            except AccessDeniedError as error:
                self._refused = error
                self._stop.set()
            except (ServiceUnavailableError, SetupMissingError):
                return

    def _look_after(self, engine: "MacEngine") -> None:
        """Crashes that were reported late count; a long pause gives the memory of the weights back."""
        now = time.monotonic()
        if now - self._looked_for_crashes >= CRASH_SECONDS:
            self._looked_for_crashes = now
            self._guest.caution = self._panics.look()
            if self._guest.caution.stays_off:
                self._stop.set()
                return
        unload_seconds = self._guest.allowed.unload_minutes * 60.0
        paused_seconds = self._guest.paused_seconds()
        if engine.holds_weights and not self._guest.playing_now and 0.0 < unload_seconds <= paused_seconds:
            self._begin_anew(f"{self._guest.decision.reason}: memory is given back after {paused_seconds:.0f} s")

    async def _pause(self, seconds: float) -> None:
        """Sleep, or return at once when this process is asked to end."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return


if __name__ == "__main__":
    leave(main())
