"""Makes folders of a run's weights for other tools. Joins the run as a Mac would, so every byte is verified."""

import tempfile
from pathlib import Path

from stoa.bucket.head import read_head
from stoa.bucket.run_document import RunDocument, fetch_model_files
from stoa.bucket.store import Store
from stoa.contracts.errors import UsageError
from stoa.weights.sync import Puller, write_mlx_folder


def export_mlx(document: RunDocument, store: Store, folder: Path) -> tuple[int, int]:
    """Write the newest version as a folder that `mlx_lm.load` opens; returns the version and its bytes.

    Raises UsageError if the folder holds something; ObjectMissingError before the first version.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: not an empty folder; an export overwrites nothing", hint="name a new folder")
    head, _ = read_head(store, document.run, document.public_key)
    with tempfile.TemporaryDirectory() as scratch:
        state = Puller(store, document, Path(scratch) / "weights").join(head)
        files = Path(scratch) / "model"
        fetch_model_files(store, document.model_files, files)
        write_mlx_folder(state, files, folder)
    return head.version, sum(path.stat().st_size for path in folder.iterdir())
