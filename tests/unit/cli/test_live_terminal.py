"""The live view on a real terminal: Ctrl-C and SIGTERM end it, and the terminal is given back as it was."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

PROGRAM = """
import signal
from cli.live.app import Live
from cli.main import _interrupt
from tests.unit.cli.test_live import Fleet, running
signal.signal(signal.SIGTERM, _interrupt)
try:
    Live(Fleet(running()), steps=8, every=3600.0).run()
except KeyboardInterrupt:
    raise SystemExit(3)
"""


def read_until(terminal: int, true: Callable[[bytes], bool], seconds: float) -> bytes:
    seen = b""
    deadline = time.monotonic() + seconds
    while not true(seen) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
    return seen


@pytest.mark.parametrize(("end", "code"), [("ctrl-c", 0), ("q", 0), ("SIGTERM", 3)])
def test_ends_promptly_and_leaves_the_terminal_as_it_was(end: str, code: int) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    try:
        seen = read_until(ours, lambda text: b"mac-2" in text, 40)
        assert b"mac-2" in seen and b"\x1b[?1049h" in seen
        if end == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            os.write(ours, b"\x03" if end == "ctrl-c" else b"q")
        rest = read_until(ours, lambda _: False, 3) if process.poll() is None else b""
        rest += read_until(ours, lambda text: b"\x1b[?1049l" in text, 10)
        assert process.wait(10) == code, rest[-500:]
        assert b"\x1b[?1049l" in rest, "the screen that was there before comes back"
    finally:
        process.kill()
        process.wait()
        os.close(ours)
