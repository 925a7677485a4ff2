"""`stoa eval` shows what a run's bucket holds, keeps results in files, and compares two of them."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cli.evaluation import asked, shown
from cli.evaluation.standalone import Asked, _seat, examine
from cli.evaluation.wired import make_ready
from cli.processes import Household
from stoa.bucket.evals import Mark, Summary
from stoa.config.run import RunConfig
from stoa.contracts.errors import CheckpointError, FormatError, UsageError, WiredError
from stoa.contracts.evaluation_messages import EvalAsk, EvalPlayer, EvaluationResult


def summary(evaluation: str, version: int, num_right: int, num: int = 100) -> Summary:
    marks = tuple(Mark(f"q{i}", float(i < num_right), float(i < num_right), 0.0, 1.0, 12, num_turns=2) for i in range(num))
    result = EvaluationResult("demo", evaluation, version, num, num_right / num, (0.0, 1.0), 1.0, key="k")
    return Summary("stoa-evaluation-1", result, marks)


SUMMARIES = [summary("v0-first", 0, 29), summary("v4-every", 4, 10, 20), summary("v4-last", 4, 63)]


def test_every_measure_is_told_with_its_interval() -> None:
    exam = shown.of_summary(SUMMARIES[0], [EvalPlayer("mac-1", 2, 100, 12345.6, 789.0)])
    told = "\n".join(shown.lines(exam))
    assert "demo version 0, v0-first: 100 questions (95 % intervals: wilson)" in told
    assert "0.290  (0.210 to 0.385)" in told
    for words in ("pass@1", "cover", "exact match", "searches", "cut off", "turns", "words of an answer", "sampled tokens"):
        assert words in told
    assert "mac-1: 100 episodes in 2 parts, 12,346 an hour, 789 tokens/s" in told
    tree = shown.as_tree(exam)
    assert tree["measures"]["estimates"]["pass_at_1"]["value"] == 0.29
    assert "marks" not in tree
    json.dumps(tree)


def test_results_are_found_by_name_and_by_version() -> None:
    assert shown.pick(SUMMARIES, "v4-every").evaluation == "v4-every"
    assert shown.pick(SUMMARIES, "4").evaluation == "v4-last", "of a version the one with most questions"
    assert shown.pick(SUMMARIES, "v0").evaluation == "v0-first"
    with pytest.raises(UsageError) as caught:
        shown.pick(SUMMARIES, "v9")
    assert "v0-first, v4-every, v4-last" in caught.value.hint


def test_an_examination_that_the_run_refuses_is_not_said_to_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agrees = True

    def examine(run: str, ask: EvalAsk, taken: Callable[[], None]) -> tuple[EvaluationResult, tuple[EvalPlayer, ...]]:
        if agrees:
            taken()
        raise UsageError(f"run {run}: evaluate was refused: the run has ended")

    @contextmanager
    def find_run(run: str, config: Path | None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(control=SimpleNamespace(examine=examine))

    monkeypatch.setattr(asked, "find_run", find_run)
    for agrees in (True, False):
        with pytest.raises(UsageError):
            asked.examine_run("demo", 7, 4, 1, "mine", None)
        assert ("run demo examines version 7 as mine" in capsys.readouterr().err) is agrees


def test_two_results_are_compared_in_words(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    shown.write(shown.pick(SUMMARIES, "v0-first"), path)
    found, told = shown.compared(shown.read(path), shown.pick(SUMMARIES, "v4-last"))
    assert (found.num_questions, found.only_before, found.only_after) == (100, 0, 34)
    assert "pass@1 0.290 -> 0.630: +0.340" in told[1]
    assert "more than chance" in told[2]
    assert "questions to be found" in told[3]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "stoa-exam-1"}', "\x00"])
def test_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "junk.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="no evaluation"):
        shown.read(path)


POLICY = Path(__file__).parents[3] / "environments" / "search" / "policy"


def test_a_checkpoint_without_a_tokenizer_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((POLICY / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: No such file") as caught:
        examine(Asked(str(tmp_path), 4, 1, 0, 1, None, ()))
    assert "beside config.json" in caught.value.hint


def test_wired_macs_are_looked_at_for_the_checkpoint_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for a model of the same run that this Mac once played."""
    looked: list[str] = []

    def make_ready(hosts: Path, config: RunConfig, *, look: bool) -> None:
        looked.append(config.model)
        raise WiredError("seen")

    monkeypatch.setattr("cli.evaluation.wired.make_ready", make_ready)
    with pytest.raises(WiredError, match="seen"):
        examine(Asked("environments/search/policy", 4, 1, 0, 1, None, (), hosts=tmp_path / "hosts.json"))
    assert looked == [str(POLICY)]


def test_each_thing_that_is_done_with_wired_macs_is_said_before_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def install(probe: object, hosts: Sequence[object], say: Callable[[str], None]) -> None:
        told.append(capsys.readouterr().err.splitlines()[-1])

    def look(hosts: Path, scene: object) -> list[object]:
        told.append(capsys.readouterr().err.splitlines()[-1])
        return []

    def start(name: str, command: list[str], *, env: dict[str, str], log: Path) -> str:
        told.append(capsys.readouterr().err.splitlines()[-1])
        return name

    monkeypatch.setattr("cli.evaluation.wired.install_everywhere", install)
    monkeypatch.setattr("cli.evaluation.wired.wired.examine_hosts", look)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1"}]))
    config = RunConfig(run="exam", model=str(POLICY))
    make_ready(hosts, config, look=True)
    wanted = Asked(str(POLICY), 4, 1, 0, 1, None, (), hosts=hosts)
    _seat(cast("Household", SimpleNamespace(start=start)), tmp_path, config, config.bucket, wanted, "any", POLICY, ["q"])
    assert [line.split(";")[0] for line in told] == [
        "asking each of them which program it has", "looking whether they are fit for the model", "starting them",
    ]  # fmt: skip
