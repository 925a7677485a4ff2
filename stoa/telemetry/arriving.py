"""How far bytes on their way to this machine have come, as a person sees it: a bar on a terminal, a word each ten percent elsewhere.

A share is of bytes on disk and of the total that manifest and index name: after a restart it goes on where it was. Who
downloads, and what, is the caller's business.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LOOK_SECONDS: Final = 0.5
_STEP_PERCENT: Final = 10


@dataclass(frozen=True, slots=True)
class Arrival:
    """Bytes that are on disk, of those that are needed."""

    num_bytes: int
    total_bytes: int

    @property
    def share(self) -> float:
        """From 0 to 1; 1 where nothing is needed."""
        return min(1.0, max(0.0, self.num_bytes / self.total_bytes)) if self.total_bytes > 0 else 1.0

    @property
    def percent(self) -> int:
        """From 0 to 100, rounded down: 100 is said of what is whole alone."""
        whole = self.num_bytes >= self.total_bytes
        return 100 if whole else min(99, int(100 * self.share))

    def __str__(self) -> str:
        """As in `45 %, 4050000000 of 9000000000 bytes`."""
        return f"{self.percent} %, {self.num_bytes} of {self.total_bytes} bytes"


class Shown:
    """One download as it is shown: never less than before. What is whole at the first look, or nearly, is not shown at all."""

    def __init__(self, what: str, tell: Callable[[Arrival], None], *, console: "Console | None" = None, least_bytes: int = 1) -> None:
        """tell: called each ten percent where there is no terminal. least_bytes: what must be missing at first."""
        self._what, self._tell, self._least = what, tell, least_bytes
        self._console = console
        self._last: Arrival | None = None
        self._told = -1
        self._bar: Progress | None = None

    def show(self, found: Arrival) -> None:
        """Bring it up to date. Another total is another download, with a bar of its own."""
        last = self._last
        if last is None or last.total_bytes != found.total_bytes:
            if found.total_bytes - found.num_bytes < self._least:
                return
            self.close()
            self._told = -1
            self._begin(found)
        else:
            found = Arrival(max(last.num_bytes, min(found.num_bytes, found.total_bytes)), found.total_bytes)
        self._last = found
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=max(0, found.num_bytes))
        elif found.percent // _STEP_PERCENT > self._told:
            self._told = found.percent // _STEP_PERCENT
            self._tell(found)

    def whole(self) -> None:
        """It is all here: what was shown of it ends at 100 %."""
        if self._last is not None:
            self.show(Arrival(self._last.total_bytes, self._last.total_bytes))

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _begin(self, found: Arrival) -> None:
        if not (sys.stderr.isatty() if self._console is None else self._console.is_terminal):
            return
        from rich.console import Console  # noqa: PLC0415 - for a terminal alone
        from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console or Console(stderr=True))
        self._bar.add_task(self._what, total=found.total_bytes, completed=max(0, found.num_bytes))
        self._bar.start()


@contextmanager
def watched(look: Callable[[], Arrival | None], show: Callable[[Arrival | None], None], seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """Within the block a thread looks every so often, and shows what it finds."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(seconds):
            show(look())

    watcher = threading.Thread(target=watch, name="arriving", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@contextmanager
def shown(shown: Shown, look: Callable[[], Arrival | None], seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """Within the block what `look` finds is shown; a block that ends without an error ends at 100 %."""

    def show(found: Arrival | None) -> None:
        if found is not None:
            shown.show(found)

    try:
        with watched(look, show, seconds):
            yield
        shown.whole()
    finally:
        shown.close()
