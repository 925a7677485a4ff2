"""Who is let into a wired set, and how it ends: callers that only hold the line, Macs that go when all were asked to."""

import io
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from stoa.contracts.errors import StoaError, WiredError
from tests.servers import free_ports
from worker_mac.cluster import admission, launch
from worker_mac.cluster import rank as ranks
from worker_mac.cluster.lead import Ranks
from worker_mac.cluster.wire import Channel, Message

SECRET = "s3"


class Door:
    """An admission that goes on, at `address`."""

    def __init__(self, size: int = 2, seconds: float = 30.0) -> None:
        self.address = ("127.0.0.1", free_ports(1)[0])
        self.found: dict[int, tuple[Channel, Message]] = {}
        self.fault: StoaError | None = None
        self._waiting = threading.Thread(target=self._wait, args=(size, seconds))
        self._waiting.start()

    def _wait(self, size: int, seconds: float) -> None:
        try:
            self.found = admission.admit(self.address, SECRET, size, lambda *_: None, seconds)
        except StoaError as error:
            self.fault = error

    def call(self) -> socket.socket:
        deadline = time.monotonic() + 20
        while True:
            try:
                return socket.create_connection(self.address, timeout=20)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def end(self) -> None:
        self._waiting.join(40)
        assert not self._waiting.is_alive()
        for channel, _ in self.found.values():
            channel.close()


@contextmanager
def door(size: int = 2, seconds: float = 30.0) -> Iterator[Door]:
    made = Door(size, seconds)
    try:
        yield made
    finally:
        made.end()


def hello(rank: object) -> bytes:
    """By hand, as the table of `wire.py` has it."""
    head = json.dumps({"op": "hello", "fields": {"secret": SECRET, "rank": rank}, "arrays": []}).encode()
    return b"STW1" + len(head).to_bytes(4, "little") + head


def test_strangers_that_only_hold_the_line_keep_no_mac_out() -> None:
    with door(3) as at:
        strangers = [at.call() for _ in range(3 * admission.MAX_CALLERS)]
        for one in strangers[-5:]:
            one.sendall(b"STW1\x40\x00\x00\x00{")  # the rest comes a byte a second, if ever
        friends = [at.call() for _ in range(2)]
        for rank, friend in enumerate(friends, 1):
            for byte in hello(rank):  # in pieces, as a wire may deliver it
                friend.sendall(bytes([byte]))
        at.end()
        assert at.fault is None and sorted(at.found) == [1, 2]
        assert all(one.recv(1) == b"" for one in strangers)
        for one in (*strangers, *friends):
            one.close()


def test_a_caller_has_a_few_seconds_in_all_however_its_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HELLO_SECONDS", 0.3)
    with door() as at:
        dripping = at.call()
        refused = False
        for byte in hello(1)[:-1] * 10:
            try:
                dripping.sendall(bytes([byte]))
            except OSError:
                refused = True
                break
            time.sleep(0.05)
        assert refused, "it was heard as long as it liked"
        dripping.close()
        with at.call() as friend:
            friend.sendall(hello(1))
            at.end()
        assert at.fault is None and list(at.found) == [1]


@pytest.mark.parametrize(
    "said",
    [
        b"STW1" + (admission.HELLO_BYTES + 1).to_bytes(4, "little"),
        b"STW1" + len(head := b'{"op": "hello", "fields": {"rank": 1}, "arrays": [["a", "<f4", [1]]]}').to_bytes(4, "little") + head,
        hello(2),
        hello(0),
        hello(1).replace(b"s3", b"s4"),
        b"",
    ],
)
def test_who_is_none_of_the_sets_macs_is_put_out_and_the_door_stays_open(said: bytes) -> None:
    with door(2, 20.0) as at:
        with at.call() as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
        with at.call() as friend:
            friend.sendall(hello(1))
            at.end()
        assert at.fault is None and list(at.found) == [1]


def test_strangers_do_not_fill_the_log_whatever_they_say() -> None:
    with capture_logs() as logs, door() as at:
        for number in range(3 * admission.MAX_CALLERS):
            with at.call() as stranger:
                stranger.sendall(hello(f"the {number}th"))
                assert stranger.recv(1) == b""
        with at.call() as friend:
            friend.sendall(hello(1))
            at.end()
        assert at.fault is None and 0 < len(logs) <= admission.MAX_CALLERS


def test_a_mac_says_hello_as_soon_as_it_is_heard() -> None:
    """What it says was measured before: the seconds that a caller has are for the wire."""
    said = Message("hello", {"secret": SECRET, "rank": 1, "limit": 0, "bandwidth": 7})
    with door() as at:
        channel = ranks.call_in(at.address, said)
        at.end()
        assert at.fault is None and at.found[1][1].fields == said.fields
        channel.close()


def test_what_follows_a_hello_is_for_whoever_reads_the_channel() -> None:
    with door() as at, at.call() as friend:
        after = b'{"op": "beat", "fields": {}, "arrays": []}'
        friend.sendall(hello(1) + b"STW1" + len(after).to_bytes(4, "little") + after)
        at._waiting.join(20)
        channel, said = at.found[1]
        assert said.number("rank") == 1 and channel.receive().op == "beat"


def test_macs_that_do_not_come_and_one_that_does_not_fit_are_told_and_nobody_is_left_waiting() -> None:
    with door(3, 0.5) as at, at.call() as friend:
        friend.sendall(hello(1))
        at.end()
        assert isinstance(at.fault, WiredError) and "of 3 Macs only 2 came" in at.fault.message
        assert friend.recv(1) == b""


def test_a_mac_that_goes_once_the_set_was_asked_to_end_is_no_loss() -> None:
    for is_ending, event, level in ((True, "wired_set_ended", "info"), (False, "wired_set_lost", "error")):
        here, there = socket.socketpair()
        lost: list[StoaError] = []
        with capture_logs() as logs:
            others = Ranks([Channel(here, "Mac 1")], lost.append, is_ending=lambda is_ending=is_ending: is_ending)
            there.close()
            deadline = time.monotonic() + 20
            while not lost and time.monotonic() < deadline:
                time.sleep(0.01)
        assert len(lost) == 1 and [(one["event"], one["log_level"]) for one in logs] == [(event, level)]
        others.close()


def test_told_bye_the_others_have_ended_before_the_first_does() -> None:
    here, there = socket.socketpair()
    other = Channel(there, "the first Mac")
    said: list[str] = []

    def obey() -> None:
        while not said or said[-1] == "beat":
            said.append(other.receive().op)
        time.sleep(0.2)
        said.append("done")
        other.close()

    threading.Thread(target=obey).start()
    with capture_logs() as logs:
        Ranks([Channel(here, "Mac 1")], lambda _: None).close()
    assert said[-2:] == ["bye", "done"] and logs == []


def test_only_the_first_mac_ends_at_the_word_the_others_await_its_bye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BYE_SECONDS", 1e6)
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        first, other = ranks.Asked(), ranks.Asked()
        other.await_bye()
        ranks._watch_input(io.StringIO("end\n"), other.end)
        assert other.to_end and not told
        ranks._watch_input(io.StringIO("end\n"), first.end)
        assert first.to_end and told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_ranks_say_is_taken_to_its_end_where_nobody_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    seen: list[str] = []
    with os.fdopen(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr("sys.stderr", closed)
        launch._pump(io.BytesIO(b"one\ntwo\n"), seen)
        monkeypatch.undo()
        with open(os.devnull, "w", encoding="utf-8") as nowhere:  # for what it still holds
            os.dup2(nowhere.fileno(), closed.fileno())
    assert seen == ["one", "two"]


def test_a_terminal_shows_what_ranks_say_in_words() -> None:
    waits = {"event": "worker_waiting", "level": "info", "reason": "no bucket", "rank": 0}
    assert launch.shown_of(json.dumps(waits))[8:] == "  waits: no bucket"
    assert launch.shown_of(json.dumps({"event": "layers_taken", "level": "info", "first": 3})) == ""
    for text in ("Traceback (most recent call last):", "3", '{"no": "event"}', "[1]", "[" * 100_000):
        assert launch.shown_of(text) == text
    assert os.linesep not in launch.shown_of(json.dumps(waits))
