"""Messages between the first Mac of a wired set and each other one, over one TCP connection: plans, weights, answers, beats.

    bytes 0-3    "STW1"
    bytes 4-7    length H of the header, uint32 little-endian
    bytes 8-     header: JSON object: "op", "fields", "arrays" (a list of [name, numpy type, shape])
    bytes 8+H-   the arrays' bytes, back to back in that order

Whoever waits for a message is told when the other side has been silent for too long. What is said is `lead.py`'s and
`follow.py`'s; hidden states go another way, by `link.py`.
"""

import json
import math
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import FormatError, RankLostError

MAGIC: Final = b"STW1"
MAX_HEADER_BYTES: Final = 1 << 20
MAX_ARRAYS_BYTES: Final = 1 << 31
BEAT_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 20.0
"""A Mac that says nothing for so long is lost: it beats every second, whatever it computes."""
MAX_DIMENSIONS: Final = 8
_KINDS: Final = frozenset("biuf")
_START: Final = struct.Struct("<4sI")
START_BYTES: Final = _START.size
Fields = Mapping[str, object]
Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Message:
    """`op`: what it is. Arrays are read-only."""

    op: str
    fields: Fields = field(default_factory=dict[str, object])
    arrays: Arrays = field(default_factory=dict[str, NDArray[np.generic]])

    def number(self, name: str) -> int:
        """A whole number of the fields. Raises FormatError."""
        found = self.fields.get(name)
        if not isinstance(found, int):
            raise FormatError(f"a message {self.op!r} says {name} is {found!r}, not a whole number")
        return found

    def text(self, name: str) -> str:
        """A text of the fields; "" for none."""
        return str(self.fields.get(name, ""))

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts of the fields."""
        found = self.fields.get(name, ())
        return tuple(str(one) for one in found) if isinstance(found, list | tuple) else ()


class Channel:
    """One connection, for any number of senders and one reader."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """`peer`: who is at the other end, for messages to people."""
        connection.settimeout(SILENT_SECONDS)
        self._connection, self.peer = connection, peer
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self.bytes_sent = 0

    def send(self, message: Message) -> None:
        """Raises RankLostError if the other side is gone, or takes nothing for too long."""
        table = [[name, array.dtype.str, list(array.shape)] for name, array in message.arrays.items()]
        head = json.dumps({"op": message.op, "fields": dict(message.fields), "arrays": table}).encode("utf-8")
        pieces = [_START.pack(MAGIC, len(head)) + head]
        pieces += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in message.arrays.values() if array.size]
        try:
            with self._sending:
                for piece in pieces:
                    self._connection.sendall(piece)
                    self.bytes_sent += len(piece)
        except OSError as error:
            raise RankLostError(f"{self.peer} is gone: {error}") from error

    def receive(self) -> Message:
        """The next message. Raises RankLostError at the end of the connection and after silence, FormatError for nonsense."""
        return read_message(self._read, self.peer)

    def start_beating(self) -> None:
        """Say every second that this side lives, until `close`."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def close(self) -> None:
        """End the connection."""
        self._ended.set()
        self._connection.close()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.send(Message("beat"))
            except RankLostError:
                return

    def _read(self, size: int) -> bytes:
        buffer = bytearray(size)
        view, at = memoryview(buffer), 0
        while at < size:
            try:
                count = self._connection.recv_into(view[at:])
            except TimeoutError:
                raise RankLostError(f"{self.peer} has said nothing for {SILENT_SECONDS:g} s") from None
            except OSError as error:
                raise RankLostError(f"{self.peer} is gone: {error}") from error
            if not count:
                raise RankLostError(f"{self.peer} has ended")
            at += count
        return bytes(buffer)


def header_bytes(start: bytes, peer: str, most_bytes: int = MAX_HEADER_BYTES) -> int:
    """Of the header behind a message's first `START_BYTES`. Raises FormatError for more than may be, and for another language."""
    magic, size = _START.unpack(start)
    if magic != MAGIC or size > most_bytes:
        raise FormatError(f"{peer} speaks another language than this program")
    return size


def read_message(read: Callable[[int], bytes], peer: str, most_header_bytes: int = MAX_HEADER_BYTES) -> Message:
    """One message, of what `read` gives: exactly as many bytes as it is asked for. Raises FormatError for nonsense."""
    size = header_bytes(read(START_BYTES), peer, most_header_bytes)
    try:
        head = json.loads(read(size))
        op, fields = str(head["op"]), dict(head["fields"])
        specs = [(str(name), np.dtype(str(kind)), tuple(int(one) for one in shape)) for name, kind, shape in head["arrays"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, SyntaxError) as error:
        # The last two: of lists in lists without end, and of a numpy type with an open bracket.
        raise FormatError(f"{peer} sent a header that cannot be read: {error}") from error
    sizes = [kind.itemsize * math.prod(shape) for _, kind, shape in specs]
    odd = any(kind.kind not in _KINDS or min(shape, default=0) < 0 or len(shape) > MAX_DIMENSIONS for _, kind, shape in specs)
    if odd or sum(sizes) > MAX_ARRAYS_BYTES:
        raise FormatError(f"{peer} sent arrays of types or sizes that are not sent here")
    arrays = {name: np.frombuffer(read(size), kind).reshape(shape) for (name, kind, shape), size in zip(specs, sizes, strict=True)}
    return Message(op, fields, arrays)
