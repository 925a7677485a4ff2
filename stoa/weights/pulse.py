"""The codec of a delta: which codes changed and which way, as few bytes as the change rate allows.

A change of weights is positions and differences over the concatenated code space of the layout, plus new values of raw
elements and whole re-gridded groups. Gaps between positions go through pcodec (or, as the second codec, a nibble split
and zstd), signs are one bit each, magnitudes appear only if some difference is not +-1. Nothing here has a checksum:
the caller has checked the sha256 of the bytes.

Sections (all little-endian; absent when empty):

    segments       int64 [K] changes in each segment of 2^26 codes; only if one beyond the first has any
    gaps           gap blob of the C changed positions of segment 0, counted from its start
    signs          ceil(C / 8) bytes, bit i (low bit first) is 1 where difference i is positive
    magnitudes     blob of |difference| - 1 as uint8 [C], only if one of them is not 0
    gaps.k, signs.k, magnitudes.k   the same of segment k > 0
    raw.gaps       gap blob of the M changed raw positions
    raw.values     uint16 or uint32 [M], bit patterns of the new values
    regrid.groups  gap blob of the R group numbers
    regrid.scales, regrid.biases   uint16 [R] bf16 bits
    regrid.codes   uint8 [R, 64]

Segments are coded one by one, so that neither side ever holds more than one in full width. Gap blob, codec pco-8: byte
0 is 4, the width of a gap, then one pcodec stream. Codec nibble-zstd-1: byte 0 the width
of a high part (1, 2 or 4), bytes 1-4 length of the zstd frame of the high parts (gap >> 4), the frame, then the low
nibbles, two a byte, first one low. A gap is the distance to the position before, minus 1; the first is the position.

Legend: C changed codes, M changed raw elements, R re-gridded groups.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
SEGMENT_CODES: Final = 1 << 26
"""Codes of a segment; part of the format."""

_Item = TypeVar("_Item", bound=np.generic)
Int64s = NDArray[np.int64]
RawBits = NDArray[np.uint16 | np.uint32]
Sections = dict[str, NDArray[np.generic]]


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


def segments_of(change: Change, segment_codes: int = SEGMENT_CODES) -> Iterator[Change]:
    """The change cut at multiples of `segment_codes`, as views; raw values come with the first. Always at least one."""
    last = max((int(ends[-1]) for ends in (change.positions, change.groups * GROUP_SIZE) if len(ends)), default=0)
    for number in range(last // segment_codes + 1):
        start, stop = np.searchsorted(change.positions, [number * segment_codes, (number + 1) * segment_codes])
        first, end = np.searchsorted(change.groups * GROUP_SIZE, [number * segment_codes, (number + 1) * segment_codes])
        raw = slice(None) if number == 0 else slice(0, 0)
        yield Change(
            change.positions[start:stop],
            change.differences[start:stop],
            change.raw_positions[raw],
            change.raw_values[raw],
            change.groups[first:end],
            change.scales[first:end],
            change.biases[first:end],
            change.codes[first:end],
        )


def encode_change(change: Change, codec: Codec = PCO, *, segment_codes: int = SEGMENT_CODES) -> Sections:
    """The sections of a change. Raises FormatError if positions do not increase or a difference is 0 or too large."""
    return encode_segments(segments_of(change, segment_codes), codec, segment_codes=segment_codes)[0]


def encode_segments(changes: Iterable[Change], codec: Codec = PCO, *, segment_codes: int = SEGMENT_CODES) -> tuple[Sections, Counts]:
    """The sections of a change that comes segment by segment, as `segments_of` cuts it. Raises as `encode_change`."""
    sections: Sections = {}
    counts: list[int] = []
    rest: list[Change] = []
    for number, change in enumerate(changes):
        counts.append(len(change.positions))
        if len(change.positions):
            local = change.positions - number * segment_codes
            if local[0] < 0 or local[-1] >= segment_codes:
                raise FormatError("positions do not increase, or leave their segment")
            sections |= {_name(name, number): section for name, section in _encode_segment(local, change.differences, codec).items()}
        rest.append(replace(change, positions=_no_positions(), differences=np.empty(0, dtype=np.int16)))
    raw, groups = rest[0], [part for part in rest if len(part.groups)]
    num_regrid = sum(len(part.groups) for part in groups)
    if any(counts[1:]):
        sections["segments"] = np.array(np.trim_zeros(counts, "b"), dtype=np.int64)
    if len(raw.raw_positions):
        sections["raw.gaps"] = encode_positions(raw.raw_positions, codec)
        sections["raw.values"] = raw.raw_values
    if num_regrid:
        sections["regrid.groups"] = encode_positions(np.concatenate([part.groups for part in groups]), codec)
        sections["regrid.scales"] = np.concatenate([part.scales for part in groups])
        sections["regrid.biases"] = np.concatenate([part.biases for part in groups])
        sections["regrid.codes"] = np.concatenate([part.codes for part in groups])
    return sections, Counts(sum(counts), len(raw.raw_positions), num_regrid)


def _encode_segment(positions: Int64s, differences: NDArray[np.int16], codec: Codec) -> Sections:
    """Gaps, signs and magnitudes of one segment's changes."""
    low, high = int(differences.min()), int(differences.max())
    if low < -255 or high > 255 or np.count_nonzero(differences) != len(differences):
        raise FormatError("a difference of codes is 0 or beyond 255")
    sections: Sections = {
        "gaps": encode_positions(positions, codec),
        "signs": np.packbits(differences > 0, bitorder="little"),
    }
    if low < -1 or high > 1:
        sections["magnitudes"] = _encode_small((np.abs(differences) - 1).astype(np.uint8), codec)
    return sections


def decode_change(
    sections: Mapping[str, NDArray[np.generic]], counts: Counts, layout: Layout, codec: Codec, *, segment_codes: int = SEGMENT_CODES
) -> Change:
    """The change in `sections`, whole. Raises as `decode_segments`."""
    parts = list(decode_segments(sections, counts, layout, codec, segment_codes=segment_codes))
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(Change) if not field.name.startswith("raw_")]
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **joined)


def decode_segments(
    sections: Mapping[str, NDArray[np.generic]], counts: Counts, layout: Layout, codec: Codec, *, segment_codes: int = SEGMENT_CODES
) -> Iterator[Change]:
    """The change in `sections`, segment by segment.

    No buffer is larger than the bytes at hand, `counts` and the layout allow. Raises FormatError for anything that is not
    exactly one encoded change of this layout with these counts; what concerns the whole, before the first segment.
    """
    num_groups = layout.num_codes // GROUP_SIZE
    num_c, num_m, num_r = counts.num_changed, counts.num_raw, counts.num_regrid
    if not (0 <= num_c <= layout.num_codes and 0 <= num_m <= layout.num_raw and 0 <= num_r <= num_groups):
        raise FormatError(f"{counts} is more than the layout holds")
    reader = _Reader(sections, codec)
    numbers = reader.segments(num_c, layout.num_codes, segment_codes)
    # What needs bytes of its own for every entry comes first: a small object with large counts ends here.
    signs = [reader.array(_name("signs", k), np.uint8, ((count + 7) // 8,)) for k, count in enumerate(numbers)]
    raw_values = reader.array("raw.values", np.uint16 if layout.raw_dtype == "bfloat16" else np.uint32, (num_m,))
    scales, biases = (reader.array(f"regrid.{name}", np.uint16, (num_r,)) for name in ("scales", "biases"))
    codes = reader.array("regrid.codes", np.uint8, (num_r, GROUP_SIZE))
    raw_positions = reader.positions("raw.gaps", num_m, layout.num_raw)
    groups = reader.positions("regrid.groups", num_r, num_groups)
    blobs = [(reader.take(_name("gaps", k), count), reader.left.pop(_name("magnitudes", k), None)) for k, count in enumerate(numbers)]
    if reader.left:
        raise FormatError(f"section {min(reader.left)!r} belongs to nothing")
    borders = np.searchsorted(groups * GROUP_SIZE, np.arange(len(numbers) + 1) * segment_codes)
    borders[-1] = num_r
    for k, count in enumerate(numbers):
        start, (gaps, sizes) = k * segment_codes, blobs[k]
        positions = _no_positions()
        if gaps is not None:
            positions = decode_positions(gaps, count, min(segment_codes, layout.num_codes - start), codec)
            positions += start
        own = slice(int(borders[k]), int(borders[k + 1]))
        if num_r and np.isin(positions // GROUP_SIZE, groups[own]).any():
            raise FormatError("a code changes both by itself and with its group")
        differences = _differences(signs[k], sizes, count, codec)
        raw = slice(None) if k == 0 else slice(0, 0)
        yield Change(positions, differences, raw_positions[raw], raw_values[raw], groups[own], scales[own], biases[own], codes[own])


def _name(section: str, segment: int) -> str:
    return f"{section}.{segment}" if segment else section


def merge(first: Change, second: Change) -> Change:
    """Two changes in a row as one: what cancels is gone, later absolute values win."""
    groups = np.union1d(first.groups, second.groups)
    scales, biases = np.empty(len(groups), dtype=np.uint16), np.empty(len(groups), dtype=np.uint16)
    codes = np.empty((len(groups), GROUP_SIZE), dtype=np.uint8)
    for change in (first, second):
        if change is second and len(first.groups):
            # A group that was made anew first and then changed by single codes.
            at = np.searchsorted(groups, second.positions // GROUP_SIZE)
            inside = np.isin(second.positions // GROUP_SIZE, first.groups)
            codes[at[inside], second.positions[inside] % GROUP_SIZE] += second.differences[inside].astype(np.uint8)
        at = np.searchsorted(groups, change.groups)
        scales[at], biases[at], codes[at] = change.scales, change.biases, change.codes
    positions, differences = merge_positions([first, second], groups)
    raw_positions = np.union1d(first.raw_positions, second.raw_positions)
    raw_values = np.empty(len(raw_positions), dtype=second.raw_values.dtype if len(second.raw_values) else first.raw_values.dtype)
    for change in (first, second):
        raw_values[np.searchsorted(raw_positions, change.raw_positions)] = change.raw_values
    return Change(positions, differences, raw_positions, raw_values, groups, scales, biases, codes)


def merge_positions(changes: Sequence[Change], groups: Int64s) -> tuple[Int64s, NDArray[np.int16]]:
    """Positions and differences of several changes in a row as one, without those inside `groups`; what cancels is gone."""
    everywhere = np.concatenate([change.positions for change in changes])
    order = np.argsort(everywhere, kind="stable")
    everywhere = everywhere[order]
    differences = np.concatenate([change.differences for change in changes])[order]
    if not len(everywhere):
        return everywhere, differences
    starts = np.flatnonzero(np.diff(everywhere, prepend=np.int64(-1)))
    positions, total = everywhere[starts], np.add.reduceat(differences, starts, dtype=np.int16)
    kept = total != 0
    if len(groups):
        kept &= ~np.isin(positions // GROUP_SIZE, groups)
    return positions[kept], total[kept]


class _Reader:
    """Takes sections one by one, each checked against the count it must have."""

    def __init__(self, sections: Mapping[str, NDArray[np.generic]], codec: Codec) -> None:
        self.left = dict(sections)
        self._codec: Codec = codec

    def take(self, name: str, count: int) -> NDArray[np.generic] | None:
        found = self.left.pop(name, None)
        if (found is None) != (count == 0):
            raise FormatError(f"section {name!r} is {'missing' if found is None else 'there'}, for {count} entries")
        return found

    def array(self, name: str, dtype: type[_Item], shape: tuple[int, ...]) -> NDArray[_Item]:
        found = self.take(name, shape[0])
        if found is None:
            return np.empty(shape, dtype=dtype)
        if found.dtype != dtype or found.shape != shape:
            raise FormatError(f"section {name!r} is {found.dtype} {found.shape}, not {np.dtype(dtype)} {shape}")
        return found.view(dtype)

    def positions(self, name: str, count: int, limit: int) -> Int64s:
        found = self.take(name, count)
        return _no_positions() if found is None else decode_positions(found, count, limit, self._codec)

    def segments(self, count: int, num_codes: int, segment_codes: int) -> list[int]:
        """How many of `count` changes are in each segment."""
        found = self.left.pop("segments", None)
        if found is None:
            return [count]
        most = -(-num_codes // segment_codes)
        if found.dtype != np.int64 or found.ndim != 1 or not 2 <= len(found) <= most:
            raise FormatError(f"section 'segments' is {found.dtype} {found.shape}, for {most} segments")
        numbers = [int(number) for number in found]
        if min(numbers) < 0 or max(numbers) > segment_codes or numbers[-1] == 0 or sum(numbers) != count:
            raise FormatError(f"the segments do not hold {count} changes")
        return numbers


def _differences(signs: NDArray[np.uint8], sizes: NDArray[np.generic] | None, count: int, codec: Codec) -> NDArray[np.int16]:
    """int16 [count] from sign bits and optional magnitudes."""
    if count % 8 and signs[-1] >> (count % 8):
        raise FormatError("spare bits of section 'signs' are set")
    difference = np.unpackbits(signs, count=count, bitorder="little").astype(np.int16)
    difference *= np.int16(2)
    difference -= np.int16(1)
    if sizes is None:
        return difference
    if not count:
        raise FormatError("section 'magnitudes' belongs to nothing")
    return difference * (_decode_small(sizes, count, codec).astype(np.int16) + np.int16(1))


def encode_positions(positions: Int64s, codec: Codec = PCO) -> NDArray[np.uint8]:
    """Gap blob of strictly increasing positions below 2^32, at least one."""
    if int(positions[0]) < 0 or int(positions[-1]) >= 1 << 32 or (np.diff(positions) < 1).any():
        raise FormatError("positions do not increase, or are beyond 2^32")
    gaps = np.empty(len(positions), dtype="<u4")
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= np.uint32(1)
    if codec == PCO:
        return _blob(bytes([4]), _pco(gaps))
    high = gaps >> np.uint32(4)
    width = next(w for w in (1, 2, 4) if int(high.max()) < 1 << (8 * w))
    frame = zstandard.ZstdCompressor(level=1).compress(high.astype(f"<u{width}").tobytes())
    low = (gaps & np.uint32(15)).astype(np.uint8)
    if len(low) % 2:
        low = np.append(low, np.uint8(0))
    return _blob(bytes([width]) + len(frame).to_bytes(4, "little"), frame, (low[0::2] | (low[1::2] << 4)).tobytes())


def decode_positions(blob: NDArray[np.generic], count: int, limit: int, codec: Codec) -> Int64s:
    """The `count` positions of a gap blob, all below `limit`, which is at most 2^32. Raises FormatError."""
    if not 0 < count <= limit:
        raise FormatError(f"{count} positions below {limit}")
    data = _bytes_of(blob)
    width = data[0] if len(data) else 0
    if codec == PCO:
        if width != 4:
            raise FormatError(f"a gap has {width} bytes")
        gaps = _unpco(data[1:], np.empty(count, dtype="<u4"))
    else:
        if width not in (1, 2, 4) or len(data) < 5:
            raise FormatError("a gap blob is torn")
        end = 5 + int.from_bytes(data[1:5], "little")
        if len(data) != end + (count + 1) // 2:
            raise FormatError("a gap blob has another length than its count")
        high = np.frombuffer(_unzstd(data[5:end], count * width), dtype=f"<u{width}")
        pairs = np.frombuffer(data[end:], dtype=np.uint8)
        low = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
        if low[count:].any() or int(high.max()) >= 1 << 28:
            raise FormatError("a gap blob has spare bits set")
        gaps = (high.astype(np.uint32) << np.uint32(4)) | low[:count]
    if count > 1 and int(gaps[1:].max()) >= limit - 1:
        raise FormatError(f"a position is beyond {limit}")
    # Below 2^32, so neither a step nor the sum of at most 2^32 of them can wrap.
    gaps[1:] += np.uint32(1)
    positions = np.cumsum(gaps, dtype=np.int64)
    if int(positions[-1]) >= limit:
        raise FormatError(f"a position is beyond {limit}")
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
