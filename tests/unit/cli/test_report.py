"""The written report: files, rows in order of time, a page that needs nothing from outside."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from cli.report.summary import summarise
from cli.report.write import metric_rows, page, write_report
from tests.unit.cli.records import record, session

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_report(record(), out)
    return out


def test_all_files_are_written(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {"report.json", "metrics.jsonl", "report.html", "plots"}
    pictures = {p.name for p in (folder / "plots").iterdir()}
    assert pictures == {f"{n}.png" for n in ("learning", "reward", "distance", "staleness", "bytes", "trainer_time")}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (folder / "plots").iterdir())


def test_no_picture_is_cut_at_its_edge(folder: Path) -> None:
    """A legend wider than its figure runs over the edge, and squeezes the axes."""
    for path in (folder / "plots").iterdir():
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
    sizes = [row["metrics"]["anchor_bytes"] for row in metric_rows(record()) if row["kind"] == "version"]  # type: ignore[index]
    assert sizes == [40_000, 0, 0]


def test_report_is_written_over_itself(tmp_path: Path) -> None:
    write_report(record(), tmp_path)
    before = (tmp_path / "report.html").read_text()
    write_report(record(), tmp_path)
    assert (tmp_path / "report.html").read_text() == before
