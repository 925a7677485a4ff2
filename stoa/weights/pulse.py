"""The codec of a delta: which codes changed and which way, as few bytes as the change rate allows.

A change of weights is positions and differences over the concatenated code space of the layout, plus new values of raw
elements and whole re-gridded groups. Gaps between positions go through pcodec (or, as the second codec, a nibble split
and zstd), signs are one bit each, magnitudes appear only if some difference is not +-1. Nothing here has a checksum:
the caller has checked the sha256 of the bytes.

Sections (all little-endian; absent when empty):

    gaps           gap blob of the C changed positions
    signs          ceil(C / 8) bytes, bit i (low bit first) is 1 where difference i is positive
    magnitudes     blob of |difference| - 1 as uint8 [C], only if one of them is not 0
    raw.gaps       gap blob of the M changed raw positions
    raw.values     uint16 or uint32 [M], bit patterns of the new values
    regrid.groups  gap blob of the R group numbers
    regrid.scales, regrid.biases   uint16 [R] bf16 bits
    regrid.codes   uint8 [R, 64]

Gap blob, codec pco-8: byte 0 the width of a gap (4 or 8), then one pcodec stream. Codec nibble-zstd-1: byte 0 the width
of a high part (1, 2, 4 or 8), bytes 1-4 length of the zstd frame of the high parts (gap >> 4), the frame, then the low
nibbles, two a byte, first one low. A gap is the distance to the position before, minus 1; the first is the position.

Legend: C changed codes, M changed raw elements, R re-gridded groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone  # pyright: ignore[reportAttributeAccessIssue]

from stoa.contracts.errors import FormatError
from stoa.weights.layout import GROUP_SIZE, Layout

Codec = Literal["pco-8", "nibble-zstd-1"]
PCO: Final = "pco-8"
NIBBLE: Final = "nibble-zstd-1"

_Item = TypeVar("_Item", bound=np.generic)
Int64s = NDArray[np.int64]
RawBits = NDArray[np.uint16 | np.uint32]
Sections = dict[str, NDArray[np.generic]]

_SECTIONS: Final = {
    "gaps",
    "signs",
    "magnitudes",
    "raw.gaps",
    "raw.values",
    "regrid.groups",
    "regrid.scales",
    "regrid.biases",
    "regrid.codes",
}


def _no_positions() -> Int64s:
    return np.empty(0, dtype=np.int64)


def _no_bits() -> NDArray[np.uint16]:
    return np.empty(0, dtype=np.uint16)


@dataclass(frozen=True, slots=True)
class Change:
    """How one state of the weights becomes another. Positions are strictly increasing.

    positions: int64 [C] in the code space, never inside a re-gridded group; differences: int16 [C], not 0;
    raw_positions: int64 [M] in the raw space; raw_values: uint16 or uint32 [M] bit patterns; groups: int64 [R] group
    numbers (code position // 64); scales, biases: uint16 [R]; codes: uint8 [R, 64].
    """

    positions: Int64s = field(default_factory=_no_positions)
    differences: NDArray[np.int16] = field(default_factory=lambda: np.empty(0, dtype=np.int16))
    raw_positions: Int64s = field(default_factory=_no_positions)
    raw_values: RawBits = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    groups: Int64s = field(default_factory=_no_positions)
    scales: NDArray[np.uint16] = field(default_factory=_no_bits)
    biases: NDArray[np.uint16] = field(default_factory=_no_bits)
    codes: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, GROUP_SIZE), dtype=np.uint8))


@dataclass(frozen=True, slots=True)
class Counts:
    """C, M and R of a change, from the signed manifest: they size every buffer of the decoder."""

    num_changed: int
    num_raw: int
    num_regrid: int


def counts_of(change: Change) -> Counts:
    """C, M and R of a change."""
    return Counts(len(change.positions), len(change.raw_positions), len(change.groups))


def encode_change(change: Change, codec: Codec = PCO) -> Sections:
    """The sections of a change. Raises FormatError if positions do not increase or a difference is 0 or too large."""
    sections: Sections = {}
    if len(change.positions):
        size = np.abs(change.differences.astype(np.int32))
        if size.min() < 1 or size.max() > 255:
            raise FormatError("a difference of codes is 0 or beyond 255")
        sections["gaps"] = encode_positions(change.positions, codec)
        sections["signs"] = np.packbits(change.differences > 0, bitorder="little")
        if size.max() > 1:
            sections["magnitudes"] = _encode_small((size - 1).astype(np.uint8), codec)
    if len(change.raw_positions):
        sections["raw.gaps"] = encode_positions(change.raw_positions, codec)
        sections["raw.values"] = change.raw_values
    if len(change.groups):
        sections["regrid.groups"] = encode_positions(change.groups, codec)
        sections["regrid.scales"] = change.scales
        sections["regrid.biases"] = change.biases
        sections["regrid.codes"] = change.codes
    return sections


def decode_change(sections: Mapping[str, NDArray[np.generic]], counts: Counts, layout: Layout, codec: Codec) -> Change:
    """The change in `sections`.

    No buffer is larger than `counts` and the layout allow. Raises FormatError for anything that is not exactly one
    encoded change of this layout with these counts.
    """
    num_groups = layout.num_codes // GROUP_SIZE
    num_c, num_m, num_r = counts.num_changed, counts.num_raw, counts.num_regrid
    if not (0 <= num_c <= layout.num_codes and 0 <= num_m <= layout.num_raw and 0 <= num_r <= num_groups):
        raise FormatError(f"{counts} is more than the layout holds")
    unknown = sections.keys() - _SECTIONS
    if unknown:
        raise FormatError(f"a delta has no section {min(unknown)!r}")
    reader = _Reader(sections, codec)
    change = Change(
        reader.positions("gaps", num_c, layout.num_codes),
        reader.differences(num_c),
        reader.positions("raw.gaps", num_m, layout.num_raw),
        reader.array("raw.values", np.uint16 if layout.raw_dtype == "bfloat16" else np.uint32, (num_m,)),
        reader.positions("regrid.groups", num_r, num_groups),
        reader.array("regrid.scales", np.uint16, (num_r,)),
        reader.array("regrid.biases", np.uint16, (num_r,)),
        reader.array("regrid.codes", np.uint8, (num_r, GROUP_SIZE)),
    )
    if reader.left:
        raise FormatError(f"section {min(reader.left)!r} belongs to nothing")
    if num_r and np.isin(change.positions // GROUP_SIZE, change.groups).any():
        raise FormatError("a code changes both by itself and with its group")
    return change


def merge_positions(changes: Sequence[Change], groups: Int64s) -> tuple[Int64s, NDArray[np.int16]]:
    """Positions and differences of several changes in a row as one, without those inside `groups`; what cancels is gone."""
    everywhere = np.concatenate([change.positions for change in changes])
    positions, inverse = np.unique(everywhere, return_inverse=True)
    differences = np.concatenate([change.differences for change in changes])
    total = np.zeros(len(positions), dtype=np.int16)
    np.add.at(total, inverse, differences)
    kept = (total != 0) & ~np.isin(positions // GROUP_SIZE, groups)
    return positions[kept], total[kept]


class _Reader:
    """Takes sections one by one, each checked against the count it must have."""

    def __init__(self, sections: Mapping[str, NDArray[np.generic]], codec: Codec) -> None:
        self.left = dict(sections)
        self._codec: Codec = codec

    def _take(self, name: str, count: int) -> NDArray[np.generic] | None:
        found = self.left.pop(name, None)
        if (found is None) != (count == 0):
            raise FormatError(f"section {name!r} is {'missing' if found is None else 'there'}, for {count} entries")
        return found

    def array(self, name: str, dtype: type[_Item], shape: tuple[int, ...]) -> NDArray[_Item]:
        found = self._take(name, shape[0])
        if found is None:
            return np.empty(shape, dtype=dtype)
        if found.dtype != dtype or found.shape != shape:
            raise FormatError(f"section {name!r} is {found.dtype} {found.shape}, not {np.dtype(dtype)} {shape}")
        return found.view(dtype)

    def positions(self, name: str, count: int, limit: int) -> Int64s:
        found = self._take(name, count)
        return _no_positions() if found is None else decode_positions(found, count, limit, self._codec)

    def differences(self, count: int) -> NDArray[np.int16]:
        signs = self.array("signs", np.uint8, ((count + 7) // 8,))
        positive = np.unpackbits(signs, count=count, bitorder="little")
        if np.packbits(positive, bitorder="little").tobytes() != signs.tobytes():
            raise FormatError("spare bits of section 'signs' are set")
        difference = positive.astype(np.int16) * np.int16(2) - np.int16(1)
        sizes = self.left.pop("magnitudes", None)
        if sizes is None:
            return difference
        return difference * (_decode_small(sizes, count, self._codec).astype(np.int16) + np.int16(1))


def encode_positions(positions: Int64s, codec: Codec = PCO) -> NDArray[np.uint8]:
    """Gap blob of strictly increasing positions, at least one."""
    gaps = np.diff(positions, prepend=np.int64(-1)) - 1
    if gaps.min() < 0:
        raise FormatError("positions do not increase")
    largest = int(gaps.max())
    if codec == PCO:
        width = 4 if largest < 1 << 32 else 8
        body = _pco(gaps.astype(f"<u{width}"))
        return _blob(bytes([width]), body)
    high = gaps >> 4
    width = next(w for w in (1, 2, 4, 8) if largest >> 4 < 1 << (8 * w))
    frame = zstandard.ZstdCompressor(level=1).compress(high.astype(f"<u{width}").tobytes())
    low = (gaps & 15).astype(np.uint8)
    if len(low) % 2:
        low = np.append(low, np.uint8(0))
    return _blob(bytes([width]) + len(frame).to_bytes(4, "little"), frame, (low[0::2] | (low[1::2] << 4)).tobytes())


def decode_positions(blob: NDArray[np.generic], count: int, limit: int, codec: Codec) -> Int64s:
    """The `count` positions of a gap blob, all below `limit`. Raises FormatError."""
    data = _bytes_of(blob)
    width = data[0] if data else 0
    if codec == PCO:
        if width not in (4, 8):
            raise FormatError(f"a gap has {width} bytes")
        gaps = _unpco(data[1:], np.empty(count, dtype=f"<u{width}"))
    else:
        if width not in (1, 2, 4, 8) or len(data) < 5:
            raise FormatError("a gap blob is torn")
        end = 5 + int.from_bytes(data[1:5], "little")
        if len(data) != end + (count + 1) // 2:
            raise FormatError("a gap blob has another length than its count")
        high = np.frombuffer(_unzstd(data[5:end], count * width), dtype=f"<u{width}")
        pairs = np.frombuffer(data[end:], dtype=np.uint8)
        low = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
        if low[count:].any():
            raise FormatError("a spare nibble is set")
        gaps = (high.astype(np.uint64) << np.uint64(4)) | low[:count]
    # A running sum of hostile gaps may wrap: no gap, nor the sum of all, may reach the limit.
    if int(gaps.max()) >= limit or float(np.sum(gaps, dtype=np.float64)) + count > limit + 0.5:
        raise FormatError(f"a position is beyond {limit}")
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(count, dtype=np.int64)
    return positions


def _encode_small(values: NDArray[np.uint8], codec: Codec) -> NDArray[np.uint8]:
    if codec == PCO:
        return _blob(_pco(values.astype("<u2")))
    return _blob(zstandard.ZstdCompressor(level=1).compress(values.tobytes()))


def _decode_small(blob: NDArray[np.generic], count: int, codec: Codec) -> NDArray[np.uint16] | NDArray[np.uint8]:
    data = _bytes_of(blob)
    if codec == NIBBLE:
        return np.frombuffer(_unzstd(data, count), dtype=np.uint8)
    values = _unpco(data, np.empty(count, dtype=np.uint16))
    if count and int(values.max()) > 254:
        raise FormatError("a difference of codes is beyond 255")
    return values


def _pco(values: NDArray[np.generic]) -> bytes:
    config = ChunkConfig(compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    return standalone.simple_compress(values, config)


def _unpco(data: bytes, into: NDArray[_Item]) -> NDArray[_Item]:
    """Fill `into` with a pcodec stream of exactly its length."""
    try:
        progress = standalone.simple_decompress_into(data, into)
    except (RuntimeError, TypeError, ValueError) as error:
        raise FormatError(f"a pcodec stream is torn: {error}") from error
    if progress.n_processed != len(into) or not progress.finished:
        raise FormatError(f"a pcodec stream has not {len(into)} numbers")
    return into


def _unzstd(data: bytes, num_bytes: int) -> bytes:
    """A zstd frame of exactly this many bytes."""
    try:
        if zstandard.frame_content_size(data) != num_bytes:
            raise FormatError("a zstd frame has another size than its count")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=num_bytes)
    except zstandard.ZstdError as error:
        raise FormatError(f"a zstd frame is torn: {error}") from error


def _blob(*parts: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _bytes_of(blob: NDArray[np.generic]) -> bytes:
    if blob.dtype != np.uint8 or blob.ndim != 1:
        raise FormatError(f"a blob is {blob.dtype} {blob.shape}, not bytes")
    return blob.tobytes()
