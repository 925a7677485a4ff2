"""A friend's Mac joins with a token and nothing else, plays, is examined, is revoked; and no secret is left lying about."""

import asyncio
import base64
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from temporalio.client import Client

from activities.connection import connect
from stoa.bucket.store import Store
from stoa.bucket.tickets import read_tickets
from stoa.contracts import names
from stoa.contracts.evaluation_messages import EvaluationInput, EvaluationResult
from tests.loop.invited import RUN, World
from tests.relay import relay
from tests.servers import BucketServer, TemporalServer

pytestmark = [pytest.mark.loop, pytest.mark.timeout(240)]
HOST = "attic"


@pytest_asyncio.fixture
async def world(tmp_path: Path, temporal_server: TemporalServer, bucket_server: BucketServer, store: Store) -> AsyncIterator[World]:
    world = World(tmp_path, temporal_server, bucket_server, store)
    await world.set_up()
    yield world
    world.close()


def listening(process: subprocess.Popen[bytes]) -> list[str]:
    """Where the process or its children accept connections."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    sockets = [one for member in family for one in member.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return [f"{one.laddr.ip}:{one.laddr.port}" for one in sockets]


async def history_of(client: Client, workflow_id: str) -> str:
    return (await client.get_workflow_handle(workflow_id).fetch_history()).to_json()


def decoded(history: str) -> list[dict]:
    """Every JSON message of a history."""
    found: list[dict] = []

    def walk(tree: object) -> None:
        if isinstance(tree, dict):
            if "data" in tree and "metadata" in tree:
                data = base64.b64decode(tree["data"])
                if data.startswith(b"{"):
                    found.append(json.loads(data))
            for value in tree.values():
                walk(value)
        elif isinstance(tree, list):
            for value in tree:
                walk(value)

    walk(json.loads(history))
    return found


async def all_histories(world: World) -> dict[str, str]:
    found = {}
    for namespace in (world.core, world.mac):
        client = await connect(world.server.address, namespace)
        async for execution in client.list_workflows():
            found[f"{namespace}/{execution.id}"] = await history_of(client, execution.id)
    return found


def forms(secret: str) -> list[str]:
    """A secret as it may be written: as it is, and inside base64, which has it three ways."""
    inside = [base64.b64encode(b"\0" * lead + secret.encode()).decode()[4 * (lead > 0) + lead : -4] for lead in range(3)]
    return [secret, *inside]


async def test_a_friend_joins_plays_is_examined_and_is_revoked(world: World) -> None:
    token, invite = world.invite(HOST)
    process = world.join(token, HOST)
    await asyncio.to_thread(world.until, lambda: len(world.groups(HOST, 0)) >= 16)
    assert listening(process) == []
    assert token not in " ".join(psutil.Process(process.pid).cmdline())
    world.run.publish(steps_per_version=0)
    await asyncio.to_thread(world.until, lambda: world.groups(HOST, 1))

    client = await connect(world.server.address, world.mac)
    examined = await client.start_workflow(
        names.EVALUATION,
        EvaluationInput(RUN, "check", 1, 16, questions_a_part=8, timeout_seconds=90.0),
        id=names.evaluation_workflow_id(RUN, "check"),
        task_queue=names.control_queue(RUN),
        result_type=EvaluationResult,
    )
    assert (await asyncio.wait_for(examined.result(), 90)).num_questions == 16

    status = world.stoa(*world.guided("stoa status"))
    assert (status.returncode, HOST in status.stdout) == (0, True), status.stderr
    done = world.stoa(*world.guided("stoa revoke", **{"attic.0123abcd": invite.invite}))
    assert done.returncode == 0, done.stderr
    assert await asyncio.to_thread(process.wait, 60) == 1
    said = world.log(HOST).read_text()
    assert f"error: Temporal at {world.proxy_address} refused" in said or "may not take part" in said
    assert f"{invite.invite} was revoked: sold" in said
    assert world.stoa(*world.guided("stoa revoke")).returncode == 0
    assert world.left == []
    again = world.stoa("invite", RUN, "--host", HOST, "--config", str(world.config))
    assert (again.returncode, "is not used again" in again.stderr) == (2, True)
    await check_history(world, client)
    await check_secrets(world)


async def check_history(world: World, client: Client) -> None:
    """A grant, a sweep's request and its result are readable, but for the tickets."""
    messages = decoded(await history_of(client, names.session_workflow_id(RUN, HOST)))
    grants = [one for one in messages if "run_state" in one and one.get("question_ids")]
    sweeps = [one for one in messages if one.get("purpose") == "train" and "group_size" in one]
    results = [one for one in messages if "num_sampled_tokens" in one]
    assert grants and sweeps and results
    for one in (*grants, *sweeps):
        assert (one["run"], one["host"], len(one["question_ids"]), one["sweep"] >= 0) == (RUN, HOST, 8, True)
        assert one["tickets"].startswith(f"sealed1:{HOST}.")
        assert "put1:" not in json.dumps(one)
    assert results[0]["num_groups"] == 8 and results[0]["decode_seconds"] > 0


async def check_secrets(world: World) -> None:
    """What was planted, and every signature a Mac was given, stands in no log, no history, no object and no answer."""
    book = (world.folder / HOST / "runs" / RUN / "tickets").read_text().split()
    assert book
    for number, text in enumerate(book):
        for key, signature in read_tickets(text, RUN, HOST).signatures.items():
            world.planted[f"signature {number} of {key}"] = signature.hex()
            world.planted[f"signature {number} of {key}, raw"] = base64.b64encode(signature[:30]).decode()
    said = {str(path): path.read_text(errors="replace") for path in world.folder.glob("*.log")}
    histories = await all_histories(world)
    said |= histories
    said |= {f"message {i} of {name}": json.dumps(one) for name, text in histories.items() for i, one in enumerate(decoded(text))}
    objects = [found.key for found in world.store.list("")]
    said |= {key: world.store.get(key, max_bytes=64 << 20).data.decode("latin-1") for key in objects}
    status = world.stoa("status", RUN, "--config", str(world.config), "--json")
    report = world.stoa("report", RUN, "--config", str(world.config), "--out", str(world.folder / "report"))
    assert (status.returncode, report.returncode) == (0, 0), status.stderr + report.stderr
    said |= {"status": status.stdout + status.stderr, "report": report.stdout + report.stderr}
    said |= {str(path): path.read_text(errors="replace") for path in (world.folder / "report").glob("*.*")}
    assert len(said) > 20
    for lead in range(3):  # the search itself: a secret in the middle of a payload is found
        assert any(
            form in base64.b64encode(b"{" * lead + b'"planted-secret-of-a-length"}').decode()
            for form in forms("planted-secret-of-a-length")
        )
    # Where they belong: in the owner's environment, and in the Mac's own state folder, which is not looked at.
    found = {
        f"{what} in {where}"
        for what, secret in world.planted.items()
        for form in forms(secret)
        for where, text in said.items()
        if form in text
    }
    assert found == set()


@dataclass(frozen=True)
class Lane:
    """A network namespace that calls out and cannot be called: our end of its cable, its own address, how to run in it."""

    outside: str
    inside: str
    through: tuple[str, ...]


def make_lane(word: str, pid: int) -> Lane:
    """Lay a cable to the namespace of `pid`. What arrives there for a port that no caller of its own has is dropped."""
    net = f"10.211.{int(word[:2], 16)}.{int(word[2:], 16) & 0xFC}".rpartition(".")
    outside, inside = (f"{net[0]}.{int(net[2]) + number}" for number in (1, 2))
    ours, theirs, enter = f"stoa{word}o", f"stoa{word}i", ("nsenter", "-t", str(pid), "-n", "--")
    for command in (
        ("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs),
        ("ip", "link", "set", theirs, "netns", str(pid)),
        ("ip", "address", "add", f"{outside}/30", "dev", ours),
        ("ip", "link", "set", ours, "up"),
        (*enter, "ip", "address", "add", f"{inside}/30", "dev", theirs),
        (*enter, "ip", "link", "set", theirs, "up"),
        (*enter, "ip", "link", "set", "lo", "up"),
        (*enter, "sysctl", "-q", "-w", "net.ipv4.ip_local_port_range=40000 60999"),
        (*enter, "ip", "rule", "add", "iif", theirs, "ipproto", "tcp", "dport", "1-39999", "blackhole", "priority", "0"),
        (*enter, "ip", "rule", "add", "priority", "10", "table", "local"),
        (*enter, "ip", "rule", "del", "priority", "0", "table", "local"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        if done.returncode:
            pytest.skip(f"this machine lays no cable to a network namespace: {' '.join(command)}: {done.stderr.strip()}")
    return Lane(outside, inside, enter)


@pytest.fixture
def lane() -> Iterator[Lane]:
    tools = [name for name in ("unshare", "nsenter", "ip", "sysctl") if shutil.which(name) is None]
    if tools or os.geteuid() != 0:
        pytest.skip(f"a network namespace needs root{', and ' + ', '.join(tools) if tools else ''}")
    holder = subprocess.Popen(["unshare", "-n", "sleep", "300"])
    try:
        deadline, own = time.monotonic() + 5, os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
            if holder.poll() is not None or time.monotonic() > deadline:
                pytest.skip("this machine makes no network namespace")
            time.sleep(0.02)
        yield make_lane(secrets.token_hex(2), holder.pid)
    finally:
        holder.kill()
        holder.wait()  # the cable goes with the namespace


async def test_a_mac_that_nobody_can_call_joins_and_plays(
    lane: Lane, tmp_path: Path, temporal_server: TemporalServer, bucket_server: BucketServer, store: Store
) -> None:
    async with relay(bucket_server.endpoint.partition("//")[2], host=lane.outside) as (address, _):
        world = World(tmp_path, temporal_server, bucket_server, store, listen=lane.outside, bucket_endpoint=f"http://{address}")
        try:
            await world.set_up()
            serve = f"import socket; s = socket.create_server(('{lane.inside}', 8000)); print('up', flush=True); s.accept()"
            service = subprocess.Popen([*lane.through, sys.executable, "-c", serve], stdout=subprocess.PIPE)
            world.processes["a service in the namespace"] = service
            assert service.stdout is not None and service.stdout.readline() == b"up\n"
            with pytest.raises(OSError):  # it is there, and out of reach: nothing calls into this namespace
                socket.create_connection((lane.inside, 8000), 2.0)
            token, _ = world.invite(HOST)
            process = world.join(token, HOST, through=lane.through)
            await asyncio.to_thread(world.until, lambda: len(world.groups(HOST, 0)) >= 8)
            assert listening(process) == []
        finally:
            world.close()
