"""A run on real servers, as the live view's source."""

from cli.follow import ASKED, GONE_LOOKS, Found, gone, is_absent
from cli.live.view import ENDED
from cli.report.look import sweeps_of
from cli.report.record import RunRecord, SweepBar
from stoa.contracts import names

_WATCHED = f"{ASKED}: stoa live"


class Servers:
    """See `cli.live.app.Source`. Landings only are read of a timeline, which is a listing: groups themselves may be large."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._run = found.document.run
        self._num_absent = 0

    def look(self) -> RunRecord:
        """Raises ServiceUnavailableError while the bucket is away."""
        record = self._found.collector.collect()
        if record.state not in ENDED:
            self._num_absent = self._num_absent + 1 if is_absent(self._found.control, self._run) else 0
        return gone(record) if self._num_absent >= GONE_LOOKS else record

    def sweeps(self, record: RunRecord, version: int) -> tuple[SweepBar, ...]:
        """From the bucket's listing."""
        return sweeps_of(self._found.store, self._run, record, version, None)[0]

    def pause(self) -> None:
        """Raises UsageError if the run refuses it."""
        self._found.control.ask(self._run, names.PAUSE, _WATCHED)

    def resume(self) -> None:
        """Raises UsageError if the run refuses it."""
        self._found.control.ask(self._run, names.RESUME, _WATCHED)

    def drain(self, host: str) -> None:
        """Raises UsageError if the run refuses it."""
        self._found.control.ask_mac(self._run, names.DRAIN_MAC, host, _WATCHED)
