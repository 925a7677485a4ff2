"""Many pretended Macs in one process: sessions, queues, groups and weights of each are real, decoding and lines are not.

`python -m benchmarks.fleet_swarm SWARM CONFIG --state DIR`; SWARM is a JSON file of `Member`s. They share one Temporal client
and one connection pool to the bucket; each has its own folder, its own engine thread and its own line, which is a pause before
each of its requests. A Mac that sleeps stops in the middle of what it does, heartbeats included; one that leaves says so.
"""

import asyncio
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from temporalio.client import Client
from temporalio.worker import Worker

from activities.connection import connect_forever, make_runtime, make_worker, supervise
from activities.edge import EngineThread
from activities.rollout import RolloutActivities
from benchmarks.fleet_mac import FakeMac
from benchmarks.fleet_play import Play
from environments import registry
from environments.base import Environment
from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument, fetch_model_files, read_run
from stoa.bucket.store import RangeReply, Store, Stored
from stoa.config.load import bucket_credentials, load_run
from stoa.config.run import RunConfig
from stoa.contracts import names
from stoa.contracts.errors import ObjectMissingError, ServiceUnavailableError, StoaError
from stoa.telemetry import log as telemetry
from worker_mac.engine import Waits
from worker_mac.identity import Identity
from worker_mac.membership import Greeter, Membership

_log = structlog.get_logger(__name__)

STALL_SECONDS: Final = 3.0
"""A Mac that reports nothing for so long sends no heartbeat: that is how it sleeps."""
GRACE_SECONDS: Final = 20.0
JOIN_SPREAD_SECONDS: Final = 0.1
"""Between two Macs' joining."""


@dataclass(frozen=True, slots=True)
class Member:
    """One Mac. Rates are bytes a second, 0 for no limit; absences as in `cli.plan.fleet_model.Absences`."""

    host: str
    play: dict[str, Any]
    down_rate: float = 0.0
    up_rate: float = 0.0
    round_trip_seconds: float = 0.0
    sleeps_per_hour: float = 0.0
    sleep_seconds: float = 60.0
    leaves_per_hour: float = 0.0
    leave_seconds: float = 60.0


class LinedStore(Store):
    """A store behind a line that is pretended: every request waits for its round trip and its bytes."""

    def __init__(self, base: Store, member: Member) -> None:
        self._shared = base._client
        super().__init__(base.settings, base._credentials, patience_seconds=base.patience_seconds)
        self._member = member

    def _new_client(self, config: Any) -> Any:
        return self._shared

    def _wait(self, *, up: int = 0, down: int = 0) -> None:
        line = self._member
        seconds = line.round_trip_seconds
        seconds += up / line.up_rate if line.up_rate else 0.0
        seconds += down / line.down_rate if line.down_rate else 0.0
        if seconds:
            time.sleep(seconds)

    def get(self, key: str, *, max_bytes: int) -> Stored:
        """As `Store.get`."""
        found = super().get(key, max_bytes=max_bytes)
        self._wait(down=len(found.data))
        return found

    def get_if_changed(self, key: str, etag: str, *, max_bytes: int) -> Stored | None:
        """As `Store.get_if_changed`."""
        self._wait()
        return super().get_if_changed(key, etag, max_bytes=max_bytes)

    def open_range(self, key: str, start: int, num_bytes: int, *, etag: str = "", stall_seconds: float = 20.0) -> RangeReply:
        """As `Store.open_range`."""
        self._wait(down=num_bytes)
        return super().open_range(key, start, num_bytes, etag=etag, stall_seconds=stall_seconds)

    def create(self, key: str, data: bytes | bytearray | memoryview, *, kind: str = "") -> str:
        """As `Store.create`."""
        self._wait(up=len(data))
        return super().create(key, data, kind=kind)


class SwarmMac:
    """One Mac's life."""

    def __init__(self, member: Member, swarm: "Swarm", index: int) -> None:
        self._member, self._swarm = member, swarm
        self._chance = random.Random(f"{member.host} {index}")
        self._awake = threading.Event()
        self._awake.set()

    async def live(self) -> None:
        """Join, and go and come back by chance, until the swarm ends."""
        swarm = self._swarm
        engine = await asyncio.to_thread(self._make_engine)
        thread = EngineThread("rollout", stall_seconds=STALL_SECONDS)
        activities = RolloutActivities(swarm.run, self._member.host, engine, thread)
        try:
            while not swarm.ended.is_set():
                identity = Identity(swarm.folder / self._member.host, self._member.host)
                try:
                    leaves = await self._be_there(engine, activities, Membership(swarm.run, identity, "here"))
                finally:
                    identity.close()
                if leaves:
                    await swarm.pause(self._goes("left", self._member.leave_seconds))
        finally:
            self._awake.set()
            await activities.close()
            await asyncio.to_thread(engine.close)

    async def _be_there(self, engine: FakeMac, activities: RolloutActivities, membership: Membership) -> bool:
        """Serve until it is time to leave; True if it was, False if the swarm ends."""
        swarm, stop = self._swarm, asyncio.Event()

        async def make() -> Worker:
            queue = names.mac_queue(swarm.run, self._member.host)
            return make_worker(
                swarm.client, queue, activities=activities.served(), max_concurrent_activities=1, graceful_seconds=GRACE_SECONDS
            )

        serving = asyncio.ensure_future(supervise(make, stop))
        watching = asyncio.ensure_future(self._greet(engine, activities, membership))
        sleeping = asyncio.ensure_future(self._sleep_by_chance(membership))
        leaving = asyncio.ensure_future(self._after(self._member.leaves_per_hour))
        ended = asyncio.ensure_future(swarm.ended.wait())
        try:
            await asyncio.wait((leaving, ended), return_when=asyncio.FIRST_COMPLETED)
            return leaving.done()
        finally:
            for task in (watching, sleeping, leaving, ended):
                task.cancel()
            self._awake.set()
            stop.set()
            await asyncio.gather(serving, return_exceptions=True)
            await membership.goodbye(swarm.client, "leaves")

    async def _greet(self, engine: FakeMac, activities: RolloutActivities, membership: Membership) -> None:
        """Hello at the start, when the server had given this Mac up, and after silence: as the worker does."""
        greeter = Greeter(self._chance)
        while True:
            reason = greeter.reason(
                time.monotonic(), idle_seconds=engine.idle_seconds, lost=activities.take_lost(), unasked=activities.is_unasked
            )
            if reason:
                greeter.said(time.monotonic(), await membership.hello(self._swarm.client, self._swarm.config, reason))
            await asyncio.sleep(1.0)
            while not self._awake.is_set():
                await asyncio.sleep(1.0)

    async def _sleep_by_chance(self, membership: Membership) -> None:
        while True:
            await self._after(self._member.sleeps_per_hour)
            self._awake.clear()
            await asyncio.sleep(self._goes("asleep", self._member.sleep_seconds))
            self._awake.set()
            await membership.hello(self._swarm.client, self._swarm.config, "wake")

    def _goes(self, how: str, mean_seconds: float) -> float:
        """For how long it is away now, drawn and written to the log."""
        seconds = self._chance.expovariate(1.0 / mean_seconds)
        _log.info("mac_away", host=self._member.host, how=how, at=time.time(), seconds=seconds)
        return seconds

    async def _after(self, per_hour: float) -> None:
        await asyncio.sleep(self._chance.expovariate(per_hour / 3600.0) if per_hour else 1e9)

    def _make_engine(self) -> FakeMac:
        swarm, member = self._swarm, self._member
        store = LinedStore(swarm.store, member)
        folder = swarm.folder / member.host / "runs" / swarm.run
        folder.mkdir(parents=True, exist_ok=True)
        engine = FakeMac(
            store,
            swarm.document,
            swarm.environment,
            play=Play(**member.play),
            host=member.host,
            folder=folder,
            model_folder=swarm.model_folder,
            waits=Waits(grace=GRACE_SECONDS / 2),
        )
        engine.pretender.pause = self._pass_time
        return engine

    def _pass_time(self, seconds: float) -> None:
        """On the engine's thread."""
        time.sleep(seconds)
        self._awake.wait()


class Swarm:
    """What the Macs of this process share."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder, self.run = folder, config.run
        self.store = Store(config.bucket, bucket_credentials(config.bucket), patience_seconds=20.0)
        self.document: RunDocument = read_run(self.store, config.run)
        self.config = self.document.config.model_copy(update={"temporal": config.temporal, "bucket": config.bucket})
        self.model_folder = folder / "model"
        fetch_model_files(self.store, self.document.model_files, self.model_folder)
        tokenizer = (self.model_folder / "tokenizer.json").read_bytes()
        environment = self.document.config.environment
        self.environment: Environment = registry.create(environment.name, environment.settings, tokenizer)
        self.client: Client
        self.ended = asyncio.Event()

    async def pause(self, seconds: float) -> None:
        """Sleep, or return when the swarm ends."""
        try:
            await asyncio.wait_for(self.ended.wait(), seconds)
        except TimeoutError:
            return

    async def live(self, members: list[Member]) -> None:
        """All of them, until this process is asked to end or the run has stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ended.set)
        temporal = self.config.temporal
        self.client = await connect_forever(temporal.address, temporal.namespace_mac, runtime=make_runtime())
        lives: list[Awaitable[None]] = [asyncio.ensure_future(self._until_stopped())]
        for index, member in enumerate(members):
            lives.append(asyncio.ensure_future(SwarmMac(member, self, index).live()))
            await self.pause(JOIN_SPREAD_SECONDS)
        for found in await asyncio.gather(*lives, return_exceptions=True):
            if isinstance(found, BaseException):
                print(f"a Mac's life ended with {found!r}", file=sys.stderr)

    async def _until_stopped(self) -> None:
        while not self.ended.is_set():
            await self.pause(2.0)
            try:
                head, _ = await asyncio.to_thread(read_head, self.store, self.run, self.document.public_key)
            except (ServiceUnavailableError, ObjectMissingError):
                continue
            if head.state == "stopped":
                self.ended.set()


async def _main(members: list[Member], config: RunConfig, folder: Path) -> None:
    while True:
        try:
            swarm = Swarm(config, folder)
            break
        except StoaError:
            await asyncio.sleep(0.5)
    await swarm.live(members)


if __name__ == "__main__":
    telemetry.configure(worker="swarm")
    asyncio.run(
        _main(
            [Member(**one) for one in json.loads(Path(sys.argv[1]).read_text("utf-8"))],
            load_run(Path(sys.argv[2]), environ={}),
            Path(sys.argv[sys.argv.index("--state") + 1]),
        )
    )
