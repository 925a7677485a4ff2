"""How Macs stand with their run, asked for many by one question.

A query of a workflow waits for the tasks before it, and a server keeps few queries waiting: three hundred Macs that
join together and ask one by one fill its buffer. Here those that come while a question is on its way go into the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable

from stoa.contracts.fleet_messages import MAX_ASKED, Standing, Standings

Ask = Callable[[tuple[str, ...]], Awaitable[Standings]]
"""Hosts, at most MAX_ASKED -> how those of them stand that are not free. May raise; everyone in the question gets it."""


class Desk:
    """Gathers questions about one run. For one event loop."""

    def __init__(self, run: str, ask: Ask) -> None:
        self._run, self._ask = run, ask
        self._turn = asyncio.Lock()
        self._hosts: set[str] = set()
        self._next: asyncio.Task[dict[str, Standing]] | None = None
        """The question that still takes hosts in."""

    async def standing(self, host: str) -> Standing:
        """How `host` stands, asked after this call began. Raises as the question does."""
        if self._next is None or (len(self._hosts) >= MAX_ASKED and host not in self._hosts):
            self._hosts = set()
            self._next = asyncio.create_task(self._put(self._hosts), name="standings")
            self._next.add_done_callback(_seen)
        self._hosts.add(host)
        known = await asyncio.shield(self._next)  # whoever is cancelled goes alone: the others still want to know
        return known.get(host) or Standing(self._run, host, "free")

    async def _put(self, hosts: set[str]) -> dict[str, Standing]:
        async with self._turn:
            if self._hosts is hosts:
                self._next = None
            return {one.host: one for one in (await self._ask(tuple(sorted(hosts)))).not_free}


def _seen(answer: asyncio.Task[dict[str, Standing]]) -> None:
    """An error that nobody waits for any more is none of the loop's business."""
    if not answer.cancelled():
        answer.exception()
