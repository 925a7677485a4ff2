"""A bar for work of several passes: one changing line on a terminal, a plain line each ten percent elsewhere."""

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cli.say import time_text

_QUIET_SECONDS: Final = 30.0
"""Without a terminal a pass whose end is not known says so often how far it is."""


class Bar:
    """Use as a context; call `show` with a pass, the fraction of it that is done (None: not known) and a count."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console)
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, tuple[int, float]] = {}
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, stage: str, done: float | None, count: int) -> None:
        """Bring the bar up to date."""
        if self._progress is None:
            self._tell(stage, done, count)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=None if done is None else 1.0, count="")
        total = None if done is None else 1.0
        self._progress.update(self._tasks[stage], completed=done or 0.0, total=total, count=f"{count:,}")

    def _tell(self, stage: str, done: float | None, count: int) -> None:
        now = time.monotonic()
        tenths, told_at = self._told.get(stage, (-1, self._began))
        reached = -1 if done is None else int(10 * done)
        if reached > tenths or (done is None and now - told_at >= _QUIET_SECONDS):
            self._told[stage] = (max(reached, tenths), now)
            share = "" if done is None else f" {100 * done:.0f} %,"
            self._console.print(f"{stage}:{share} {count:,} documents, {time_text(now - self._began)}", markup=False, soft_wrap=True)
