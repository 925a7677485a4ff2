"""The proxy before Temporal for invited Macs: checks who calls and what, and passes the rest on. Over the internet, by gRPC.

Temporal gives a key of a namespace everything in it; a Mac needs a dozen of its calls, for itself. Whoever calls shows a
pass (`proxying/passes.py`), a call is one of a table (`proxying/allow.py`), and there are not too many of them
(`proxying/limits.py`). Replies pass as they are; of a task it is looked whose it is. The proxy keeps no state: several may
stand beside each other.

Nothing of a pass, a key or a payload is logged. Without TLS it listens on loopback only, unless told otherwise.
"""

import asyncio
import resource
import signal
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio
import structlog
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, DescribeNamespaceResponse

from cli.proxying.allow import MAX_REQUEST_BYTES, SERVICE, Method, Place, understand
from cli.proxying.deliver import MISDELIVERED, give_back
from cli.proxying.limits import Limiter, Rates
from cli.proxying.passes import Passes
from cli.proxying.refusal import Code, RefusedError, denied, invalid
from stoa.bucket.invite import Pass
from stoa.bucket.revocations import LOOK_SECONDS, Revoked
from stoa.config.load import is_loopback
from stoa.contracts.access import Access
from stoa.contracts.errors import AccessDeniedError, ConfigError, PortTakenError, ServiceError, ServiceUnavailableError, SetupMissingError

_log = structlog.get_logger(__name__)

CALL_SECONDS: Final = 15.0
POLL_SECONDS: Final = 75.0
"""Temporal answers a poll without a task after 60 s."""
GRACE_SECONDS: Final = 2.0
ARRIVAL_SECONDS: Final = 10.0
"""A request is small: a caller that takes longer to say it only holds a place."""
IDLE_SECONDS: Final = 300.0
"""A connection without an open call is closed; a Mac that plays always polls."""
MAX_METADATA_BYTES: Final = 8 * 1024
MAX_REPLY_BYTES: Final = 4 << 20
MAX_OPEN_CALLS: Final = 20_000
SPARE_FILES: Final = 1000
"""Open files beyond one connection a call; many systems begin a process with 1024 in all."""
STRANGERS: Final = Rates(calls_per_second=5.0, burst_calls=20.0, open_calls=20)
"""Of one address, for calls without a good pass."""
SELDOM: Final = Rates(calls_per_second=0.5, burst_calls=20.0, open_calls=4)
"""Of one Mac, for hellos and the ends of sweeps: each makes a session and the control process work."""
_PASSED_ON: Final = ("client-name", "client-version", "supported-server-versions", "supported-features", "temporal-namespace")
_QUIET_SECONDS: Final = 1.0
"""One caller's refusals are logged at most so often."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: the proxy's own certificate, and who must have signed its callers' ones (None: they need none)."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the proxy listens. `is_open`: without TLS beyond loopback, because something before it speaks TLS."""

    address: str
    tls: Tls | None = None
    is_open: bool = False
    rates: Rates = field(default_factory=Rates)
    seldom: Rates = SELDOM


class Proxy:
    """The server for the Macs of one run. `start` and `stop` on one event loop."""

    def __init__(self, run: str, public_key: str, revoked: Revoked, listening: Listening) -> None:
        if not (listening.tls or listening.is_open or is_loopback(listening.address)):
            raise ConfigError(
                f"passes would cross the net in clear: {listening.address} is not loopback and there is no TLS",
                hint="give --tls-cert and --tls-key, or --behind-tls if a TLS server stands before this one",
            )
        self._run, self._revoked, self._listening = run, revoked, listening
        self._passes = Passes(run, public_key, revoked.known)
        self._limiter, self._seldom, self._strangers = Limiter(listening.rates), Limiter(listening.seldom), Limiter(STRANGERS)
        self._logged: OrderedDict[str, float] = OrderedDict()
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None
        self._upstream_metadata: tuple[tuple[str, str], ...] = ()
        self._place = Place(run, "", "")
        self._looking: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """Where it listens, with the port it has."""
        return f"{self._listening.address.rpartition(':')[0]}:{self.port}"

    async def start(self, address: str, namespace: str, access: Access) -> None:
        """Reach Temporal at `address`, then listen.

        Raises ServiceUnavailableError, AccessDeniedError or SetupMissingError for Temporal or the bucket, PortTakenError.
        """
        await asyncio.to_thread(self._revoked.look)
        self._channel = _channel(address, access)
        self._upstream_metadata = (("authorization", f"Bearer {access.api_key}"),) if access.api_key else ()
        self._place = Place(self._run, namespace, await self._namespace_id(address, namespace))
        self._server = grpc.aio.server(
            handlers=(_Handlers(self._answer),),
            options=(
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                # Only as it is: a small compressed message could unfold to anything.
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.server_handshake_timeout_ms", int(1000 * ARRIVAL_SECONDS)),
                ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
            ),
            maximum_concurrent_rpcs=MAX_OPEN_CALLS,
        )
        tls, where = self._listening.tls, self._listening.address
        try:
            self.port = self._server.add_secure_port(where, _credentials(tls)) if tls else self._server.add_insecure_port(where)
        except RuntimeError:
            raise PortTakenError(f"{where}: cannot listen there", hint="end what uses the port, or choose another --listen") from None
        await self._server.start()
        self._looking = asyncio.create_task(self._look())
        _log.info("proxy_ready", address=self.address, tls=tls is not None, namespace=namespace)

    async def stop(self) -> None:
        """Let open calls end for a moment, then end them."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            await self._server.stop(GRACE_SECONDS)
        if self._channel is not None:
            await self._channel.close()

    async def _namespace_id(self, address: str, namespace: str) -> str:
        """Of the Macs' namespace: task tokens name it by its id."""
        request = DescribeNamespaceRequest(namespace=namespace).SerializeToString()
        try:
            data = await self._pass_on(f"{SERVICE}DescribeNamespace", request, CALL_SECONDS, ())
        except grpc.aio.AioRpcError as error:
            raise _service_error(error, address, namespace) from None
        return DescribeNamespaceResponse.FromString(data).namespace_info.id

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await asyncio.to_thread(self._revoked.look)
            except ServiceError as error:  # what is known goes on to count
                _log.warning("revocations_unknown", error=error.message)

    async def _answer(self, path: str, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """One call from its headers to its last byte. Ends in the reply, or in a status by `context.abort`."""
        name = path.rpartition("/")[2]
        try:
            caller = self._who(context)
        except RefusedError as refusal:
            return await self._refuse(context, refusal, name, _peer(context))
        try:
            with self._limiter.call(caller.invite):
                method, request = understand(path, await _arrived(requests), caller, self._place)
                with self._seldom.call(caller.invite) if method.is_seldom else nullcontext():
                    reply = await self._pass_on(path, request, _seconds(context, method), _told(context))
                if method.waits:  # a task that came after a revocation is kept: there are tickets in it
                    self._passes.known(context.invocation_metadata())
                    await self._give_back_anothers(reply, caller)
                return reply
        except RefusedError as refusal:
            return await self._refuse(context, refusal, name, caller.host)
        except grpc.aio.AioRpcError as error:
            _log.debug("call_failed", method=name, host=caller.host, code=error.code().name)
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            raise

    async def _give_back_anothers(self, reply: bytes, caller: Pass) -> None:
        """Raises RefusedError for a task that is not the caller's, once the server has it back."""
        failed = give_back(reply, caller, self._place.namespace)
        if failed is not None:
            await self._pass_on(f"{SERVICE}RespondActivityTaskFailed", failed.SerializeToString(), CALL_SECONDS, ())
            raise denied(MISDELIVERED)

    def _who(self, context: Any) -> Pass:
        known = self._passes.known(context.invocation_metadata())
        if known is not None:
            return known
        with self._strangers.call(_peer(context)):  # before a signature is checked, which takes its time
            return self._passes.check(context.invocation_metadata())

    async def _pass_on(self, path: str, request: bytes, seconds: float, metadata: Sequence[tuple[str, str]]) -> bytes:
        if self._channel is None:
            raise RefusedError(Code.UNAVAILABLE, "the proxy is not ready")
        call: Callable[..., Awaitable[bytes]] = self._channel.unary_unary(path)
        return await call(request, timeout=seconds, metadata=(*metadata, *self._upstream_metadata))

    async def _refuse(self, context: Any, refusal: RefusedError, method: str, who: str) -> bytes:
        now = time.monotonic()
        if now - self._logged.get(who, -_QUIET_SECONDS) >= _QUIET_SECONDS:
            self._logged[who] = now
            self._logged.move_to_end(who)
            if len(self._logged) > 1000:
                self._logged.popitem(last=False)
            _log.warning("call_refused", method=method[:80], who=who, code=refusal.code.value, reason=refusal.message)
        await context.abort(grpc.StatusCode[refusal.code.value], refusal.message)
        raise AssertionError("abort raises")


class _Handlers(grpc.GenericRpcHandler):
    """Takes every method there is, as bytes. Who calls is asked before the request has come: a stranger waits for nothing here."""

    def __init__(self, answer: Callable[[str, AsyncIterator[bytes], Any], Awaitable[bytes]]) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """The same for all of them."""
        path = handler_call_details.method

        async def answer(requests: AsyncIterator[bytes], context: Any) -> bytes:
            return await self._answer(path, requests, context)

        return grpc.stream_unary_rpc_method_handler(answer)


async def _arrived(requests: AsyncIterator[bytes]) -> bytes:
    """The one request of a call. Raises RefusedError if none comes, or none in time."""
    try:
        async with asyncio.timeout(ARRIVAL_SECONDS):
            return await anext(requests)
    except TimeoutError:
        raise invalid(f"no request came within {ARRIVAL_SECONDS:g} s") from None
    except StopAsyncIteration:
        raise invalid("a call without a request") from None


async def serve_until_told(proxy: Proxy, address: str, namespace: str, access: Access, ready: Callable[[], None]) -> None:
    """Start, call `ready`, and serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    make_room_for_connections()
    try:
        await proxy.start(address, namespace, access)
        ready()
        await stop.wait()
    finally:
        await proxy.stop()


def make_room_for_connections() -> None:
    """Raise this process's limit of open files to what the proxy may need, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_CALLS + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a system with a lower limit of its own
            _log.warning("few_open_files", limit=soft)


def _told(context: Any) -> tuple[tuple[str, str], ...]:
    """What the server is told of the caller's client."""
    return tuple((key, value) for key, value in context.invocation_metadata() if key in _PASSED_ON)


def _seconds(context: Any, method: Method) -> float:
    most, left = (POLL_SECONDS if method.waits else CALL_SECONDS), context.time_remaining()
    return most if left is None else min(most, max(0.0, left))


def _peer(context: Any) -> str:
    """Address of the caller without its port: `ipv4:203.0.113.7`."""
    return str(context.peer()).rpartition(":")[0]


def _channel(address: str, access: Access) -> grpc.aio.Channel:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 15_000),
    ]
    if not access.tls:
        return grpc.aio.insecure_channel(address, options)
    if access.server_name:
        options.append(("grpc.ssl_target_name_override", access.server_name))
        options.append(("grpc.default_authority", access.server_name))
    credentials = grpc.ssl_channel_credentials(access.ca or None, access.private_key or None, access.certificate or None)
    return grpc.aio.secure_channel(address, credentials, options)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """TLS that reads its files again when they change: certificates are renewed while the proxy runs."""
    files = [path for path in (tls.certificate, tls.private_key, tls.client_ca) if path is not None]
    seen: list[tuple[float, ...]] = []

    def load() -> grpc.ServerCertificateConfiguration | None:
        try:
            times = tuple(path.stat().st_mtime for path in files)
            if seen and seen[-1] == times:
                return None
            pair = (tls.private_key.read_bytes(), tls.certificate.read_bytes())
            found = grpc.ssl_server_certificate_configuration([pair], tls.client_ca.read_bytes() if tls.client_ca else None)
        except OSError as error:
            if seen:  # half-way through being replaced
                return None
            raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from None
        seen.append(times)
        return found

    first = load()
    if first is None:
        raise AssertionError("the first load gives a configuration")
    # None from the fetcher means that nothing changed, which its type does not say.
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], load)
    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=tls.client_ca is not None)


def _service_error(error: grpc.aio.AioRpcError, address: str, namespace: str) -> ServiceError:
    code, said = error.code(), error.details() or ""
    if code == grpc.StatusCode.NOT_FOUND:
        return SetupMissingError(f"Temporal at {address} has no namespace {namespace}", hint="run `stoa setup`")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessDeniedError(f"Temporal at {address} refused us: {said}", hint="check STOA_TEMPORAL_API_KEY or the certificate")
    return ServiceUnavailableError(f"Temporal at {address} cannot be used: {said}", hint="start it, or correct temporal.address")
