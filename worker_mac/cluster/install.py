"""Puts the same program on every Mac of a wired set: in a folder of each user's home, by the same relative path.

On this Mac that is a link to what is running; elsewhere a virtual environment with the same wheel. Nothing outside that
folder is touched.
"""

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from stoa.contracts.errors import WiredError
from worker_mac.cluster.hosts import FOLDER, PYTHON, WiredHost
from worker_mac.cluster.probe import SSH_FAILED, Probe, last_line
from worker_mac.cluster.wheel import make_wheel
from worker_mac.identity import project_version

INSTALL_SECONDS: Final = 900.0
OLDEST: Final = (3, 11)
NEWEST: Final = (3, 13)
"""Versions of Python that this program runs on."""
_ASK: Final = "import importlib.metadata as m; print(m.version('stoa'), m.version('mlx'))"


def ours() -> str:
    """What every Mac must have: versions of the project and of MLX."""
    return f"{project_version()} {metadata.version('mlx')}"


def installed(probe: Probe, host: WiredHost, folder: str = FOLDER, python: str = PYTHON) -> str:
    """As `ours`, of a host; "" if nothing is installed there. Raises WiredError if it cannot be asked."""
    said = probe.ask(host, (f"{folder}/{python}", "-c", _ASK))
    if said.code == SSH_FAILED:
        raise WiredError(f"{host.ssh} cannot be asked: {last_line(said.text)}", hint="see `stoa doctor --hosts`")
    return last_line(said.text) if said.code == 0 else ""


def link_here(home: Path, folder: str = FOLDER, python: str = PYTHON, prefix: Path | None = None) -> None:
    """Let the relative path lead to the program that is running."""
    place = home / folder / Path(python).parts[0]
    place.parent.mkdir(parents=True, exist_ok=True)
    target = prefix or Path(sys.prefix)
    if place.is_symlink() and place.resolve() != target.resolve():
        place.unlink()
    if not place.exists():
        place.symlink_to(target, target_is_directory=True)


def install_everywhere(probe: Probe, hosts: Sequence[WiredHost], say: Callable[[str], None], *, home: Path | None = None) -> None:
    """Install what is missing or of another version. Raises WiredError if that fails."""
    link_here(home or Path.home())
    lacking = [host for host in hosts if not host.is_here and installed(probe, host) != ours()]
    if not lacking:
        return
    with tempfile.TemporaryDirectory() as place:
        wheel = make_wheel(Path(place))
        for host in lacking:
            say(f"installing {wheel.name} on {host.ssh}, in {FOLDER} of its home folder")
            for line in install_lines(host, wheel):
                _run(line, host)
    for host in lacking:
        if (found := installed(probe, host)) != ours():
            raise WiredError(f"{host.ssh} has {found or 'nothing'} after the installation, not {ours()}", hint="look there")


def install_lines(host: WiredHost, wheel: Path) -> tuple[tuple[str, ...], ...]:
    """The commands that install a wheel on a host. Over SSH no profile is read: usual places of Python are looked into."""
    ssh = ("ssh", "-o", "BatchMode=yes", host.ssh)
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    fits = f"import sys; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    make = (
        f'PATH="$PATH:$HOME/.local/bin:/opt/homebrew/bin:/usr/local/bin"; mkdir -p {FOLDER}; test -x {FOLDER}/{PYTHON} && exit 0; '
        f"for p in {own} python3.13 python3.12 python3.11 python3; do "
        f'"$p" -c "{fits}" 2>/dev/null && exec "$p" -m venv {FOLDER}/venv; done; '
        f"echo no Python from {_dotted(OLDEST)} to {_dotted(NEWEST)} is there: install one from python.org >&2; exit 1"
    )
    return (
        (*ssh, f"/bin/sh -c {shlex.quote(make)}"),
        ("scp", "-q", "-o", "BatchMode=yes", str(wheel), f"{host.ssh}:{FOLDER}/"),
        (*ssh, f"{FOLDER}/{PYTHON} -m pip install --quiet --upgrade '{FOLDER}/{wheel.name}[mac]' mlx=={metadata.version('mlx')}"),
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _run(line: Sequence[str], host: WiredHost) -> None:
    try:
        done = subprocess.run(line, capture_output=True, timeout=INSTALL_SECONDS, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WiredError(f"{line[0]} failed: {error}") from error
    if done.returncode:
        reason = last_line(done.stderr.decode("utf-8", "replace"))
        raise WiredError(f"{line[0]} failed on {host.ssh}: {reason}", hint="see `stoa doctor --hosts`")
