"""Who is let into a wired set: whoever calls the first Mac and says hello with the start's secret, in a few seconds.

Anybody on the wire can call. A caller has little time and little room for its hello, several are heard beside each other,
and of too many the one that has waited longest is put out: nobody can keep the set's own Macs from being heard.
"""

import hmac
import io
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from stoa.contracts.errors import FormatError, StoaError, WiredError
from worker_mac.cluster.wire import START_BYTES, Channel, Message, header_bytes, read_message

JOIN_SECONDS: Final = 90.0
"""For all Macs to have found each other."""
HELLO_SECONDS: Final = 5.0
"""For a whole hello, however its bytes come."""
HELLO_BYTES: Final = 4096
MAX_CALLERS: Final = 16
"""Heard beside each other."""
_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Caller:
    """Somebody whose hello is on its way; no byte behind it is read."""

    connection: socket.socket
    peer: str
    until: float
    heard: bytearray = field(default_factory=bytearray)

    def hear(self) -> Message | None:
        """The hello, once all of it is there. Raises FormatError for anything else, OSError where the caller is gone."""
        while lacking := self._wanted() - len(self.heard):
            try:
                found = self.connection.recv(lacking)
            except BlockingIOError:
                return None
            if not found:
                raise FormatError("it ended before it had said hello")
            self.heard += found
        source = io.BytesIO(self.heard)

        def read(count: int) -> bytes:
            if count > len(self.heard) - source.tell():
                raise FormatError("arrays in a hello")
            return source.read(count)

        return read_message(read, self.peer, HELLO_BYTES)

    def _wanted(self) -> int:
        if len(self.heard) < START_BYTES:
            return START_BYTES
        return START_BYTES + header_bytes(bytes(self.heard[:START_BYTES]), self.peer, HELLO_BYTES)


def admit(
    address: tuple[str, int], secret: str, size: int, check: Callable[[int, Message], None], seconds: float = JOIN_SECONDS
) -> dict[int, tuple[Channel, Message]]:
    """The other Macs' channels and hellos, by rank, once all have come.

    check: raises WiredError for a Mac that does not fit the others.

    Raises WiredError also for an address that cannot be listened at, and if Macs do not come.
    """
    try:
        listener = socket.create_server(address, backlog=MAX_CALLERS)
    except OSError as error:
        raise WiredError(f"cannot listen at {address[0]}:{address[1]} (error: {error.errno})") from error
    with listener, selectors.DefaultSelector() as selector:
        door = _Door(listener, selector, secret, size, check)
        try:
            door.wait(time.monotonic() + seconds)
        except BaseException:
            for channel, _ in door.found.values():
                channel.close()
            raise
        finally:
            for caller in door.callers:
                caller.connection.close()
        return door.found


class _Door:
    """One listening socket, and who stands before it."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        secret: str,
        size: int,
        check: Callable[[int, Message], None],
    ) -> None:
        self._listener, self._selector, self._secret, self._size, self._check = listener, selector, secret, size, check
        self.callers: list[_Caller] = []
        self.found: dict[int, tuple[Channel, Message]] = {}
        self._told: set[str] = set()
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def wait(self, deadline: float) -> None:
        """Until all have come. Raises WiredError."""
        while len(self.found) < self._size - 1:
            now = time.monotonic()
            if now > deadline:
                raise WiredError(f"of {self._size} Macs only {1 + len(self.found)} came", hint="see `stoa doctor --hosts`")
            for caller in [one for one in self.callers if one.until < now]:
                self._put_out(caller, f"it has not said hello in {HELLO_SECONDS:g} s")
            next_time = min([deadline, *(caller.until for caller in self.callers)])
            for key, _ in self._selector.select(max(0.0, next_time - now) + 0.01):
                if key.fileobj is self._listener:
                    self._take()
                elif key.data in self.callers:  # not put out in this round
                    self._hear(key.data)

    def _take(self) -> None:
        """One more caller."""
        try:
            connection, address = self._listener.accept()
        except OSError:  # gone again before it was taken
            return
        connection.setblocking(False)
        if len(self.callers) >= MAX_CALLERS:
            self._put_out(self.callers[0], f"it has waited longest of {MAX_CALLERS} that have not said hello")
        self.callers.append(_Caller(connection, str(address[0]), time.monotonic() + HELLO_SECONDS))
        self._selector.register(connection, selectors.EVENT_READ, self.callers[-1])

    def _hear(self, caller: _Caller) -> None:
        """What a caller has said by now."""
        try:
            hello = caller.hear()
            if hello is None:
                return
            rank = hello.number("rank")
        except OSError as error:
            self._put_out(caller, str(error))
            return
        except StoaError as error:
            self._put_out(caller, error.message)
            return
        known = hmac.compare_digest(hello.text("secret").encode("utf-8", "replace"), self._secret.encode())
        if not known or rank in self.found or not 0 < rank < self._size:
            self._put_out(caller, "it is none of this set's Macs")
            return
        self._selector.unregister(caller.connection)
        self.callers.remove(caller)
        caller.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.found[rank] = Channel(caller.connection, caller.peer), hello
        self._check(rank, hello)

    def _put_out(self, caller: _Caller, reason: str) -> None:
        if reason not in self._told and len(self._told) < MAX_CALLERS:  # a flood of callers is none of the log
            self._told.add(reason)
            _log.warning("stranger_refused", peer=caller.peer, reason=reason)
        self._selector.unregister(caller.connection)
        self.callers.remove(caller)
        caller.connection.close()
