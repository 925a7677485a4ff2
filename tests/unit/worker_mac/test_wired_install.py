"""The program on the other Macs: a wheel of what runs, and a Python there that it runs on."""

import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from stoa.contracts.errors import WiredError
from worker_mac.cluster import install
from worker_mac.cluster.hosts import WiredHost
from worker_mac.cluster.wheel import make_wheel, pack

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_a_wheel_is_packed_again_of_what_was_installed(tmp_path: Path) -> None:
    """Of a prefix as pip and uv leave it, data files and programs beside the modules, with what they add themselves."""
    packages, info = tmp_path / "lib/python3.11/site-packages", "hello-1.2.dist-info"
    files = {
        "hello/__init__.py": "X = 1\n",
        "hello/__pycache__/__init__.cpython-311.pyc": "made here",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: hello\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nhello = hello:main\n",
        f"{info}/INSTALLER": "uv",
        f"{info}/uv_cache.json": "{}",
        "../../../bin/hello": "#!/of/this/machine\n",
        "../../../share/hello/configs/told.toml": "a = 1\n",
    }
    for name, text in files.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    (packages / info / "RECORD").write_text("".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")))
    (found,) = metadata.distributions(path=[str(packages)])
    made = pack(found, tmp_path)
    assert made.name == "hello-1.2-py3-none-any.whl"
    with zipfile.ZipFile(made) as wheel:
        kept = {name: wheel.read(name).decode() for name in wheel.namelist()}
    rows = [row.split(",") for row in kept.pop(f"{info}/RECORD").splitlines()]
    assert kept == {
        "hello/__init__.py": "X = 1\n",
        f"{info}/METADATA": files[f"{info}/METADATA"],
        f"{info}/WHEEL": files[f"{info}/WHEEL"],
        f"{info}/entry_points.txt": files[f"{info}/entry_points.txt"],
        "hello-1.2.data/data/share/hello/configs/told.toml": "a = 1\n",
    }
    assert [name for name, *_ in rows] == [*kept, f"{info}/RECORD"] and rows[-1][1:] == ["", ""]
    # printf 'X = 1\n' | openssl dgst -sha256 -binary | basenc --base64url, without its padding
    assert rows[0] == ["hello/__init__.py", "sha256=Crrh4K5yghbuRJk8Wjp1X4scOH2Uf8TE9yyrDkqEIUs", "6"]


def test_a_program_that_does_not_know_its_files_is_told(tmp_path: Path) -> None:
    # Of this checkout there is no list of files but the installer's own.
    with pytest.raises(WiredError, match="does not say which files"):
        pack(Listing(), tmp_path)


class Listing(metadata.Distribution):
    """An installation without a list of its files."""

    def read_text(self, filename: str) -> str | None:
        return "Name: stoa\nVersion: 0\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


def test_a_program_that_lacks_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "stoa-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stoa\nVersion: 0\n")
    (info / "RECORD").write_text("stoa/gone.py,,\n")
    (found,) = metadata.distributions(path=[str(tmp_path)])
    monkeypatch.setattr("worker_mac.cluster.wheel.IS_CHECKOUT", False)
    monkeypatch.setattr("worker_mac.cluster.wheel.metadata.distribution", lambda _: found)
    with pytest.raises(WiredError, match=r"no wheel was made: .*gone\.py"):
        make_wheel(tmp_path)


def test_a_checkout_without_a_tool_that_builds_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_mac.cluster.wheel.find_spec", lambda _: None)
    monkeypatch.setattr("worker_mac.cluster.wheel.shutil.which", lambda *_, **__: None)
    with pytest.raises(WiredError, match="neither pip nor uv"):
        make_wheel(tmp_path)


def tool(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_of_the_pythons_there_one_is_taken_that_this_program_runs_on(tmp_path: Path) -> None:
    """MacOS's own `python3` is 3.9; another lies where no profile of a shell puts it on the path."""
    home, system = tmp_path / "home", tmp_path / "system"
    for name in ("mkdir", "test"):
        tool(system, name, f'exec /bin/{name} "$@"')
    tool(system, "python3", "exit 1")
    line = install.install_lines(WiredHost("mini.local"), Path("stoa-0-py3-none-any.whl"))[0][-1]
    for place in ("/opt/homebrew/bin", "/usr/local/bin"):  # where this machine may have one
        assert f":{place}" in line
        line = line.replace(f":{place}", "")

    def run() -> subprocess.CompletedProcess[str]:
        home.mkdir(exist_ok=True)
        return subprocess.run(
            ["/bin/sh", "-c", line], cwd=home, env={"HOME": str(home), "PATH": str(system)}, capture_output=True, text=True, check=False
        )

    none = run()
    assert none.returncode == 1 and "no Python from 3.11 to 3.13 is there" in none.stderr
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    tool(home / ".local" / "bin", own, f'[ "$1" = -c ] && exec {sys.executable} "$@"; echo "$@" > made')
    assert run().returncode == 0
    assert (home / "made").read_text() == "-m venv stoa-wired/venv\n"
    tool(home / "stoa-wired" / "venv" / "bin", "python", "exit 0")
    (home / "made").unlink()
    assert run().returncode == 0 and not (home / "made").exists(), "it is there already"


def test_the_pythons_that_are_looked_for_are_those_the_project_says() -> None:
    newest = install.NEWEST[0], install.NEWEST[1] + 1
    assert PROJECT["requires-python"] == f">={install.OLDEST[0]}.{install.OLDEST[1]},<{newest[0]}.{newest[1]}"
