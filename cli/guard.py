"""Ends the processes of a command that died without ending them itself. Run as a script, standard library only.

It reads `+PID` and `-PID` lines, each the leader of a process group, until its standard input closes: that happens
when the command ends, however it ends. Groups still named then get SIGTERM, and SIGKILL `GRACE_SECONDS` later.
"""

import contextlib
import os
import signal
import sys
import time

GRACE_SECONDS = 8.0


def alive(group: int) -> bool:
    """True while a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end(groups: set[int], grace_seconds: float) -> None:
    """SIGTERM to all groups, then SIGKILL to those left after the grace."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        deadline = time.monotonic() + grace_seconds
        while groups and time.monotonic() < deadline:
            groups = {group for group in groups if alive(group)}
            time.sleep(0.05)


def watch() -> None:
    """Follow the lines of standard input to their end, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        mark, pid = line[:1], int(line[1:])
        if mark == "+":
            groups.add(pid)
        else:
            groups.discard(pid)
    end(groups, GRACE_SECONDS)


if __name__ == "__main__":
    watch()
