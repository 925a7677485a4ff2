"""What follows when the whole Mac crashed while groups were played: wait, take less memory, and after the second stay off.

GPU drivers have crashed Macs under loads like ours. A crash is told by the report macOS writes at the next start; it is
ours if it came between a start of the worker and its clean end, which are noted in one small file of the state folder.
Deciding is a pure function; who waits or stays off is the worker.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

_log = structlog.get_logger(__name__)

REPORTS: Final = Path("/Library/Logs/DiagnosticReports")
DAY_SECONDS: Final = 86_400.0
BACK_OFF_SECONDS: Final = 900.0
"""After one crash nothing is played for this long."""
CAUTIOUS_SHARE: Final = 0.5
"""For a day after a crash, the share of its usual groups that a Mac plays at once."""
MOST: Final = 2
"""This many crashes in a day, and the worker stays off until a person says otherwise."""
Reports = Callable[[], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Caution:
    """What to do now. `stays_off`: why nothing may be played at all. `until`: Unix seconds before which to wait."""

    stays_off: str = ""
    until: float = 0.0
    share: float = 1.0

    def waits(self, now: float) -> str:
        """Why to wait at `now`, in Unix seconds; "" for no reason."""
        if now >= self.until:
            return ""
        return f"this Mac crashed while groups were played: waiting until {time.strftime('%H:%M', time.localtime(self.until))}"


def decide(panics: Sequence[float], now: float) -> Caution:
    """What follows from crashes at these times (Unix seconds)."""
    recent = [at for at in panics if now - at < DAY_SECONDS]
    if len(recent) >= MOST:
        return Caution(stays_off=f"this Mac crashed {len(recent)} times in a day while groups were played")
    return Caution(until=recent[0] + BACK_OFF_SECONDS, share=CAUTIOUS_SHARE) if recent else Caution()


class PanicLog:
    """Of one state folder: when the worker began, and the crashes that came before it ended."""

    def __init__(self, folder: Path, reports: Reports | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = folder / "panics.json", clock
        self._reports: Reports = reports or panic_reports

    def begin(self) -> Caution:
        """Note that a worker starts, and say what earlier crashes mean for it."""
        panics = self._known()
        now = self._clock()
        caution = decide(panics, now)
        if panics:
            _log.error("mac_crashed_lately", crashes=len(panics), stays_off=caution.stays_off)
        self._write(0.0 if caution.stays_off else now, panics)
        return caution

    def end(self) -> None:
        """Note a clean end: a later crash is none of ours."""
        self._write(0.0, self._known())

    def look(self) -> Caution:
        """What `begin` would say, without noting anything: a report may come minutes after the Mac is up again."""
        return decide(self._known(), self._clock())

    def forget(self) -> None:
        """A person wants it tried again."""
        self._path.unlink(missing_ok=True)

    def _known(self) -> list[float]:
        """Crashes of the last day that were ours."""
        began, panics = self._read()
        new = [at for at in self._reports() if at >= began and at not in panics] if began else []
        return [at for at in sorted([*panics, *new]) if self._clock() - at < DAY_SECONDS]

    def _read(self) -> tuple[float, list[float]]:
        try:
            kept = json.loads(self._path.read_text("ascii"))
            return float(kept["began"]), [float(at) for at in kept["panics"]]
        except FileNotFoundError:
            return 0.0, []
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("crashes_forgotten", path=str(self._path), reason=str(error))
            return 0.0, []

    def _write(self, began: float, panics: Sequence[float]) -> None:
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"began": began, "panics": list(panics)}), "ascii")
            part.replace(self._path)
        except OSError as error:  # a full disk: what was noted last still stands
            _log.warning("crashes_not_noted", path=str(self._path), reason=str(error))


def panic_reports(folder: Path = REPORTS) -> Sequence[float]:
    """When each crash of the whole Mac was reported, in Unix seconds; nothing where there is no such folder or no look into it."""
    found: list[float] = []
    for place in (folder, folder / "Retired"):
        try:
            found += [path.stat().st_mtime for path in place.iterdir() if path.suffix == ".panic"]
        except OSError:
            continue
    return sorted(found)
