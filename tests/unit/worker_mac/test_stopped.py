"""A Mac started on a run that HEAD calls stopped."""

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from activities.connection import connect
from stoa.config.run import Temporal
from stoa.contracts import names
from stoa.contracts.access import Access
from tests.servers import TemporalServer
from worker_mac.stopped import begins, goes_on
from worker_mac.window import line_of


def started(head: Callable[[], str], answers: list[bool], is_leaving: Callable[[], bool] = lambda: False) -> tuple[bool, list[str], str]:
    """What comes of a start where Temporal gives `answers`: the verdict, the reasons that were logged, and the window's last line."""

    async def asked() -> bool:
        return answers.pop(0)

    with capture_logs() as log:
        verdict = asyncio.run(begins(head, asked, is_leaving, asyncio.sleep, resume_seconds=0.02))
    lines = [line_of({**event, "level": event["log_level"]}) for event in log]
    return verdict, [str(event["reason"]) for event in log], lines[-1] if lines else ""


def test_a_mac_of_a_run_that_goes_on_begins_at_once() -> None:
    assert started(lambda: "paused", []) == (True, [], "")


def test_a_mac_waits_for_as_long_as_the_run_was_resumed_without_a_trainer() -> None:
    answers = [True, True, True]
    verdict, reasons, line = started(lambda: "stopped" if answers else "running", answers)
    assert verdict
    assert reasons == ["the run has stopped", "the run was resumed, and no trainer has taken it yet"]
    assert "stoa status" in line


def test_a_mac_of_a_run_that_is_over_ends_and_says_what_to_do() -> None:
    verdict, reasons, line = started(lambda: "stopped", [True, False])
    assert not verdict
    assert reasons[-1] == "the run has stopped"
    assert "start this Mac again" in line


def test_a_mac_that_is_to_leave_does_not_wait() -> None:
    assert started(lambda: "stopped", [], is_leaving=lambda: True) == (False, [], "")


async def test_the_workflow_of_a_resumed_run_tells_that_it_goes_on(temporal_server: TemporalServer) -> None:
    settings, run = Temporal(address=temporal_server.address, namespace_mac=temporal_server.namespace), "resumed-unserved"
    client = await connect(temporal_server.address, temporal_server.namespace)
    assert not await goes_on(settings, Access(), run)
    handle = await client.start_workflow("Nobody", id=names.run_workflow_id(run), task_queue="nobody")
    assert await goes_on(settings, Access(), run)
    await handle.terminate()
    assert not await goes_on(settings, Access(), run)


@pytest.mark.timeout(20)
async def test_a_server_that_is_away_tells_nothing() -> None:
    assert not await goes_on(Temporal(address="127.0.0.1:1"), Access(), "demo")
