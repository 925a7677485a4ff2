"""How errors and sizes are told."""

import errno
from pathlib import Path

import pytest

from cli import say
from cli.say import Exit
from stoa.contracts.errors import ConfigError, ServiceUnavailableError


def test_error_is_what_where_then_a_hint_after_an_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = say.fault(ConfigError("x.toml:3: a.b is not a setting", hint="did you mean a.c?"))
    out = capsys.readouterr()
    assert out.err == "error: x.toml:3: a.b is not a setting\n\nhint: did you mean a.c?\n"
    assert out.out == ""
    assert code == Exit.WRONG_USE == 2


def test_trouble_with_a_server_is_a_failure_not_wrong_use() -> None:
    assert say.fault(ServiceUnavailableError("no answer")) == Exit.FAILED == 1


def test_full_disk_is_told_without_a_trace_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert say.system_fault(OSError(errno.ENOSPC, "No space left on device", "runs/x/report.json")) == Exit.FAILED
    assert capsys.readouterr().err == "error: runs/x/report.json: No space left on device\n\nhint: make room on the disk\n"


def test_file_where_a_folder_is_wanted_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    taken = tmp_path / "report"
    taken.touch()
    with pytest.raises(OSError, match="exists") as caught:
        taken.mkdir(exist_ok=True)
    assert say.system_fault(caught.value) == Exit.FAILED
    assert capsys.readouterr().err == f"error: {taken}: a file of that name is there\n\nhint: name another path\n"


def test_brackets_in_a_message_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    say.error("[stop] may change [/red]")
    assert capsys.readouterr().err == "error: [stop] may change [/red]\n"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_960, "1.0 MB"), (8_466_000_000, "8.5 GB")]
)
def test_sizes(size: int, text: str) -> None:
    assert say.bytes_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (11_220, "3 h 07 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert say.time_text(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(1, "1 minute"), (1.0, "1 minute"), (8.0, "8 minutes"), (0.5, "0.5 minutes")])
def test_one_of_a_thing_is_not_several(number: float, text: str) -> None:
    assert say.counted(number, "minute") == text
