"""Other ways to send the same change, for comparison only: nothing outside the benchmarks reads or writes them.

`public_pulse` is the encoding that was published for bf16 weights, on int8 codes: sorted gaps as uint16 with an escape,
the new values as they are, one zstd-1 frame over both. `flat_sign_zstd` is the same with +-1 in place of the values,
`sign_zstd` with +-1 and the published order: matrix by matrix as checkpoints have them, each expert its own, gaps between
rows as uint8, between columns as uint16, the values as int8; one zstd-1 frame over all. Its header is left out.
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

from stoa.weights.layout import Layout

_ESCAPE = 0xFFFF


def public_pulse(positions: NDArray[np.int64], values: NDArray[np.uint8]) -> bytes:
    """Gaps and absolute values."""
    return zstandard.ZstdCompressor(level=1).compress(_gaps(positions) + values.tobytes())


def flat_sign_zstd(positions: NDArray[np.int64], differences: NDArray[np.int16]) -> bytes:
    """Gaps and differences."""
    return zstandard.ZstdCompressor(level=1).compress(_gaps(positions) + differences.astype(np.int8).tobytes())


def sign_zstd(layout: Layout, positions: NDArray[np.int64], differences: NDArray[np.int16]) -> bytes:
    """Row gaps, column gaps (from the row's start where the row changes) and differences, matrix by matrix."""
    pieces: list[bytes] = []
    start = offset = 0
    for spec in layout.quantised:
        num_rows, num_columns = spec.shape[-2:]
        for _ in range(spec.num_elements // (num_rows * num_columns)):
            offset += num_rows * num_columns
            stop = int(np.searchsorted(positions, offset))
            rows, columns = np.divmod(positions[start:stop] - (offset - num_rows * num_columns), num_columns)
            row_gaps = np.diff(rows, prepend=np.int64(0))
            fresh = np.append(np.True_, row_gaps[1:] > 0)[: len(row_gaps)]
            column_gaps = np.where(fresh, columns, np.diff(columns, prepend=np.int64(0)))
            pieces += [_narrow(row_gaps), _narrow(column_gaps, 2), differences[start:stop].astype(np.int8).tobytes()]
            start = stop
    return zstandard.ZstdCompressor(level=1).compress(b"".join(pieces))


def _narrow(gaps: NDArray[np.int64], least_bytes: int = 1) -> bytes:
    """Gaps in the narrowest of 1, 2 and 4 bytes that holds the widest of them."""
    widest = int(gaps.max(initial=0))
    num_bytes = next(size for size in (1, 2, 4) if size >= least_bytes and widest < 1 << 8 * size)
    return gaps.astype(f"<u{num_bytes}").tobytes()


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
