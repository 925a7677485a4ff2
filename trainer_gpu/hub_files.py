"""The safetensors of a hub checkpoint folder, read by tensor name, one tensor in memory at a time.

Bytes are read, not mapped: pages of a mapped file count as this process's memory until the file is closed, and a
checkpoint has as many as the host has room for. Which tensors there should be is `convert.py`'s. Nothing is unpickled.

    u64 little-endian: bytes of the header | header, JSON: name -> dtype, shape, data_offsets | data
"""

import json
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from stoa.contracts.errors import CheckpointError

INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes are."""

    file: BufferedReader
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class HubFiles:
    """Open inside `with`. Raises CheckpointError for a folder without weights, or with a torn file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._places: dict[str, _Place] = {}

    def __enter__(self) -> "HubFiles":
        paths = sorted(self.folder.glob("*.safetensors"))
        index = self.folder / INDEX
        if index.exists():
            paths = [self.folder / name for name in self._indexed(index)]
        if not paths:
            raise self.error("holds no safetensors file")
        for path in paths:
            self._open(path)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._place(name).shape

    def read(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own. Raises CheckpointError if there is none of that name, or its bytes are not there."""
        place = self._place(name)
        tensor = torch.empty(place.shape, dtype=place.dtype)
        if place.num_bytes:
            place.file.seek(place.start)
            # A view of the tensor's own memory: nothing is copied.
            if place.file.readinto(tensor.flatten().view(torch.uint8).numpy().data) != place.num_bytes:
                raise self.error(f"ends inside the tensor {name}")
        return tensor

    def error(self, problem: str) -> CheckpointError:
        """What is wrong with the folder, for the caller to raise."""
        return CheckpointError(f"{self.folder} {problem}", hint="fetch the checkpoint again, whole")

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise self.error(f"lacks the tensor {name}")
        return self._places[name]

    def _indexed(self, index: Path) -> list[str]:
        """Names of the files that the index tells of."""
        try:
            named: set[object] = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            names = sorted(name for name in named if isinstance(name, str))
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise self.error(f"has a {index.name} that cannot be read: {error}") from error
        if len(names) != len(named):
            raise self.error(f"has a {index.name} that names files by other than text")
        return names

    def _open(self, path: Path) -> None:
        """Note where the tensors of one file are; the library checks that its header fits its length."""
        try:
            with safe_open(path, framework="pt"):
                pass
            file = self._stack.enter_context(path.open("rb"))
        except (OSError, SafetensorError) as error:
            raise self.error(f"has a file that cannot be read: {path.name}: {error}") from error
        (num_header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(num_header_bytes))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in self._places:
                raise self.error(f"holds {name} twice")
            if entry["dtype"] not in _DTYPES:
                raise self.error(f"holds {name} as {entry['dtype']}; weights are {', '.join(_DTYPES)}")
            first, end = entry["data_offsets"]
            start = 8 + num_header_bytes + first
            self._places[name] = _Place(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start, end - first)
