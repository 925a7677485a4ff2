"""What the checks look at: a configuration, a state folder, the ways to the servers, and for whom the machine is looked at.

Made once; what must be fetched (the run, the model's config.json) is fetched at most once, by whichever check asks first.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar, cast

from stoa.bucket.run_document import RunDocument, read_run
from stoa.bucket.store import SMALL_BYTES, Store
from stoa.config.host import MacHost
from stoa.config.load import Credentials, find_model_folder, load_mac_host
from stoa.config.run import RunConfig
from stoa.contracts.access import PLAIN, Access
from stoa.contracts.errors import StoaError
from stoa.weights.layout import Layout, layout_of

_Answer = TypeVar("_Answer")
Role = Literal["mac", "gpu", "all", "home"]
"""home: commands and the control process only."""


@dataclass(frozen=True)
class Scene:
    """`role`: what this machine is to be. `store`: None if there is no key for the bucket."""

    role: Role
    config: RunConfig
    folder: Path
    """State folder of the Mac's worker."""
    store: Store | None
    credentials: Credentials | None = None
    """Of the store."""
    access: Access = PLAIN
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)
    _asking: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _answers: dict[object, object] = field(default_factory=dict[object, object], repr=False, compare=False)

    def once(self, ask: Callable[[], _Answer]) -> _Answer:
        """What `ask` answers; it is called once, by whichever check is first, and the others wait."""
        with self._asking:
            if ask not in self._answers:
                self._answers[ask] = ask()
            return cast(_Answer, self._answers[ask])

    @property
    def is_mac(self) -> bool:
        """True if a Mac's worker is to run here."""
        return self.role in ("mac", "all")

    @property
    def is_home(self) -> bool:
        """True if the run is kept from here: trainer, control process, commands."""
        return self.role != "mac"

    @cached_property
    def allowed(self) -> MacHost:
        """What the Mac's owner allows. Raises ConfigError."""
        path = self.folder / "mac.toml"
        return load_mac_host(path if path.is_file() else None)

    @cached_property
    def run(self) -> RunDocument | None:
        """The run as it is in the bucket; None if it is not, or the bucket does not say."""
        with self._lock:
            try:
                return None if self.store is None else read_run(self.store, self.config.run)
            except StoaError:
                return None

    @cached_property
    def settings(self) -> RunConfig:
        """What a worker here plays by: on a Mac that only works for it, the run's own settings where the run is known."""
        return self.config if self.is_home or self.run is None else self.run.config

    @cached_property
    def model_folder(self) -> Path | None:
        """A folder with the model's small files: the checkpoint's, or what this Mac fetched of it."""
        fetched = self.folder / "runs" / self.config.run / "model"
        return find_model_folder(self.config) or (fetched if (fetched / "config.json").is_file() else None)

    @cached_property
    def model_config(self) -> Mapping[str, object] | None:
        """The model's config.json: from its folder, else from the bucket; None if it is in neither."""
        with self._lock:
            data = self._model_config_bytes()
        try:
            tree: object = json.loads(data) if data else None
        except ValueError:
            return None
        return {str(name): value for name, value in tree.items()} if isinstance(tree, dict) else None

    def _model_config_bytes(self) -> bytes:
        if self.model_folder is not None:
            return (self.model_folder / "config.json").read_bytes()
        files = self.run.model_files if self.run is not None else ()
        named = next((file for file in files if file.name == "config.json"), None)
        if named is None or self.store is None:
            return b""
        try:
            return self.store.get(named.key, max_bytes=SMALL_BYTES).data
        except StoaError:
            return b""

    @cached_property
    def layout(self) -> Layout | None:
        """The weights' layout; None if the model is not known here or its config.json makes none."""
        try:
            return None if self.model_config is None else layout_of(self.model_config, self.settings.learning.dtype)
        except StoaError:
            return None
