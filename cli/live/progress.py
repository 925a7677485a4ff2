"""Shows a run while it goes on: one changing block on a terminal, plain lines elsewhere. It reads records, asks nobody.

Lines come when there is news: a version, an evaluation, a Mac that joined or left, a change of state.
"""

import sys
import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.macs import SPEED, doing
from cli.report.record import Held, RunRecord
from cli.say import bytes_text, time_text
from stoa.contracts.fleet_messages import SessionStatus

_BARS: Final = " .:-=+*#%@"
"""Heights of the little curve of rewards; ASCII, so that every terminal has them."""
_CURVE_STEPS: Final = 48


class Progress:
    """Follows one run. Use as a context; call `show` with each new record.

    max_steps: for records that name no limit. quiet: say nothing.
    """

    def __init__(self, max_steps: int, ui_url: str = "", console: Console | None = None, *, quiet: bool = False) -> None:
        self._console = console if console is not None else Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._max_steps = max_steps
        self._ui_url = ui_url
        self._live = Live(console=self._console, refresh_per_second=4, transient=False) if self._console.is_terminal and not quiet else None
        self._began = time.monotonic()
        self._told_version = -1
        self._told_evaluations: set[str] = set()
        self._first = True
        self._told_hosts: dict[str, str] = {}
        self._told_state = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """One line that stays, above the block."""
        if self._quiet:
            return
        self._console.print(line, markup=False, soft_wrap=True)
        sys.stderr.flush()

    def show(self, record: RunRecord) -> None:
        """Bring the view up to date."""
        if self._live is not None:
            self._live.update(block(record, record.max_steps or self._max_steps, self._ui_url))
        else:
            for line in self._news(record):
                self.say(line)

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:6.1f} s  "

    def _news(self, record: RunRecord) -> list[str]:
        lines: list[str] = []
        if record.state != self._told_state:
            self._told_state = record.state
            lines.append(f"{self._clock()}run {record.facts.run} is {record.state}" + (f": {_why(record)}" if _why(record) else ""))
        for session in record.sessions:
            if self._told_hosts.get(session.host) != session.state:
                self._told_hosts[session.host] = session.state
                lines.append(f"{self._clock()}{session.host} is {session.state}" + (f": {session.reason}" if session.reason else ""))
        if record.version > self._told_version:
            self._told_version = record.version
            lines.append(f"{self._clock()}{version_line(record, record.max_steps or self._max_steps)}")
        when = ""
        if self._first:
            # Those of before were not made now: of them the newest tells how the run stands.
            self._first, when = False, "so far, "
            self._told_evaluations.update(result.evaluation for result in record.evaluations[:-1])
        for result in record.evaluations:
            if result.evaluation not in self._told_evaluations:
                self._told_evaluations.add(result.evaluation)
                low, high = result.interval_95
                lines.append(
                    f"{self._clock()}{when}held-out at version {result.version}: pass@1 {result.pass_at_1:.3f} ({low:.3f} to {high:.3f}), "
                    f"search rate {result.search_rate:.3f}, {result.num_questions} questions"
                )
        return lines


def version_line(record: RunRecord, max_steps: int) -> str:
    """The newest version in one line: steps, reward, search rate, bytes, staleness, Macs."""
    steps = f"step {record.step}" + (f"/{max_steps}" if max_steps else "")
    parts = [f"version {record.version}", steps]
    if record.steps:
        recent = [row.metrics for row in record.steps[-4:]]
        for name, label in (("reward_mean", "reward"), ("search_rate", "search"), ("staleness_mean", "staleness")):
            values = [metrics[name] for metrics in recent if name in metrics]
            if values:
                parts.append(f"{label} {sum(values) / len(values):.2f}")
    newest = record.versions[-1] if record.versions else None
    if newest is not None and newest.delta_bytes:
        parts.append(f"delta {bytes_text(newest.delta_bytes)}")
    if newest is not None and newest.anchor_version == newest.version:
        parts.append(f"anchor {bytes_text(newest.anchor_bytes)}")
    down, up = sum(s.bytes_down for s in record.sessions), sum(s.bytes_up for s in record.sessions)
    parts.append(f"Macs {sum(s.state == 'live' for s in record.sessions)}, down {bytes_text(down)}, up {bytes_text(up)}")
    return "  ".join(parts)


def block(record: RunRecord, max_steps: int, ui_url: str) -> RenderableType:
    """The changing block of a terminal."""
    head = Text.assemble(
        ("run ", "dim"), (record.facts.run, "bold"), "  ", record.state, "  ", time_text(record.seconds),
        ("  " + _why(record) if _why(record) else "", "dim"),
    )  # fmt: skip
    parts: list[RenderableType] = [head, _steps(record, max_steps), _numbers(record)]
    if record.steps:
        parts.append(Text(f"rewards  {curve([row.metrics.get('reward_mean', 0.0) for row in record.steps])}"))
    if record.sessions:
        parts.append(_fleet(record.sessions, record.held))
    if ui_url:
        parts.append(Text(f"Temporal page {ui_url}", style="dim"))
    return Group(*parts)


def _why(record: RunRecord) -> str:
    """Why a run ended, or what it waits for."""
    return record.end_reason if record.state in ("stopped", "failed", "gone") and record.end_reason else record.waiting_for


def _steps(record: RunRecord, max_steps: int) -> RenderableType:
    done = max(record.step, record.live_step)
    row = Table.grid(padding=(0, 2))
    row.add_row(
        f"version {max(record.version, 0)}",
        f"step {done}" + (f"/{max_steps}" if max_steps else ""),
        ProgressBar(total=max(max_steps, 1), completed=min(done, max_steps or 0), width=36) if max_steps else "",
    )
    return row


def _numbers(record: RunRecord) -> RenderableType:
    said: list[str] = []
    if record.steps:
        metrics = record.steps[-1].metrics
        for name, label, form in (
            ("reward_mean", "reward", "{:.2f}"), ("search_rate", "search", "{:.2f}"), ("staleness_mean", "staleness", "{:.1f}"),
            ("mismatch_mean", "mismatch", "{:.4f}"), ("gate_drop_rate", "gate drops", "{:.2%}"),
        ):  # fmt: skip
            if name in metrics:
                said.append(f"{label} {form.format(metrics[name])}")
    if record.evaluations:
        last = record.evaluations[-1]
        said.append(f"held-out pass@1 {last.pass_at_1:.3f}, search rate {last.search_rate:.3f} (version {last.version})")
    deltas = [row.delta_bytes for row in record.versions if row.delta_bytes]
    if deltas:
        said.append(f"delta {bytes_text(deltas[-1])}, anchor {bytes_text(record.versions[-1].anchor_bytes)}")
    return Text("   ".join(said))


def _fleet(sessions: tuple[SessionStatus, ...], held: Held) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("Mac", "state", "version", "sweeps", "groups", "tokens/s", "pull", "down", "up"):
        table.add_column(name, justify="left" if name in {"Mac", "state"} else "right", no_wrap=True)
    reasons: dict[str, list[str]] = {}
    for s in sessions:
        state, reason = doing(s, held)
        # Of a Mac that only the bucket tells of, nobody counted sweeps, time and bytes.
        known = bool(s.num_sweeps or not s.num_groups)
        table.add_row(
            f"{s.host} {s.place}".strip(), state, str(s.version) if s.version >= 0 else "-", str(s.num_sweeps) if known else "-",
            str(s.num_groups), f"{s.tokens_per_second:.0f}" if s.tokens_per_second else "-",
            f"{s.pull_latency_seconds_last:.1f} s" if s.pull_latency_seconds_last else "-",
            bytes_text(s.bytes_down) if known else "-", bytes_text(s.bytes_up) if known else "-",
        )  # fmt: skip
        if reason:
            reasons.setdefault(reason, []).append(s.host)
    # Below the table, whose columns would otherwise be squeezed on a terminal of 80 columns.
    speeds = [Text(SPEED, style="dim")] if any(s.tokens_per_second for s in sessions) else []
    return Group(table, *speeds, *(Text(f"{', '.join(hosts)}: {reason}", style="dim") for reason, hosts in reasons.items()))


def curve(values: list[float]) -> str:
    """The last rewards, each a mark whose weight grows with its value in [0, 1]."""
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(value * len(_BARS))))] for value in values[-_CURVE_STEPS:])
