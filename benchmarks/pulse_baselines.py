"""Other ways to send the same change, for comparison only: nothing outside the benchmarks reads or writes them.

`public_pulse` is the encoding that was published for bf16 weights, on int8 codes: sorted gaps as uint16 with an escape,
the new values as they are, one zstd-1 frame over both. `flat_sign_zstd` is the same with +-1 in place of the values,
`sign_zstd` with +-1 and the other published order: gaps between rows as uint8, between columns as uint16.
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

_ESCAPE = 0xFFFF


def public_pulse(positions: NDArray[np.int64], values: NDArray[np.uint8]) -> bytes:
    """Gaps and absolute values."""
    return zstandard.ZstdCompressor(level=1).compress(_gaps(positions) + values.tobytes())


def flat_sign_zstd(positions: NDArray[np.int64], differences: NDArray[np.int16]) -> bytes:
    """Gaps and differences."""
    return zstandard.ZstdCompressor(level=1).compress(_gaps(positions) + differences.astype(np.int8).tobytes())


def sign_zstd(positions: NDArray[np.int64], differences: NDArray[np.int16], row: int = 2048) -> bytes:
    """Row gaps, column gaps (from the row's start where the row changes) and differences."""
    rows, columns = positions // row, positions % row
    row_gaps = np.diff(rows, prepend=np.int64(0))
    column_gaps = np.where(row_gaps > 0, columns, np.diff(columns, prepend=np.int64(0)))
    if int(row_gaps.max()) > 255:
        raise ValueError("a gap of more than 255 rows")
    raw = row_gaps.astype(np.uint8).tobytes() + column_gaps.astype("<u2").tobytes() + differences.astype(np.int8).tobytes()
    return zstandard.ZstdCompressor(level=1).compress(raw)


def read_public_pulse(data: bytes, count: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Positions and values again: what the baseline's decoding costs."""
    raw = zstandard.ZstdDecompressor().decompress(data)
    num_short = int.from_bytes(raw[:8], "little")
    gaps = np.frombuffer(raw, "<u2", num_short, 8).astype(np.int64)
    escaped = np.flatnonzero(gaps == _ESCAPE)
    start = 8 + 2 * num_short
    gaps[escaped] = np.frombuffer(raw, "<u4", len(escaped), start)
    return np.cumsum(gaps), np.frombuffer(raw, np.uint8, count, start + 4 * len(escaped))


def _gaps(positions: NDArray[np.int64]) -> bytes:
    gaps = np.diff(positions, prepend=np.int64(0))
    short = np.minimum(gaps, _ESCAPE).astype("<u2")
    return len(short).to_bytes(8, "little") + short.tobytes() + gaps[gaps >= _ESCAPE].astype("<u4").tobytes()
