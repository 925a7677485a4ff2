"""Makes folders of a run's weights for other tools. Joins the run as a Mac would, so every byte is verified.

An export is done only when another library has loaded it and said the same; the comparisons are the wings'.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from cli.say import bytes_text, talk
from environments import known
from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument, fetch_model_files
from stoa.bucket.store import Store
from stoa.contracts.errors import DiskFullError, MissingExtraError, StoaError, UsageError
from stoa.telemetry.arriving import Shown, shown
from stoa.weights.sync import Puller, write_mlx_folder

LAST_FILE: Final = "config.json"
"""Goes to its place last: no library opens a folder without it."""
OF_THE_DISK: Final = frozenset({"lost+found", ".DS_Store", ".Spotlight-V100", ".TemporaryItems", ".Trashes", ".fseventsd"})
"""What a system puts into a disk's root by itself: a disk with nothing else is empty."""
SCRATCH: Final = ".stoa-export-"
HELD: Final = "held"
"""A file in a scratch folder that its export keeps locked: the system lets go of it, however that ends."""
UNHELD_SECONDS: Final = 600.0
"""A scratch folder without that file, and no younger than this, is not one that is just being made."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


NUM_PROMPTS: Final = 10
MAX_PROMPT_TOKENS: Final = 512
_SENTENCES: Final = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Dear Professor, I am writing to ask",
    "1, 1, 2, 3, 5, 8,",
    "Once upon a time in a village by the sea",
    "The mitochondrion is the part of the cell that",
    "Question: who wrote Faust? Answer:",
    "To whom it may concern: the delivery of last",
    "Zum Abendessen gibt es heute",
)


@dataclass(frozen=True, slots=True)
class Export:
    """What was written, and what the library it is for says of it: none where that is not installed here."""

    what: str
    num_bytes: int
    max_logit_difference: float | None
    greedy_agreement: float | None = None
    """Share of the places compared at which both find the same token likeliest."""
    num_prompts: int = 0
    prompts_of: str = ""
    """The environment whose questions they ask, or `plain sentences`."""


def export_mlx(document: RunDocument, store: Store, folder: Path, *, quiet: bool = True) -> Export:
    """Write the newest version as a folder that `mlx_lm.load` opens. It appears whole, and after it was compared.

    Without `quiet` the download shows how far it is. Raises UsageError if the folder holds something or cannot be written;
    DiskFullError; ObjectMissingError before the first version; WeightsError if mlx_lm computes something else from it.
    """
    with _placed(folder) as scratch:
        head, _ = read_head(store, document.run, document.public_key)
        puller = Puller(store, document, scratch / "weights")
        with nullcontext() if quiet else shown(_bar(), lambda: puller.arrival):
            state = puller.join(head)
        files, out = scratch / "model", scratch / "out"
        fetch_model_files(store, document.model_files, files)
        write_mlx_folder(state, files, out)
        num_bytes, what = _size(out), f"version {head.version}"
        if find_spec("mlx_lm") is None:
            return Export(what, num_bytes, None)
        from worker_mac.export import compare

        prompts_of, prompts = prompts_for(document, files)
        found = compare(state, out, prompts)
        return Export(what, num_bytes, found.max_logit_difference, found.greedy_agreement, len(prompts), prompts_of)


def export_hf(document: RunDocument, store: Store, folder: Path, *, quiet: bool = True) -> Export:
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

        files, bar, prompts_of, num_prompts = scratch / "model", _bar(), "", 0

        def prompts() -> list[list[int]]:
            nonlocal prompts_of, num_prompts
            bar.whole()
            bar.close()
            prompts_of, rows = prompts_for(document, files)
            num_prompts = len(rows)
            return rows

        with closing(bar):
            done = export_hub(document, store, files, scratch / "out", prompts, lambda found: None if quiet else bar.show(found))
        found, num_bytes = done.compared, _size(scratch / "out")
        return Export(f"step {done.step}", num_bytes, found.max_logit_difference, found.greedy_agreement, num_prompts, prompts_of)


def prompts_for(document: RunDocument, files: Path) -> tuple[str, list[list[int]]]:
    """Ten prompts as ids, at most MAX_PROMPT_TOKENS each, and what they are of: questions of the run's environment, spread
    over its held-out ones; plain sentences where the environment cannot be made on this machine, and to fill up.

    files: folder with the run's tokenizer.json.
    """
    tokenizer = (files / "tokenizer.json").read_bytes()
    named, rows = document.config.environment, list[list[int]]()
    try:
        environment = known.create(named.name, named.settings, tokenizer)
        ids = environment.question_ids("held_out") or environment.question_ids("train")
        chosen = sorted({number * len(ids) // NUM_PROMPTS for number in range(NUM_PROMPTS)}) if ids else []
        rows = [list(environment.prompt_ids(ids[number])) for number in chosen]
    except (StoaError, OSError):  # its index, its data set or the package it is made with is not here
        rows = []
    plain = Tokenizer.from_str(tokenizer.decode("utf-8"))
    left = [plain.encode(text).ids for text in _SENTENCES[: NUM_PROMPTS - len(rows)]]
    return named.name if rows else "plain sentences", [row[:MAX_PROMPT_TOKENS] for row in (*rows, *left) if row]


def _bar() -> Shown:
    """How far the download is: on a terminal one bar, else a line each ten percent."""
    return Shown("weights", lambda at: talk(f"weights: {at.percent} %, {bytes_text(at.num_bytes)} of {bytes_text(at.total_bytes)}"))


@contextmanager
def _placed(folder: Path) -> Iterator[Path]:
    """A scratch folder on the disk of `folder`; what the block leaves in its `out` takes the place of `folder`.

    Until then there is nothing to see but a hidden folder, inside `folder` if that is there (it may be the root of a disk,
    or the folder one stands in) and else above it. Raises UsageError and DiskFullError as `export_mlx`.
    """
    try:
        place = _resolved(folder)
        above = next(path for path in (place, *place.parents) if path.exists())
        clear_scratch(above)
        if place.exists():
            _check_empty(place, folder)
        with tempfile.TemporaryDirectory(dir=above, prefix=SCRATCH) as name, (Path(name) / HELD).open("wb") as held:
            with suppress(OSError):  # a disk that knows no locks: what is left there is for its owner to remove
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def clear_scratch(above: Path) -> None:
    """Remove what exports that were killed have left in `above`; those that still run hold theirs, and are let be."""
    if not above.is_dir():
        return
    for path in above.glob(f"{SCRATCH}*"):
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink() and not _is_held(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_held(scratch: Path) -> bool:
    if not (scratch / HELD).is_file():
        return time.time() - scratch.stat().st_mtime < UNHELD_SECONDS
    number = os.open(scratch / HELD, os.O_RDWR)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(number)
    return False


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
