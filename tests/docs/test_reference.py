"""The reference pages say what the code says, and miss nothing of it."""

import ast
import re
from pathlib import Path

import pytest

from cli.main import _COMMANDS
from cli.reference import PAGES, main, write
from stoa.config.host import MacHost
from stoa.config.run import RunConfig

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "reference"


def test_the_pages_that_are_kept_are_current() -> None:
    stale = [name for name, page in PAGES.items() if not (KEPT / name).is_file() or (KEPT / name).read_text("utf-8") != page()]
    assert stale == [], "run `make docs` and commit docs/reference"


def test_pages_are_written_once_and_then_left(tmp_path: Path) -> None:
    assert write(tmp_path / "new") == list(PAGES)
    assert write(tmp_path / "new") == []
    (tmp_path / "new" / "keys.md").write_text("old")
    assert write(tmp_path / "new") == ["keys.md"]


def test_every_command_has_its_part() -> None:
    text = PAGES["commands.md"]()
    parts = set(re.findall(r"^## stoa ([a-z-]+)$", text, re.MULTILINE))
    assert parts == {name for group in _COMMANDS.values() for name in group}
    assert "`--expires" in text.partition("## stoa invite")[2].partition("\n## ")[0]


def test_every_setting_stands_in_its_table() -> None:
    text = PAGES["settings.md"]()
    assert re.search(r"^\| `learning_rate` \| number, >= 0 \| `0\.0001` \| ", text, re.MULTILINE)
    assert re.search(r'^\| `when` \| `"idle_only"` or `"gentle"` or `"full"` \| `"gentle"` \| ', text, re.MULTILINE)
    assert re.search(r"^\| `fingerprints` \| list of text \| `\[\]` \| ", text, re.MULTILINE)
    for kind in (RunConfig, MacHost):
        for name, field in kind.model_fields.items():
            inner = getattr(field.annotation, "model_fields", {})
            assert f"| `{name}` |" in text if not inner else f"### `[{name}]`" in text
            for setting in inner:
                assert f"| `{setting}` |" in text or f"### `[{name}.{setting}]`" in text


@pytest.mark.parametrize(
    ("page", "source", "what"),
    [("errors.md", "stoa/contracts/errors.py", ast.ClassDef), ("messages.md", "stoa/contracts/fleet_messages.py", ast.ClassDef)],
)
def test_every_class_of_a_file_stands_on_its_page(page: str, source: str, what: type[ast.ClassDef]) -> None:
    text = PAGES[page]()
    classes = [node.name for node in ast.parse((ROOT / source).read_text()).body if isinstance(node, what)]
    assert len(classes) > 5
    assert [name for name in classes if f"`{name}`" not in text and f"## {name}\n" not in text] == []


def test_every_metric_and_every_key_is_told() -> None:
    declared = re.findall(r'^    Metric\(\s*"([a-z0-9_]+)"', (ROOT / "stoa/telemetry/metrics.py").read_text(), re.MULTILINE)
    assert len(declared) > 50
    text = PAGES["metrics.md"]()
    assert [name for name in declared if f"| `{name}` |" not in text and f"| `{name}_...` |" not in text] == []
    for folder in ("manifests", "deltas", "anchors", "groups", "steps", "checkpoints", "evals", "revoked"):
        assert f"runs/<run>/{folder}/" in PAGES["keys.md"]()


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--nonsense", 2)])
def test_a_flag_is_no_folder(flag: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([flag]) == code
    assert list(tmp_path.iterdir()) == []
