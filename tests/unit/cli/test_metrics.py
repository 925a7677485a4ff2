"""A sink gets each row once, also those that come late; following ends with the run."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from cli.follow import Found
from cli.metrics import Feeder, feed_until_end
from cli.report.record import RunRecord
from stoa.contracts.errors import ServiceUnavailableError
from stoa.telemetry.sinks import MetricRow
from tests.unit.cli.records import record


class Kept:
    def __init__(self) -> None:
        self.rows: list[MetricRow] = []

    def write(self, rows: Iterable[MetricRow]) -> None:
        self.rows.extend(rows)

    def close(self) -> None:
        pass


def test_each_row_once_and_a_late_evaluation_after_the_others() -> None:
    sink = Kept()
    feeder = Feeder(sink)
    whole = record()
    early = replace(whole, steps=whole.steps[:2], versions=whole.versions[:2], evaluations=whole.evaluations[:1])
    assert (feeder.feed(early), feeder.feed(early), feeder.feed(whole), feeder.feed(whole)) == (5, 0, 4, 0)
    assert [row.key for row in sink.rows[5:]] == [("step", 3, 1), ("version", 4, 2), ("evaluation", 4, 2), ("step", 4, 1)]
    assert len({row.key for row in sink.rows}) == 9


def test_following_rides_out_an_outage_and_ends_with_the_run() -> None:
    going = replace(record(), state="running", steps=record().steps[:1])
    answers: list[RunRecord | ServiceUnavailableError] = [going, ServiceUnavailableError("away"), record()]

    def collect() -> RunRecord:
        answer = answers.pop(0)
        if isinstance(answer, ServiceUnavailableError):
            raise answer
        return answer

    found = SimpleNamespace(
        document=SimpleNamespace(run="demo"), collector=SimpleNamespace(collect=collect), control=SimpleNamespace(is_running=lambda _: True)
    )
    sink, said = Kept(), list[str]()
    assert feed_until_end(cast(Found, found), sink, said.append, lambda _: None) == len(sink.rows) == 9
    assert said == ["waiting: away"]
