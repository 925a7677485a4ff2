"""A Mac whose cable is pulled for ten minutes, by a clock that skips: away with a reason, and back as the same Mac."""

from temporalio.testing import WorkflowEnvironment

from activities.connection import make_worker
from stoa.contracts import names
from stoa.contracts.fleet_messages import Hello
from tests.workflows.test_mac_session import given, only, session, stop, until
from tests.workflows.world import World


async def test_ten_minutes_without_a_cable_cost_no_identity(skipping: WorkflowEnvironment) -> None:
    world = World(skipping.client)
    world.on_grant = only(0)
    start = given(away_expiry_seconds=1800)
    async with session(skipping, start, world, serve_mac=False) as handle:
        await skipping.sleep(600)
        away = await until(handle, lambda status: status.state == "away")
        assert (away.host, away.place) == ("mac-1", "attic")
        assert "schedule_to_start" in away.reason, "the log says why it was given up"
        queue = names.mac_queue(start.run, start.host)
        async with make_worker(skipping.client, queue, activities=world.mac_activities(), max_concurrent_activities=1, graceful_seconds=0):
            # the same process: the nonce it had
            await handle.signal(names.HELLO, Hello("mac-1", "nonce-1", reason="silence"))
            back = await until(handle, lambda status: status.num_sweeps == 1)
            assert back.host == "mac-1"
            await until(handle, lambda _: [event.event for event in world.fleet] == ["joined", "left", "joined"])
            await stop(handle)
    assert {event.host for event in world.fleet} == {"mac-1"}
    assert [one.sweep for one in world.swept] == [0], "the sweep it was away for, under its number"
