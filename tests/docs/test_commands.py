"""Whatever a document tells somebody to type exists, is run by a test or says what it needs, and every link leads somewhere."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from cyclopts import CycloptsError, MissingArgumentError

from cli.main import build
from tests.docs.commands import ROOT, RULES, Command, all_commands, commands_in, documents, rule_of

NAMES = [str(path.relative_to(ROOT)) for path in documents()]
YOURS = ("environments/spell.py",)
"""Files that a guide lets its reader write."""
STOA_INLINE = re.compile(r"`(stoa [a-z][^`]*)`")


def test_every_command_of_a_document_is_run_or_says_what_it_needs() -> None:
    found = all_commands()
    assert len(found) > 60
    assert [f"{one.document}: {one.text}" for one in found if rule_of(one) is None] == [], "add a rule to tests/docs/commands.py"


def test_a_test_that_is_named_is_there_and_speaks_of_it() -> None:
    for rule in RULES:
        if rule.need == "test":
            assert rule.witness and rule.witness in (ROOT / rule.where).read_text("utf-8"), rule
        else:
            assert len(rule.where.split()) > 2, rule


def test_what_a_test_runs_stands_in_console_blocks_and_nothing_else_does() -> None:
    """So that a reader who copies from a `console` block knows that it works."""
    wrong = [one.text for one in all_commands() if one.block == "console" and (rule := rule_of(one)) is not None and rule.need != "test"]
    assert wrong == []


def test_what_the_tour_writes_into_a_checkout_is_ignored_by_git() -> None:
    text = "\n".join(one.text for one in all_commands() if one.document == "docs/start/one-machine.md" and one.block == "console")
    written = set(re.findall(r"(?:> |--(?:state|out|snapshot) |--to mlx )([\w.]+)", text))
    assert {"token.txt", "exported"} < written
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines()}
    assert written <= ignored


def test_no_rule_is_left_over() -> None:
    used = {rule_of(one) for one in all_commands()}
    assert [rule for rule in RULES if rule not in used] == []


def test_the_finder_sees_blocks_of_every_kind() -> None:
    blocks = ("sh\nexport A=1 \\\n    B=2  # both\n# only said\n", "toml\nx = 1\n", "\nmake demo\n+---+\n")
    text = "a\n" + "".join(f"```{block}```\n" for block in blocks) + "- b\n  ```console\n  stoa x\n  ```\n"
    assert [(one.block, one.text) for one in commands_in(text, "d")] == [("sh", "export A=1 B=2"), ("", "make demo"), ("console", "stoa x")]
    assert rule_of(Command("docs/new.md", "console", "stoa frobnicate")) is None


def parses(line: str, *, whole: bool = True) -> str:
    """Why `line` is no command of ours with arguments of its own; empty if it is. Placeholders in capitals and ... are fine.

    whole: nothing may be left out; in the middle of a sentence an argument may.
    """
    line = re.sub(r"\s*[<>|].*$", "", line)
    words = [word.strip("[]") for word in shlex.split(line)[1:]]
    words = [re.sub(r"^[A-Z/_]+$", "x", word) for word in words if word != "..."]
    if len(words) == 1 or words[-1] in ("--help",):  # a command alone is its name
        words = [*words[:-1], "--help"] if words[-1] == "--help" else [*words, "--help"]
    try:
        build().parse_args(words, exit_on_error=False, print_error=False)
    except MissingArgumentError as problem:
        return str(problem) if whole else ""
    except CycloptsError as problem:
        return f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_every_stoa_command_that_a_document_names_can_be_given(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    wrong = {one.text: why for one in commands_in(text, name) if one.text.startswith("stoa ") and (why := parses(one.text))}
    for line in STOA_INLINE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "|" not in line and "{" not in line and (why := parses(line.replace("\n", " "), whole=False)):
            wrong[line] = why
    assert wrong == {}


def test_a_command_that_is_none_is_found() -> None:
    assert parses("stoa status demo --config c.json") == ""
    assert parses("stoa statsu demo") != ""
    assert parses("stoa live --snapshot FILE") != "" == parses("stoa live --snapshot FILE", whole=False)
    assert parses("stoa status demo --cofnig c.json") != ""
    assert parses("stoa export demo --to gguf DIR") != ""


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_to_a_file_and_every_file_that_is_named_is_there(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    targets = [
        target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith(("http", "#", "mailto"))
    ]
    assert [target for target in targets if target and not (ROOT / name).parent.joinpath(target).exists()] == []
    named = re.findall(r"`((?:stoa|cli|tests|docker|configs|docs|benchmarks|environments|worker_mac|trainer_gpu)/[\w./-]+\.\w+)`", text)
    assert [path for path in named if not (ROOT / path).exists() and path not in YOURS] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_toml_of_a_document_is_toml(name: str) -> None:
    for block in re.findall(r"^```toml\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.MULTILINE | re.DOTALL):
        assert tomllib.loads(block)


def test_messages_that_troubleshooting_explains_are_said_by_the_code() -> None:
    rooms = ("cli", "stoa", "activities", "workflows", "worker_mac", "trainer_gpu")
    code = "\n".join(path.read_text("utf-8") for room in rooms for path in sorted((ROOT / room).rglob("*.py")))
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    firsts = re.findall(r"^\| (?!what you see)([^|]+) \|", text, re.MULTILINE)
    said = [part.strip() for first in firsts for span in re.findall(r"`([^`]+)`", first) for part in span.split("...")]
    assert len(said) > 8
    assert [part for part in said if part and part not in code] == []


def test_no_page_tells_anybody_to_edit_our_source() -> None:
    told = re.compile(
        r"\b(edit|change|patch|modify)\b[^.\n]{0,40}`?(stoa|cli|worker_mac|trainer_gpu|workflows|activities)/\w+", re.IGNORECASE
    )
    assert [name for name in NAMES if told.search((ROOT / name).read_text("utf-8"))] == []


def test_every_page_is_found_from_the_first_one() -> None:
    """By links from README and docs/README.md; folders that are linked count with all they hold."""
    seen: set[Path] = set()
    todo = [ROOT / "README.md", ROOT / "docs" / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text("utf-8")):
            path = (page.parent / target).resolve()
            if path.is_dir():
                todo += sorted(path.glob("*.md"))
            elif path.suffix == ".md" and path.is_file():
                todo.append(path)
    assert [
        str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.resolve() not in {p.resolve() for p in seen}
    ] == []


def test_the_readme_is_short_and_shows_the_demo() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) < 250
    assert "docs/demo-learning.png" in text


TELLS_TO_EDIT = re.compile(r"\b(?:edit|change|patch|comment out)\b[^.|\n]{0,60}\.py\b", re.IGNORECASE)


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_is_told_to_edit_our_source(path: Path) -> None:
    """Every limit is a setting."""
    assert TELLS_TO_EDIT.search(path.read_text()) is None
    assert TELLS_TO_EDIT.search("To debug, edit constants.py and revert it later")
