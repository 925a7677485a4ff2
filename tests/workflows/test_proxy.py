"""The proxy before a real Temporal: an invited Mac plays through it, and can do nothing else. Two namespaces, TLS, rates."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from temporalio import activity
from temporalio.api import operatorservice, workflowservice
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from activities.connection import connect, connect_forever, make_runtime, make_worker, setup_namespace
from cli import proxy as proxy_module
from cli.proxy import Listening, Proxy
from cli.proxying.limits import Rates
from cli.proxying.task_token import read_task_token
from stoa.bucket.invite import BucketDoor, Invite, TemporalDoor, write_invite
from stoa.bucket.manifest import Signer
from stoa.bucket.revocations import Revoked, revoke
from stoa.bucket.store import Store
from stoa.contracts import names
from stoa.contracts.access import PLAIN
from stoa.contracts.errors import AccessDeniedError, ConfigError, PortTakenError, ServiceUnavailableError, SetupMissingError
from stoa.contracts.fleet_messages import Goodbye, Hello, SessionInput, SweepRequest, SweepResult
from tests.fakes.sessions import PlainSession
from tests.servers import TemporalServer

api = workflowservice.v1
SIGNER = Signer.from_seed(bytes(range(32)))


class Sweeps:
    """A Mac that keeps the tokens of its tasks."""

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.hold = asyncio.Event()
        self.hold.set()

    @activity.defn(name=names.SWEEP)
    async def sweep(self, request: SweepRequest) -> SweepResult:
        self.tokens.append(activity.info().task_token)
        activity.heartbeat("on it")
        await self.hold.wait()
        await asyncio.sleep(0.2)
        return SweepResult("done", request.sweep, version=0, num_groups=1)


@dataclass
class World:
    """A proxy, and behind it a server with a namespace `core` and a namespace `mac`."""

    proxy: Proxy
    address: str
    core: str
    mac: str
    owner: Client
    store: Store

    def invite(
        self, host: str = "mac-1", *, run: str = "demo", signer: Signer = SIGNER, seconds: float = 600.0, now: float | None = None
    ) -> Invite:
        door = TemporalDoor(f"127.0.0.1:{self.proxy.port}", self.mac)
        bucket = BucketDoor("http://127.0.0.1:1", "stoa", "auto", "k", "s")
        return write_invite(signer, run, host, seconds=seconds, temporal=door, bucket=bucket, now=now)[1]

    async def client(self, invite: Invite) -> Client:
        return await connect(invite.temporal.address, self.mac, access=invite.access)


@asynccontextmanager
async def world_of(server: TemporalServer, store: Store, listening: Listening | None = None) -> AsyncIterator[World]:
    word = secrets.token_hex(4)
    core, mac = f"core-{word}", f"mac-{word}"
    for namespace in (core, mac):
        await setup_namespace(server.address, namespace)
    proxy = Proxy("demo", SIGNER.public_key, Revoked(store, "demo", SIGNER.public_key), listening or Listening("127.0.0.1:0"))
    await proxy.start(server.address, mac, PLAIN)
    try:
        yield World(proxy, server.address, core, mac, await connect(server.address, mac), store)
    finally:
        await proxy.stop()


async def say_hello(client: Client, invite: Invite) -> None:
    await client.start_workflow(
        names.MAC_SESSION,
        SessionInput("demo", invite.host),
        id=names.session_workflow_id("demo", invite.host),
        task_queue=names.control_queue("demo"),
        start_signal=names.HELLO,
        start_signal_args=[Hello(invite.host, "n", invite=invite.invite)],
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


async def status_of(call: Awaitable[object]) -> tuple[RPCStatusCode | None, str]:
    try:
        await call
    except RPCError as error:
        return error.status, error.message
    return None, "it passed"


async def test_an_invited_mac_plays_sweeps_and_says_goodbye(temporal_server: TemporalServer, store: Store) -> None:
    async with world_of(temporal_server, store) as world:
        invite, mac = world.invite(), Sweeps()
        client = await connect_forever(invite.temporal.address, world.mac, access=invite.access, runtime=make_runtime(1.0))
        queue = names.mac_queue("demo", "mac-1")
        async with make_worker(world.owner, names.control_queue("demo"), workflows=[PlainSession]):
            async with make_worker(client, queue, activities=[mac.sweep], max_concurrent_activities=1, graceful_seconds=1):
                await say_hello(client, invite)
                await say_hello(client, invite)  # a rejoin is the same call
                await until(lambda: len(mac.tokens) >= 3)
                session = client.get_workflow_handle(names.session_workflow_id("demo", "mac-1"))
                await session.signal(names.GOODBYE, Goodbye("mac-1", "n"))
                handle = world.owner.get_workflow_handle(session.id, result_type=int)
                assert await handle.result() >= 3
            assert await handle.query(names.SESSION_QUERY, result_type=list[str]) == [invite.invite] * 2


async def test_a_task_of_a_namesake_goes_back_and_reaches_who_it_is_for(temporal_server: TemporalServer, store: Store) -> None:
    """Run `demo-mac` has a Mac `1`: its queue is spelt like that of our Mac `mac-1`."""
    async with world_of(temporal_server, store) as world:
        client, theirs = await world.client(world.invite()), Sweeps()
        queue = names.mac_queue("demo-mac", "1")
        assert queue == names.mac_queue("demo", "mac-1")
        async with make_worker(world.owner, names.control_queue("demo-mac"), workflows=[PlainSession]):
            await world.owner.start_workflow(
                names.MAC_SESSION,
                SessionInput("demo-mac", "1"),
                id=names.session_workflow_id("demo-mac", "1"),
                task_queue=names.control_queue("demo-mac"),
            )
            poll = api.PollActivityTaskQueueRequest(namespace=world.mac, task_queue={"name": queue}, identity="x")
            code, text = await status_of(client.workflow_service.poll_activity_task_queue(poll))
            assert (code, "spelt like" in text) == (RPCStatusCode.PERMISSION_DENIED, True)
            async with make_worker(world.owner, queue, activities=[theirs.sweep], max_concurrent_activities=1, graceful_seconds=1):
                await until(lambda: theirs.tokens)
                session = world.owner.get_workflow_handle(names.session_workflow_id("demo-mac", "1"))
                await session.signal(names.GOODBYE, Goodbye("1", "n"))
                await session.result()
            failed = [
                event.activity_task_started_event_attributes.last_failure.application_failure_info.type
                for event in (await session.fetch_history()).events
                if event.HasField("activity_task_started_event_attributes")
            ]
            assert failed[0] == "NamesakeError"


def payloads(value: object) -> Payloads:
    return Payloads(payloads=[Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(value).encode())])


def hello_request(world: World, invite: Invite, host: str, **changes: Any) -> Any:
    request = api.SignalWithStartWorkflowExecutionRequest(
        namespace=world.mac,
        workflow_id=names.session_workflow_id("demo", host),
        workflow_type={"name": names.MAC_SESSION},
        task_queue={"name": names.control_queue("demo")},
        input=payloads(asdict(SessionInput("demo", host))),
        signal_name=names.HELLO,
        signal_input=payloads(asdict(Hello(host, "n", invite=invite.invite))),
        workflow_id_conflict_policy=2,
    )
    request.MergeFrom(api.SignalWithStartWorkflowExecutionRequest(**changes))
    return request


def forbidden(world: World, client: Client, invite: Invite, other_task: bytes, control_task: bytes) -> dict[str, Awaitable[object]]:
    """Calls that a Mac must not make, each as itself, with a good pass. `other_task`: of mac-2; `control_task`: of its own session."""
    service, operator, mac = client.workflow_service, client.operator_service, world.mac
    own, run = names.session_workflow_id("demo", "mac-1"), names.run_workflow_id("demo")

    def poll(namespace: str, queue: str, **more: Any) -> Awaitable[object]:
        request = api.PollActivityTaskQueueRequest(namespace=namespace, task_queue={"name": queue, **more})
        return service.poll_activity_task_queue(request)

    def signal(workflow_id: str, name: str, value: object) -> Awaitable[object]:
        request = api.SignalWorkflowExecutionRequest(
            namespace=mac, workflow_execution={"workflow_id": workflow_id}, signal_name=name, input=payloads(value)
        )
        return service.signal_workflow_execution(request)

    def hello(host: str = "mac-1", **changes: Any) -> Awaitable[object]:
        return service.signal_with_start_workflow_execution(hello_request(world, invite, host, **changes))

    done = payloads(asdict(SweepResult("done", 0)))
    tasks: dict[str, Awaitable[object]] = {}
    for whose, token in (("another Mac's task", other_task), ("a control task of its session", control_task), ("nonsense", b"\x0a\xff")):
        tasks |= {
            f"complete {whose}": service.respond_activity_task_completed(
                api.RespondActivityTaskCompletedRequest(namespace=mac, task_token=token, result=done)
            ),
            f"fail {whose}": service.respond_activity_task_failed(api.RespondActivityTaskFailedRequest(namespace=mac, task_token=token)),
            f"cancel {whose}": service.respond_activity_task_canceled(
                api.RespondActivityTaskCanceledRequest(namespace=mac, task_token=token)
            ),
            f"heartbeat {whose}": service.record_activity_task_heartbeat(
                api.RecordActivityTaskHeartbeatRequest(namespace=mac, task_token=token)
            ),
        }
    at = {"workflow_id": run}
    return tasks | {
        "poll another Mac's queue": poll(mac, names.mac_queue("demo", "mac-2")),
        "poll the control queue": poll(mac, names.control_queue("demo")),
        "poll the trainer's queue": poll(mac, names.gpu_queue("demo")),
        "poll its own queue in core": poll(world.core, names.mac_queue("demo", "mac-1")),
        "poll a sticky queue": poll(mac, names.mac_queue("demo", "mac-1"), kind=2, normal_name=names.control_queue("demo")),
        "poll workflow tasks": service.poll_workflow_task_queue(
            api.PollWorkflowTaskQueueRequest(namespace=mac, task_queue={"name": names.control_queue("demo")})
        ),
        "complete by id": service.respond_activity_task_completed_by_id(
            api.RespondActivityTaskCompletedByIdRequest(namespace=mac, workflow_id=own, activity_id="1", result=done)
        ),
        "complete a workflow task": service.respond_workflow_task_completed(
            api.RespondWorkflowTaskCompletedRequest(namespace=mac, task_token=other_task)
        ),
        "start a workflow": service.start_workflow_execution(api.StartWorkflowExecutionRequest(namespace=mac, workflow_id=own)),
        "terminate the run": service.terminate_workflow_execution(
            api.TerminateWorkflowExecutionRequest(namespace=world.core, workflow_execution=at)
        ),
        "terminate its own session": service.terminate_workflow_execution(
            api.TerminateWorkflowExecutionRequest(namespace=mac, workflow_execution={"workflow_id": own})
        ),
        "cancel a session": service.request_cancel_workflow_execution(
            api.RequestCancelWorkflowExecutionRequest(namespace=mac, workflow_execution={"workflow_id": own})
        ),
        "delete": service.delete_workflow_execution(
            api.DeleteWorkflowExecutionRequest(namespace=mac, workflow_execution={"workflow_id": own})
        ),
        "reset": service.reset_workflow_execution(
            api.ResetWorkflowExecutionRequest(namespace=mac, workflow_execution={"workflow_id": own})
        ),
        "query the run": service.query_workflow(api.QueryWorkflowRequest(namespace=world.core, execution=at)),
        "query its session": service.query_workflow(api.QueryWorkflowRequest(namespace=mac, execution={"workflow_id": own})),
        "update the run": service.update_workflow_execution(
            api.UpdateWorkflowExecutionRequest(namespace=world.core, workflow_execution=at)
        ),
        "read a history": service.get_workflow_execution_history(
            api.GetWorkflowExecutionHistoryRequest(namespace=mac, execution={"workflow_id": own})
        ),
        "describe a workflow": service.describe_workflow_execution(
            api.DescribeWorkflowExecutionRequest(namespace=mac, execution={"workflow_id": own})
        ),
        "list workflows": service.list_workflow_executions(api.ListWorkflowExecutionsRequest(namespace=mac)),
        "count workflows": service.count_workflow_executions(api.CountWorkflowExecutionsRequest(namespace=mac)),
        "list workers": service.list_workers(api.ListWorkersRequest(namespace=mac)),
        "list namespaces": service.list_namespaces(api.ListNamespacesRequest()),
        "describe core": service.describe_namespace(api.DescribeNamespaceRequest(namespace=world.core)),
        "describe a namespace by id": service.describe_namespace(api.DescribeNamespaceRequest(id="x")),
        "register a namespace": service.register_namespace(api.RegisterNamespaceRequest(namespace="mine")),
        "change a namespace": service.update_namespace(api.UpdateNamespaceRequest(namespace=mac)),
        "delete a namespace": operator.delete_namespace(operatorservice.v1.DeleteNamespaceRequest(namespace=mac)),
        "list search attributes": operator.list_search_attributes(operatorservice.v1.ListSearchAttributesRequest(namespace=mac)),
        "pause an activity": service.pause_activity(api.PauseActivityRequest(namespace=mac, execution={"workflow_id": own})),
        "signal the run": signal(run, names.FLEET_EVENT, {"event": "left"}),
        "signal another session": signal(names.session_workflow_id("demo", "mac-2"), names.GOODBYE, asdict(Goodbye("mac-2", "n"))),
        "signal its session something else": signal(own, names.RUN_STOPPED, {}),
        "goodbye of another host": signal(own, names.GOODBYE, asdict(Goodbye("mac-2", "n"))),
        "hello as another host": hello("mac-2"),
        "hello for a second": hello(workflow_run_timeout={"seconds": 1}),
        "hello that starts a run": hello(workflow_type={"name": names.RUN_WORKFLOW}),
        "hello in core": hello(namespace=world.core),
        "hello that replaces its session": hello(workflow_id_conflict_policy=3),
        "hello every minute": hello(cron_schedule="* * * * *"),
        "hello with attributes of another": hello(search_attributes={"indexed_fields": {"RlHost": Payload(data=b'"mac-2"')}}),
        "worker heartbeat of another": service.record_worker_heartbeat(
            api.RecordWorkerHeartbeatRequest(namespace=mac, worker_heartbeat=[{"task_queue": names.mac_queue("demo", "mac-2")}])
        ),
        "shut another worker down": service.shutdown_worker(
            api.ShutdownWorkerRequest(namespace=mac, task_queue=names.mac_queue("demo", "mac-2"), worker_instance_key="x")
        ),
        "a huge heartbeat": service.record_activity_task_heartbeat(
            api.RecordActivityTaskHeartbeatRequest(namespace=mac, task_token=other_task, details=payloads("x" * 30_000))
        ),
        "a huge message": service.respond_activity_task_completed(
            api.RespondActivityTaskCompletedRequest(namespace=mac, task_token=other_task, result=payloads("x" * 1_000_000))
        ),
    }


async def test_more_than_fifty_calls_are_refused_and_change_nothing(temporal_server: TemporalServer, store: Store) -> None:
    """Every call carries a good pass; what it asks is not for Macs, or not for this one."""
    rates = Rates(calls_per_second=1000.0, burst_calls=1000.0)
    async with world_of(temporal_server, store, Listening("127.0.0.1:0", rates=rates, seldom=rates)) as world:
        invite, neighbour = world.invite(), world.invite("mac-2")
        client, other, held = await world.client(invite), await world.client(neighbour), Sweeps()
        held.hold.clear()
        queue = names.mac_queue("demo", "mac-2")
        serving = make_worker(world.owner, names.control_queue("demo"), workflows=[PlainSession])
        playing = make_worker(other, queue, activities=[held.sweep], max_concurrent_activities=1, graceful_seconds=0)
        async with serving, playing:
            await say_hello(other, neighbour)
            await until(lambda: held.tokens)
            # A token of the same server for an activity that its own session runs on the control queue.
            own = names.session_workflow_id("demo", "mac-1").encode()
            control_task = held.tokens[0].replace(names.session_workflow_id("demo", "mac-2").encode(), own)
            control_task = control_task.replace(b"\x42\x05sweep", b"\x42\x0bgrant_sweep")
            said = read_task_token(control_task)
            assert (said.workflow_id, said.activity_type) == (own.decode(), names.GRANT_SWEEP)
            tries = forbidden(world, client, invite, held.tokens[0], control_task)
            with capture_logs() as logs:
                found = {what: await status_of(call) for what, call in tries.items()}
            refusals = (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.INVALID_ARGUMENT, RPCStatusCode.RESOURCE_EXHAUSTED)
            assert {what: said for what, said in found.items() if said[0] not in refusals or not said[1]} == {}
            assert len(found) > 50
            assert found["a huge message"][0] == found["a huge heartbeat"][0] == RPCStatusCode.RESOURCE_EXHAUSTED
            assert next(log for log in logs if log["event"] == "call_refused")["who"] == "mac-1"
            # The neighbour noticed nothing, and no session of ours came to be.
            held.hold.set()
            await until(lambda: len(held.tokens) >= 2)
            sessions = [one.id async for one in world.owner.list_workflows("ExecutionStatus = 'Running'")]
            assert sessions == [names.session_workflow_id("demo", "mac-2")]


@pytest.mark.parametrize("who", ["nobody", "nonsense", "another run", "another key", "expired", "revoked invite", "revoked host"])
async def test_without_a_good_pass_nothing_passes_and_the_reason_is_told(who: str, temporal_server: TemporalServer, store: Store) -> None:
    async with world_of(temporal_server, store) as world:
        invite = {
            "another run": lambda: world.invite(run="other"),
            "another key": lambda: world.invite(signer=Signer.generate()),
            "expired": lambda: world.invite(seconds=5.0, now=1_700_000_000),
        }.get(who, world.invite)()
        if who.startswith("revoked"):
            assert (await world.client(invite)).namespace == world.mac
            revoke(store, SIGNER, "demo", invite.invite if who == "revoked invite" else "mac-1", "a test")
            await asyncio.to_thread(world.proxy._revoked.look)
        shown = {"nobody": "", "nonsense": "x" * 50}.get(who, invite.proof)
        with capture_logs() as logs, pytest.raises(AccessDeniedError) as caught:
            await connect(invite.temporal.address, world.mac, access=replace(invite.access, api_key=shown))
        reasons = {"nobody": "no pass", "expired": "was good until", "revoked invite": "revoked: a test", "revoked host": "revoked: a test"}
        assert reasons.get(who, "none of run demo") in caught.value.message
        assert "ask" in caught.value.hint
        assert not shown or shown not in f"{caught.value}{logs}"


async def test_a_mac_revoked_in_the_middle_is_refused_from_its_next_call_on(temporal_server: TemporalServer, store: Store) -> None:
    async with world_of(temporal_server, store) as world:
        invite = world.invite()
        client = await world.client(invite)
        await say_hello(client, invite)
        revoke(store, SIGNER, "demo", "mac-1", "sold")
        await asyncio.to_thread(world.proxy._revoked.look)
        status, said = await status_of(say_hello(client, invite))
        assert (status, said) == (RPCStatusCode.PERMISSION_DENIED, "mac-1 was revoked: sold")


async def test_too_many_calls_are_told_to_slow_down_and_others_are_not(temporal_server: TemporalServer, store: Store) -> None:
    rates = Rates(calls_per_second=0.5, burst_calls=8.0, open_calls=3)
    async with world_of(temporal_server, store, Listening("127.0.0.1:0", rates=rates)) as world:
        one, two = await world.client(world.invite()), await world.client(world.invite("mac-2"))
        request = api.DescribeNamespaceRequest(namespace=world.mac)

        async def ask(client: Client) -> tuple[RPCStatusCode | None, str]:
            return await status_of(client.workflow_service.describe_namespace(request))

        found = [await ask(one) for _ in range(10)]
        assert found[0][0] is None
        assert found[-1] == (RPCStatusCode.RESOURCE_EXHAUSTED, "more than 0.5 calls a second: slow down")
        assert (await ask(two))[0] is None
        poll = api.PollActivityTaskQueueRequest(namespace=world.mac, task_queue={"name": names.mac_queue("demo", "mac-2")})
        polls = [asyncio.create_task(two.workflow_service.poll_activity_task_queue(poll)) for _ in range(3)]
        await until(lambda: sum(use.num_open for use in world.proxy._limiter._uses.values()) == 3)
        assert "open already" in (await ask(two))[1]
        for task in polls:
            task.cancel()
        await asyncio.wait(polls)
        # A caller that hangs up frees its place, and its poll at the server.
        await until(lambda: not any(use.num_open for use in world.proxy._limiter._uses.values()))


async def test_hellos_and_ends_of_sweeps_are_seldom(temporal_server: TemporalServer, store: Store) -> None:
    seldom = Rates(calls_per_second=0.01, burst_calls=5.0, open_calls=4)
    async with world_of(temporal_server, store, Listening("127.0.0.1:0", seldom=seldom)) as world:
        invite = world.invite()
        client = await world.client(invite)
        found = [await status_of(say_hello(client, invite)) for _ in range(6)]
        assert [status for status, _ in found] == [None] * 5 + [RPCStatusCode.RESOURCE_EXHAUSTED]
        assert (await status_of(client.workflow_service.describe_namespace(api.DescribeNamespaceRequest(namespace=world.mac))))[0] is None


async def test_a_task_that_comes_after_a_revocation_is_not_handed_on(temporal_server: TemporalServer, store: Store) -> None:
    async with world_of(temporal_server, store) as world:
        invite = world.invite()
        client = await world.client(invite)
        poll = api.PollActivityTaskQueueRequest(namespace=world.mac, task_queue={"name": names.mac_queue("demo", "mac-1")})
        polling = asyncio.create_task(status_of(client.workflow_service.poll_activity_task_queue(poll)))
        await until(lambda: any(use.num_open for use in world.proxy._limiter._uses.values()))
        await say_hello(client, invite)
        revoke(store, SIGNER, "demo", "mac-1", "in the middle")
        await asyncio.to_thread(world.proxy._revoked.look)
        async with make_worker(world.owner, names.control_queue("demo"), workflows=[PlainSession]):
            status, said = await asyncio.wait_for(polling, 20)
        assert (status, said) == (RPCStatusCode.PERMISSION_DENIED, "mac-1 was revoked: in the middle")


async def test_strangers_are_slowed_down_by_address(temporal_server: TemporalServer, store: Store) -> None:
    async with world_of(temporal_server, store) as world, grpc.aio.insecure_channel(f"127.0.0.1:{world.proxy.port}") as channel:
        call = channel.unary_unary("/temporal.api.workflowservice.v1.WorkflowService/GetSystemInfo")
        codes = []
        for _ in range(40):
            try:
                await call(b"", timeout=5)
            except grpc.aio.AioRpcError as error:
                codes.append(error.code())
        assert {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED} == set(codes)
        assert codes[0] == grpc.StatusCode.UNAUTHENTICATED


async def test_calls_that_say_nothing_hold_no_place(temporal_server: TemporalServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger is told at once, before its request; a Mac's own silent calls end by themselves."""
    monkeypatch.setattr(proxy_module, "ARRIVAL_SECONDS", 0.5)

    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with world_of(temporal_server, store) as world, grpc.aio.insecure_channel(f"127.0.0.1:{world.proxy.port}") as channel:
        open_call = channel.stream_unary("/temporal.api.workflowservice.v1.WorkflowService/GetSystemInfo")
        good = (("authorization", f"Bearer {world.invite().proof}"),)
        for metadata, code in (((), grpc.StatusCode.UNAUTHENTICATED), (good, grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await open_call(silence(), timeout=10, metadata=metadata)
            assert caught.value.code() == code
        assert not any(use.num_open for use in world.proxy._limiter._uses.values())


async def test_a_compressed_message_is_refused_before_it_unfolds(temporal_server: TemporalServer, store: Store) -> None:
    async with world_of(temporal_server, store) as world, grpc.aio.insecure_channel(f"127.0.0.1:{world.proxy.port}") as channel:
        call = channel.unary_unary("/temporal.api.workflowservice.v1.WorkflowService/GetSystemInfo")
        metadata = (("authorization", f"Bearer {world.invite().proof}"),)
        assert await call(b"", timeout=5, metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(50_000_000), timeout=20, metadata=metadata, compression=grpc.Compression.Gzip)
        assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)
        assert await call(b"", timeout=5, metadata=metadata)


async def test_the_proxy_says_what_it_lacks(temporal_server: TemporalServer, store: Store) -> None:
    def proxy(listening: Listening) -> Proxy:
        return Proxy("demo", SIGNER.public_key, Revoked(store, "demo", SIGNER.public_key), listening)

    with pytest.raises(ConfigError, match="in clear") as caught:
        proxy(Listening("0.0.0.0:7234"))
    assert "--tls-cert" in caught.value.hint
    proxy(Listening("0.0.0.0:7234", is_open=True))
    first, second, third = (proxy(Listening("127.0.0.1:0")) for _ in range(3))
    with pytest.raises(SetupMissingError, match="no namespace nowhere"):
        await first.start(temporal_server.address, "nowhere", PLAIN)
    with pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:1 cannot be used"):
        await second.start("127.0.0.1:1", "default", PLAIN)
    await third.start(temporal_server.address, "default", PLAIN)
    again = proxy(Listening(f"127.0.0.1:{third.port}"))
    with pytest.raises(PortTakenError):
        await again.start(temporal_server.address, "default", PLAIN)
    for one in (first, second, third, again):
        await one.stop()
