"""A Mac's membership of a run, as told to its session: hello at the start, after sleep and after silence; goodbye at the end.

What a session makes of it is `workflows/session_plan.py`'s; when to say it is the worker's.
"""

import random
from datetime import timedelta
from typing import Final

import structlog
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from stoa.config.run import RunConfig
from stoa.contracts import names
from stoa.contracts.errors import AccessDeniedError
from stoa.contracts.fleet_messages import Goodbye, Hello, SessionInput
from worker_mac.identity import Identity, project_version

_log = structlog.get_logger(__name__)

CLOCK_JUMP_SECONDS: Final = 10.0
"""A tick that took this long by the wall clock means that the Mac slept."""
SILENCE_SECONDS: Final = 60.0
"""Without a sweep for this long the session may have lost us."""
UNASKED_SECONDS: Final = 10.0
"""Playing by itself for this long, the session may have lost us."""
LONGEST_SILENCE_SECONDS: Final = 240.0
"""A hello that changes nothing is said ever more rarely, down to this: it may be the control plane that has no time."""
LONGEST_RETRY_SECONDS: Final = 30.0
HELLO_LIMIT: Final = timedelta(seconds=10)
GOODBYE_LIMIT: Final = timedelta(seconds=2)


class Greeter:
    """When to say hello. Times are seconds of one monotonic clock.

    Each wait is drawn from its upper half: a thousand Macs whose control plane was away do not come back in one instant,
    nor one that is slow gets a thousand hellos more for being slow.
    """

    def __init__(self, draw: random.Random | None = None) -> None:
        self._draw = draw or random.Random()
        self._pending, self._due_at = "start", 0.0
        self._said_at = 0.0
        self._num_failed = self._num_vain = 0
        self._part = self._draw.uniform(0.5, 1.0)

    def reason(self, now: float, *, tick_seconds: float = 0.0, idle_seconds: float = 0.0, lost: bool = False, unasked: bool = False) -> str:
        """Why to say hello now; "" for no reason.

        tick_seconds: wall clock since the last look, which is longer than a tick after sleep (the monotonic clock of a Mac
        stands still meanwhile). idle_seconds: without a sweep. lost: the server gave our sweep up. unasked: the Mac plays
        on by itself.
        """
        if tick_seconds > CLOCK_JUMP_SECONDS or lost:
            self._pending, self._due_at = "wake" if tick_seconds > CLOCK_JUMP_SECONDS else "lost", now
            self._num_failed = 0
        if not self._pending:
            self._pending = self._misgiving(now - self._said_at, idle_seconds, unasked)
        return self._pending if now >= self._due_at else ""

    def _misgiving(self, since_hello: float, idle_seconds: float, unasked: bool) -> str:
        if not unasked and idle_seconds < since_hello:
            self._num_vain = 0  # we were asked for something since
        longer = self._part * 2.0**self._num_vain
        if unasked and since_hello > min(LONGEST_SILENCE_SECONDS, UNASKED_SECONDS * longer):
            return "unasked"
        return "silence" if min(idle_seconds, since_hello) > min(LONGEST_SILENCE_SECONDS, SILENCE_SECONDS * longer) else ""

    def said(self, now: float, taken: bool) -> None:
        """A hello was said; `taken`: the server has it."""
        self._part = self._draw.uniform(0.5, 1.0)
        if taken:
            self._num_vain = min(self._num_vain + 1, 10) if self._pending in ("silence", "unasked") else 0
            self._pending, self._said_at, self._num_failed = "", now, 0
            return
        self._due_at = now + min(LONGEST_RETRY_SECONDS, 2.0**self._num_failed) * self._part
        self._num_failed = min(self._num_failed + 1, 10)


class Membership:
    """One worker's, in one run."""

    def __init__(self, run: str, identity: Identity, place: str, invite: str = "") -> None:
        """`invite`: id of this Mac's invitation, if it has one."""
        self._run, self._identity, self._place, self._invite = run, identity, place, invite

    async def hello(self, client: Client, config: RunConfig, reason: str, *, groups: int = 0) -> bool:
        """Start this Mac's session, or tell the one there is that we are here; False if the server did not take it.

        groups: to be given at a time; 0 for as many as is usual. Raises AccessDeniedError if this Mac may take part no longer.
        """
        session = SessionInput(
            run=self._run,
            host=self._identity.host,
            groups=groups or config.rollout.usual_groups,
            group_size=config.rollout.group_size,
            sweep_timeout_seconds=config.timeouts.sweep_seconds,
            heartbeat_seconds=config.timeouts.heartbeat_seconds,
            away_expiry_seconds=config.timeouts.away_minutes * 60.0,
            place=self._place,
        )
        hello = Hello(
            self._identity.host, self._identity.nonce, build=project_version(), reason=reason, invite=self._invite, groups=groups
        )  # fmt: skip
        try:
            await client.start_workflow(
                names.MAC_SESSION,
                session,
                id=names.session_workflow_id(self._run, self._identity.host),
                task_queue=names.control_queue(self._run),
                start_signal=names.HELLO,
                start_signal_args=[hello],
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                rpc_timeout=HELLO_LIMIT,
            )
        except RPCError as error:
            _log.warning("hello_failed", reason=reason, error=error.message)
            if error.status in (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNAUTHENTICATED):
                raise AccessDeniedError(
                    f"this Mac may not take part in run {self._run}: {error.message}", hint="ask who invited you for another token"
                ) from None
            return False
        _log.info("hello_said", reason=reason)
        return True

    async def goodbye(self, client: Client, reason: str) -> None:
        """Tell the session that we leave; one that has ended, as a stopped run's has, needs no telling."""
        host = self._identity.host
        handle = client.get_workflow_handle(names.session_workflow_id(self._run, host))
        try:
            await handle.signal(names.GOODBYE, Goodbye(host, self._identity.nonce, reason), rpc_timeout=GOODBYE_LIMIT)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                _log.info("goodbye_failed", error=error.message)
            return
        _log.info("goodbye_said", reason=reason)
