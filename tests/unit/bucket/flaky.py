"""A TCP proxy that misbehaves on purpose: it cuts connections, or swallows the reply after the server has answered."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class FlakyProxy:
    """Forwards to a server. `cut_after_bytes` ends a connection after so many bytes of replies, `num_cuts` times in all;
    `swallow` drops that many replies whole.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.cut_after_bytes = 0
        self.num_cuts = 0
        self.swallow = 0
        self.bytes_down = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            while data := _receive(client):
                server.sendall(data)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        sent = 0
        while data := _receive(server):
            with self._lock:
                if self.swallow and b"100 Continue" not in data:
                    self.swallow -= 1
                    break
                cut = self.num_cuts > 0 and sent + len(data) > self.cut_after_bytes
                if cut:
                    data = data[: max(self.cut_after_bytes - sent, 0)]
                    self.num_cuts -= 1
                self.bytes_down += len(data)
            try:
                client.sendall(data)
            except OSError:
                break
            sent += len(data)
            if cut:
                break
        for end in (client, server):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(65536)
    except OSError:
        return b""


@contextmanager
def flaky_proxy(endpoint: str) -> Iterator[FlakyProxy]:
    """A proxy before `endpoint` for the length of the block."""
    proxy = FlakyProxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()
