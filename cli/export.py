"""Makes folders of a run's weights for other tools. Joins the run as a Mac would, so every byte is verified.

An export is done only when another library has loaded it and said the same; the comparisons are the wings'.
"""

import tempfile
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument, fetch_model_files
from stoa.bucket.store import Store
from stoa.contracts.errors import MissingExtraError, UsageError
from stoa.weights.sync import Puller, write_mlx_folder


@dataclass(frozen=True, slots=True)
class Export:
    """What was written. max_logit_difference: from the library the folder is for; None if it is not installed here."""

    what: str
    num_bytes: int
    max_logit_difference: float | None


def export_mlx(document: RunDocument, store: Store, folder: Path) -> Export:
    """Write the newest version as a folder that `mlx_lm.load` opens. It appears whole, and after it was compared.

    Raises UsageError if the folder holds something; ObjectMissingError before the first version; WeightsError if mlx_lm
    computes something else from it.
    """
    _check_empty(folder)
    head, _ = read_head(store, document.run, document.public_key)
    difference = None
    made_beside = folder if folder.exists() else folder.parent
    made_beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made_beside) as scratch:
        state = Puller(store, document, Path(scratch) / "weights").join(head)
        files, out = Path(scratch) / "model", Path(scratch) / "out"
        fetch_model_files(store, document.model_files, files)
        write_mlx_folder(state, files, out)
        if find_spec("mlx_lm") is not None:
            from worker_mac.export import compare

            difference = compare(state, out)
        folder.mkdir(exist_ok=True)
        for path in sorted(out.iterdir()):
            path.replace(folder / path.name)
    return Export(f"version {head.version}", _size(folder), difference)


def export_hf(document: RunDocument, store: Store, folder: Path) -> Export:
    """Write the newest checkpoint's weights as a folder that transformers opens.

    Raises as `export_mlx`; MissingExtraError where nothing of the trainer is installed.
    """
    _check_empty(folder)
    for module in ("torch", "megatron", "transformers"):
        if find_spec(module) is None:
            raise MissingExtraError(f"an export for transformers needs {module}", hint="run `pip install 'stoa[gpu]'`")
    with warnings.catch_warnings():
        # What the libraries say of themselves while they are loaded: which faster parts are not installed.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch)\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch)\.")
        from trainer_gpu.export import export_hub

        done = export_hub(document, store, folder)
    return Export(f"step {done.step}", done.num_bytes, done.max_logit_difference)


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: not an empty folder; an export overwrites nothing", hint="name a new folder")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
