"""A grant that had to be waited for says what was waited for."""

import asyncio
from collections.abc import Sequence

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.testing import ActivityEnvironment

from activities.grants import GrantActivities
from stoa.contracts.fleet_messages import Grant, GrantRequest
from stoa.contracts.ports import Progress


class Granter:
    """Gives these answers, one after another, and the last for ever."""

    def __init__(self, answers: Sequence[Grant]) -> None:
        self._answers = list(answers)

    def grant(self, request: GrantRequest, progress: Progress) -> Grant:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def host_left(self, host: str) -> None: ...

    def on_the_way(self) -> tuple[int, int]:
        return 0, 0


FULL = Grant("r", "mac-1", 3, (), reason="no room", waits_for="room")
GIVEN = Grant("r", "mac-1", 3, ("q1",))


async def ask(*answers: Grant, wait_seconds: float = 10.0) -> Grant:
    return await ActivityEnvironment().run(GrantActivities(Granter(answers)).grant, GrantRequest("r", "mac-1", 3, 1, wait_seconds))


async def test_grant_that_was_there_waited_for_nothing() -> None:
    assert await ask(GIVEN) == GIVEN


async def test_grant_after_a_wait_says_what_for() -> None:
    found = await ask(FULL, FULL, GIVEN)
    assert (found.question_ids, found.waits_for) == (("q1",), "room")


async def test_wait_in_vain_ends_with_its_reason() -> None:
    assert await ask(FULL, wait_seconds=0.0) == FULL


async def _cancelled(why: ActivityCancellationDetails) -> BaseException:
    """What a wait for room ends with when it is cancelled."""
    room = ActivityEnvironment()
    waiting = asyncio.create_task(room.run(GrantActivities(Granter((FULL,))).grant, GrantRequest("r", "mac-1", 3, 1, 60.0)))
    await asyncio.sleep(0.05)
    room.cancel(why)
    with pytest.raises(BaseException) as ended:
        await waiting
    return ended.value


async def test_wait_of_a_session_that_is_over_ends_without_an_answer_and_without_a_failure() -> None:
    ended = await _cancelled(ActivityCancellationDetails(not_found=True))
    assert type(ended).__name__ == "_CompleteAsyncError", "any other end is logged with a traceback at the end of a clean run"


async def test_wait_that_its_session_cancels_is_cancelled() -> None:
    assert isinstance(await _cancelled(ActivityCancellationDetails(cancel_requested=True)), asyncio.CancelledError)
