"""A path to a server that can forget its connections, which stay open with nothing passing any more, or be cut and mended."""

import asyncio
from types import TracebackType
from typing import Self


class Relay:
    """Copies bytes both ways."""

    def __init__(self, server: str) -> None:
        self._host, port = server.rsplit(":", 1)
        self._port = int(port)
        self._gates: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.address = ""

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget_connections(self) -> None:
        """Nothing passes on the connections there are."""
        for gate in self._gates:
            gate.clear()
        self._gates.clear()

    def cut(self) -> None:
        """End the connections there are, and every new one at once, until `mend`."""
        self._is_cut = True
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def mend(self) -> None:
        """New connections work again."""
        self._is_cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        gate = asyncio.Event()
        gate.set()
        self._gates.append(gate)
        from_server, to_server = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, to_server}
        for source, target in ((reader, to_server), (from_server, writer)):
            task = asyncio.create_task(self._copy(source, target, gate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        try:
            while data := await source.read(65536):
                await gate.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()
