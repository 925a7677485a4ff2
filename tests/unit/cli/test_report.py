"""The written report: files, rows in order of time, a page that needs nothing from outside."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from cli.report.curves import FIGURES
from cli.report.pictures import pulls
from cli.report.record import HostShare, RunRecord, Told
from cli.report.summary import summarise
from cli.report.write import metric_rows, page, said_of, write_report
from tests.unit.cli.records import episode, record, session, step, sweep, version

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "circle", "line"}


class Tags(HTMLParser):
    """Checks that every tag is closed by its own end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href"):
                self.links.append(str(value))


def whole() -> RunRecord:
    """A run with everything a report can draw and tell."""
    more = {"entropy": 0.5, "staleness_0": 1.0, "staleness_2": 3.0}
    more |= {"trainer_wait_share": 0.4, "batch_occupancy_mean": 0.9, "empty_retrieval_rate": 0.1}
    steps = tuple(
        replace(one, metrics={**one.metrics, **more}, hosts={"mac-1": HostShare(accepted=2, sampled_tokens=50)})
        for one in (step(n, version=(n - 1) // 2) for n in (1, 2, 3, 4))
    )
    return record(
        steps=steps,
        interval=1,
        sweeps=(sweep("mac-1", 7, 1), sweep("mac-2", 8, 0)),
        transcripts=(Told("Best of the last steps", episode()),),
        bucket_bytes={"groups": 900, "deltas": 3000},
        gpu_hours=0.5,
        software={"stoa": "0.1.0"},
        engines={"mac-1": "mlx"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_report(whole(), out)
    return out


def test_all_files_are_written(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {"report.json", "metrics.jsonl", "report.html", "plots"}
    names = {"learning", "reward", "distance", "entropy", "staleness", "staleness_histogram", "fleet_speed", "trainer_time"}
    names |= {"busy", "bytes", "changed", "bytes_by_kind", "cost", "timeline", "star"}
    assert {p.name for p in (folder / "plots").iterdir()} == {f"{n}.{kind}" for n in names for kind in ("png", "svg")}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (folder / "plots").glob("*.png"))
    for picture in (folder / "plots").glob("*.svg"):
        assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_waits_of_the_trainer_filled_places_and_empty_searches_are_drawn() -> None:
    told = [{"trainer_wait_share": 0.2, "batch_occupancy_mean": 0.9, "empty_retrieval_rate": 0.0}, {"trainer_wait_share": 0.4}]
    run = record(steps=tuple(step(n, metrics=metrics) for n, metrics in enumerate(told, 1)))
    figures = {one.name: one for one in FIGURES}
    lines: dict[str, list[float]] = {}
    for name in ("busy", "reward"):
        axes = Figure().subplots()
        figures[name].draw(run, axes)
        lines |= {str(line.get_label()): [float(y) for y in np.asarray(line.get_ydata())] for line in axes.get_lines()}
    assert lines["trainer waits"] == pytest.approx([0.2, 0.3])  # the mean of what there is so far
    assert lines["places filled"] == pytest.approx([0.9, 0.9])
    assert lines["empty searches"] == pytest.approx([0.0, 0.0])
    assert not figures["busy"].has_data(record())


def bars_of(run: RunRecord) -> dict[str, list[float]]:
    axes = Figure().subplots()
    next(one for one in FIGURES if one.name == "trainer_time").draw(run, axes)
    return {str(bars.get_label()): [float(bar.get_height()) for bar in bars] for bars in axes.containers}


def test_a_pause_before_a_version_is_not_drawn_as_publishing() -> None:
    steps = tuple(step(n, version=n - 1) for n in (1, 2, 3))
    came = ((0.5, 0.5), (45.0, 44.0), (300.25, 0.25))
    versions = tuple(version(n, latency_seconds=seconds, work_seconds=work) for n, (seconds, work) in enumerate(came, 1))
    drawn = bars_of(record(steps=steps, versions=versions))
    assert drawn["publishing"] == pytest.approx([0.5, 44.0, 0.25])
    assert drawn["held up"] == pytest.approx([0.0, 1.0, 300.0])
    assert drawn["waiting for groups"] == pytest.approx([0.5, 0.5, 0.5])


def test_nothing_is_drawn_as_held_up_where_nothing_was() -> None:
    """The stages of a version whose latency is not known, 0, are nobody's time."""
    steps = tuple(step(n, version=n - 1) for n in (1, 2))
    drawn = bars_of(record(steps=steps, versions=(version(1, latency_seconds=0.0, work_seconds=3.0), version(2))))
    assert drawn["publishing"] == pytest.approx([0.0, 0.5])
    assert "held up" not in drawn


def test_the_way_of_a_version_to_a_mac_that_joined_later_is_drawn_where_it_was() -> None:
    """Version 1 was named at 100; one Mac's sweep on it began at 104.75, after a way of 0.3 s, another's after one from the start."""
    there = replace(sweep("mac-1", 3, 1), started_at=104.0, pull_latency_seconds=4.0)
    run = record(sweeps=(there, sweep("mac-2", 1, 1)), versions=(version(1, published_at=100.0),))
    assert pulls(run) == [("mac-1", 100.0, 4.0), ("mac-2", pytest.approx(104.45), 0.3)]


def test_no_picture_is_cut_at_its_edge(folder: Path) -> None:
    """A legend wider than its figure runs over the edge, and squeezes the axes."""
    for path in (folder / "plots").glob("*.png"):
        pixels = imread(path)
        assert pixels[:, -3:, :3].min() == 1.0, path.name


def test_page_is_whole_and_needs_no_network(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    assert all(link.startswith("#") for link in tags.links)
    assert not re.search(r"<script|@import|src=|url\((?!#)", text)
    used = {link.removeprefix("#") for link in tags.links} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert used <= set(tags.ids)


def test_page_follows_the_readers_theme_and_width(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport" content="width=device-width' in text
    assert "var(--series-1)" in text and "currentColor" in text
    assert "#2f6fde" not in text.split("</style>")[1]
    assert not re.search(r'<svg[^>]* (width|height)="', text)


def test_page_says_that_roll_ups_are_among_the_deltas_in_the_bucket() -> None:
    told = record(bucket_bytes={"groups": 900, "deltas": 3000})
    text = page(told, summarise(told), ())
    assert "in the bucket: deltas, and roll-ups of several for who comes late</td>" in text
    assert "in the bucket: groups</td>" in text


def test_page_escapes_what_macs_say_of_themselves() -> None:
    hostile = record(sessions=(session("mac-1", place="<script>alert(1)</script>"),))
    text = page(hostile, summarise(hostile), ())
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_page_of_a_run_that_has_not_begun_is_written(tmp_path: Path) -> None:
    write_report(record(steps=(), versions=(), evaluations=(), sessions=(), version=-1, step=0), tmp_path)
    assert (tmp_path / "report.html").is_file()


def test_metric_rows_come_in_order_of_time_with_kind_and_number(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert {row["kind"] for row in rows} == {"step", "version", "evaluation"}
    first_step = next(row for row in rows if row["kind"] == "step")
    assert first_step["time"] == 102.0 + 1.5
    assert first_step["metrics"]["reward_mean"] == 0.1


def test_anchor_bytes_are_told_once_of_each_anchor() -> None:
    sizes = [row.metrics["anchor_bytes"] for row in metric_rows(record()) if row.kind == "version"]
    assert sizes == [40_000, 0, 0]


def test_report_is_written_over_itself(tmp_path: Path) -> None:
    write_report(record(), tmp_path)
    before = (tmp_path / "report.html").read_text()
    write_report(record(), tmp_path)
    assert (tmp_path / "report.html").read_text() == before


def test_transcripts_mark_each_token_by_what_became_of_it(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert '<span class="given">a prompt </span>' in text
    assert '<span class="kept">search</span>' in text and '<span class="dropped">&lt;b&gt;x</span>' in text
    assert "3 tokens sampled, 4 masked, 1 dropped" in text
    for said in ("No fault was told of", "stoa 0.1.0", "mac-1: mlx", "0.500 h, no price set"):
        assert said in text, said


def test_faults_are_told_each_in_a_few_words() -> None:
    """A lease that another followed, a worker started twice, a sweep redone, a stale group and one Mac shut out."""
    steps = (step(1, dropped={"g": "stale"}), step(2, epoch=2001, hosts={"mac-2": HostShare(quarantined=True)}))
    faulty = record(steps=steps, restarts={"trainer": 2}, sessions=(session("mac-1", num_redone=1, state="away"),))
    assert said_of(summarise(faulty).survived) == [
        "1 trainer took over from one before it",
        "2 workers started again",
        "1 sweep redone",
        "1 group too old when its turn came",
        "quarantined: mac-2",
        "away: mac-1",
    ]


def test_several_samples_a_question_show_pass_at_k_and_their_own_interval() -> None:
    first, last = record().evaluations
    several = record(evaluations=(first, replace(last, num_samples=8, pass_at_k=0.9, interval_95=(0.7, 0.85))))
    summary = summarise(several)
    assert summary.pass_at_1.interval_95 == (0.7, 0.85)
    text = page(several, summary, ())
    assert "90.0% (k = 8)" in text and "<th>pass@k</th>" in text
    assert "pass@k" not in page(record(), summarise(record()), ())
