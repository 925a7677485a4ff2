"""A grant that had to be waited for says what was waited for."""

from collections.abc import Sequence

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
