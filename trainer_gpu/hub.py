"""Base checkpoints by name: `owner/name@revision` on a model hub, fetched once into this host's state folder.

A fetch that was cut short goes on where it ended. A folder counts only after its files were checked against its
config.json and their hashes written down; without a network such a folder, or any other, is all that is needed. Finding
a folder by its path is `stoa.config.load`'s.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, cast

import structlog
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from stoa.bucket.run_document import RunDocument, WeightFile
from stoa.config.load import find_model_folder, state_base
from stoa.config.run import RunConfig
from stoa.contracts.errors import CheckpointError, ConfigError, MissingExtraError, ModelMissingError, RunMismatchError

MARK: Final = "stoa-model.json"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([0-9a-f]{40}))?")
_WANTED: Final = ("*.json", "*.jinja", "*.safetensors")
_CHUNK_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Marked:
    """MARK: what was fetched, and what its weight files are."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    model: str
    revision: str
    files: Annotated[list[WeightFile], Field(min_length=1)]


_MARKED: Final = TypeAdapter(_Marked)

log = structlog.get_logger()


def locate_model(config: RunConfig, *, endpoint: str | None = None) -> Path:
    """Folder of a run's base checkpoint, fetched if it is a hub's and not here yet.

    Raises:
        ConfigError: neither a folder nor a name with a pinned revision.
        ModelMissingError: the hub cannot be reached, or does not have it; the hint is a command that fetches it elsewhere.
        CheckpointError: what was fetched does not fit its config.json.
    """
    folder = find_model_folder(config)
    if folder is not None:
        return folder
    named = _NAME.fullmatch(config.model)
    if named is None:
        raise ConfigError(f"model = {config.model!r}: no folder of that name holds a config.json", hint=f"looked from {Path.cwd()}")
    owner, name, revision = named.groups()
    if revision is None:
        raise ConfigError(
            f"model = {config.model!r}: neither a folder with a config.json nor a hub's model with its revision pinned",
            hint=f'pin it: model = "{owner}/{name}@COMMIT", with the 40 characters of the commit from its page',
        )
    folder = state_base() / "models" / f"{owner}--{name}" / revision
    if not _is_whole(f"{owner}/{name}", revision, folder):
        fetch_model(f"{owner}/{name}", revision, folder, endpoint=endpoint)
    return folder


def fetch_model(name: str, revision: str, folder: Path, *, endpoint: str | None = None) -> None:
    """Fetch a model's files into `folder`, check them and mark it as whole. Raises as `locate_model`."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only where a model is fetched
        from huggingface_hub.errors import HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("a hub's model is fetched with huggingface_hub", hint="run `pip install 'stoa[gpu]'`") from error
    log.info("model_fetch_started", model=name, revision=revision, folder=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        snapshot_download(name, revision=revision, local_dir=folder, allow_patterns=list(_WANTED), endpoint=endpoint)
    except (HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelMissingError(
            f"{name}@{revision[:12]} is not on this host and cannot be fetched: {reason}",
            hint=f"where there is a network run `hf download {name} --revision {revision} --local-dir DIR`, then set model to that folder",
        ) from error
    _mark(name, revision, folder)


def _is_whole(name: str, revision: str, folder: Path) -> bool:
    """Whether a model was fetched. Where only what was written down of it is torn, its files are looked at again: no network is needed."""
    try:
        return _noted(folder) is not None
    except CheckpointError as error:
        log.warning("model_mark_unusable", error=error.message)
    try:
        _mark(name, revision, folder)
    except (CheckpointError, ConfigError) as error:
        log.warning("model_unusable", error=error.message)
        return False
    return True


def _mark(name: str, revision: str, folder: Path) -> None:
    """Check a folder's files and write down what they are. Raises CheckpointError, ConfigError."""
    check_weights(folder)
    files = [{"name": f.name, "sha256": f.sha256, "num_bytes": f.num_bytes} for f in _hash_weights(folder)]
    part = folder / f"{MARK}.part"
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"model": name, "revision": revision, "files": files}, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())  # else a loss of power may leave the name without the content
    part.replace(folder / MARK)
    log.info("model_fetched", model=name, num_files=len(files), num_bytes=sum(cast(int, file["num_bytes"]) for file in files))


def check_weights(folder: Path) -> None:
    """Raise CheckpointError or ConfigError unless every tensor that config.json asks for is in a file, with its shape."""
    from trainer_gpu.convert import hub_shapes  # noqa: PLC0415 - torch, and only where a model was fetched
    from trainer_gpu.hub_files import HubFiles  # noqa: PLC0415
    from trainer_gpu.model_config import read_model_config  # noqa: PLC0415

    with HubFiles(folder) as files:
        for name, shape in hub_shapes(read_model_config(folder)):
            if files.shape(name) != shape:
                raise files.error(f"has {name} with shape {files.shape(name)}; config.json makes it {shape}")


def weight_files(folder: Path) -> tuple[WeightFile, ...]:
    """Names, hashes and sizes of a checkpoint's weights: as written down when it was fetched, else from the bytes.

    Raises CheckpointError if what was written down is torn, or of files that are not there in that size.
    """
    noted = _noted(folder)
    if noted is None:
        return _hash_weights(folder)
    for file in noted:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise _unusable(folder, f"{file.name} is not there with its {file.num_bytes} bytes")
    return noted


def _noted(folder: Path) -> tuple[WeightFile, ...] | None:
    """What was written down of a fetched model; None where nothing was. Raises CheckpointError as `weight_files`, but for sizes."""
    try:
        text = (folder / MARK).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unusable(folder, str(error)) from error
    try:
        return tuple(_MARKED.validate_json(text).files)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _unusable(folder, ": ".join((*map(str, first["loc"]), first["msg"]))) from error


def _unusable(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{folder / MARK} cannot be used: {reason}", hint="delete that file: the model is then looked at anew")


def check_weight_files(document: RunDocument, folder: Path) -> None:
    """Raise RunMismatchError unless the folder's weights are those the run was started with."""
    if document.weights and weight_files(folder) != document.weights:
        raise RunMismatchError(
            f"{folder} holds other weights than run {document.run} was started with", hint="use the base checkpoint of the run"
        )


def _hash_weights(folder: Path) -> tuple[WeightFile, ...]:
    found: list[WeightFile] = []
    for path in sorted(folder.glob("*.safetensors")):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                digest.update(data)
        found.append(WeightFile(path.name, digest.hexdigest(), path.stat().st_size))
    return tuple(found)
