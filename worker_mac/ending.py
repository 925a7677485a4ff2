"""How the worker's process ends when it must not take long: cut short after some seconds, or begun anew in its place.

Everything that is finished is on disk before it is sent, so nothing is lost by an end at any moment. Why to end is
`worker.py`'s.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import structlog

from stoa.contracts.errors import AccessDeniedError, BuildTooOldError, NamesakeError
from stoa.contracts.fleet_messages import Notice
from stoa.contracts.namesakes import HINT

_log = structlog.get_logger(__name__)

LEAVE_SECONDS: Final = 9.5
"""From being asked to end to having ended, whatever hangs: launchd, log-out and people wait for us."""
FINISH_SECONDS: Final = 3.5
"""Of these, for groups in hand; the bucket gets as much for what is finished."""
ANEW_SECONDS: Final = 30.0
"""For a clean end before the process is begun anew."""


class LastCall:
    """Calls `act` once, `seconds` after the first `start`, from a thread of its own, unless the process has ended by then."""

    def __init__(self, act: Callable[[], object], seconds: float) -> None:
        self._timer = threading.Timer(seconds, act)
        self._timer.daemon = True

    def start(self) -> None:
        """From now on time runs; again does nothing."""
        if not self._timer.ident:
            self._timer.start()

    def cancel(self) -> None:
        """It is not needed any more."""
        self._timer.cancel()


def heed(notice: Notice | None) -> None:
    """End as the run said. Raises BuildTooOldError or AccessDeniedError where that is a failure; a Mac that may leave just leaves."""
    if notice is not None and notice.kind == "too_old":
        raise BuildTooOldError(notice.text)
    if notice is not None and notice.kind == "name_taken":
        raise NamesakeError(notice.text, hint=HINT)
    if notice is not None and notice.kind == "revoked":
        raise AccessDeniedError(notice.text, hint="ask who invited you for another token, then `stoa join` with it")


def cut_short() -> None:
    """End the process now, with 0: it was asked to end, and launchd shall not start it again."""
    _log.warning("worker_cut_short", after_seconds=LEAVE_SECONDS)
    leave(0)


def leave(code: int) -> NoReturn:
    """End the process at once, with this code: Temporal's threads may still call into an interpreter that is taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def begin_anew(command: Sequence[str] | None = None) -> None:
    """Become a new process of the same command line and number: memory, wired memory and all that a GPU driver kept are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    words = [sys.executable, *sys.orig_argv[1:]] if command is None else list(command)
    os.execv(words[0], words)  # noqa: S606 - this process goes on as itself
