"""Saved states of a warm start: from one a later start goes on bit for bit, on as many ranks as it likes.

    STATE/step-00000050/trained.safetensors    parameters by name
                        first.safetensors      first moments, second.safetensors second ones
                        state.json             the step, the settings that decide the result, the ranks' shares, sha256 of the files

A state is whole: split halves are put together before they are written. A folder appears under its name only when all of
it is on disk. The newest two are kept, and the older is taken where the newer is torn.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import mlx.core as mx
import structlog

from stoa.contracts.errors import CheckpointError, RunMismatchError
from worker_mac.warmstart.adam import Arrays
from worker_mac.warmstart.settings import Settings

_PARTS: Final = ("trained", "first", "second")
_KEPT: Final = 2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Saved:
    """A state after `step` steps. `shares`: the ranks' speeds, which a start with as many ranks keeps."""

    step: int
    shares: tuple[float, ...]
    trained: Arrays
    first: Arrays
    second: Arrays


def save(folder: Path, settings: Settings, saved: Saved) -> None:
    """Write a state and forget those before the last one."""
    folder.mkdir(parents=True, exist_ok=True)
    final, part = folder / _name(saved.step), folder / f".part-{_name(saved.step)}"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        digests: dict[str, str] = {}
        for name, arrays in zip(_PARTS, (saved.trained, saved.first, saved.second), strict=True):
            path = part / f"{name}.safetensors"
            mx.save_safetensors(str(path), arrays)
            digests[path.name] = _sync(path)
        document = {"step": saved.step, "shares": list(saved.shares), "settings": settings.deciding, "sha256": digests}
        (part / "state.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _sync(part / "state.json")
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    finally:  # a disk that is full is not left fuller
        shutil.rmtree(part, ignore_errors=True)
    for old in _folders(folder)[_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def has_saves(folder: Path) -> bool:
    """Whether a warm start was begun here."""
    return bool(_folders(folder))


def load_saved(folder: Path, settings: Settings) -> Saved | None:
    """The newest state that is whole; None where there is none.

    Raises RunMismatchError: other settings began it. CheckpointError: there are states, and none is whole.
    """
    folders = _folders(folder)
    for path in folders:
        try:
            return _load(path, settings)
        except CheckpointError as error:
            log.warning("state_torn", folder=str(path), reason=error.message)
    if folders:
        raise CheckpointError(f"{folder}: no saved state is whole", hint="delete the folder and start from the beginning")
    return None


def _load(path: Path, settings: Settings) -> Saved:
    try:
        document = cast(dict[str, object], json.loads((path / "state.json").read_text(encoding="utf-8")))
        digests = cast(dict[str, str], document["sha256"])
        for name, digest in digests.items():
            if hashlib.sha256((path / name).read_bytes()).hexdigest() != digest:
                raise ValueError(f"{name} was changed or cut")
        begun = cast(dict[str, object], document["settings"])
        step, shares = int(str(document["step"])), tuple(float(share) for share in cast(list[float], document["shares"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a whole saved state: {error}") from error
    differ = sorted(name for name, value in settings.deciding.items() if begun.get(name) != value)
    if differ:
        listed = ", ".join(f"{name} was {begun.get(name)!r}, is {settings.deciding[name]!r}" for name in differ)
        raise RunMismatchError(f"{path} was begun with other settings: {listed}", hint="use the same, or another --state folder")
    trained, first, second = (cast(Arrays, mx.load(str(path / f"{name}.safetensors"))) for name in _PARTS)
    mx.eval(trained, first, second)
    return Saved(step, shares, trained, first, second)


def _folders(folder: Path) -> list[Path]:
    """Saved states, the newest first."""
    return sorted(folder.glob("step-*"), reverse=True) if folder.is_dir() else []


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _sync(path: Path) -> str:
    """Bring a file's bytes to the disk; returns their sha256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest
