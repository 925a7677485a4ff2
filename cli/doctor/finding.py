"""What a check found, and many checks at once within a limit of time.

A check is a function of the scene that returns a finding, or nothing where it does not apply. What is checked is the
other files'.
"""

import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Final, Literal

from cli.doctor.scene import Scene
from stoa.contracts.errors import StoaError

Verdict = Literal["pass", "warn", "fail"]
LIMIT_SECONDS: Final = 9.0
"""For all checks together."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`found`: what is so, in a sentence. `fix`: what to do about it; "" for a pass."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""
    seconds: float = 0.0


Check = Callable[[Scene], Finding | None]


def good(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "pass", found)


def warn(name: str, found: str, fix: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(name, "warn", found, fix)


def bad(name: str, found: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(name, "fail", found, fix)


def examine(
    checks: Sequence[tuple[str, Check]], scene: Scene, limit_seconds: float = LIMIT_SECONDS, advice: Container[str] = ()
) -> list[Finding]:
    """Do all checks at once; findings in the order of `checks`.

    One that gives no answer in time is a failure, or a warning where its name is among `advice`: what warns at most does not stop
    anybody because the machine is busy.
    """
    pool = ThreadPoolExecutor(max_workers=max(1, len(checks)), thread_name_prefix="doctor")
    started = [(name, pool.submit(_timed, check, scene)) for name, check in checks]
    wait([future for _, future in started], limit_seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    found = [_finding(name, future, limit_seconds, "warn" if name in advice else "fail") for name, future in started]
    return [one for one in found if one is not None]


def _timed(check: Check, scene: Scene) -> Finding | None:
    began = time.monotonic()
    found = check(scene)
    return None if found is None else replace(found, seconds=round(time.monotonic() - began, 3))


def _finding(name: str, future: "Future[Finding | None]", limit_seconds: float, late: Verdict) -> Finding | None:
    if not future.done():
        fix = "look whether the network or the disk hangs, then ask again"
        return Finding(name, late, f"no answer in {limit_seconds:g} s", fix, limit_seconds)
    try:
        return future.result()
    except StoaError as error:
        return bad(name, error.message, error.hint or "see the message")
    except OSError as error:
        return bad(name, f"{error.filename or 'the system'}: {error.strerror or error}", "give this user access, or choose another --state")
