"""This project's wheel, for the other Macs of a wired set: built from its source, or packed again of what was installed.

A wheel is a ZIP of the files as they are installed, with what goes elsewhere than among the modules under `NAME.data/`, and
a list of all with their hashes (PyPA's binary distribution format). Who it is sent to is `install.py`'s business.
"""

import base64
import csv
import hashlib
import io
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stoa.config.load import IS_CHECKOUT, PROJECT_ROOT
from stoa.contracts.errors import WiredError

BUILD_SECONDS: Final = 300.0
_NOT_OURS: Final = ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_cache.json")
"""What an installer writes beside a wheel's own files."""


def make_wheel(place: Path) -> Path:
    """A wheel of the program that runs, in `place`. Raises WiredError."""
    try:
        return _build(place) if IS_CHECKOUT else pack(metadata.distribution("stoa"), place)
    except OSError as error:  # a file that an installer listed is gone, or the disk is full
        raise WiredError(f"no wheel was made: {error}", hint="install this program again, or on each Mac by hand") from error


def pack(installed: metadata.Distribution, place: Path) -> Path:
    """A wheel of a distribution as it lies installed; programs in `bin` are made anew where it is installed."""
    name = f"{installed.metadata['Name']}-{installed.version}"
    rows: list[tuple[str, str, int | str]] = []
    path = place / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in installed.files or ():
            target = _place_of(file.parts, name)
            if not target:
                continue
            data = Path(str(installed.locate_file(file))).read_bytes()
            wheel.writestr(target, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((target, f"sha256={digest}", len(data)))
        if not any(target.endswith(".dist-info/METADATA") for target, *_ in rows):
            raise WiredError("this program does not say which files it consists of", hint="install it on each Mac by hand")
        record = f"{name}.dist-info/RECORD"
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        wheel.writestr(record, text.getvalue())
    return path


def _place_of(parts: tuple[str, ...], name: str) -> str:
    """Where an installed file lies in the wheel; "" for one that is not of it."""
    if "__pycache__" in parts or (parts[-1] in _NOT_OURS and parts[0].endswith(".dist-info")):
        return ""
    inner = [part for part in parts if part != ".."]
    if len(inner) == len(parts):
        return "/".join(parts)
    return "" if inner[0] in ("bin", "Scripts") else f"{name}.data/data/{'/'.join(inner)}"


def _build(place: Path) -> Path:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if find_spec("pip") is not None:
        line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(PROJECT_ROOT)]
    elif uv is not None:
        line = [uv, "build", "--quiet", "--wheel", "--out-dir", str(place), str(PROJECT_ROOT)]
    else:
        raise WiredError("neither pip nor uv is here to build a wheel with", hint="install one, or this program on each Mac by hand")
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WiredError(f"no wheel was built: {error}") from error
    found = next(place.glob("stoa-*.whl"), None)
    if done.returncode or found is None:
        raise WiredError(f"no wheel was built: {(done.stderr or done.stdout).strip()[-300:]}")
    return found
