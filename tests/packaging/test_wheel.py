"""The wheel: what is in it, what each extra brings, and that it works in an empty environment away from the checkout.

Resolved for Linux and for a Mac, wheels only; installed for all extras but `gpu`, whose torch alone is gigabytes: that
one is resolved, and what `make install` sets up holds it. Skipped where no package registry can be reached.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = tuple(PROJECT["optional-dependencies"])
LINUX, MAC = "x86_64-manylinux_2_35", "aarch64-apple-darwin"
pytestmark = pytest.mark.timeout(60)


def clean_environment() -> dict[str, str]:
    """Without what would let the checkout, or a person's settings, into a new environment."""
    mine = ("PYTHON", "STOA_", "AWS_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(mine)} | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}


def done(*command: str | Path, cwd: Path = ROOT, seconds: float = 55.0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=seconds
    )
    if result.returncode and re.search(r"error sending request|Could not connect|client error \(Connect\)|NameResolution", result.stderr):
        pytest.skip("no package registry can be reached from here")
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, from the files that are tracked and nothing else."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    built = done(UV, "build", "--wheel", "--out-dir", out, source)
    assert built.returncode == 0, built.stderr
    (found,) = out.glob("*.whl")
    return found


def resolved(wheel: Path, extra: str, platform: str) -> set[str]:
    """Names of all packages that an extra brings on a platform, none of which may be built from source."""
    asked = wheel.with_name(f"{extra}-{platform}.in")
    asked.write_text(f"stoa[{extra}] @ {wheel.as_uri()}\n")
    words = ("-q", "--no-header", "--no-annotate", "--only-binary", ":all:", "--python-version", "3.11", "--python-platform", platform)
    result = done(UV, "pip", "compile", *words, "-c", ROOT / "constraints.txt", asked)
    assert result.returncode == 0, result.stderr
    return {re.split(r"[=@ \[]", line)[0].lower() for line in result.stdout.splitlines() if line}


def installed(wheel: Path, extra: str, folder: Path) -> Path:
    """A new environment with one extra; its folder of programs."""
    for command in (
        ("venv", "-q", "--python", sys.executable, folder),
        ("pip", "install", "-q", "-p", folder / "bin/python", "-c", ROOT / "constraints.txt", f"stoa[{extra}] @ {wheel.as_uri()}"),
        ("pip", "check", "-q", "-p", folder / "bin/python"),
    ):
        result = done(UV, *command)
        assert result.returncode == 0, result.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment without any extra."""
    return installed(wheel, "", tmp_path_factory.mktemp("plain") / "env")


def test_the_wheel_holds_every_module_and_everything_that_is_read_beside_them(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    rooms = ("stoa", "environments", "activities", "workflows", "metal", "worker_mac", "trainer_gpu", "cli", "benchmarks")
    listed = subprocess.run(["git", "ls-files", *rooms], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) > 300
    assert [name for name in listed if (ROOT / name).is_file() and name not in names] == []
    data = {name.partition(".data/data/share/stoa/")[2] for name in names}
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.toml")}
    assert {*configs, "constraints.txt"} <= data
    assert [name for name in names if name.split("/")[0] in ("tests", "docs", "docker", "build")] == []


@pytest.mark.parametrize("platform", [LINUX, MAC])
def test_a_mac_gets_no_torch_and_everything_as_wheels(wheel: Path, platform: str) -> None:
    brought = resolved(wheel, "mac", platform)
    assert {"mlx", "mlx-lm", "temporalio", "boto3"} <= brought
    assert ("mlx-metal" in brought) == (platform == MAC)
    assert [name for name in brought if name.startswith(("torch", "megatron", "nvidia", "triton", "grpcio"))] == []


def test_a_gpu_box_gets_no_mlx(wheel: Path) -> None:
    brought = resolved(wheel, "gpu", LINUX)
    assert {"torch", "megatron-core", "transformers"} <= brought
    assert [name for name in brought if name.startswith("mlx")] == []


def test_an_empty_environment_works_away_from_the_checkout(plain: Path, tmp_path: Path) -> None:
    assert done(plain / "stoa", "--version", cwd=tmp_path).stdout.strip() == PROJECT["version"]
    assert "demo" in done(plain / "stoa", "--help", cwd=tmp_path).stdout
    checked = done(plain / "stoa", "config", "check", plain.parent / "share/stoa/configs/demo.toml", cwd=tmp_path)
    assert (checked.returncode, "well configured" in checked.stdout + checked.stderr) == (0, True), checked.stderr
    planned = done(plain / "stoa", "plan", "fleet", "--hours", "1", "--json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)


def test_a_part_that_is_not_installed_names_its_extra_and_ends_with_2(plain: Path, tmp_path: Path) -> None:
    for command, extra in (
        (("python", "-m", "worker_mac.worker"), "mac"),
        (("python", "-m", "trainer_gpu.worker"), "gpu"),
        (("stoa", "services", "--dir", str(tmp_path / "s"), "--temporal-port", "0", "--ui-port", "0", "--bucket-port", "0"), "local"),
        (("stoa", "proxy", "--listen", "127.0.0.1:0"), "proxy"),
    ):
        result = done(plain / command[0], *command[1:], cwd=tmp_path, seconds=30)
        assert (result.returncode, f"stoa[{extra}]" in result.stderr) == (2, True), (command, result.stderr)


@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra not in ("gpu", "dev")])
def test_an_extra_alone_installs_and_agrees_with_itself(wheel: Path, extra: str, tmp_path: Path) -> None:
    programs = installed(wheel, extra, tmp_path / "env")
    if extra == "mac":
        joined = done(programs / "stoa", "join", "stoa1.cut-off", "--state", tmp_path / "state", cwd=tmp_path)
        assert joined.returncode == 2
        assert "token" in joined.stderr and "stoa[" not in joined.stderr
        assert done(programs / "python", "-c", "import torch", cwd=tmp_path).returncode == 1


def test_one_line_installs_the_command_for_a_mac(wheel: Path, tmp_path: Path) -> None:
    """`uv tool install`, as the guides have it, into folders of its own."""
    environment = clean_environment() | {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    line = [
        str(UV),
        "tool",
        "install",
        "-q",
        "--python",
        sys.executable,
        "-c",
        str(ROOT / "constraints.txt"),
        f"stoa[mac] @ {wheel.as_uri()}",
    ]
    result = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=55)
    if "error sending request" in result.stderr:
        pytest.skip("no package registry can be reached from here")
    assert result.returncode == 0, result.stderr
    asked = subprocess.run([tmp_path / "bin" / "stoa", "leave", "--help"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert asked.returncode == 0 and "worker" in asked.stdout
