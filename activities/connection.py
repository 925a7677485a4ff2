"""Clients and workers of Temporal: connect and wait, set a namespace up, keep a worker running, bound messages.

Nothing here knows what a workflow or an activity does. Every client of the project is made here, so that every
message passes the size check.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

import structlog
from google.protobuf.duration_pb2 import Duration
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, RegisterNamespaceRequest
from temporalio.client import Client, GrpcCompression
from temporalio.converter import DataConverter, DefaultPayloadConverter, PayloadCodec
from temporalio.exceptions import ApplicationError
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.service import KeepAliveConfig, RPCError, RPCStatusCode, TLSConfig
from temporalio.worker import Worker

from activities.signals import DropEmptySignals
from activities.watch import LAG_SECONDS, SILENT_SECONDS, WATCH_SECONDS, WatchedRuntime, end_if_hung
from stoa.contracts import names
from stoa.contracts.access import PLAIN, Access
from stoa.contracts.errors import (
    AccessDeniedError,
    MessageTooLargeError,
    ServiceUnavailableError,
    SetupMissingError,
    StoaError,
)
from stoa.contracts.messages import RunInput

_log = structlog.get_logger(__name__)

MIN_WAIT_SECONDS: Final = 0.5
MAX_WAIT_SECONDS: Final = 60.0
HEALTHY_SECONDS: Final = 120.0
"""A worker that ran this long starts again with the shortest wait."""
HEARTBEAT_THROTTLE: Final = timedelta(seconds=2)
STICKY_TIMEOUT: Final = timedelta(seconds=5)
RPC_TIMEOUT: Final = timedelta(seconds=10)
KEEP_ALIVE: Final = KeepAliveConfig(interval_millis=15_000, timeout_millis=10_000)
"""A path that a router forgot looks open for ever: it is given up after 25 s, and the polls on it begin anew."""
SHUTDOWN_SECONDS: Final = 10.0
"""How long a worker that has gone silent may take to shut down before it is left behind."""
RETENTION_DAYS: Final = 3
_ACCESS_HINT: Final = "check the key or certificate for the namespace; an invited Mac asks for another token"
_MESSAGE = re.compile(r'message: "((?:[^"\\]|\\.)*)"')
SETUP_HINT: Final = "run `stoa setup`, or `stoa run CONFIG`, which does it first"

ATTRIBUTE_TYPES: Final = {
    "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
    "Double": IndexedValueType.INDEXED_VALUE_TYPE_DOUBLE,
}

OnWait = Callable[[StoaError, float], None]
"""Told the reason of a wait and its seconds, each time."""


class OversizedMessageError(MessageTooLargeError, ApplicationError):
    """`MessageTooLargeError` in a form that fails an activity or workflow at once instead of being retried for ever."""

    def __init__(self, message: str, *, hint: str) -> None:
        # Only this base's constructor: it keeps the message under the name the other one would set.
        ApplicationError.__init__(self, message, hint, type=MessageTooLargeError.__name__, non_retryable=True)
        self.hint = hint


class BoundedPayloadConverter(DefaultPayloadConverter):
    """JSON as usual, with a limit on the size of each message."""

    def to_payloads(self, values: Sequence[Any]) -> list[Payload]:
        """Encode `values`. Raises OversizedMessageError for one above its limit."""
        payloads = super().to_payloads(values)
        for value, payload in zip(values, payloads, strict=True):
            limit = names.MAX_RUN_STATE_BYTES if isinstance(value, RunInput) else names.MAX_MESSAGE_BYTES
            if len(payload.data) > limit:
                raise OversizedMessageError(
                    f"a {type(value).__name__} of {len(payload.data)} bytes would cross Temporal, where {limit} may",
                    hint="put the bytes into the bucket and pass the key",
                )
        return payloads


DATA_CONVERTER: Final = DataConverter(payload_converter_class=BoundedPayloadConverter)


def make_runtime(worker_heartbeat_seconds: float | None = None) -> WatchedRuntime:
    """The one SDK runtime of a worker's process; worker heartbeats (1 to 60 s) make `temporal worker list` show it as alive.

    Its workers must run under `supervise`, which reads the metrics that it keeps.
    """
    return WatchedRuntime(worker_heartbeat_seconds)


@lru_cache(maxsize=1)
def _quiet_runtime() -> Runtime:
    """For a command: it says itself what is wrong, and the SDK's own log goes to standard output, where data is."""
    return Runtime(telemetry=TelemetryConfig(logging=None))


async def connect(
    address: str, namespace: str, *, access: Access = PLAIN, codec: PayloadCodec | None = None, runtime: Runtime | None = None
) -> Client:
    """One attempt. Raises ServiceUnavailableError, or AccessDeniedError when the server refuses us.

    codec: of a process that seals or opens tickets; see `codec.py`. runtime: a worker's; None for one that logs nothing.
    """
    try:
        return await Client.connect(
            address,
            namespace=namespace,
            data_converter=replace(DATA_CONVERTER, payload_codec=codec),
            runtime=runtime or _quiet_runtime(),
            keep_alive_config=KEEP_ALIVE,
            tls=_tls(access),
            api_key=access.api_key or None,
            # The proxy takes no compressed messages: a small one could unfold to anything.
            grpc_compression=GrpcCompression.NONE if access.is_invited else GrpcCompression.GZIP,
        )
    except RPCError as error:
        raise _service_error(error, address, namespace) from error
    except RuntimeError as error:  # what the SDK raises when it cannot connect, with the gRPC code in the text
        text = str(error)
        if "Unauthenticated" in text or "PermissionDenied" in text:
            raise AccessDeniedError(f"Temporal at {address} refused our credentials{_said(text)}", hint=_ACCESS_HINT) from error
        raise _unavailable(address) from error


def _tls(access: Access) -> TLSConfig | bool:
    if not access.tls:
        return False
    return TLSConfig(
        server_root_ca_cert=access.ca or None,
        domain=access.server_name or None,
        client_cert=access.certificate or None,
        client_private_key=access.private_key or None,
    )


def _said(text: str) -> str:
    """What the server wrote beside a status, from the SDK's rendering of it."""
    found = _MESSAGE.search(text)
    return f": {found[1]}" if found is not None and found[1] else ""


async def connect_forever(
    address: str,
    namespace: str,
    *,
    access: Access = PLAIN,
    codec: PayloadCodec | None = None,
    on_wait: OnWait | None = None,
    give_up_seconds: float | None = None,
    runtime: Runtime | None = None,
) -> Client:
    """A client of a namespace that is set up, waiting until there is one.

    Waits out a server that is not there and a set-up that has not been made, telling `on_wait` why. With
    `give_up_seconds` the last reason is raised after that time: ServiceUnavailableError or SetupMissingError.
    Raises AccessDeniedError at once.
    """
    started = time.monotonic()
    wait_seconds = MIN_WAIT_SECONDS
    while True:
        try:
            client = await connect(address, namespace, access=access, codec=codec, runtime=runtime)
            await (require_namespace(client) if access.is_invited else require_setup(client))
            return client
        except (ServiceUnavailableError, SetupMissingError) as error:
            if give_up_seconds is not None and time.monotonic() - started + wait_seconds > give_up_seconds:
                raise
            if on_wait is not None:
                on_wait(error, wait_seconds)
        await asyncio.sleep(wait_seconds)
        wait_seconds = min(wait_seconds * 1.5, 5.0)


async def require_namespace(client: Client) -> None:
    """Pass if the client's namespace exists: all that an invited Mac may ask. Raises as `require_setup` does."""
    request = DescribeNamespaceRequest(namespace=client.namespace)
    try:
        await client.workflow_service.describe_namespace(request, timeout=RPC_TIMEOUT)
    except RPCError as error:
        raise _service_error(error, client.service_client.config.target_host, client.namespace) from error


async def require_setup(client: Client) -> None:
    """Pass if the client's namespace and our search attributes exist.

    A workflow that sets an unregistered attribute would hang without an error. Raises SetupMissingError,
    ServiceUnavailableError, AccessDeniedError.
    """
    address, namespace = client.service_client.config.target_host, client.namespace
    try:
        present = await _search_attributes(client)
    except RPCError as error:
        raise _service_error(error, address, namespace) from error
    missing = sorted(set(names.SEARCH_ATTRIBUTES) - set(present))
    if missing:
        raise SetupMissingError(f"namespace {namespace} at {address} lacks search attributes {', '.join(missing)}", hint=SETUP_HINT)


async def setup_namespace(address: str, namespace: str, *, access: Access = PLAIN, patience_seconds: float = 30.0) -> None:
    """Make a namespace and its search attributes where they are missing, and wait until the server uses them.

    Doing it again changes nothing. Raises ServiceUnavailableError (also when it is not usable in time),
    AccessDeniedError, SetupMissingError when an attribute exists with another type.
    """
    deadline = time.monotonic() + patience_seconds
    client = await _connect_before(deadline, address, namespace, access)
    while True:
        try:
            await _ensure(client)
            # Counting by every attribute fails until the frontend has read what was just registered.
            await client.count_workflows(" AND ".join(f"{name} IS NULL" for name in names.SEARCH_ATTRIBUTES), rpc_timeout=RPC_TIMEOUT)
            return
        except RPCError as error:
            caught_up = error.status not in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT, RPCStatusCode.UNAVAILABLE)
            if caught_up or time.monotonic() > deadline:
                raise _service_error(error, address, namespace) from error
        await asyncio.sleep(0.2)


async def _connect_before(deadline: float, address: str, namespace: str, access: Access) -> Client:
    while True:
        try:
            return await connect(address, namespace, access=access)
        except ServiceUnavailableError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


async def _ensure(client: Client) -> None:
    namespace = client.namespace
    try:
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=namespace), timeout=RPC_TIMEOUT)
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        await _register(client)
    present = await _search_attributes(client)
    wanted = {name: ATTRIBUTE_TYPES[kind] for name, kind in names.SEARCH_ATTRIBUTES.items()}
    for name, kind in wanted.items():
        if present.get(name, kind) != kind:
            raise SetupMissingError(
                f"namespace {namespace}: search attribute {name} has another type than {names.SEARCH_ATTRIBUTES[name]}",
                hint="use another namespace, or remove the attribute with `temporal operator search-attribute remove`",
            )
    missing = {name: kind for name, kind in wanted.items() if name not in present}
    if missing:
        request = AddSearchAttributesRequest(namespace=namespace, search_attributes=missing)
        await client.operator_service.add_search_attributes(request, timeout=RPC_TIMEOUT)
        _log.info("search_attributes_added", namespace=namespace, attributes=sorted(missing))


async def _register(client: Client) -> None:
    request = RegisterNamespaceRequest(
        namespace=client.namespace, workflow_execution_retention_period=Duration(seconds=RETENTION_DAYS * 86_400)
    )
    try:
        await client.workflow_service.register_namespace(request, timeout=RPC_TIMEOUT)
        _log.info("namespace_registered", namespace=client.namespace)
    except RPCError as error:
        if error.status != RPCStatusCode.ALREADY_EXISTS:
            raise


async def _search_attributes(client: Client) -> dict[str, IndexedValueType.ValueType]:
    request = ListSearchAttributesRequest(namespace=client.namespace)
    response = await client.operator_service.list_search_attributes(request, timeout=RPC_TIMEOUT)
    return dict(response.custom_attributes)


def make_worker(
    client: Client,
    task_queue: str,
    *,
    activities: Sequence[Callable[..., Any]] = (),
    workflows: Sequence[type] = (),
    max_concurrent_activities: int | None = None,
    graceful_seconds: float = 30.0,
) -> Worker:
    """A worker with the project's timings: heartbeats at most every 2 s, a short sticky queue, a graceful end."""
    single = max_concurrent_activities == 1
    return Worker(
        client,
        task_queue=task_queue,
        activities=activities,
        workflows=workflows,
        max_concurrent_activities=max_concurrent_activities,
        # One poll at a time where one task is served: a second open poll could swallow a task while we are busy.
        max_concurrent_activity_task_polls=1 if single else None,
        graceful_shutdown_timeout=timedelta(seconds=graceful_seconds),
        max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
        interceptors=[DropEmptySignals()] if workflows else [],
    )


async def supervise(
    make: Callable[[], Awaitable[Worker]],
    stop: asyncio.Event,
    *,
    max_failures: int = 10,
    silent_seconds: Callable[[], float] = lambda: 0.0,
) -> None:
    """Keep a worker running until `stop` is set, then shut it down gracefully.

    A worker that ends by an error (after about a minute of refused polls), or that has nothing to do and does not poll,
    is made anew, after a growing wait. A process whose engine hangs, as `silent_seconds` tells, is ended.
    Raises ServiceUnavailableError after `max_failures` failures without 2 healthy minutes between.
    """
    num_failures = 0
    while not stop.is_set():
        started = time.monotonic()
        try:
            worker = await _unless_stopped(make(), stop)
            if worker is not None:
                await _run_until(worker, stop, silent_seconds)
        except (RuntimeError, RPCError, ServiceUnavailableError, SetupMissingError) as error:
            num_failures = 1 if time.monotonic() - started > HEALTHY_SECONDS else num_failures + 1
            if num_failures >= max_failures:
                raise ServiceUnavailableError(
                    f"a worker failed {num_failures} times, the last time with: {error}", hint="look at the server, then start it again"
                ) from error
            wait_seconds = min(2.0 ** (num_failures - 1), MAX_WAIT_SECONDS)
            _log.warning("worker_failed", error=str(error), failures=num_failures, wait_seconds=wait_seconds)
            await _wait(stop, wait_seconds)


async def _unless_stopped(making: Awaitable[Worker], stop: asyncio.Event) -> Worker | None:
    """What `making` gives; None, with it cancelled, if `stop` is set first: a client may wait for its server for ever."""
    made = asyncio.ensure_future(making)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((made, stopped), return_when=asyncio.FIRST_COMPLETED)
        return made.result() if made.done() else None
    finally:
        stopped.cancel()
        made.cancel()


async def _run_until(worker: Worker, stop: asyncio.Event, silent_seconds: Callable[[], float]) -> None:
    running = asyncio.create_task(worker.run())
    stopped = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(_watch(worker, silent_seconds))
    try:
        await asyncio.wait((running, stopped, watching), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        elif stopped.done():
            await worker.shutdown()
            await running
        else:
            await asyncio.wait((asyncio.create_task(worker.shutdown()),), timeout=SHUTDOWN_SECONDS)
            watching.result()
    finally:
        for task in (running, stopped, watching):
            task.cancel()


async def _watch(worker: Worker, silent_seconds: Callable[[], float]) -> None:
    """Raise ServiceUnavailableError once the worker has been idle without a poll for too long; end a process that hangs."""
    runtime = worker.client.service_client.config.runtime
    watch = runtime.watch if isinstance(runtime, WatchedRuntime) else None
    if watch is not None:
        watch.begin(worker.task_queue)
    while watch is None or watch.silent_seconds(worker.task_queue) < SILENT_SECONDS:
        end_if_hung(silent_seconds())
        asked = time.monotonic()
        await asyncio.sleep(WATCH_SECONDS)
        late = time.monotonic() - asked - WATCH_SECONDS
        if late > LAG_SECONDS:
            # Heartbeats and polls are as late: what follows looks like a fault of the network.
            _log.warning("loop_lagging", queue=worker.task_queue, seconds=round(late, 1))
    raise ServiceUnavailableError(f"the worker of queue {worker.task_queue} has not asked for work for {SILENT_SECONDS:g} s")


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return


def _service_error(error: RPCError, address: str, namespace: str) -> StoaError:
    if error.status == RPCStatusCode.NOT_FOUND:
        return SetupMissingError(f"Temporal at {address} has no namespace {namespace}", hint=SETUP_HINT)
    if error.status in (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNAUTHENTICATED):
        return AccessDeniedError(f"Temporal at {address} refused access to namespace {namespace}: {error.message}", hint=_ACCESS_HINT)
    return _unavailable(address, error.message)


def _unavailable(address: str, reason: str = "it does not answer") -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"Temporal at {address} cannot be used: {reason}",
        hint="start it (`stoa services` or `temporal server start-dev`) or set STOA_TEMPORAL_ADDRESS",
    )
