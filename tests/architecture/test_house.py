"""The house rules that no off-the-shelf tool checks: sizes, words, broad excepts, the environment, log events."""

import ast
import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("stoa", "environments", "activities", "workflows", "metal", "worker_mac", "trainer_gpu", "cli", "benchmarks")
TOP_LEVEL = {*ROOMS, "tests", "docs", "docker", "configs"}
EDGES = {"activities/edge.py", "worker_mac/worker.py", "trainer_gpu/worker.py", "cli/main.py"}
ENVIRONMENT_READERS = {"stoa/config/load.py"}


def tracked(pattern: str = "") -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / n for n in names.stdout.splitlines() if n.endswith(pattern) and (ROOT / n).is_file()]


def sources() -> list[Path]:
    return [p for p in tracked(".py") if p.relative_to(ROOT).parts[0] in ROOMS]


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sources():
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_every_top_level_folder_is_a_decision() -> None:
    folders = {p.relative_to(ROOT).parts[0] for p in tracked() if len(p.relative_to(ROOT).parts) > 1}
    assert {f for f in folders if not f.startswith(".")} <= TOP_LEVEL


def test_files_stay_under_500_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in tracked(".py") if (n := len(p.read_text().splitlines())) > 500}
    assert long == {}


def test_functions_stay_under_60_lines() -> None:
    long = {
        f"{name}:{node.name}": node.end_lineno - node.lineno + 1
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60
    }
    assert long == {}


def test_every_file_opens_by_saying_what_lives_there() -> None:
    silent = [name for name, tree in trees() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


def test_no_room_without_a_name() -> None:
    odd = [p for p in tracked() if re.search(r"(^|/)(utils?|helpers?|common|misc|manager)(\.py$|/)", str(p.relative_to(ROOT)))]
    assert odd == []


def test_broad_excepts_stand_at_the_edges_only() -> None:
    found = []
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                if caught in {"everything", "Exception", "BaseException"} and name not in EDGES and not _reraises(node):
                    found.append(f"{name}:{node.lineno} catches {caught}")
    assert found == []


def _reraises(node: ast.ExceptHandler) -> bool:
    return any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))


def test_the_environment_is_read_in_one_file() -> None:
    found = []
    for name, tree in trees():
        if name in ENVIRONMENT_READERS:
            continue
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
            is_read = isinstance(node, ast.Call) and text.startswith(("os.environ.get(", "os.getenv(", "environ.get("))
            is_read = is_read or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and text.startswith("os.environ["))
            if is_read:
                found.append(f"{name}:{node.lineno}: {text}")
    assert found == []


def test_log_events_are_names_not_sentences() -> None:
    found = []
    for name, tree in trees():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            owner = ast.unparse(node.func.value)
            if owner.split(".")[-1] in {"log", "_log", "LOG", "logger"} and node.func.attr in {
                "debug",
                "info",
                "warning",
                "error",
                "exception",
            }:
                event = node.args[0]
                if isinstance(event, ast.JoinedStr) or (isinstance(event, ast.Constant) and " " in str(event.value)):
                    found.append(f"{name}:{node.lineno}")
    assert found == []


def test_source_is_ascii() -> None:
    odd = [str(p.relative_to(ROOT)) for p in sources() if not p.read_text().isascii()]
    assert odd == []


def test_every_message_of_an_error_class_is_documented() -> None:
    tree = ast.parse((ROOT / "stoa/contracts/errors.py").read_text())
    assert [c.name for c in tree.body if isinstance(c, ast.ClassDef) and not ast.get_docstring(c)] == []


def test_every_setting_is_read_by_something() -> None:
    files = [ROOT / "stoa/config" / name for name in ("run.py", "host.py")]
    settings = {
        item.target.id
        for section in itertools.chain.from_iterable(ast.parse(path.read_text()).body for path in files)
        if isinstance(section, ast.ClassDef) and section.name != "Alarms"  # read by looping over its fields
        for item in section.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    code = "\n".join(p.read_text() for p in sources() if p not in files)
    unread = sorted(s for s in settings if not re.search(rf"\.{s}\b", code))
    assert unread == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_config_loads(path: Path) -> None:
    from cli.plan.fleet_spec import DEFAULT_FLEET, FleetPlan
    from stoa.config.load import MAC_CONFIG, load_mac_host, load_run, load_section

    assert tomllib.loads(path.read_text())
    if path == DEFAULT_FLEET:
        load_section(path, FleetPlan, example=path)
    else:
        (load_mac_host if path == MAC_CONFIG else load_run)(path)


def test_nothing_names_a_machine_or_how_it_was_made() -> None:
    words = re.compile(r"/(?:work|root|home)/[a-z]|chat ?gpt|\bclaude\b|\banthropic\b|\bco-pilot\b|language model wrote", re.IGNORECASE)
    kinds = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".html", ".metal", ".cfg", ""}
    found = [
        f"{p.relative_to(ROOT)}: {m.group(0)}"
        for p in tracked()
        if p.suffix in kinds
        and p.name != "test_house.py"
        and "histories" not in p.parts
        and (m := words.search(p.read_text(errors="ignore")))
    ]
    assert found == []
