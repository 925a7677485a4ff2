"""Bytes of deltas and anchors: safetensors files, read with every size checked before anything is decoded.

    bytes 0-7    length H of the header, uint64 little-endian
    bytes 8-     header: JSON object; name -> {"dtype", "shape", "data_offsets"}; "__metadata__" -> strings; space padded
    bytes 8+H-   data, back to back, in the order of their offsets

The reader is our own because it must know bf16, keep to memory views, and take bytes from a stranger's hands. A delta's
sections are `pulse.py`'s; its metadata repeats what the signed manifest says. An anchor is several parts of whole
tensors, as stock MLX opens them (codes as uint32, scales and biases as bf16), and an index that names them.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter

from stoa.bucket.manifest import DeltaRef, canonical, parse_canonical, validate
from stoa.contracts.errors import FormatError, WrongBaseError
from stoa.weights.layout import ArraySpec, Layout
from stoa.weights.pulse import Change, Codec, Counts, Sections, counts_of, decode_change, decode_segments, encode_change
from stoa.weights.state import WeightState

DELTA_FORMAT: Final = "stoa-delta-1"
ANCHOR_FORMAT: Final = "stoa-anchor-1"
MAX_INDEX_BYTES: Final = 4 << 20
_MAX_HEADER_BYTES: Final = 4 << 20
_DTYPES: Final = {
    "U8": np.dtype("<u1"),
    "U16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
}
_NAMES: Final = {"uint8": "U8", "uint16": "U16", "uint32": "U32", "int64": "I64"}


@dataclass(frozen=True, slots=True)
class Table:
    """A parsed file: arrays are views of its bytes. `dtypes` tells BF16 from U16."""

    metadata: Mapping[str, str]
    arrays: Mapping[str, NDArray[np.generic]]
    dtypes: Mapping[str, str]


_Entry = tuple[str, list[int], int, int]
"""dtype and shape of an array, and where its bytes begin and end in the body."""
_Shape = tuple[str, tuple[int, ...]]
"""dtype and shape of an array."""


@dataclass(frozen=True, slots=True)
class AnchorPart:
    """One part of an anchor: which arrays it holds."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    key: str
    sha256: str
    num_bytes: int
    arrays: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnchorIndex:
    """The parts of an anchor; its sha256 is in the signed manifest."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: str
    run: str
    version: int
    layout_id: str
    state_id: str
    parts: tuple[AnchorPart, ...]


_INDEX = TypeAdapter(AnchorIndex)


def write_table(arrays: Mapping[str, tuple[str, NDArray[np.generic]]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of name -> (dtype name, array), as `table_pieces`."""
    return b"".join(table_pieces(arrays, metadata))


def table_pieces(arrays: Mapping[str, tuple[str, NDArray[np.generic]]], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """The bytes of a safetensors file, without copying the arrays. Wide types come first, so that all are aligned."""
    order = sorted(arrays, key=lambda name: (-_DTYPES[arrays[name][0]].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name in order:
        dtype, array = arrays[name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    pieces: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    return pieces + [np.ascontiguousarray(arrays[name][1]).reshape(-1).view(np.uint8).data for name in order]


def read_table(data: bytes | memoryview) -> Table:
    """Parse a safetensors file without copying. Raises FormatError unless its arrays fill it exactly."""
    size = _header_bytes(data, len(data))
    metadata, entries = _read_header(data[8 : 8 + size], len(data) - 8 - size)
    body = memoryview(data)[8 + size :]
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, (dtype, shape, start, stop) in entries.items():
        try:
            arrays[name] = np.frombuffer(body[start:stop], dtype=_DTYPES[dtype]).reshape(shape)
        except ValueError as error:  # empty, with sides beyond what an array can have
            raise FormatError(f"array {name!r} of a safetensors file has shape {shape}: {error}") from error
    return Table(metadata, arrays, {name: dtype for name, (dtype, *_) in entries.items()})


def _header_bytes(start: bytes | memoryview, num_bytes: int) -> int:
    """Size of the header of a file of `num_bytes` that begins so. Raises FormatError."""
    size = int.from_bytes(start[:8], "little")
    if num_bytes < 8 or len(start) < 8 or size > min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise FormatError("a safetensors file is torn")
    return size


def _read_header(text: bytes | memoryview, num_body_bytes: int) -> tuple[dict[str, str], dict[str, _Entry]]:
    """Metadata and arrays that a header names. Raises FormatError unless the arrays fill the body exactly."""
    try:
        header: Any = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError("a safetensors header is not an object")
    metadata: Any = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("safetensors metadata is not strings")
    entries = {name: _entry(name, entry, num_body_bytes) for name, entry in header.items()}
    end = 0
    for start, stop in sorted((start, stop) for _, _, start, stop in entries.values()):
        if start != end:
            raise FormatError("arrays of a safetensors file overlap or leave a hole")
        end = stop
    if end != num_body_bytes:
        raise FormatError("a safetensors file has bytes that belong to no array")
    return metadata, entries


def _entry(name: str, entry: Any, limit: int) -> _Entry:
    """One array's dtype, shape and span. Raises FormatError unless they agree."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], list(entry["shape"]), entry["data_offsets"]
        whole = all(type(value) is int and value >= 0 for value in (*shape, start, stop))
        if not whole or len(entry) != 3 or len(shape) > 8 or not start <= stop <= limit:
            raise ValueError
        num_bytes = _DTYPES[dtype].itemsize
        for side in shape:
            num_bytes *= side
        if num_bytes != stop - start:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"array {name!r} of a safetensors file has no sound dtype, shape and offsets") from error
    return dtype, shape, start, stop


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a delta says it is."""

    run: str
    base: int
    version: int
    base_state_id: str
    state_id: str
    layout_id: str
    codec: Codec


def encode_delta(header: DeltaHeader, change: Change) -> bytes:
    """The bytes of a delta or roll-up."""
    return pack_delta(header, encode_change(change, header.codec), counts_of(change))


def pack_delta(header: DeltaHeader, sections: Sections, counts: Counts) -> bytes:
    """The bytes of a delta or roll-up whose sections are encoded already."""
    return b"".join(delta_pieces(header, sections, counts))


def delta_pieces(header: DeltaHeader, sections: Sections, counts: Counts) -> list[bytes | memoryview]:
    """As `pack_delta`, without copying the sections."""
    return table_pieces({name: (_NAMES[array.dtype.name], array) for name, array in sections.items()}, _metadata(header, counts))


def decode_delta(data: bytes | memoryview, header: DeltaHeader, counts: Counts, layout: Layout) -> Change:
    """The change in a delta, whole. Raises as `read_delta`."""
    return decode_change(_sections(data, header, counts), counts, layout, header.codec)


def read_delta(data: bytes | memoryview, header: DeltaHeader, counts: Counts, layout: Layout) -> Iterator[Change]:
    """The change in a delta whose sha256 has been checked, segment by segment.

    `header` and `counts` are what the signed manifest says; the bytes must say the same. Raises WrongBaseError if they
    name another run, version or state, FormatError if they are nonsense.
    """
    return decode_segments(_sections(data, header, counts), counts, layout, header.codec)


def _sections(data: bytes | memoryview, header: DeltaHeader, counts: Counts) -> Sections:
    table = read_table(data)
    for name, expected in _metadata(header, counts).items():
        found = table.metadata.get(name)
        if found != expected:
            wrong = FormatError if name in ("format", "codec") or name.startswith("num_") else WrongBaseError
            raise wrong(f"a delta has {name} {found!r}, its manifest says {expected!r}")
    return dict(table.arrays)


def counts_in(ref: DeltaRef) -> Counts:
    """The counts a signed manifest promises."""
    return Counts(ref.num_changed, ref.num_raw, ref.num_regrid)


def _metadata(header: DeltaHeader, counts: Counts) -> dict[str, str]:
    return {
        "format": DELTA_FORMAT,
        "run": header.run,
        "base": str(header.base),
        "version": str(header.version),
        "base_state_id": header.base_state_id,
        "state_id": header.state_id,
        "layout_id": header.layout_id,
        "codec": header.codec,
        "num_changed": str(counts.num_changed),
        "num_raw": str(counts.num_raw),
        "num_regrid": str(counts.num_regrid),
    }


def anchor_groups(layout: Layout, part_bytes: int) -> Iterator[tuple[ArraySpec, ...]]:
    """Split the arrays of a layout into parts of whole tensors, each closed once it reaches `part_bytes`."""
    group: list[ArraySpec] = []
    num_bytes = 0
    for spec in layout.tensors:
        group += spec.arrays
        num_bytes += sum(array.num_bytes for array in spec.arrays)
        if num_bytes >= part_bytes:
            yield tuple(group)
            group, num_bytes = [], 0
    if group:
        yield tuple(group)


def anchor_part_pieces(state: WeightState, arrays: tuple[ArraySpec, ...], *, run: str, version: int) -> list[bytes | memoryview]:
    """The bytes of one part of an anchor, as stock MLX opens it: views of the weights, not copies."""
    entries: dict[str, tuple[str, NDArray[np.generic]]] = {}
    for spec in arrays:
        entries[spec.name] = as_stored(spec, state.arrays[spec.name])
    metadata = {"format": "mlx", "kind": ANCHOR_FORMAT, "run": run, "version": str(version), "layout_id": state.layout.layout_id}
    return table_pieces(entries, metadata)


def encode_anchor_part(state: WeightState, arrays: tuple[ArraySpec, ...], *, run: str, version: int) -> bytes:
    """One part of an anchor in one piece."""
    return b"".join(anchor_part_pieces(state, arrays, run=run, version=version))


def as_stored(spec: ArraySpec, array: NDArray[np.generic]) -> tuple[str, NDArray[np.generic]]:
    """An array as MLX files hold it: codes packed four to a uint32, bf16 and float32 as they are."""
    if spec.dtype == "uint8":
        return "U32", array.view("<u4")
    return ("BF16" if spec.dtype == "bfloat16" else "F32"), array


def decode_anchor_part(data: bytes | memoryview, part: AnchorPart, state: WeightState) -> None:
    """Copy one part, whose sha256 has been checked, into the arrays of `state`. Raises FormatError before writing."""
    table = read_table(data)
    _check_part(part, state, table.metadata, {name: (table.dtypes[name], array.shape) for name, array in table.arrays.items()})
    state.verified_id = None
    for name, array in table.arrays.items():
        np.copyto(state.arrays[name], array.view(state.arrays[name].dtype) if array.ndim else array)


def read_anchor_part(path: Path, part: AnchorPart, state: WeightState) -> dict[str, str]:
    """Read the file of one part straight into the arrays of `state`; returns the digests of what stands there then.

    Nothing of it need have been checked: digests that give the promised state_id say more than the file's sha256.
    Raises FormatError, also in the middle: the arrays are worth nothing then.
    """
    with path.open("rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        size = _header_bytes(start, num_bytes)
        metadata, entries = _read_header(file.read(size), num_bytes - 8 - size)
        _check_part(part, state, metadata, {name: (dtype, tuple(shape)) for name, (dtype, shape, *_) in entries.items()})
        state.verified_id = None
        digests: dict[str, str] = {}
        for name in sorted(entries, key=lambda name: entries[name][2:]):
            digests[name] = state.fill(name, file.readinto, path.name)
    return digests


def _check_part(part: AnchorPart, state: WeightState, metadata: Mapping[str, str], found: Mapping[str, _Shape]) -> None:
    """Raises FormatError unless a part holds the arrays that its index and the layout say."""
    if set(found) != set(part.arrays) or metadata.get("layout_id") != state.layout.layout_id:
        raise FormatError(f"{part.key} holds other arrays than its index says")
    specs = state.layout.arrays_by_name
    for name, (dtype, shape) in found.items():
        spec = specs.get(name)
        expected = "" if spec is None else {"uint8": "U32", "bfloat16": "BF16", "float32": "F32"}[spec.dtype]
        if spec is None or dtype != expected:
            raise FormatError(f"{part.key}: {name} is {dtype}, not {expected or 'in the layout'}")
        stored = (*spec.shape[:-1], spec.shape[-1] // 4) if spec.dtype == "uint8" else spec.shape
        if shape != stored:
            raise FormatError(f"{part.key}: {name} has shape {shape}, not {stored}")


def encode_index(index: AnchorIndex) -> tuple[bytes, str]:
    """Canonical bytes of an anchor's index and their sha256."""
    data = canonical(_INDEX.dump_python(index, mode="json"))
    return data, hashlib.sha256(data).hexdigest()


def decode_index(data: bytes, layout: Layout, where: str) -> AnchorIndex:
    """The index in bytes whose sha256 has been checked. Raises FormatError unless its parts hold every array once."""
    parse_canonical(data, where)
    index = validate(_INDEX, data, where)
    names = [name for part in index.parts for name in part.arrays]
    if index.format != ANCHOR_FORMAT or index.layout_id != layout.layout_id:
        raise FormatError(f"{where} is a {index.format} of layout {index.layout_id[:16]}")
    if sorted(names) != sorted(array.name for array in layout.arrays):
        raise FormatError(f"{where}: the parts do not hold every array once")
    return index
