"""No dependency forbids the Apache licence of this project, and every direct one is pinned in the constraints file."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = re.compile(
    r"\b(AGPL|Affero|SSPL|Business Source|BUSL|Commons Clause|non-?commercial)\b|\bGNU General Public\b|\bGPL(v?[23])?\b", re.IGNORECASE
)
ALLOWED_ANYWAY = re.compile(r"LGPL|Lesser|linking exception|with GCC-exception|GPL-compatible", re.IGNORECASE)


def direct() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    return sorted({re.split(r"[\[<>=~;! ]", d)[0] for d in wanted})


@pytest.mark.parametrize("name", direct())
def test_dependency_allows_our_licence(name: str) -> None:
    try:
        meta = distribution(name).metadata
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed on this platform")
    stated = [
        meta.get("License-Expression") or "",
        *(c for c in meta.get_all("Classifier") or [] if c.startswith("License")),
        (meta.get("License") or "")[:200],
    ]
    text = " / ".join(stated)
    assert not (FORBIDDEN.search(text) and not ALLOWED_ANYWAY.search(text)), text


def test_every_direct_dependency_is_pinned() -> None:
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert [d for d in direct() if d.lower().replace("_", "-") not in pinned] == []


def test_licence_is_apache() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
