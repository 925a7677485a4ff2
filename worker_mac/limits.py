"""How many bytes may cross the network: caps a second in each direction, budgets of a day and of a month.

`CappedMeters` takes the place of a store's meters, through which every byte passes before it is sent and after it is
received, so nothing that uses the store knows of caps. Budgets are kept in one small file and outlive the process.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final

import structlog

from stoa.bucket.store import Meters
from stoa.config.host import MacHost

_log = structlog.get_logger(__name__)

WINDOW_SECONDS: Final = 60.0
"""In any window of this length no more than the cap allows passes, if no single piece is larger than that."""
LONGEST_WAIT_SECONDS: Final = 60.0
"""Of one piece: callers are watched for silence."""
SAVE_BYTES: Final = 1 << 20
"""A killed process forgets at most this much of what it has used."""


class Cap:
    """At most `bytes_per_second`, evenly and in any minute; 0 is no cap. Safe from any thread.

    Pieces pass whole. One that is larger than a minute's worth waits for an empty minute, or LONGEST_WAIT_SECONDS; what it
    took too much, later ones make good.
    """

    def __init__(
        self, bytes_per_second: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_second, clock, sleep
        self._lock = threading.Lock()
        self._passed: deque[tuple[float, int]] = deque()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until this many bytes may pass, and count them."""
        if not self._rate or not num_bytes:
            return
        with self._lock:
            deadline = self._clock() + LONGEST_WAIT_SECONDS
            while (wait_seconds := min(self._wait_seconds(num_bytes), deadline - self._clock())) > 0:
                self._sleep(wait_seconds)
            now = self._clock()
            self._passed.append((now, num_bytes))
            self._free_at = max(self._free_at, now) + num_bytes / self._rate

    def _wait_seconds(self, num_bytes: int) -> float:
        """Until the piece before has had its time, and the last minute has room."""
        now = self._clock()
        while self._passed and self._passed[0][0] <= now - WINDOW_SECONDS:
            self._passed.popleft()
        window_seconds, room = 0.0, self._rate * WINDOW_SECONDS - sum(size for _, size in self._passed)
        for passed_at, size in self._passed:
            if num_bytes <= room:
                break
            window_seconds, room = passed_at + WINDOW_SECONDS - now, room + size
        return max(self._free_at - now, window_seconds)


class Budgets:
    """Bytes of this day and this calendar month by local time, both directions together. Safe from any thread."""

    def __init__(self, path: Path, day_bytes: int, month_bytes: int, today: Callable[[], datetime] = datetime.now) -> None:
        """day_bytes, month_bytes: 0 for no budget."""
        self._path, self._today = path, today
        self._most = {"day": day_bytes, "month": month_bytes}
        self._lock = threading.Lock()
        self._used = self._read()
        self._unsaved = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that passed."""
        with self._lock:
            for period, name in self._names().items():
                before, used = self._used.get(period, (name, 0))
                self._used[period] = (name, (used if before == name else 0) + num_bytes)
            self._unsaved += num_bytes
            if self._unsaved >= SAVE_BYTES:
                self._save()

    def used_bytes(self, period: str) -> int:
        """Of this `day` or `month`, so far."""
        with self._lock:
            name, used = self._used.get(period, ("", 0))
            return used if name == self._names()[period] else 0

    def spent(self) -> str:
        """Which budget is spent, in words; "" for none."""
        for period, most in self._most.items():
            if most and self.used_bytes(period) >= most:
                return f"this {period}'s network budget of {most / 1e9:.3g} GB is spent"
        return ""

    def close(self) -> None:
        """Keep what was counted."""
        with self._lock:
            self._save()

    def _names(self) -> dict[str, str]:
        now = self._today()
        return {"day": f"{now:%Y-%m-%d}", "month": f"{now:%Y-%m}"}

    def _read(self) -> dict[str, tuple[str, int]]:
        try:
            kept = json.loads(self._path.read_text("ascii"))
            return {period: (str(kept[period][0]), int(kept[period][1])) for period in self._most}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            _log.warning("budgets_forgotten", path=str(self._path), reason=str(error))
            return {}

    def _save(self) -> None:
        self._unsaved = 0
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._used), "ascii")
            part.replace(self._path)
        except OSError as error:  # a full disk must not end a transfer
            _log.warning("budgets_not_kept", path=str(self._path), reason=str(error))


class CappedMeters(Meters):
    """Meters that let bytes pass no faster than a Mac's owner allows, and count them against the budgets."""

    def __init__(self, allowed: MacHost, budgets: Budgets, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__()
        self._up, self._down = Cap(allowed.upload_bytes_per_second, sleep=sleep), Cap(allowed.download_bytes_per_second, sleep=sleep)
        self._budgets = budgets

    def add(self, kind: str, *, up: int = -1, down: int = -1, num_requests: int = 1) -> None:
        """Count, and wait for the caps."""
        super().add(kind, up=up, down=down, num_requests=num_requests)
        self._up.take(max(up, 0))
        self._down.take(max(down, 0))
        self._budgets.add(max(up, 0) + max(down, 0))
