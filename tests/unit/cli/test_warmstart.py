"""`stoa warmstart` before and after its processes: what it refuses, the line it starts them by, what it shows."""

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cli.main import run as stoa
from cli.say import Exit
from cli.warmstart import Event, Hosts, View, memory_line, parse_shares
from stoa.contracts.errors import UsageError, WiredError

POLICY = Path(__file__).parents[3] / "environments/search/policy"
MEMORY = {"planned_bytes": 2e9, "limit_bytes": 16e9, "weights_bytes": 1e9, "num_trained": 63488, "trained_bytes": 1e6}


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--model", "nowhere"], "nowhere/config.json"),
        (["--model", str(POLICY), "--memory-gb", "0.001"], "may be used"),
        (["--model", str(POLICY), "--split", "tensor", "--full"], "use adapters"),
        (["--model", str(POLICY), "--shares", "fast,slow"], "not numbers"),
        (["--model", str(POLICY), "--memory-gb", "nan"], "not a size of a memory"),
        (["--model", str(POLICY), "--memory-gb", "1e300"], "not a size of a memory"),
    ],
)
def test_what_cannot_be_is_said_in_words(wrong: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoa(["warmstart", str(tmp_path / "out"), *wrong]) in (Exit.WRONG_USE, Exit.FAILED)
    shown = " ".join(capsys.readouterr().err.split())
    assert words in shown and "Traceback" not in shown


@pytest.mark.parametrize("place, words", [("/", "no checkpoint can be written there"), (".", "num_steps = 0")])
def test_a_place_without_a_name_is_refused(
    place: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    monkeypatch.chdir(tmp_path / "here")
    assert stoa(["warmstart", place, "--model", str(POLICY), "--steps", "0"]) in (Exit.WRONG_USE, Exit.FAILED)
    assert words in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "file"]


def test_wired_macs_are_started_by_one_line_that_holds_in_every_home() -> None:
    hosts = Hosts(Path("/place/ring.json"), 2)
    line = hosts.command(["-m", "worker_mac.warmstart", "{}"], 3700)
    assert line[0] == str(Path(sys.executable).with_name("mlx.launch")) and Path(line[0]).is_file()
    told = ["--hostfile", "/place/ring.json", "--backend", "ring", "--starting-port", "3700", "--cwd", "stoa-wired"]
    assert line[1:] == [*told, "--python", "venv/bin/python", "--", "-m", "worker_mac.warmstart", "{}"]


@pytest.mark.parametrize("text", ["[]", "{", '[{"ssh": ""}]', '[{"ssh": "mini.local"}, {"ssh": "127.0.0.1"}]'])
def test_a_list_of_macs_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(text)
    with pytest.raises(WiredError):
        Hosts.find(tmp_path / "hosts.json", tmp_path)


def test_progress_is_lines_in_a_pipe_and_a_bar_on_a_terminal() -> None:
    memory = {"event": "memory", **MEMORY, "rows_at_once": 8, "longest_tokens": 42, "grad_checkpoint": True}
    events: list[Event] = [
        memory,
        {"event": "started", "first_step": 10, "num_steps": 40, "shares": [0.75, 0.25]},
        *({"event": "step", "step": step, "loss": 1.5, "num_tokens": 100, "seconds": 0.5} for step in range(10, 40)),
        {"event": "exported", "folder": "out", "num_bytes": 1.2e6, "max_logit_difference": 0.001},
    ]
    shown = {}
    for terminal in (False, True):
        text = StringIO()
        with View(Console(file=text, force_terminal=terminal, width=100, color_system=None)) as view:
            for event in events:
                view.show(event)
        shown[terminal] = text.getvalue()
    assert memory_line(memory) in shown[False]
    assert memory_line(memory) == (
        "memory: 2.0 GB of 16.0 GB (weights 1.0 GB, 63,488 trained 1.0 MB), 8 rows of up to 42 tokens at once, layers computed twice"
    )
    assert "rank 0 75%, rank 1 25%" in shown[False] and "going on after step 10" in shown[False]
    assert "step 40/40  loss 1.5000  200 tokens/s" in shown[False] and shown[False].count("loss") == 15
    assert "40/40" in shown[True] and "warm start" in shown[True]
    assert "out: a hub checkpoint of 1.2 MB, reloaded: logits differ by at most 0.001" in shown[True].replace("\n", " ")


def test_shares_are_numbers() -> None:
    assert parse_shares("") == () and parse_shares("2,1.5") == (2.0, 1.5)
    with pytest.raises(UsageError):
        parse_shares("2;1")
