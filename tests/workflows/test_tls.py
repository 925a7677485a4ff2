"""TLS, client certificates and API keys: against a TLS end before a real Temporal, and against the proxy's own TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from activities.connection import connect, connect_forever, require_namespace, setup_namespace
from cli.proxy import Listening, Proxy, Tls
from cli.temporal import Control
from stoa.bucket.invite import BucketDoor, Invite, TemporalDoor, write_invite
from stoa.bucket.manifest import Signer
from stoa.bucket.revocations import Revoked
from stoa.bucket.store import Store
from stoa.config.load import temporal_access
from stoa.config.run import Temporal
from stoa.contracts.access import PLAIN, Access
from stoa.contracts.errors import RunMissingError, ServiceUnavailableError
from tests.certificates import Authority, Pair
from tests.relay import relay
from tests.servers import TemporalServer

SIGNER = Signer.from_seed(bytes(range(32)))


@asynccontextmanager
async def tls_end(server: str, pair: Pair, client_ca: Path | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A port that speaks TLS and passes plain bytes on to `server`; what callers sent is kept."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.private_key)
    context.set_alpn_protocols(["h2"])
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    async with relay(server, tls=context) as (address, seen):
        yield int(address.rpartition(":")[2]), seen


def settings_of(port: int, server: TemporalServer, *, name: str = "") -> Temporal:
    return Temporal(
        address=f"127.0.0.1:{port}", namespace_core=server.namespace, namespace_mac=server.namespace, tls=True, tls_server_name=name
    )


async def test_tls_with_an_authority_of_ones_own(temporal_server: TemporalServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("temporal.test", "127.0.0.1")
    async with tls_end(temporal_server.address, pair) as (port, seen):
        access = temporal_access(settings_of(port, temporal_server), environ={"STOA_TEMPORAL_CA": str(authority.certificate)})
        client = await connect_forever(f"127.0.0.1:{port}", temporal_server.namespace, access=access, give_up_seconds=20)
        assert client.namespace == temporal_server.namespace
        await setup_namespace(f"127.0.0.1:{port}", temporal_server.namespace, access=access)
        assert seen
        for wrong in (PLAIN, Access(tls=True), Access(tls=True, ca=Authority(tmp_path, "another").certificate.read_bytes())):
            with pytest.raises(ServiceUnavailableError):
                await connect(f"127.0.0.1:{port}", temporal_server.namespace, access=wrong)


async def test_the_name_of_the_certificate_may_be_given(temporal_server: TemporalServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with tls_end(temporal_server.address, authority.pair("frontend.test")) as (port, _):
        environ = {"STOA_TEMPORAL_CA": str(authority.certificate)}
        with pytest.raises(ServiceUnavailableError):
            access = temporal_access(settings_of(port, temporal_server), environ=environ)
            await connect(f"127.0.0.1:{port}", temporal_server.namespace, access=access)
        access = temporal_access(settings_of(port, temporal_server, name="frontend.test"), environ=environ)
        await connect(f"127.0.0.1:{port}", temporal_server.namespace, access=access)


async def test_a_client_certificate_is_shown_where_one_is_wanted(temporal_server: TemporalServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mine, theirs = authority.pair("worker"), authority.pair("temporal.test", "127.0.0.1")
    async with tls_end(temporal_server.address, theirs, authority.certificate) as (port, _):
        environ = {"STOA_TEMPORAL_CA": str(authority.certificate)}
        with pytest.raises(ServiceUnavailableError):
            access = temporal_access(settings_of(port, temporal_server), environ=environ)
            await connect(f"127.0.0.1:{port}", temporal_server.namespace, access=access)
        environ |= {"STOA_TEMPORAL_CERT": str(mine.certificate), "STOA_TEMPORAL_KEY": str(mine.private_key)}
        access = temporal_access(settings_of(port, temporal_server), environ=environ)
        await connect(f"127.0.0.1:{port}", temporal_server.namespace, access=access)


class Listener(grpc.GenericRpcHandler):
    """Answers every call with an empty message, and keeps who called what."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        metadata = dict(handler_call_details.invocation_metadata)
        self.heard.append((handler_call_details.method.rpartition("/")[2], metadata.get("authorization", "")))

        async def answer(_data: bytes, _context: object) -> bytes:
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


async def test_an_api_key_goes_with_every_call(tmp_path: Path) -> None:
    """The dev server takes any key, so that a listener stands in its place."""
    authority, listener = Authority(tmp_path), Listener()
    pair = authority.pair("temporal.test", "127.0.0.1")
    server = grpc.aio.server(handlers=(listener,))
    files = [(pair.private_key.read_bytes(), pair.certificate.read_bytes())]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(files))
    await server.start()
    try:
        environ = {"STOA_TEMPORAL_CA": str(authority.certificate), "STOA_TEMPORAL_API_KEY": "a-key"}
        access = temporal_access(Temporal(address=f"127.0.0.1:{port}", tls=True), environ=environ)
        client = await connect(f"127.0.0.1:{port}", "default", access=access)
        await require_namespace(client)
    finally:
        await server.stop(0)
    assert listener.heard == [("GetSystemInfo", "Bearer a-key"), ("DescribeNamespace", "Bearer a-key")]


async def test_the_proxy_shows_its_own_key_and_no_macs_pass(store: Store) -> None:
    listener = Listener()
    upstream = grpc.aio.server(handlers=(listener,))
    port = upstream.add_insecure_port("127.0.0.1:0")
    await upstream.start()
    proxy = Proxy("demo", SIGNER.public_key, Revoked(store, "demo", SIGNER.public_key), Listening("127.0.0.1:0"))
    try:
        await proxy.start(f"127.0.0.1:{port}", "mac", Access(api_key="the-proxys"))
        door = TemporalDoor(proxy.address, "mac")
        _, invite = write_invite(
            SIGNER, "demo", "mac-1", seconds=600, temporal=door, bucket=BucketDoor("http://b:1", "b", "auto", "k", "s")
        )
        await require_namespace(await connect(proxy.address, "mac", access=invite.access))
    finally:
        await proxy.stop()
        await upstream.stop(0)
    assert {shown for _, shown in listener.heard} == {"Bearer the-proxys"}
    assert len(listener.heard) == 3


@asynccontextmanager
async def proxy_with(server: TemporalServer, store: Store, tls: Tls, upstream: tuple[str, Access]) -> AsyncIterator[Proxy]:
    proxy = Proxy("demo", SIGNER.public_key, Revoked(store, "demo", SIGNER.public_key), Listening("127.0.0.1:0", tls))
    await proxy.start(upstream[0], server.namespace, upstream[1])
    try:
        yield proxy
    finally:
        await proxy.stop()


def invite_to(proxy: Proxy, server: TemporalServer, ca: Path | None) -> Invite:
    door = TemporalDoor(f"127.0.0.1:{proxy.port}", server.namespace, tls=True, ca=ca.read_text() if ca else "")
    return write_invite(
        SIGNER, "demo", "mac-1", seconds=600, temporal=door, bucket=BucketDoor("http://127.0.0.1:1", "b", "auto", "k", "s")
    )[1]


async def test_the_proxy_speaks_tls_on_both_sides(temporal_server: TemporalServer, store: Store, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    front, back, own = authority.pair("proxy.test", "127.0.0.1"), authority.pair("temporal.test"), authority.pair("proxy-client")
    async with tls_end(temporal_server.address, back, authority.certificate) as (port, _):
        upstream = Access(
            True, "temporal.test", authority.certificate.read_bytes(), own.certificate.read_bytes(), own.private_key.read_bytes()
        )
        files = Tls(front.certificate, front.private_key)
        async with proxy_with(temporal_server, store, files, (f"127.0.0.1:{port}", upstream)) as proxy:
            invite = invite_to(proxy, temporal_server, authority.certificate)
            await connect_forever(invite.temporal.address, temporal_server.namespace, access=invite.access, give_up_seconds=10)
            stranger = invite_to(proxy, temporal_server, Authority(tmp_path, "another").certificate)
            for access in (stranger.access, replace(invite.access, tls=False)):
                with pytest.raises(ServiceUnavailableError):
                    await connect(invite.temporal.address, temporal_server.namespace, access=access)
            # A renewed certificate is taken up without a new start.
            renewed = Authority(tmp_path, "renewed")
            pair = renewed.pair("proxy.test", "127.0.0.1")
            assert pair.certificate == front.certificate
            invite = invite_to(proxy, temporal_server, renewed.certificate)
            await connect_forever(invite.temporal.address, temporal_server.namespace, access=invite.access, give_up_seconds=10)


async def test_the_proxy_may_want_certificates_of_its_callers(temporal_server: TemporalServer, store: Store, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    front, friend = authority.pair("proxy.test", "127.0.0.1"), authority.pair("friend")
    files = Tls(front.certificate, front.private_key, authority.certificate)
    async with proxy_with(temporal_server, store, files, (temporal_server.address, PLAIN)) as proxy:
        invite = invite_to(proxy, temporal_server, authority.certificate)
        with pytest.raises(ServiceUnavailableError):
            await connect(invite.temporal.address, temporal_server.namespace, access=invite.access)
        known = replace(invite.access, certificate=friend.certificate.read_bytes(), private_key=friend.private_key.read_bytes())
        await connect(invite.temporal.address, temporal_server.namespace, access=known)


def test_the_command_line_uses_the_same_settings(temporal_server: TemporalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("temporal.test", "127.0.0.1")
    monkeypatch.setenv("STOA_TEMPORAL_CA", str(authority.certificate))

    async def ask() -> None:
        async with tls_end(temporal_server.address, pair) as (port, _):
            await asyncio.to_thread(look, port)

    def look(port: int) -> None:
        with Control(settings_of(port, temporal_server)) as control, pytest.raises(RunMissingError):
            control.status("nowhere")

    asyncio.run(ask())
