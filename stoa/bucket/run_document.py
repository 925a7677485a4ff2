"""run.json: what a run was started with, create-only, signed by the key it names; and the base model's small files.

A Mac joins with the bucket alone: settings, layout, tokenizer and the key it must trust are all here.
"""

import base64
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.manifest import Signer, parse_canonical, validate, verify, write_signed
from stoa.bucket.store import SMALL_BYTES, Store, check_sha256
from stoa.config.run import RunConfig
from stoa.contracts.errors import (
    FormatError,
    ObjectExistsError,
    ObjectMissingError,
    RunExistsError,
    RunMissingError,
    SignatureError,
)

RUN_FORMAT: Final = "stoa-run-1"
_MAX_MODEL_FILE_BYTES: Final = 64 << 20
_MODEL_FILES: Final = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A small file of the base checkpoint."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: str
    key: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of the base checkpoint's weights, which stays on the hosts that train."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RunDocument:
    """A run: resolved settings, the key that signs it (base64 ed25519), the weights' layout, the base model's files."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: str
    run: str
    created_at: float
    config: RunConfig
    public_key: str
    layout_id: str
    model_files: tuple[ModelFile, ...]
    weights: tuple[WeightFile, ...] = ()
    """Of the base checkpoint: a trainer on another host starts from these bytes or not at all."""
    sig: str = ""


_RUN = TypeAdapter(RunDocument)


def new_run(
    config: RunConfig,
    signer: Signer,
    *,
    layout_id: str,
    model_files: tuple[ModelFile, ...],
    weights: tuple[WeightFile, ...] = (),
) -> RunDocument:
    """The document of a run that starts now."""
    return RunDocument(RUN_FORMAT, config.run, time.time(), config, signer.public_key, layout_id, model_files, weights)


def claim_run(store: Store, document: RunDocument, signer: Signer) -> RunDocument:
    """Write run.json; returns it as read back. Raises RunExistsError if the name is used."""
    try:
        store.create(keys.run_json(document.run), write_signed(_RUN, document, signer))
    except ObjectExistsError as error:
        raise RunExistsError(
            f"{store.name} has a run {document.run!r} already", hint="choose another name, or continue it with --resume"
        ) from error
    return read_run(store, document.run, document.public_key)


def read_run(store: Store, run: str, pinned_public_key: str | None = None) -> RunDocument:
    """The document of a run.

    Raises RunMissingError; SignatureError if it is not signed by the key it names, or names another than the pinned one.
    """
    key = keys.run_json(run)
    try:
        data = store.get(key, max_bytes=SMALL_BYTES).data
    except ObjectMissingError as error:
        raise RunMissingError(f"{store.name} has no run {run!r}", hint="start it with `stoa run`, or check the name") from error
    tree = parse_canonical(data, key)
    public_key = str(tree.get("public_key", ""))
    if pinned_public_key is not None and public_key != pinned_public_key:
        raise SignatureError(
            f"{key} names another key than the one this machine trusts for run {run!r}",
            hint="if the run was made anew on purpose, remove this machine's state folder of the run",
        )
    verify(tree, public_key, key)
    document = validate(_RUN, data, key)
    if document.format != RUN_FORMAT or document.run != run or document.config.run != run:
        raise FormatError(f"{key} is a {document.format} of run {document.run}, not a {RUN_FORMAT} of run {run}")
    if len(base64.b64decode(public_key)) != 32:
        raise FormatError(f"{key}: public_key is not an ed25519 key")
    return document


def upload_model_files(store: Store, run: str, folder: Path) -> tuple[ModelFile, ...]:
    """Write the base checkpoint's small files (config, tokenizer, chat template) that are in `folder`."""
    files: list[ModelFile] = []
    for name in _MODEL_FILES:
        path = folder / name
        if path.is_file():
            data = path.read_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            key = keys.model_file(run, name, sha256)
            store.create(key, data)
            files.append(ModelFile(name, key, sha256, len(data)))
    return tuple(files)


def fetch_model_files(store: Store, files: tuple[ModelFile, ...], folder: Path) -> None:
    """Put the files into `folder`, each checked; those that are there and right are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        path = folder / file.name
        if path.name not in _MODEL_FILES:
            raise FormatError(f"run.json names a model file {file.name!r}", hint="not a file of a checkpoint this project knows")
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256:
            continue
        data = store.get(file.key, max_bytes=min(file.num_bytes, _MAX_MODEL_FILE_BYTES)).data
        check_sha256(data, file.sha256, file.key)
        part = path.with_name(path.name + ".part")
        part.write_bytes(data)
        part.replace(path)
