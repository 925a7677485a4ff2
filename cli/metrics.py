"""Feeds a run's metrics to a sink: all there are, and with following those that come until the run has ended."""

import json
import time
from collections.abc import Callable

from cli.follow import OUTAGE_SECONDS, POLL_SECONDS, Found
from cli.live.source import Servers
from cli.live.view import ENDED
from cli.report.record import RunRecord
from cli.report.write import metric_rows
from stoa.contracts.errors import ServiceUnavailableError
from stoa.telemetry.sinks import MetricRow, Sink


class Feeder:
    """Gives a sink each row once; a row that comes late, such as an evaluation's, comes after those that were there."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._told: set[tuple[str, int, int]] = set()

    def feed(self, record: RunRecord) -> int:
        """Rows that were new."""
        fresh: list[MetricRow] = []
        for row in metric_rows(record):
            if row.key not in self._told:
                self._told.add(row.key)
                fresh.append(row)
        self._sink.write(fresh)
        return len(fresh)


def feed_until_end(found: Found, sink: Sink, said: Callable[[str], None], pause: Callable[[float], None] = time.sleep) -> int:
    """Follow a run to its end; returns the number of rows. Raises ServiceUnavailableError after a long outage."""
    feeder, source = Feeder(sink), Servers(found)
    num, away_since = 0, 0.0
    while True:
        try:
            record = source.look()
            num += feeder.feed(record)
            if record.state in ENDED:
                return num
            away_since = 0.0
        except ServiceUnavailableError as problem:
            if not away_since:
                away_since = time.monotonic()
                said(f"waiting: {problem.message}")
            if time.monotonic() - away_since > OUTAGE_SECONDS:
                raise
        pause(POLL_SECONDS)


def settings_of(found: Found) -> dict[str, object]:
    """The resolved configuration, for sinks that keep it."""
    return json.loads(found.document.config.model_dump_json())
