"""`stoa live`: a run on the whole terminal, kept up to date, with pause and drain by key.

Draws what `view.py` and `pictures.py` say; asks a `Source` on a thread of its own, so that a slow line never holds a key. Only
what changed is sent to the terminal, without animation.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, DataTable, Footer, Static

from cli.live.pictures import star_lines, timeline_lines
from cli.live.view import COLUMNS, Look, MacLine, View, columns_of, reason_lines, view_of
from cli.report.look import interval_bounds
from cli.report.record import RunRecord, SweepBar
from stoa.contracts.errors import StoaError

_Answer = TypeVar("_Answer")
MOST_CHANGED: Final = 40
"""Rows that are changed in place; with more it is quicker to fill the table anew."""
_STATES = {
    "live": "green",
    "ahead": "green",
    "waits": "yellow",
    "resting": "yellow",
    "away": "red",
    "quarantined": "red",
    "drained": "dim",
    "refused": "red",
    "ended": "dim",
}


class Source(Protocol):
    """Where the facts come from, and where a key's order goes. Each call may take seconds and may raise a StoaError."""

    def look(self) -> RunRecord:
        """The run up to now."""
        ...

    def sweeps(self, record: RunRecord, version: int) -> tuple[SweepBar, ...]:
        """What landed while a version was the newest."""
        ...

    def pause(self) -> None:
        """Ask the run to pause."""
        ...

    def resume(self) -> None:
        """Undo a pause."""
        ...

    def drain(self, host: str) -> None:
        """Let one Mac finish its sweep and leave."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """What a key asks for: the question, how it is done, and what is said once it is."""

    question: str
    do: Callable[[], None]
    said: str


class Sure(ModalScreen[bool]):
    """Asks before something is done to a run."""

    CSS = """
    Sure { align: center middle; }
    Sure > Static { width: auto; max-width: 70; height: auto; padding: 1 3; border: round $warning; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        """The question."""
        yield Static(Text(f"{self.question}\n\ny yes   n no"))

    def action_answer(self, yes: bool) -> None:
        """Close with the answer."""
        self.dismiss(yes)


class Live(App[None]):
    """One run. `every` seconds it looks again; `steps` is the limit of steps where a record names none."""

    CSS = """
    #run { height: auto; padding: 0 1; border: round $primary; }
    #picture { height: 1fr; min-height: 4; }
    #fleet { height: 1fr; }
    #timeline, #star { padding: 0 1; height: 1fr; }
    #slowest { height: auto; max-height: 6; padding: 0 1; color: $text-muted; }
    #below { height: auto; max-height: 8; }
    #bandwidth, #alarms { width: 1fr; height: auto; min-height: 4; padding: 0 1; border: round $primary; }
    """
    ANIMATION_LEVEL = "none"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "picture('fleet')", "fleet"),
        Binding("t", "picture('timeline')", "timeline"),
        Binding("left_square_bracket", "interval(-1)", "earlier", key_display="["),
        Binding("right_square_bracket", "interval(1)", "later", key_display="]"),
        Binding("s", "picture('star')", "star"),
        Binding("p", "pause", "pause"),
        Binding("d", "drain", "drain"),
        Binding("q", "quit", "quit"),
        # In a terminal's own words Ctrl-C ends a program; textual would only say how.
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    ]

    def __init__(self, source: Source, *, steps: int, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.animation_level = "none"
        self._source = source
        self._steps = steps
        self._every = every
        self._clock = clock
        # One at a time: a source is asked by one thread only.
        self._asker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="live")
        self._before: Look | None = None
        self._now: Look | None = None
        self._view: View | None = None
        self._chosen = -1
        """Version of the timeline; -1: the newest that was followed by another."""
        self._sweeps: tuple[int, tuple[SweepBar, ...]] = (-1, ())
        self._said = ""
        self._shown: tuple[MacLine, ...] = ()
        self._columns: tuple[str, ...] = ()
        self._drawn: tuple[str, ...] = ()
        """Hosts of the table's rows, in their order."""

    def compose(self) -> ComposeResult:
        """Run above, one picture in the middle, bandwidth and alarms below."""
        yield Static(id="run")
        with ContentSwitcher(initial="fleet", id="picture"):
            yield DataTable[Text](id="fleet", cursor_type="row", zebra_stripes=False)
            yield Static(id="timeline")
            yield Static(id="star")
        yield Static(id="slowest")
        with Horizontal(id="below"):
            yield Static(id="bandwidth")
            yield Static(id="alarms")
        yield Footer()

    async def on_mount(self) -> None:
        """Look once, and then every so often."""
        self.query_one("#run", Static).update(Text("looking ..."))
        self.query_one("#run", Static).border_title = "run"
        self.query_one("#bandwidth", Static).border_title = "bandwidth"
        self.query_one("#alarms", Static).border_title = "alarms"
        self.run_worker(self._keep_looking(), exclusive=True)

    def on_unmount(self) -> None:
        """No more questions."""
        self._asker.shutdown(wait=False, cancel_futures=True)

    async def _keep_looking(self) -> None:
        while True:
            await self.refresh_view()
            await asyncio.sleep(self._every)

    async def refresh_view(self) -> None:
        """Look once and draw it. A server that is away is said so, and the last picture stays."""
        try:
            record = await self._ask(self._source.look)
            self._before, self._now = self._now, Look(self._clock(), record)
            await self._read_sweeps()
            self._said = "" if self._said.startswith("waiting") else self._said
        except StoaError as problem:
            self._said = f"waiting: {problem.message}"
        self._draw()

    async def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._asker, question)

    async def _read_sweeps(self) -> None:
        """Those of the timeline's interval, once for each interval that is over, and only while the timeline is looked at."""
        if self._now is None or self.query_one("#picture", ContentSwitcher).current != "timeline":
            return
        record, version = self._now.record, self._version()
        over = any(row.version == version + 1 for row in record.versions)
        if version >= 0 and not (over and self._sweeps[0] == version):
            self._sweeps = (version, await self._ask(lambda: self._source.sweeps(record, version)))

    def _version(self) -> int:
        """The version of the timeline."""
        versions = [row.version for row in self._now.record.versions] if self._now is not None else []
        if not versions:
            return -1
        return self._chosen if self._chosen in versions else versions[-2] if len(versions) > 1 else versions[-1]

    def _draw(self) -> None:
        if self._now is None:
            self.query_one("#run", Static).update(Text(self._said or "looking ..."))
            return
        view = self._view = view_of(self._now, self._before, self._steps)
        lines = [*view.run, *([self._said] if self._said else [])]
        run = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        run.stylize("bold", 0, len(lines[0]))
        self._put("#run", run)
        self._fill(view.fleet)
        self._tell_reasons()
        self._put("#bandwidth", Text("\n".join(view.bandwidth), no_wrap=True, overflow="ellipsis"))
        self._put("#alarms", Text("\n".join(view.alarms) or "none", no_wrap=True, overflow="ellipsis", style="red" if view.alarms else ""))
        record, version = self._now.record, self._version()
        width = max(30, self.size.width - 4)
        sweeps = self._sweeps[1] if self._sweeps[0] == version else ()
        timeline = timeline_lines(record, sweeps, interval_bounds(record, version), width)
        legend = f"version {version}:  = step  . wait  P publish  # sweep  o group landed   [ earlier  ] later"
        self._put("#timeline", Text("\n".join([legend, "", *timeline]), no_wrap=True))
        self._put("#star", Text("\n".join(star_lines(record)), no_wrap=True))

    def on_data_table_row_highlighted(self) -> None:
        """Why the Mac under the cursor is as it is stands first."""
        self._tell_reasons()

    def _tell_reasons(self) -> None:
        if self._view is not None:
            slowest = self._view.slowest
            lines = [*filter(None, [slowest]), *reason_lines(self._view.fleet, self._selected(), slowest)]
            self._put("#slowest", Text("\n".join(lines)))

    def _put(self, name: str, text: Text) -> None:
        """Change a part only if it says something new: what stays the same is not sent again."""
        part = self.query_one(name, Static)
        if part.content != text:
            part.update(text)

    def _fill(self, lines: tuple[MacLine, ...]) -> None:
        table = self.query_one("#fleet", DataTable)
        before, self._shown = self._shown, lines
        changed = [pair for pair in zip(before, lines, strict=False) if pair[0] != pair[1]]
        columns = columns_of(lines)
        if columns == self._columns and [line.host for line in before] == [line.host for line in lines] and len(changed) <= MOST_CHANGED:
            for old, new in changed:
                for name, was, cell in zip(COLUMNS, old.cells(), _cells(new), strict=True):
                    if name in columns and cell.plain != was:
                        table.update_cell(new.host, name, cell, update_width=True)
            return
        chosen = self._selected()
        self._drawn = tuple(line.host for line in lines)
        table.clear(columns=columns != self._columns)
        if columns != self._columns:
            self._columns = columns
            for name in columns:
                table.add_column(name, key=name)
        for line in lines:
            cells = dict(zip(COLUMNS, _cells(line), strict=True))
            table.add_row(*(cells[name] for name in columns), key=line.host)
        if chosen in (hosts := [line.host for line in lines]):
            table.move_cursor(row=hosts.index(chosen))

    def _selected(self) -> str:
        """Host of the row under the cursor."""
        row = self.query_one("#fleet", DataTable).cursor_row
        shown = self._drawn
        return shown[row] if 0 <= row < len(shown) else ""

    def action_picture(self, name: str) -> None:
        """Show the fleet, the timeline or the star."""
        self.query_one("#picture", ContentSwitcher).current = name
        self.run_worker(self.refresh_view(), exclusive=False)

    def action_interval(self, by: int) -> None:
        """Show the publish interval before or after."""
        versions = [row.version for row in self._now.record.versions] if self._now is not None else []
        version = self._version() + by
        if version in versions:
            self._chosen = version
            self.action_picture("timeline")

    def action_pause(self) -> None:
        """Pause the run, or undo it, once that is confirmed."""
        if self._view is None or self._view.ended:
            self._say("the run has ended" if self._view is not None else "nothing is known of the run yet")
        elif self._view.paused:
            self._confirm(Order("Resume the run?", self._source.resume, "the run goes on"))
        else:
            self._confirm(Order("Pause the run? Macs finish their groups.", self._source.pause, "the run is pausing"))

    def action_drain(self) -> None:
        """Drain the Mac under the cursor, once that is confirmed."""
        host = self._selected()
        if not host:
            self._say("no Mac is chosen")
            return
        order = Order(f"Drain {host}? It finishes its sweep and leaves.", lambda: self._source.drain(host), f"{host} finishes its sweep")
        self._confirm(order)

    def _confirm(self, order: Order) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._carry_out(order), exclusive=False)

        self.push_screen(Sure(order.question), answered)

    async def _carry_out(self, order: Order) -> None:
        try:
            await self._ask(order.do)
            self._say(order.said)
        except StoaError as problem:
            self._say(problem.message)
        await self.refresh_view()

    def _say(self, words: str) -> None:
        self._said = words
        self._draw()


def _cells(line: MacLine) -> list[Text]:
    state = Text(line.state, style=_STATES.get(line.state, ""))
    return [state if name == "state" else Text(cell) for name, cell in zip(COLUMNS, line.cells(), strict=True)]
