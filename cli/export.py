"""Makes folders of a run's weights for other tools. Joins the run as a Mac would, so every byte is verified.

An export is done only when another library has loaded it and said the same; the comparisons are the wings'.
"""

import errno
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument, fetch_model_files
from stoa.bucket.store import Store
from stoa.contracts.errors import DiskFullError, MissingExtraError, UsageError
from stoa.weights.sync import Puller, write_mlx_folder

LAST_FILE: Final = "config.json"
"""Goes to its place last: no library opens a folder without it."""
OF_THE_DISK: Final = frozenset({"lost+found", ".DS_Store", ".Spotlight-V100", ".TemporaryItems", ".Trashes", ".fseventsd"})
"""What a system puts into a disk's root by itself: a disk with nothing else is empty."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Export:
    """What was written. max_logit_difference: from the library the folder is for; None if it is not installed here."""

    what: str
    num_bytes: int
    max_logit_difference: float | None


def export_mlx(document: RunDocument, store: Store, folder: Path) -> Export:
    """Write the newest version as a folder that `mlx_lm.load` opens. It appears whole, and after it was compared.

    Raises UsageError if the folder holds something or cannot be written; DiskFullError; ObjectMissingError before the first
    version; WeightsError if mlx_lm computes something else from it.
    """
    difference = None
    with _placed(folder) as scratch:
        head, _ = read_head(store, document.run, document.public_key)
        state = Puller(store, document, scratch / "weights").join(head)
        files, out = scratch / "model", scratch / "out"
        fetch_model_files(store, document.model_files, files)
        write_mlx_folder(state, files, out)
        if find_spec("mlx_lm") is not None:
            from worker_mac.export import compare

            difference = compare(state, out)
        num_bytes = _size(out)
    return Export(f"version {head.version}", num_bytes, difference)


def export_hf(document: RunDocument, store: Store, folder: Path) -> Export:
    """Write the newest checkpoint's weights as a folder that transformers opens.

    Raises as `export_mlx`; MissingExtraError where nothing of the trainer is installed.
    """
    for module in ("torch", "megatron", "transformers"):
        if find_spec(module) is None:
            raise MissingExtraError(f"an export for transformers needs {module}", hint="run `pip install 'stoa[gpu]'`")
    with _placed(folder) as scratch, warnings.catch_warnings():
        # What the libraries say of themselves while they are loaded: which faster parts are not installed.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch)\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch)\.")
        from trainer_gpu.export import export_hub

        done = export_hub(document, store, scratch / "model", scratch / "out")
        num_bytes = _size(scratch / "out")
    return Export(f"step {done.step}", num_bytes, done.max_logit_difference)


@contextmanager
def _placed(folder: Path) -> Iterator[Path]:
    """A scratch folder on the disk of `folder`; what the block leaves in its `out` takes the place of `folder`.

    Until then there is nothing to see but a hidden folder, inside `folder` if that is there (it may be the root of a disk,
    or the folder one stands in) and else above it. Raises UsageError and DiskFullError as `export_mlx`.
    """
    try:
        place = _resolved(folder)
        if place.exists():
            _check_empty(place, folder)
        above = next(path for path in (place, *place.parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=above, prefix=".stoa-export-") as name:
            scratch = Path(name)
            yield scratch
            _move(scratch, place, folder)
    except OSError as problem:
        # A library that cannot read what was written has an error of this class without a number.
        if problem.errno is None or isinstance(problem, ConnectionError | TimeoutError):
            raise
        where = f" ({problem.filename})" if problem.filename else ""
        if problem.errno in _FULL:
            raise DiskFullError(f"{folder}: the disk is full{where}", hint="make room or name a folder on another disk") from problem
        reason = (problem.strerror or str(problem)).lower()
        raise UsageError(f"{folder} cannot be written: {reason}{where}", hint="name a folder that you may write to") from problem


def _resolved(folder: Path) -> Path:
    try:
        return folder.resolve()
    except RuntimeError as problem:  # what OSError is in later Pythons
        raise OSError(errno.ELOOP, "too many symbolic links", str(folder)) from problem


def _move(scratch: Path, place: Path, folder: Path) -> None:
    """Everything in `out` to its place, whole or not at all as far as the file system has a say."""
    out = scratch / "out"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        out.rename(place)
        return
    _check_empty(place, folder, but=scratch.name)  # somebody may have written meanwhile
    moved: list[Path] = []
    try:
        for path in sorted(out.iterdir(), key=lambda path: (path.name == LAST_FILE, path.name)):
            path.rename(place / path.name)
            moved.append(place / path.name)
    except OSError:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _check_empty(place: Path, folder: Path, but: str = "") -> None:
    """Raise UsageError unless `place`, which the user called `folder`, is a folder with nothing of anybody's."""
    if not place.is_dir() or any(path.name not in OF_THE_DISK and path.name != but for path in place.iterdir()):
        raise UsageError(f"{folder}: not an empty folder; an export overwrites nothing", hint="name a new folder")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
