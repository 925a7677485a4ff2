"""Are the installed packages those this project was made and tested with?

What it needs stands in its own metadata, with ranges; exact versions stand in constraints.txt, where that is at hand.
Outside its range a package is a failure, another version than the exact one a warning.
"""

from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from cli.doctor.finding import Finding, bad, good, warn
from cli.doctor.scene import Role, Scene
from stoa.config.load import SHIPPED

NAME: Final = "versions"
LOCK: Final = SHIPPED / "constraints.txt"
_EXTRAS: Final[dict[Role, tuple[str, ...]]] = {"mac": ("", "mac"), "gpu": ("", "gpu"), "all": ("", "mac", "gpu"), "home": ("",)}


def check_versions(scene: Scene) -> Finding | None:
    """Compare what is installed with what is asked for."""
    extras = ",".join(filter(None, _EXTRAS[scene.role]))
    target = f"'stoa[{extras}]'" if extras else "stoa"
    try:
        asked = metadata.requires("stoa") or []
    except metadata.PackageNotFoundError:
        return warn(NAME, "the project runs from its folder and is not installed", f"run `pip install {target}`")
    return compare(asked, _EXTRAS[scene.role], read_lock(LOCK), target)


def compare(asked: list[str], extras: tuple[str, ...], lock: dict[str, str], target: str) -> Finding:
    """The finding about requirements `asked`, of which those of `extras` count ("" for those of all)."""
    wanted = [Requirement(text) for text in asked]
    wanted = [one for one in wanted if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)]
    wrong: list[str] = []
    other: list[str] = []
    for one in wanted:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{one.name} is missing")
            continue
        exact = lock.get(canonicalize_name(one.name), version)
        if not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} is {version}, not {one.specifier}")
        elif Version(version).public != Version(exact).public:  # a build for one kind of hardware is the same version
            other.append(f"{one.name} is {version}, tested with {exact}")
    if wrong:
        return bad(NAME, "; ".join(wrong), f"run `pip install {target}`")
    if other:
        return warn(NAME, "; ".join(other), f"run `pip install -c {LOCK} {target}`")
    return good(NAME, f"{len(wanted)} packages are as they should be")


def read_lock(path: Path) -> dict[str, str]:
    """Exact versions by name; empty where there is no such file."""
    if not path.is_file():
        return {}
    pins = (line.partition("==") for line in path.read_text("utf-8").splitlines() if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name.strip()): version.partition(";")[0].strip() for name, _, version in pins}
