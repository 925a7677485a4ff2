"""A port that passes bytes on to a server, perhaps out of TLS; for tests that need another way to it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def relay(server: str, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Listens at `host` and passes on to `server` (host:port); gives its own address, and what callers sent so far."""
    seen: list[bytes] = []
    far_host, _, far_port = server.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if keep:
                    seen.append(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(far_host, int(far_port))
        await asyncio.gather(copy(reader, far_writer, True), copy(far_reader, writer, False))

    listening = await asyncio.start_server(answer, host, 0, ssl=tls)
    try:
        yield f"{host}:{listening.sockets[0].getsockname()[1]}", seen
    finally:
        listening.close()
