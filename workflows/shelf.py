"""The grants a session holds for its Mac, by sweep number, and the one that is on its way.

Which number is wanted next, and how far ahead, is decided in `session_plan`. Asked again under its number a grant is the
same, so nothing here needs to be carried anywhere, and a fetch that is let go is merely not awaited any more.
"""

from collections.abc import Callable
from dataclasses import dataclass

from temporalio import workflow
from temporalio.exceptions import ActivityError
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from stoa.contracts.fleet_messages import Grant
    from workflows import session_plan
    from workflows.calls import forget


@dataclass(frozen=True)
class Fetch:
    """A grant on its way."""

    sweep: int
    handle: ActivityHandle[Grant]
    asked_at: float


@dataclass(frozen=True)
class Fetched:
    """How a fetch ended: with an answer, or with an error."""

    sweep: int
    asked_at: float
    grant: Grant | None
    error: ActivityError | None = None


class Shelf:
    """At most one fetch at a time."""

    def __init__(self, ask: Callable[[int, float], ActivityHandle[Grant]]) -> None:
        """`ask(sweep, wait_seconds)` begins to fetch."""
        self._ask = ask
        self._fetch: Fetch | None = None
        self._held: dict[int, Grant] = {}
        self._dry: dict[int, int] = {}
        self._refused = False

    def find(self, sweep: int) -> Grant | None:
        """The grant of a sweep, if it is here."""
        return self._held.get(sweep)

    def after(self, sweep: int) -> tuple[Grant, ...]:
        """Grants of the sweeps that follow `sweep` without a gap."""
        found: list[Grant] = []
        while (grant := self._held.get(sweep + 1 + len(found))) is not None:
            found.append(grant)
        return tuple(found)

    def want(self, sweep: int, wait_seconds: float) -> None:
        """See to it that the grant of `sweep` is on its way; whatever else was is let go."""
        if self._fetch is not None and self._fetch.sweep == sweep:
            return
        self._fetch = Fetch(sweep, forget(self._ask(sweep, wait_seconds)), workflow.time())

    def prefetch(self, sweep: int, num_ahead: int) -> None:
        """While `sweep` is played: fetch the next grants that are missing, until the shelf holds `num_ahead` beyond the next.

        The next one is waited for. One further ahead is asked for once a sweep, and taken if it is there. An answer that
        said no without having waited will not be another in this sweep.
        """
        if self._fetch is not None or self._refused:
            return
        ahead = sweep + 1 + len(self.after(sweep))
        if ahead > sweep + 1 + num_ahead:
            return
        num_dry = self._dry.get(ahead, 0)
        if ahead == sweep + 1:
            self.want(ahead, session_plan.prefetch_wait(num_dry))
        elif not num_dry:
            self.want(ahead, 0.0)

    @property
    def has_answer(self) -> bool:
        """True once the fetch on its way has ended."""
        return self._fetch is not None and self._fetch.handle.done()

    async def take(self) -> Fetched:
        """The answer that is here. A grant to play is kept."""
        fetch = self._fetch
        if fetch is None:
            raise RuntimeError("nothing was asked for")
        self._fetch = None
        try:
            grant = await fetch.handle
        except ActivityError as error:
            self._note_dry(fetch)
            return Fetched(fetch.sweep, fetch.asked_at, None, error)
        if session_plan.may_play(grant):
            self._held[fetch.sweep] = grant
        else:
            self._note_dry(fetch)
        return Fetched(fetch.sweep, fetch.asked_at, grant)

    def _note_dry(self, fetch: Fetch) -> None:
        self._dry[fetch.sweep] = self._dry.get(fetch.sweep, 0) + 1
        self._refused = workflow.time() - fetch.asked_at < session_plan.MIN_WAIT_SECONDS / 2

    def move_to(self, sweep: int) -> None:
        """Sweeps before `sweep` are over; those ahead may be asked for again."""
        self._held = {number: grant for number, grant in self._held.items() if number >= sweep}
        self._dry.clear()
        self._refused = False

    def clear(self) -> None:
        """Ask for everything anew."""
        self._held.clear()
        self._dry.clear()
        self._refused = False
        self._fetch = None

    def drop(self, sweep: int) -> None:
        """Ask for one grant anew: what came with it may no longer hold."""
        self._held.pop(sweep, None)
