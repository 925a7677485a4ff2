"""Lines: bytes arrive whole and in order, as late and as slowly as the line says, and not at all while it is cut."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from benchmarks.network import groups_per_hour, home_line
from benchmarks.network_link import Lines, Quality


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def returned(connection: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    back = b""
    while len(back) < len(data):
        back += connection.recv(65536)
    sender.join()
    return back


def test_bytes_come_back_whole_and_are_counted(echo: str) -> None:
    data = bytes(range(256)) * 1000
    with Lines() as lines:
        line = lines.lay()
        with connect(lines.lead(line, echo)) as connection:
            assert returned(connection, data) == data
        assert (line.carried.bytes_up, line.carried.bytes_down) == (len(data), len(data))


def test_round_trip_costs_its_time_for_the_handshake_and_for_the_bytes(echo: str) -> None:
    with Lines() as lines:
        address = lines.lead(lines.lay(Quality(round_trip_seconds=0.3)), echo)
        started = time.monotonic()
        with connect(address) as connection:
            returned(connection, b"x")
            first = time.monotonic() - started
            returned(connection, b"x")
        assert first >= 0.6
        assert time.monotonic() - started >= 0.9


def test_narrow_line_takes_bytes_over_rate(echo: str) -> None:
    with Lines() as lines:
        address = lines.lead(lines.lay(Quality(down_rate=100_000.0)), echo)
        started = time.monotonic()
        with connect(address) as one, connect(address) as other:  # both share the line
            threads = [threading.Thread(target=returned, args=(end, bytes(50_000))) for end in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert time.monotonic() - started >= 0.9


def test_silent_line_holds_bytes_until_it_is_mended(echo: str) -> None:
    with Lines() as lines:
        line = lines.lay()
        with connect(lines.lead(line, echo)) as connection:
            assert returned(connection, b"before") == b"before"
            lines.cut(line, "silent")
            time.sleep(0.2)
            connection.sendall(b"after")
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(16)
            lines.cut(line, "")
            connection.settimeout(20)
            assert connection.recv(16) == b"after"


def test_refused_line_resets_old_and_new_connections(echo: str) -> None:
    with Lines() as lines:
        line = lines.lay()
        address = lines.lead(line, echo)
        with connect(address) as connection:
            assert returned(connection, b"before") == b"before"
            lines.cut(line, "refused")
            with pytest.raises(ConnectionError):
                while connection.recv(16):
                    pass
                raise ConnectionResetError  # an orderly end counts as well
            with pytest.raises(ConnectionError), connect(address) as late:  # or it is refused while it connects
                late.sendall(b"x")
                if not late.recv(16):
                    raise ConnectionResetError
            lines.cut(line, "")
        with connect(address) as connection:
            assert returned(connection, b"again") == b"again"


def test_line_drops_and_stalls_by_chance(echo: str) -> None:
    with Lines() as lines:
        line = lines.lay(Quality(stall_every_seconds=0.05, stall_seconds=0.01, drop_every_seconds=0.05, seed=1))
        deadline = time.monotonic() + 20
        while not (line.carried.num_drops > 2 and line.carried.num_stalls > 2):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_home_line_takes_of_compressed_time_what_the_real_one_takes_of_real_time() -> None:
    line = home_line(36_000_000, 0)
    # 8.82 GB at 12.5 MB/s take 705.6 s of real time; sweeps of 20 s stand for 180 s.
    assert 36e6 / line.down_rate == pytest.approx(705.6 / 9)
    assert line.down_rate / line.up_rate == pytest.approx(5.0)
    assert line.round_trip_seconds == 0.15


def test_groups_per_hour_are_counted_between_the_ends_of_sweeps() -> None:
    sweeps = [{"ended_at": at, "groups": 4} for at in (140.0, 100.0, 120.0)]
    assert groups_per_hour(sweeps) == 3600 * 8 / 40
    assert groups_per_hour(sweeps[:1]) == 0.0
