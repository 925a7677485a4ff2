"""What one run is to the trainer's processes: its document, its bucket, its signing key, its environment.

Built once a process, after run.json is there; the trainer and its control child both use it, so no torch here.
"""

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from environments import known
from environments.base import Environment
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import RunDocument, read_run
from stoa.bucket.store import Store
from stoa.config.load import bucket_credentials, signing_seed
from stoa.config.run import RunConfig
from stoa.contracts.errors import ConfigError, RunMismatchError
from trainer_gpu.hub import check_weight_files, locate_model

PATIENCE_SECONDS = 300.0
"""How long an outage of the bucket is ridden out inside one call."""


@dataclass(frozen=True, slots=True)
class RunHandle:
    """One run, as this process may touch it."""

    store: Store
    document: RunDocument
    signer: Signer
    environment: Environment
    model_folder: Path
    owner: str
    folder: Path | None = None
    """State of this process on disk; None: nothing is kept there."""
    word_seconds: float = 0.5
    """How long an acquisition waits for word that it is no longer wanted, before it fences the present holder."""

    @property
    def run(self) -> str:
        """The run's name."""
        return self.document.run

    @property
    def config(self) -> RunConfig:
        """The run's settings, as it was started with."""
        return self.document.config


def open_store(config: RunConfig, *, patience_seconds: float = PATIENCE_SECONDS) -> Store:
    """The bucket of `config`, with this host's credentials. Raises AccessDeniedError if there are none."""
    return Store(config.bucket, bucket_credentials(config.bucket), patience_seconds=patience_seconds)


def open_run(config: RunConfig, store: Store, *, check_weights: bool = False) -> RunHandle:
    """The run that `config` names; where to find things comes from `config`, what the run is from run.json.

    check_weights: also compare the bytes of the base checkpoint's weights: for who trains on them.

    Raises:
        RunMissingError: it was not started yet. SignatureError, FormatError: run.json is not one.
        ConfigError: the signing key here is not the run's. RunMismatchError: the base checkpoint here is another.
    """
    document = read_run(store, config.run)
    signer = Signer.from_seed(signing_seed())
    if signer.public_key != document.public_key:
        raise ConfigError(
            f"run {config.run} is signed by another key than the one on this host",
            hint="set STOA_SIGNING_KEY to the key of the host that started the run",
        )
    folder = locate_model(document.config)
    check_model_files(document, folder)
    if check_weights:
        check_weight_files(document, folder)
    tokenizer = (folder / "tokenizer.json").read_bytes()
    environment = known.create(document.config.environment.name, document.config.environment.settings, tokenizer)
    owner = f"{socket.gethostname()}-{os.getpid()}"
    return RunHandle(store, document, signer, environment, folder, owner)


def check_model_files(document: RunDocument, folder: Path) -> None:
    """Raise RunMismatchError unless all files of the base checkpoint that run.json lists are those in `folder`."""
    for file in document.model_files:
        path = folder / file.name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"
        if found != file.sha256:
            raise RunMismatchError(f"{path} is not the file run {document.run} was started with", hint="use the base checkpoint of the run")
