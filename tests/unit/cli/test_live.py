"""The live view without a terminal: what it shows, what its keys do, and that a server's silence leaves the last picture."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widgets import ContentSwitcher, DataTable, Static

from cli.live.app import Live
from cli.live.pictures import star_lines, timeline_lines
from cli.live.snapshot import take
from cli.live.view import Look, Rates, alarm_lines, fleet_lines, rates_between, reason_lines, slowest_line, view_of
from cli.report.record import HostShare, RunRecord, SweepBar
from stoa.contracts.errors import ServiceUnavailableError, UsageError
from tests.unit.cli.records import record, session, step, sweep, version


def running(**changes: object) -> RunRecord:
    """Two Macs, the second the faster one; two groups refused of the first; an alarm and two sweeps of version 1's time."""
    hosts = {"mac-1": HostShare(accepted=2, refused={"wrong_reward": 1}), "mac-2": HostShare(accepted=3)}
    steps = tuple(
        step(n, version=(n - 1) // 2, hosts=hosts, metrics={"reward_mean": 0.4, "alarm_k3": float(n == 2), "k3": 0.7}) for n in (1, 2)
    )
    macs = (
        session("mac-1", tokens_per_second=100.0, place="Lyon", slow_because="pull", heat="nominal"),
        session("mac-2", tokens_per_second=300.0, state="resting", reason="on battery"),
        session("mac-3", tokens_per_second=200.0),
    )
    settings: dict[str, object] = {
        "state": "running",
        "end_reason": "",
        "steps": steps,
        "sessions": macs,
        "waiting_for": "groups, since 3 s",
    }
    return record(**{**settings, **changes})


class Fleet:
    """A source whose run stands still, and which keeps the orders it is given."""

    def __init__(self, *records: RunRecord | Exception) -> None:
        self.records = list(records)
        self.orders: list[str] = []
        self.asked_for: list[int] = []
        self.refuses = False

    def look(self) -> RunRecord:
        found = self.records.pop(0) if len(self.records) > 1 else self.records[0]
        if isinstance(found, Exception):
            raise found
        return found

    def sweeps(self, record: RunRecord, version: int) -> tuple[SweepBar, ...]:
        self.asked_for.append(version)
        return (sweep("mac-1", 7, version),)

    def pause(self) -> None:
        if self.refuses:
            raise UsageError("run demo: pause was refused: it drains")
        self.orders.append("pause")

    def resume(self) -> None:
        self.orders.append("resume")

    def drain(self, host: str) -> None:
        self.orders.append(f"drain {host}")


def play(fleet: Fleet, do: Callable[[Live, "Pilot[None]"], Awaitable[None]], size: tuple[int, int] = (120, 32)) -> Live:
    app = Live(fleet, steps=8, every=3600.0, clock=lambda: 10.0)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await app.refresh_view()
            await do(app, pilot)

    asyncio.run(run())
    return app


async def until(pilot: "Pilot[None]", true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never came to be")


def carrying(app: Live) -> bool:
    """An order was confirmed and is not carried out yet."""
    return any(worker.name == "_carry_out" and not worker.is_finished for worker in app.workers)


def said(app: Live, name: str = "#run") -> str:
    return str(app.query_one(name, Static).content)


def screen(svg: str) -> list[str]:
    """Lines of the picture, by the height at which their text stands."""
    rows: dict[float, dict[float, str]] = {}
    for attributes, text in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        place = dict(re.findall(r'(\w+)="([^"]*)"', attributes))
        if "clip-path" in attributes and "y" in place:
            rows.setdefault(float(place["y"]), {})[float(place["x"])] = text.replace("&#160;", " ")
    return ["".join(cells[x] for x in sorted(cells)).rstrip() for _, cells in sorted(rows.items())]


def test_snapshot_shows_run_fleet_bandwidth_and_alarms_in_80_columns() -> None:
    lines = screen(take(Live(Fleet(running()), steps=8, every=3600.0, clock=lambda: 10.0), (80, 24)))
    picture = "\n".join(lines)
    for words in (
        "run demo: running for 12 s",
        "version 2  step 4 of 8  reward 0.40",
        "pass@1 0.800 (0.000 to 1.000) at version 2",
        "waits: groups, since 3 s",
        "slowest: mac-1 at 100 tokens/s, the other 200: pull",
        "alarm: k3 at step 2 (0.7)",
        "quit",
    ):
        assert words in picture, picture
    assert "mac-2: on battery" in picture
    macs = [line.split()[0] for line in lines if re.match(r" *mac-\d ", line)]
    assert macs == ["mac-2", "mac-3", "mac-1"], "sorted by speed"


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (200, 60)])
@pytest.mark.parametrize("key", ["f", "t", "s"])
def test_every_picture_fits_every_terminal(size: tuple[int, int], key: str) -> None:
    assert len(screen(take(Live(Fleet(running()), steps=8, every=3600.0), size, (key,)))) > 5


def test_pause_asks_first_and_no_is_no() -> None:
    fleet = Fleet(running())

    async def keys(app: Live, pilot: "Pilot[None]") -> None:
        await pilot.press("p", "n")
        assert fleet.orders == []
        await pilot.press("p", "y")
        await until(pilot, lambda: not carrying(app))
        assert "the run is pausing" in said(app)

    play(fleet, keys)
    assert fleet.orders == ["pause"]


def test_paused_run_is_resumed_by_the_same_key_and_an_ended_one_is_left_alone() -> None:
    fleet = Fleet(running(state="paused"))

    async def keys(app: Live, pilot: "Pilot[None]") -> None:
        await pilot.press("p", "y")
        await until(pilot, lambda: not carrying(app))
        fleet.records = [running(state="stopped")]
        await app.refresh_view()
        await pilot.press("p")
        assert "the run has ended" in said(app)

    play(fleet, keys)
    assert fleet.orders == ["resume"]


def test_drain_is_of_the_mac_under_the_cursor_also_when_the_order_changes() -> None:
    fleet = Fleet(running())

    async def keys(app: Live, pilot: "Pilot[None]") -> None:
        await pilot.press("down", "down")
        slower = tuple(replace(one, tokens_per_second=900.0) if one.host == "mac-1" else one for one in running().sessions)
        fleet.records = [running(sessions=slower)]
        await app.refresh_view()
        assert app.query_one("#fleet", DataTable).cursor_row == 0
        await pilot.press("d", "y")
        await until(pilot, lambda: not carrying(app))

    play(fleet, keys)
    assert fleet.orders == ["drain mac-1"]


def test_changed_cell_is_changed_in_place_and_a_large_fleet_is_drawn_in_time() -> None:
    """A thousand Macs whose numbers all change; then one whose state does."""
    macs = tuple(session(f"mac-{i}", tokens_per_second=float(1000 - i)) for i in range(1000))
    fleet = Fleet(running(sessions=macs))

    async def look(app: Live, pilot: "Pilot[None]") -> None:
        table = app.query_one("#fleet", DataTable)
        assert table.row_count == 1000
        began = time.process_time()
        fleet.records = [running(sessions=tuple(replace(one, version=3) for one in macs))]
        await app.refresh_view()
        fleet.records = [running(sessions=(replace(macs[0], version=3, state="away"), *(replace(one, version=3) for one in macs[1:])))]
        await app.refresh_view()
        assert time.process_time() - began < 5
        assert [str(cell) for cell in table.get_row("mac-0")][1:3] == ["away", "3"]
        assert str(table.get_row("mac-999")[2]) == "3"

    play(fleet, look)


def test_refused_order_is_told() -> None:
    fleet = Fleet(running())
    fleet.refuses = True

    async def keys(app: Live, pilot: "Pilot[None]") -> None:
        await pilot.press("p", "y")
        await until(pilot, lambda: not carrying(app))
        assert "pause was refused: it drains" in said(app)

    play(fleet, keys)


def test_silent_server_leaves_the_last_picture_and_says_what_it_waits_for() -> None:
    fleet = Fleet(running(), running(), ServiceUnavailableError("the bucket does not answer"))

    async def look(app: Live, pilot: "Pilot[None]") -> None:
        await app.refresh_view()
        await app.refresh_view()
        assert "waiting: the bucket does not answer" in said(app)
        assert "version 2" in said(app)
        fleet.records = [running()]
        await app.refresh_view()
        assert "waiting:" not in said(app).replace("waits:", "")

    play(fleet, look)


def test_timeline_is_read_only_while_it_is_looked_at_and_once_for_an_interval_that_is_over() -> None:
    fleet = Fleet(running())

    async def keys(app: Live, pilot: "Pilot[None]") -> None:
        assert fleet.asked_for == []
        await pilot.press("t")
        for _ in range(3):
            await app.refresh_view()
        assert fleet.asked_for == [1]
        await pilot.press("left_square_bracket")
        await app.refresh_view()
        assert app.query_one("#picture", ContentSwitcher).current == "timeline"
        assert "version 0:" in said(app, "#timeline")
        assert fleet.asked_for == [1, 0]

    play(fleet, keys)


def test_what_stays_the_same_is_not_drawn_again() -> None:
    drawn: list[str] = []

    async def look(app: Live, pilot: "Pilot[None]") -> None:
        await app.refresh_view()
        for name in ("#run", "#bandwidth", "#alarms", "#star"):
            part = app.query_one(name, Static)
            before = part.update
            part.update = lambda text, before=before: (drawn.append(str(text)), before(text))[1]  # type: ignore[method-assign]
        await app.refresh_view()

    play(Fleet(running()), look)
    assert drawn == []


def test_rates_are_differences_and_a_mac_that_began_anew_counts_from_nothing() -> None:
    before = Look(10.0, running(sessions=(session("a", bytes_up=100, bytes_down=0), session("b", bytes_up=5000))))
    now = Look(12.0, running(sessions=(session("a", bytes_up=700, bytes_down=50), session("b", bytes_up=40), session("c", bytes_up=8))))
    rates = rates_between(before, now)
    assert rates.up == {"a": 300.0, "b": 0.0, "c": 4.0}
    assert rates.down["a"] == 25.0
    assert rates_between(None, now).up == rates_between(Look(11.9, before.record), now).up == {}


def test_fleet_tells_of_groups_and_lag() -> None:
    first = next(line for line in view_of(Look(0.0, running()), None, 8).fleet if line.host == "mac-1")
    assert (first.accepted, first.refused, first.staleness, first.heat, first.place) == ("4", "2", "0", "nominal", "Lyon")


def test_ended_run_is_told_whole_and_its_table_fits_the_terminal() -> None:
    """No column is shown that says nothing, and a sentence is no column: there is no bar to push the table by."""
    why = "run stopped: 120 s of wall clock are over"
    macs = (session("mac-1", state="ended", reason=why), session("mac-2", state="ended", reason=why))
    app = Live(Fleet(running(state="stopped", end_reason="120 s of wall clock are over", sessions=macs)), steps=8, every=3600.0)
    bars: list[bool] = []
    columns: list[str] = []

    async def run() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await app.refresh_view()
            await app.refresh_view()
            await pilot.pause()
            table = app.query_one("#fleet", DataTable)
            bars.append(table.show_horizontal_scrollbar)
            columns.extend(str(column.label) for column in table.columns.values())
            assert said(app, "#slowest") == f"mac-1, mac-2: {why}"
            assert "ended: 120 s of wall clock are over" in said(app)
            assert "/s" not in said(app, "#bandwidth"), "of an ended run nothing flows"

    asyncio.run(run())
    assert bars == [False]
    assert columns == ["Mac", "state", "v", "lag", "tok/s", "ok", "no", "pull", "join", "idle"]


def test_reasons_of_many_macs_are_counted_and_that_under_the_cursor_comes_first() -> None:
    macs = tuple(session(f"m{n}", reason=f"reason {min(n, 5)}") for n in range(12))
    lines = fleet_lines(running(sessions=macs), Rates())
    assert reason_lines(lines, "m3") == (
        "m3: reason 3",
        "m10, m11, m5, m6 and 3 more: reason 5",
        "m0: reason 0",
        "and 3 more with reasons of their own: see `stoa fleet`",
    )
    slow = fleet_lines(running(sessions=(session("m1", slow_because="pull"),)), Rates())
    assert reason_lines(slow, "", "slowest: m1 at 1 tokens/s, the other 2: pull") == ()


def test_what_flows_is_the_mean_of_the_newest_steps() -> None:
    flows = [{"fleet_tokens_per_second": 100.0 * n, "trainer_wait_share": 0.5, "empty_retrieval_rate": 0.02} for n in range(1, 11)]
    steps = tuple(step(n, metrics=metrics) for n, metrics in enumerate(flows, 1))
    lines = view_of(Look(0.0, running(steps=steps)), None, 8).run
    assert "fleet 650 tokens/s  trainer waits 50%  empty searches 2%" in lines  # steps 3 to 10
    assert not any("trainer waits" in line for line in view_of(Look(0.0, running()), None, 8).run)


def test_macs_of_a_paused_run_are_not_shown_as_if_they_played() -> None:
    macs = (session("mac-1"), session("mac-2", state="away", reason="lost"))
    rows = {row.host: (row.state, row.reason) for row in fleet_lines(running(state="paused", held="waits", sessions=macs), Rates())}
    assert rows == {"mac-1": ("waits", "the run is paused"), "mac-2": ("away", "lost")}
    view = view_of(Look(0.0, running(state="paused", held="waits")), None, 8)
    sentence = "paused (tea): waiting for `stoa resume demo`"
    assert sentence in view_of(Look(0.0, running(waiting_for=sentence)), None, 8).run, "and not that it waits for waiting"
    assert (view.run[0], view.slowest) == ("run demo: paused at 12 s", ""), "who waits is not slow"


def test_alarms_are_told_once_newest_first_and_shut_out_macs_before_them() -> None:
    steps = (step(1, metrics={"alarm_a": 1.0}), step(2, metrics={"alarm_a": 1.0, "warning_b": 1.0, "alarm_c": 0.0}))
    shut = session("mac-9", state="quarantined", reason="rewards")
    assert alarm_lines(running(steps=steps, sessions=(shut,))) == (
        "mac-9 is quarantined: rewards",
        "alarm: a at step 2",
        "warning: b at step 2",
    )


def test_slowest_needs_two_that_play() -> None:
    one, two, three = (session(host, tokens_per_second=speed) for host, speed in (("a", 1.0), ("b", 3.0), ("c", 9.0)))
    assert slowest_line((one,)) == ""
    assert slowest_line((one, two)) == "slowest: a at 1 tokens/s, the other 3"
    assert slowest_line((one, two, three)) == "slowest: a at 1 tokens/s, the middle one 3"


def test_timeline_marks_each_slice_of_time() -> None:
    """Twenty slices of 0.2 s from 104.5: steps to 105.4 and, after a wait since 105.55, from 106 to 107.45; a sweep from 104.75 on."""
    one = step(2, started_at=104.0, wait_seconds=0.0, train_seconds=1.4)
    two = step(3, started_at=106.0, wait_seconds=0.45, train_seconds=1.45)
    lines = timeline_lines(record(steps=(one, two)), (sweep("mac-1", 7, 1),), (104.5, 108.5), 31)
    assert lines[0] == "trainer    =====..========     "
    assert lines[2] == "mac-1       ######o########### "
    assert lines[-1].split() == ["0", "s", "4", "s"]
    assert timeline_lines(record(), (), (0.0, 0.0), 80) == ("no publish interval to show yet",)


def test_timeline_does_not_show_a_pause_as_publishing() -> None:
    """Slices of 0.2 s from 104.5: version 1 ends in the first one, version 2 took 0.4 s like it, from the 16th to the 18th."""
    versions = tuple(version(n, published_at=at, latency_seconds=s, work_seconds=0.4) for n, at, s in ((1, 104.5, 0.4), (2, 108.0, 90.0)))
    lines = timeline_lines(record(steps=(), versions=versions), (), (104.5, 108.5), 31)
    assert lines[1] == "publishing P" + 14 * " " + "PPP" + 2 * " "


def test_star_has_every_mac_once_with_what_it_sent_and_took() -> None:
    text = "\n".join(star_lines(running()))
    assert [text.count(name) for name in ("trainer", "bucket", "mac-1", "mac-2", "mac-3")] == [1, 1, 1, 1, 1]
    assert text.count("500 B") == 3 and text.count("45.0 kB") == 3
    assert "groups 1.5 kB" in text and "versions 43.0 kB" in text
