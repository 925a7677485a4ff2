"""Home internet lines, before real servers: narrow, far, silent now and then, dropped now and then, or cut on command.

A line carries TCP bytes of any protocol and understands none. All connections of one machine share its line, whatever
servers they lead to. The lines of a benchmark run on one event loop in a thread of their own.
"""

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

_CHUNK_BYTES: Final = 16 << 10
_BURST_SECONDS: Final = 0.05
"""What a modem's own buffer evens out."""
Cut = Literal["", "silent", "refused"]
"""silent: nothing passes, nobody is told. refused: every connection is reset, and so are new ones."""


@dataclass(frozen=True, slots=True)
class Quality:
    """A line. Rates are bytes a second, 0 for none; `every` times are means of an exponential distribution, 0 for never."""

    down_rate: float = 0.0
    up_rate: float = 0.0
    round_trip_seconds: float = 0.0
    stall_every_seconds: float = 0.0
    stall_seconds: float = 0.0
    drop_every_seconds: float = 0.0
    """All connections of the line are reset."""
    seed: int = 0


@dataclass(slots=True)
class Carried:
    """What a line did."""

    bytes_up: int = 0
    bytes_down: int = 0
    num_connections: int = 0
    num_drops: int = 0
    num_stalls: int = 0


class _Pace:
    """Lets `rate` bytes a second through."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free_at = rate, 0.0

    async def take(self, num_bytes: int) -> None:
        if self._rate:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_SECONDS) + num_bytes / self._rate
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)


@dataclass
class Line:
    """One machine's line. `cut` may be set from any thread; `carried` may be read from any."""

    quality: Quality = Quality()
    carried: Carried = field(default_factory=Carried)
    _cut: Cut = ""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._up, self._down = _Pace(self.quality.up_rate), _Pace(self.quality.down_rate)
        self._passable = asyncio.Event()
        self._passable.set()
        self._chance = random.Random(self.quality.seed)

    async def live(self) -> None:
        """Stall and drop by chance, for ever."""
        quality = self.quality
        moments: list[tuple[float, Callable[[], Coroutine[Any, Any, None]]]] = []
        if quality.stall_every_seconds:
            moments.append((quality.stall_every_seconds, self._stall))
        if quality.drop_every_seconds:
            moments.append((quality.drop_every_seconds, self._drop))
        await asyncio.gather(*(self._repeat(every, act) for every, act in moments))

    async def _repeat(self, every: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / every))
            await act()

    async def _stall(self) -> None:
        self.carried.num_stalls += 1
        self._passable.clear()
        await asyncio.sleep(self.quality.stall_seconds)
        if self._cut != "silent":
            self._passable.set()

    async def _drop(self) -> None:
        self.carried.num_drops += 1
        self.reset()

    def set_cut(self, cut: Cut) -> None:
        """On the loop's thread: begin or end a cut."""
        self._cut = cut
        if cut == "silent":
            self._passable.clear()
        else:
            self._passable.set()
        if cut == "refused":
            self.reset()

    def reset(self) -> None:
        """Reset every connection."""
        for writer in list(self._open):
            _abort(writer)

    async def serve(self, target: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the machine to `target`."""
        self.carried.num_connections += 1
        if self._cut == "refused":
            _abort(writer)
            return
        self._open.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            await asyncio.sleep(self.quality.round_trip_seconds)  # of the handshake
            await self._passable.wait()
            from_server, upstream = await asyncio.open_connection(*target)
            self._open.add(upstream)
            both = (self._carry(reader, upstream, self._up, up=True), self._carry(from_server, writer, self._down, up=False))
            await asyncio.gather(*both)
        except (OSError, asyncio.IncompleteReadError):
            pass  # whichever end left
        finally:
            for end in (writer, upstream):
                if end is not None:
                    self._open.discard(end)
                    with suppress(OSError):
                        end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: _Pace, *, up: bool) -> None:
        """One direction: what is read leaves at the line's rate and arrives half a round trip later, in order."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.ensure_future(self._arrive(under_way, writer))
        try:
            while data := await reader.read(_CHUNK_BYTES):
                await pace.take(len(data))
                if up:
                    self.carried.bytes_up += len(data)
                else:
                    self.carried.bytes_down += len(data)
                under_way.put_nowait((time.monotonic() + self.quality.round_trip_seconds / 2, data))
                if arriving.done():
                    break
            under_way.put_nowait((0.0, b""))
            await arriving
        finally:
            arriving.cancel()

    async def _arrive(self, under_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await under_way.get()
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await self._passable.wait()
            writer.write(data)
            await writer.drain()


class Lines:
    """All lines of a benchmark, on one thread. Use as a context."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._living: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def lay(self, quality: Quality = Quality()) -> Line:
        """A new line."""
        line = Line(quality)
        self._call(self._start(line))
        return line

    def lead(self, line: Line, target: str) -> str:
        """An address that leads to `target` (host:port) over this line."""
        host, _, port = target.rpartition(":")
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._call(self._listen(line, (host, int(port)), listener))
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def cut(self, line: Line, cut: Cut) -> None:
        """Cut a line, or with "" mend it."""
        self._loop.call_soon_threadsafe(line.set_cut, cut)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        while left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _start(self, line: Line) -> None:
        self._living.append(asyncio.ensure_future(line.live()))

    async def _listen(self, line: Line, target: tuple[str, int], listener: socket.socket) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await line.serve(target, reader, writer)

        await asyncio.start_server(serve, sock=listener)


def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection the hard way."""
    end = writer.get_extra_info("socket")
    if end is not None:
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
