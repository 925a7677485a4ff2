"""Many Macs, few questions."""

import asyncio

import pytest

from activities.standings import Desk
from stoa.contracts.fleet_messages import MAX_ASKED, Standing, Standings

OUT = Standing("demo", "mac-7", "quarantined", "lies")


class Run:
    """Answers when let."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def ask(self, hosts: tuple[str, ...]) -> Standings:
        self.asked.append(hosts)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Standings(tuple(one for one in (OUT,) if one.host in hosts))


async def _begun(*tasks: asyncio.Task[Standing]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_those_that_come_during_a_question_share_the_next_one():
    run = Run()
    desk = Desk("demo", run.ask)
    first = asyncio.create_task(desk.standing("mac-0"))
    await _begun(first)
    rest = [asyncio.create_task(desk.standing(f"mac-{number}")) for number in range(9)]
    await _begun(*rest)
    assert run.asked == [("mac-0",)], "one question at a time"
    run.gate.set()
    assert [(await one).state for one in rest] == ["free"] * 7 + ["quarantined", "free"]
    assert await rest[7] == OUT
    assert (await first).state == "free"
    assert run.asked == [("mac-0",), tuple(f"mac-{number}" for number in range(9))], "mac-0 asked again: the answer is newer"


async def test_a_question_holds_no_more_than_one_message():
    run = Run()
    desk = Desk("demo", run.ask)
    hosts = [f"mac-{number:03d}" for number in range(300)]
    asked = [asyncio.create_task(desk.standing(host)) for host in hosts]
    await _begun(*asked)
    run.gate.set()
    assert {(await one).host for one in asked} == set(hosts)
    assert max(map(len, run.asked)) == MAX_ASKED
    assert len(run.asked) == 8


async def test_who_comes_while_a_full_question_is_asked_joins_the_one_that_waits():
    asked, turns = list[int](), asyncio.Semaphore(0)

    async def ask(hosts: tuple[str, ...]) -> Standings:
        asked.append(len(hosts))
        await turns.acquire()
        return Standings()

    desk = Desk("demo", ask)
    first = asyncio.create_task(desk.standing("first"))
    await _begun(first)
    many = [asyncio.create_task(desk.standing(f"mac-{number:03d}")) for number in range(MAX_ASKED + 1)]
    await _begun(*many)
    turns.release()
    await first
    await _begun(*many)
    late = asyncio.create_task(desk.standing("late"))
    await _begun(late)
    for _ in range(3):
        turns.release()
    await asyncio.gather(*many, late)
    assert asked == [1, MAX_ASKED, 2]


async def test_an_error_reaches_all_who_asked_and_nobody_later():
    run = Run()
    desk = Desk("demo", run.ask)
    run.error = OSError("cut")
    asked = [asyncio.create_task(desk.standing(f"mac-{number}")) for number in range(3)]
    await _begun(*asked)
    run.gate.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, OSError) for one in results)
    run.error = None
    assert await desk.standing("mac-7") == OUT


async def test_one_that_goes_takes_no_other_along():
    run = Run()
    desk = Desk("demo", run.ask)
    goes, stays = (asyncio.create_task(desk.standing("mac-7")) for _ in range(2))
    await _begun(goes, stays)
    goes.cancel()
    with pytest.raises(asyncio.CancelledError):
        await goes
    run.gate.set()
    assert await stays == OUT
