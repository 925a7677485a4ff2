"""A child process that must be there as long as we are: started again when it ends, told to end when we do.

The child reads its standard input; end of file there means that its parent is gone, however the parent went.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

import structlog

FIRST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 30.0
HEALTHY_SECONDS: Final = 60.0
"""A child that lived this long is started again with the shortest wait."""
END_SECONDS: Final = 15.0
"""How long a child may take to end before it is killed."""

_log = structlog.get_logger(__name__)


async def keep_alive(command: Sequence[str], stop: asyncio.Event) -> None:
    """Run `command` again and again until `stop` is set; then close its input and wait for its end."""
    name = _name(command)
    wait_seconds = FIRST_WAIT_SECONDS
    while not stop.is_set():
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)
        _log.info("child_started", command=name, pid=process.pid)
        ended = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await _end(process)
        if stop.is_set():
            return
        if time.monotonic() - started > HEALTHY_SECONDS:
            wait_seconds = FIRST_WAIT_SECONDS
        _log.warning("child_ended", command=name, code=process.returncode, wait_seconds=wait_seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), wait_seconds)
        wait_seconds = min(wait_seconds * 2, LONGEST_WAIT_SECONDS)


def _name(command: Sequence[str]) -> str:
    """The module that Python runs, else the program."""
    return command[command.index("-m") + 1] if "-m" in command[:-1] else command[0]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the child's input, then wait for it; kill it if it does not end."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        _log.warning("child_killed", pid=process.pid)
        process.kill()
        await process.wait()
