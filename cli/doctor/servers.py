"""Temporal and the clock: can they be used from here, and does nothing of ours listen to the world?

The bucket is `bucket.py`'s.
"""

import asyncio
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from typing import Final

import psutil

from activities import connection
from cli.doctor.finding import Finding, bad, good, warn
from cli.doctor.scene import Scene
from cli.say import counted
from stoa.contracts import names
from stoa.contracts.errors import ServiceUnavailableError

TEMPORAL: Final = "temporal"
CLOCK: Final = "clock"
OUTBOUND: Final = "outbound only"
CALL_SECONDS: Final = 5.0
WARN_SKEW_SECONDS: Final = 5.0
"""Latencies between machines mean nothing beyond it."""
MAX_SKEW_SECONDS: Final = 600.0
"""Requests are signed with the time, and refused from 15 minutes on."""
_OURS: Final = ("worker_mac.worker", "trainer_gpu.worker")


def check_temporal(scene: Scene) -> Finding:
    """Namespaces and search attributes. Raises what connecting raises."""
    settings = scene.config.temporal
    wanted = (settings.namespace_core, settings.namespace_mac) if scene.is_home else (settings.namespace_mac,)
    spaces = tuple(dict.fromkeys(wanted))
    try:
        asyncio.run(asyncio.wait_for(_ask(scene, spaces), CALL_SECONDS))
    except TimeoutError:
        raise ServiceUnavailableError(
            f"Temporal at {settings.address} did not answer in {CALL_SECONDS:g} s", hint="is the address right, and the way there open?"
        ) from None
    attributes = "" if scene.access.is_invited else f", {len(names.SEARCH_ATTRIBUTES)} search attributes"
    return good(TEMPORAL, f"{settings.address} answers: namespace {' and '.join(spaces)}{attributes}")


async def _ask(scene: Scene, spaces: tuple[str, ...]) -> None:
    for namespace in spaces:
        client = await connection.connect(scene.config.temporal.address, namespace, access=scene.access)
        await connection.require_namespace(client)
        if not scene.access.is_invited:
            await connection.require_setup(client)


def check_clock(scene: Scene) -> Finding | None:
    """This machine's clock against the bucket's, which signs its answers with the time to a second."""
    endpoint = scene.config.bucket.endpoint
    began = time.time()
    date = _date_of(endpoint)
    if date is None:
        return None  # the bucket's own check says what is wrong
    skew = (began + time.time()) / 2 - (date + 0.5)
    said = f"this clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the bucket's"
    fix = "let the system set its clock by itself (macOS: Settings, General, Date & Time)"
    if abs(skew) > MAX_SKEW_SECONDS:
        return bad(CLOCK, f"{said}: it will refuse our requests", fix)
    if abs(skew) > WARN_SKEW_SECONDS:
        return warn(CLOCK, said, fix)
    return good(CLOCK, f"within {max(1.0, abs(skew)):.0f} s of the bucket's")


def _date_of(endpoint: str) -> float | None:
    """Unix seconds of the Date header of any answer; None if there is none."""
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - the settings allow http and https only
    try:
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as reply:  # noqa: S310
            text = reply.headers.get("Date")
    except urllib.error.HTTPError as refusal:
        text = refusal.headers.get("Date")
    except (OSError, ValueError):
        return None
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None


def check_outbound(_scene: Scene) -> Finding:
    """No worker of this user may accept connections from other machines."""
    found: list[str] = []
    looked = 0
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if not any(name in command for name in _OURS):
                continue
            looked += 1
            found += [
                f"process {process.pid} ({next(name for name in _OURS if name in command)}) on {one.laddr.ip}:{one.laddr.port}"
                for one in process.net_connections("inet")
                if one.status == psutil.CONN_LISTEN and not _is_loopback(one.laddr.ip)
            ]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    if found:
        return bad(OUTBOUND, f"listens to other machines: {'; '.join(found)}", "end it: no worker needs to be reached from outside")
    workers = f"{counted(looked, 'worker')} of ours here, listening" if looked else "no worker of ours is here; one listens"
    return good(OUTBOUND, f"{workers} to nobody outside this machine")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
