"""An invited Mac whose proxy, whose own process, and whose control process are killed goes on, and nothing is played twice."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stoa.bucket import keys
from stoa.bucket.store import Store
from tests.loop.invited import RUN, STOA, World
from tests.servers import BucketServer, TemporalServer

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
HOST = "attic"


@pytest_asyncio.fixture
async def world(tmp_path: Path, temporal_server: TemporalServer, bucket_server: BucketServer, store: Store) -> AsyncIterator[World]:
    world = World(tmp_path, temporal_server, bucket_server, store)
    await world.set_up()
    yield world
    world.close()


def slots(world: World) -> list[tuple[int, int]]:
    """Sweep and group of every object of the Mac, at whatever version."""
    listed = (found.key for found in world.store.list(keys.groups_prefix(RUN)))
    return [(parts.sweep, parts.group) for _, parts in keys.ours(listed, keys.parse_group) if parts.host == HOST]


def kill(world: World, name: str) -> None:
    process = world.processes.pop(name)
    process.kill()
    process.wait(10)


async def test_kills_of_proxy_mac_and_control_lose_and_double_nothing(world: World) -> None:
    token, _ = world.invite(HOST)
    world.join(token, HOST)
    await asyncio.to_thread(world.until, lambda: len(slots(world)) >= 12)

    kill(world, "proxy")
    seen = len(slots(world))
    await asyncio.sleep(3.0)
    world.start("proxy", *STOA, "proxy", str(world.config), "--listen", world.proxy_address)
    await asyncio.to_thread(world.until, lambda: len(slots(world)) >= seen + 24, 90)

    kill(world, HOST)  # in the middle of a sweep, as likely as not
    world.start(HOST, *STOA, "join", "--state", str(world.folder / HOST), "--no-doctor", stranger=True)
    seen = len(slots(world))
    world.run.publish(steps_per_version=0)  # what is redone is played at another version
    await asyncio.to_thread(world.until, lambda: len(slots(world)) >= seen + 24, 90)

    kill(world, "control")
    world.start("control", sys.executable, "-m", "trainer_gpu.control", str(world.config), stdin=subprocess.PIPE)
    seen = len(slots(world))
    world.run.publish(steps_per_version=0)
    await asyncio.to_thread(world.until, lambda: len(slots(world)) >= seen + 24, 90)

    found = slots(world)
    assert len(found) == len(set(found)), "a group was played at two versions"
    whole = {sweep for sweep, _ in found if sweep < max(sweep for sweep, _ in found) - 1}
    assert {sweep: sum(one == sweep for one, _ in found) for sweep in whole} == dict.fromkeys(whole, 8)
