"""The guides of environments hold: the thirty lines run, the settings load, the commands exist."""

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import environments.registry
from cli.main import build, run
from cli.say import Exit
from environments.base import Environment
from environments.papersearchqa import invented
from environments.papersearchqa.env import PaperSearchSettings
from environments.verifiers_v1 import VerifiersSettings
from tests.unit.chat.conftest import character_tokenizer

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
WRITE, PAPERS = ((GUIDES / name).read_text() for name in ("write-an-environment.md", "search-papers.md"))
TOKENIZER = character_tokenizer()


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def test_the_thirty_lines_are_a_working_environment() -> None:
    (source,) = blocks(WRITE, "python")
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith(('"""', "from ", "import "))]
    assert len(lines) <= 30
    module = ModuleType("spell")
    exec(compile(source, "spell.py", "exec"), module.__dict__)
    environment: Environment = module.create({"max_turn_tokens": 32}, TOKENIZER.to_str().encode())
    answer, wrong = (TOKENIZER.encode(f"{text}<|im_end|>", add_special_tokens=False).ids for text in ("niarb", "brain"))
    assert environment.question_ids("held_out") == ("brain",)
    assert environment.reply("brain", [answer]).stop_reason == "answered"
    assert [environment.score("brain", [turn]).reward for turn in (answer, wrong, answer[:-1])] == [1.0, 0.0, 0.0]


def test_the_lines_of_the_registry_make_it_known(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,), (diff,) = blocks(WRITE, "python"), blocks(WRITE, "diff")
    spell = ModuleType("environments.spell")
    exec(compile(source, "spell.py", "exec"), spell.__dict__)
    monkeypatch.setattr(environments, "spell", spell, raising=False)
    imported, opening, entry = diff.splitlines()
    registry = Path(environments.registry.__file__).read_text()
    assert registry.count(opening[1:]) == 1
    changed = ModuleType("environments.registry")
    exec(compile(registry.replace(opening[1:], "\n".join((imported[1:], opening[1:], entry[1:]))), "registry.py", "exec"), changed.__dict__)
    assert changed.names() == sorted([*environments.registry.names(), "spell"])
    assert changed.create("spell", {}, TOKENIZER.to_str().encode()).question_ids("held_out") == ("brain",)


@pytest.mark.parametrize("text", [*blocks(WRITE, "toml"), *blocks(PAPERS, "toml")])
def test_settings_of_the_guides_are_settings(text: str) -> None:
    section = tomllib.loads(text)["environment"]
    known = {"verifiers": VerifiersSettings, "papersearchqa": PaperSearchSettings}.get(section["name"])
    if known is not None:
        known(**section["settings"]).check()


def test_commands_of_the_guides_are_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line.replace("DATA", str(tmp_path)) for block in blocks(PAPERS, "console") for line in block.splitlines()]
    named = {tuple(line.split()[:3]) for line in commands if line.startswith("stoa search")}
    assert named == {("stoa", "search", name) for name in ("fetch", "questions", "index", "ask")}
    for _, _, name in sorted(named):
        build()(["search", name, "--help"], exit_on_error=False)
        assert "Usage" in capsys.readouterr().out
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "TITLE: On aspirin. ABSTRACT: Aspirin blocks cyclooxygenase."}\n')
    index, ask = (next(line for line in commands if line.startswith(f"stoa search {name}")) for name in ("index", "ask"))
    assert run(index.split()[1:]) == Exit.DONE
    words = re.fullmatch(r'stoa (search ask \S+) "(.*)"', ask)
    assert words is not None
    assert run([*words[1].split(), words[2]]) == Exit.DONE
    assert "cyclooxygenase" in capsys.readouterr().err


def test_shipped_settings_pass_with_the_model_that_the_guide_names() -> None:
    (check,) = [line for block in blocks(PAPERS, "console") for line in block.splitlines() if line.startswith("stoa config check")]
    assert run(check.split()[1:]) == Exit.DONE


def test_invented_papers_become_questions_of_all_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (first,) = [block for block in blocks(PAPERS, "console") if "invented DATA" in block]
    write, clean, index = first.replace("DATA", str(tmp_path)).splitlines()
    invented.main([*write.split()[3:-1], "400"])
    said = capsys.readouterr().err
    assert clean in said and index in said, "the next commands, as the guide has them"
    assert run(clean.split()[1:]) == Exit.DONE
    kept = dict(re.findall(r"(\w+): ([\d,]+) read", capsys.readouterr().err))
    assert kept.keys() == {"train", "held_out", "transfer"} and "0" not in kept.values()
