"""A link that misbehaves, before a real server: narrow, slow, cut, silent; it can also answer by itself, and speak TLS.

Requests are parsed only as far as it takes to tell them apart: each is recorded, and may be answered here instead of
being passed on. Replies are bytes: paced, delayed, cut after a random number of them, or stopped without a word. It
runs on an event loop in a thread of its own, or with `in_process` in a process of its own, so that a benchmark does
not pay for its link.
"""

import asyncio
import multiprocessing
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

_CHUNK_BYTES: Final = 64 << 10
_BURST_SECONDS: Final = 0.1
"""What a link's own buffer holds: so much lost time is made up for, no more."""
_MAX_HEAD_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with the link; 0 means nothing. Rates are in bytes a second, of replies where they do not say else."""

    connection_rate: float = 0.0
    link_rate: float = 0.0
    upload_rate: float = 0.0
    """Of the bodies of all requests together."""
    pause_after_bytes: float = 0.0
    """So much of a request's body is taken, and then nothing for a while; once."""
    pause_seconds: float = 0.0
    latency_seconds: float = 0.0
    """Before the first byte of each reply."""
    reset_every_bytes: float = 0.0
    """Mean of the exponentially distributed bytes after which a connection is cut."""
    stall_fraction: float = 0.0
    """Share of cuts that are silence instead of a reset."""
    garbage_every_bytes: float = 0.0
    """Mean bytes between two flipped bits in bodies: reply bytes after the first 4 kB of a connection."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it came. `headers` have lower-case names; `at` is monotonic seconds."""

    method: str
    target: str
    headers: dict[str, str]
    num_body_bytes: int
    at: float


@dataclass(slots=True)
class Counts:
    """What the link did."""

    bytes_down: int = 0
    num_connections: int = 0
    num_resets: int = 0
    num_stalls: int = 0
    cpu_seconds: float = 0.0
    """Of the link's process, where it has one of its own."""


Answer = Callable[[Seen], "bytes | None"]
"""The whole reply to a request, or None to pass the request on."""


def reply(status: int, code: str = "", headers: str = "") -> bytes:
    """An S3 error reply."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode() if code else b""
    head = f"HTTP/1.1 {status} {code or 'OK'}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


class _Bucket:
    """A token bucket that lets `rate` bytes a second through, with a small burst after a pause."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def take(self, num_bytes: int) -> None:
        if self._rate:
            now = time.monotonic()
            self._free_at = max(self._free_at or now, now - _BURST_SECONDS) + num_bytes / self._rate
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)


@dataclass
class FaultProxy:
    """The link. `answer` may be set at any time; `seen` and `counts` may be read at any time."""

    server: str
    faults: Faults = Faults()
    tls: ssl.SSLContext | None = None
    answer: Answer | None = None
    seen: list[Seen] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    def start(self) -> str:
        """Begin to listen; returns the endpoint."""
        self._chance = random.Random(self.faults.seed)
        self._pauses = self.faults.pause_seconds > 0
        self._link, self._uplink = _Bucket(self.faults.link_rate), _Bucket(self.faults.upload_rate)
        self._loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        scheme = "https" if self.tls else "http"
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name="proxy", daemon=True)
        self._thread.start()
        ready.wait(10.0)
        return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"

    def stop(self) -> None:
        """End every connection and the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=listener, ssl=self.tls, limit=1 << 18))
        ready.set()
        self._loop.run_forever()
        server.close()
        while left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client, with one of its own to the server."""
        self.counts.num_connections += 1
        writer.transport.set_write_buffer_limits(high=1, low=0)  # `drain` then waits until the kernel has it all
        parts = urlsplit(self.server)
        up: asyncio.Task[None] | None = None
        try:
            from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 18)
            asked: asyncio.Queue[float] = asyncio.Queue()
            try:
                up = asyncio.create_task(self._up(reader, writer, to_server, asked))
                await self._down(from_server, writer, asked)
            finally:
                to_server.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # whichever end left, or the proxy stops
        finally:
            if up is not None:
                up.cancel()
            with suppress(OSError):
                writer.close()

    async def _up(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_server: asyncio.StreamWriter, asked: "asyncio.Queue[float]"
    ) -> None:
        """Requests, one after another. Ends the connection when the client does, or after an answer made here."""
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")[:-2]
                method, target, _ = first.split(" ", 2)
                headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                left = int(headers.get("content-length", "0"))
                seen = Seen(method, target, headers, left, time.monotonic())
                self.seen.append(seen)
                answered = self.answer(seen) if self.answer is not None else None
                if answered is not None:
                    if "expect" not in headers:
                        await reader.readexactly(left)
                    writer.write(answered.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                    await writer.drain()
                    break
                await asked.put(seen.at)
                to_server.write(head)
                while left:
                    data = await reader.read(min(_CHUNK_BYTES, left))
                    if not data:
                        break
                    left -= len(data)
                    await self._uplink.take(len(data))
                    if self._pauses and seen.num_body_bytes - left >= self.faults.pause_after_bytes:
                        self._pauses = False
                        await asyncio.sleep(self.faults.pause_seconds)
                    to_server.write(data)
                    await to_server.drain()
        to_server.close()
        with suppress(OSError):
            writer.close()

    async def _down(self, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: "asyncio.Queue[float]") -> None:
        """Replies as bytes, with all that is wrong with the link."""
        faults, chance, own = self.faults, self._chance, _Bucket(self.faults.connection_rate)
        until_cut = chance.expovariate(1 / faults.reset_every_bytes) if faults.reset_every_bytes else float("inf")
        until_flip = 4096 + chance.expovariate(1 / faults.garbage_every_bytes) if faults.garbage_every_bytes else float("inf")
        sent = 0
        while data := await from_server.read(_CHUNK_BYTES):
            if faults.latency_seconds and not asked.empty():
                begun = asked.get_nowait()
                await asyncio.sleep(max(0.0, begun + faults.latency_seconds - time.monotonic()))
            cut = sent + len(data) >= until_cut
            data = data[: max(0, int(until_cut) - sent)] if cut else data
            if sent + len(data) > until_flip:
                data = data[:-1] + bytes([data[-1] ^ 1])
                until_flip = sent + len(data) + chance.expovariate(1 / faults.garbage_every_bytes)
            await own.take(len(data))
            await self._link.take(len(data))
            writer.write(data)
            await writer.drain()
            sent += len(data)
            self.counts.bytes_down += len(data)
            if cut:
                if chance.random() < faults.stall_fraction:
                    self.counts.num_stalls += 1
                    await asyncio.sleep(3600.0)
                self.counts.num_resets += 1
                _reset(writer)
                return


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection the hard way, once what was written has left."""
    end = writer.get_extra_info("socket")
    if end is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def fault_proxy(server: str, faults: Faults = Faults(), *, tls: ssl.SSLContext | None = None) -> Iterator[tuple[FaultProxy, str]]:
    """The link, in a thread, and its endpoint."""
    proxy = FaultProxy(server, faults, tls)
    endpoint = proxy.start()
    try:
        yield proxy, endpoint
    finally:
        proxy.stop()


@contextmanager
def in_process(server: str, faults: Faults) -> Iterator[tuple[Callable[[], Counts], str]]:
    """The link, in a process of its own: how to ask what it did, and its endpoint."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_alone, args=(theirs, server, faults), daemon=True)
    process.start()
    theirs.close()  # so that a process that dies is the end of the pipe
    try:
        endpoint = ours.recv()

        def counts() -> Counts:
            ours.send("counts")
            return ours.recv()

        yield counts, endpoint
    finally:
        with suppress(OSError):
            ours.send("stop")
        process.join(10.0)
        if process.is_alive():
            process.kill()


def _serve_alone(pipe: Any, server: str, faults: Faults) -> None:
    """Body of the process: answers `counts` until `stop`, or until its parent has ended."""
    with fault_proxy(server, faults) as (proxy, endpoint):
        pipe.send(endpoint)
        with suppress(EOFError):
            while pipe.recv() == "counts":
                pipe.send(replace(proxy.counts, cpu_seconds=time.process_time()))
