"""A list of environments, or an environment, that Python cannot load: told by file and line, to who needs one and to nobody else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import environments
from environments import known, registry
from environments.base import Environment
from stoa.contracts.errors import BrokenEnvironmentError, StoaError

ROOT = Path(environments.__file__).parents[1]
PROGRAM = """
import sys
from environments import known
from stoa.contracts.errors import BrokenEnvironmentError
try:
    print(known.names())
except BrokenEnvironmentError as broken:
    print(broken.message)
"""


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A copy of the folder of environments, without the data, that Python finds before the project's own."""
    unread = shutil.ignore_patterns("__pycache__", "*.jsonl", "*.gz", "*.safetensors")
    shutil.copytree(ROOT / "environments", tmp_path / "environments", ignore=unread)
    return tmp_path


def said(root: Path) -> str:
    """What asking for the names of environments ends with, in a process that reads the edited folder."""
    path = os.pathsep.join((str(root), str(ROOT)))
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_known_environments_are_those_of_the_registry(tokenizer_json: bytes) -> None:
    assert known.names() == registry.names()
    assert known.create("copy_word", {}, tokenizer_json).name == "copy_word"


def test_entry_without_its_import_is_told_by_file_and_line(edited: Path) -> None:
    path = edited / "environments" / "registry.py"
    path.write_text(path.read_text().replace("    search.NAME:", "    spell.NAME: spell.create,\n    search.NAME:"))
    told = said(edited)
    assert told.startswith(f"environments/registry.py, line {line_of(path, 'spell.NAME')}: NameError: name 'spell' is not defined"), told


def test_half_a_line_in_the_registry_is_told_by_file_and_line(edited: Path) -> None:
    path = edited / "environments" / "registry.py"
    path.write_text(path.read_text().replace("from environments import copy_word", "from environments import copy_word,,"))
    told = said(edited)
    assert told.startswith(f"environments/registry.py, line {line_of(path, ',,')}: SyntaxError"), told


def test_environment_that_fails_while_it_is_imported_is_told_by_its_own_file(edited: Path) -> None:
    path = edited / "environments" / "search" / "prompts.py"
    path.write_text(path.read_text() + '\nWORDS = {}["none"]\n')
    told = said(edited)
    assert told.startswith(f"environments/search/prompts.py, line {line_of(path, 'none')}: KeyError: 'none'"), told


def test_environment_that_fails_while_it_is_built_is_told_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(_settings: object, _tokenizer: bytes) -> Environment:
        raise TypeError("no words")

    monkeypatch.setitem(vars(registry)["_BUILDERS"], "copy_word", create)
    with pytest.raises(BrokenEnvironmentError, match="TypeError: no words; so environment copy_word cannot be built") as caught:
        known.create("copy_word", {}, b"")
    assert "registry.py, line" in caught.value.message  # the nearest line of an environment: `create` stands elsewhere


def test_no_environment_is_loaded_before_one_is_asked_for() -> None:
    program = "import sys; import environments.known; print([name for name in sys.modules if name.startswith('environments.')])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['environments.base', 'environments.known']"


def test_errors_on_purpose_pass_as_they_are(tokenizer_json: bytes) -> None:
    with pytest.raises(StoaError, match="no environment is called"):
        known.create("serch", {}, tokenizer_json)
