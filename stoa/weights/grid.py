"""The int8 grid: how masters become codes, bit for bit. The numpy reference that torch and MLX twins are tested against.

A group of 64 consecutive elements of the last axis has one bf16 scale and bias; a code c stands for scale * c + bias.
The grid is made once, from the base checkpoint, and frozen; afterwards only codes move, and a code moves only when its
master is more than half a step plus the hysteresis away. All arithmetic is IEEE float32, one operation at a time.

Legend: N groups, 64 the elements of a group, R re-gridded groups, C changed codes.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoa.contracts.errors import LayoutError, NonFiniteError
from stoa.weights.layout import GROUP_SIZE

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Bits16 = NDArray[np.uint16]

HEADROOM: Final = 1
"""Free code steps below the smallest and above the largest weight the grid was made from; bf16 rounding of scale and bias
may eat up to one more, hence the 2 below."""
STEPS: Final = np.float32(255 - 2 * HEADROOM - 2)
_SMALLEST_SCALE: Final = np.float32(2.0**-126)
_BLOCK_GROUPS: Final = 4096
"""Groups worked on at a time: their float32 values stay in a processor's cache."""
_SCAN: Final = 1 << 20
_ONE_BITS: Final = 0x3F80
"""1.0 in bf16."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What must change in one published tensor so that it follows its masters. Positions count within the tensor.

    positions: int64 [C] increasing; codes: uint8 [C] the new codes; groups: int64 [R] increasing, re-gridded whole:
    scales, biases uint16 [R] bf16 bits, group_codes uint8 [R, 64]. num_clipped: masters beyond the ends of the grid by
    more than half a step. lag_steps: farthest a master within the grid is from its new code.
    """

    positions: NDArray[np.int64]
    codes: Codes
    groups: NDArray[np.int64]
    scales: Bits16
    biases: Bits16
    group_codes: Codes
    num_clipped: int
    lag_steps: float


def bf16_bits(values: Floats) -> Bits16:
    """float32 -> bf16 bit patterns, rounded to nearest, ties to even. Finite input; may overflow to infinity."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def bf16_values(bits: Bits16) -> Floats:
    """bf16 bit patterns -> float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def make_grid(weights: Floats) -> tuple[Bits16, Bits16]:
    """Scales and biases (bf16 bits) of the grid of `weights`.

    scale = bf16((max - min) / 251), bias = bf16(min - scale), both from the group's float32 extremes; the bias uses the
    rounded scale. That fits weights around zero; of a group whose offset is hundreds of times its range the bias cannot
    be rounded to bf16 without clipping, and `Scan.num_clipped` says so. A constant group (scale below 2^-126) has scale 1
    and bias bf16(value).

    Args:
        weights: float32 [.., cols], cols a multiple of 64.

    Returns:
        scales, biases: uint16 [.., cols / 64].

    Raises:
        NonFiniteError: a weight is NaN or infinite, or a group's range does not fit float32.
    """
    groups_N64 = _grouped(weights)
    low_N, high_N = groups_N64.min(axis=1), groups_N64.max(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        scales_N = bf16_bits((high_N - low_N) / STEPS)
        constant_N = bf16_values(scales_N) < _SMALLEST_SCALE
        scales_N[constant_N] = _ONE_BITS
        lowest_N = low_N - np.float32(HEADROOM) * bf16_values(scales_N)
        biases_N = bf16_bits(np.where(constant_N, low_N, lowest_N))
    # The extremes too: some NaNs become zeros when they are rounded to bf16.
    if not all(np.isfinite(values).all() for values in (low_N, high_N, bf16_values(scales_N), bf16_values(biases_N))):
        raise NonFiniteError("a group of weights is NaN, infinite or too wide for the grid")
    shape = (*weights.shape[:-1], weights.shape[-1] // GROUP_SIZE)
    return scales_N.reshape(shape), biases_N.reshape(shape)


def place(weights: Floats, scales: Bits16, biases: Bits16) -> Floats:
    """Where weights lie on their grid, in code steps: (w - bias) / scale. float32 [N, 64]."""
    with np.errstate(over="ignore"):
        return (_grouped(weights) - _per_group(biases)) / _per_group(scales)


def codes_of(places: Floats) -> Codes:
    """Nearest codes, ties to even, clamped to 0..255; same shape."""
    return np.clip(np.rint(places), np.float32(0), np.float32(255)).astype(np.uint8)


def quantise(weights: Floats) -> tuple[Codes, Bits16, Bits16]:
    """A fresh grid and the codes on it: codes uint8 [.., cols], scales and biases uint16 [.., cols / 64]."""
    shape = (*weights.shape[:-1], weights.shape[-1] // GROUP_SIZE)
    made = np.empty(weights.shape, np.uint8), np.empty(shape, np.uint16), np.empty(shape, np.uint16)
    quantise_into(weights, *made)
    return made


def quantise_into(weights: Floats, codes: Codes, scales: Bits16, biases: Bits16) -> int:
    """Write a fresh grid and the codes on it into arrays of the right shape; returns how many codes are clipped."""
    groups_N64, codes_N64 = _grouped(weights), codes.reshape(-1, GROUP_SIZE)
    scales_N, biases_N = scales.reshape(-1), biases.reshape(-1)
    num_clipped = 0
    for start in range(0, len(groups_N64), _BLOCK_GROUPS):
        rows = slice(start, start + _BLOCK_GROUPS)
        made = make_grid(groups_N64[rows])
        scales_N[rows], biases_N[rows] = made[0].reshape(-1), made[1].reshape(-1)
        places_N64 = place(groups_N64[rows], scales_N[rows], biases_N[rows])
        num_clipped += int(np.count_nonzero((places_N64 < -0.5) | (places_N64 > 255.5)))
        codes_N64[rows] = codes_of(places_N64)
    return num_clipped


def differing(left: NDArray[np.generic], right: NDArray[np.generic]) -> NDArray[np.int64]:
    """Flat positions at which two contiguous arrays of one shape and type differ, block by block."""
    left_E, right_E = left.reshape(-1), right.reshape(-1)
    find = _differing_bytes if left.dtype == np.uint8 else _differing_items
    blocks = [slice(start, start + _SCAN) for start in range(0, len(left_E), _SCAN)]
    found = [find(left_E[block], right_E[block]) + block.start for block in blocks]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _differing_items(left_E: NDArray[np.generic], right_E: NDArray[np.generic]) -> NDArray[np.int64]:
    return np.flatnonzero(left_E != right_E)


def _differing_bytes(left_E: NDArray[np.generic], right_E: NDArray[np.generic]) -> NDArray[np.int64]:
    """As `_differing_items`: eight bytes are compared at once, and only in the few words that differ each one is looked at."""
    whole = len(left_E) // 8 * 8
    left_W, right_W = left_E[:whole].view(np.uint64), right_E[:whole].view(np.uint64)
    words = np.flatnonzero(left_W != right_W)
    within = np.flatnonzero((left_W[words] ^ right_W[words]).view(np.uint8))
    found = words[within >> 3] * 8 + (within & 7)
    return found if whole == len(left_E) else np.append(found, whole + np.flatnonzero(left_E[whole:] != right_E[whole:]))


def dequantise(codes: Codes, scales: Bits16, biases: Bits16) -> Floats:
    """Scale * code + bias in float32, product rounded first; shape of `codes`."""
    groups_N64 = codes.reshape(-1, GROUP_SIZE).astype(np.float32)
    return (groups_N64 * _per_group(scales) + _per_group(biases)).reshape(codes.shape)


def scan(weights: Floats, codes: Codes, scales: Bits16, biases: Bits16, hysteresis: float) -> Scan:
    """What must change in a published tensor (codes, scales, biases) so that it follows its masters `weights`.

    A code moves to the nearest one if its master is more than 0.5 + hysteresis steps away; without hysteresis it is
    simply the nearest one. A group with a master more than one step outside 0..255 gets a new grid, if that differs.

    Args:
        weights: float32 [.., cols]; codes: uint8 [.., cols]; scales, biases: uint16 [.., cols / 64].
        hysteresis: dead band in steps, 0 <= d < 0.5. The threshold is float32(0.5 + d).

    Raises:
        NonFiniteError: a weight is NaN or infinite.
    """
    groups_N64, codes_N64 = _grouped(weights), codes.reshape(-1, GROUP_SIZE)
    scales_N, biases_N = scales.reshape(-1), biases.reshape(-1)
    room = _Room.of(min(_BLOCK_GROUPS, len(groups_N64)))
    parts: list[Scan] = []
    for start in range(0, len(groups_N64), _BLOCK_GROUPS):
        rows = slice(start, start + _BLOCK_GROUPS)
        block = groups_N64[rows], codes_N64[rows], scales_N[rows], biases_N[rows]
        parts.append(_quick_scan(*block, hysteresis, start, room) or _scan_block(*block, hysteresis, start))
    return Scan(
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.groups for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.biases for part in parts]),
        np.concatenate([part.group_codes for part in parts]),
        sum(part.num_clipped for part in parts),
        max(part.lag_steps for part in parts),
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory for one block, used again for every block of a tensor."""

    places_N64: Floats
    distance_N64: Floats
    far_N64: NDArray[np.bool_]

    @classmethod
    def of(cls, num_groups: int) -> "_Room":
        shape = (num_groups, GROUP_SIZE)
        return cls(np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape, np.bool_))


def _quick_scan(
    weights_N64: Floats, old_N64: Codes, scales_N: Bits16, biases_N: Bits16, hysteresis: float, first_group: int, room: _Room
) -> Scan | None:
    """`_scan_block` of a block where nothing is clipped, to be re-gridded or not finite; None if something is.

    Only a code at least half a step from its master can move, so all but a few elements are looked at once.
    """
    num_groups = len(weights_N64)
    places_N64, distance_N64, far_N64 = room.places_N64[:num_groups], room.distance_N64[:num_groups], room.far_N64[:num_groups]
    with np.errstate(over="ignore", invalid="ignore"):
        np.subtract(weights_N64, _per_group(biases_N), out=places_N64)
        np.divide(places_N64, _per_group(scales_N), out=places_N64)
        if not (places_N64.min() >= np.float32(-0.5) and places_N64.max() <= np.float32(255.5)):  # so for NaN too
            return None
    np.copyto(distance_N64, old_N64)
    np.subtract(places_N64, distance_N64, out=distance_N64)
    np.abs(distance_N64, out=distance_N64)
    if hysteresis > 0:
        np.greater(distance_N64, np.float32(0.5 + hysteresis), out=far_N64)
    else:
        np.greater_equal(distance_N64, np.float32(0.5), out=far_N64)
    far_F = np.flatnonzero(far_N64)
    nearest_F = codes_of(places_N64.reshape(-1)[far_F])
    moved_F = nearest_F != old_N64.reshape(-1)[far_F]
    distance_N64.reshape(-1)[far_F[moved_F]] = np.abs(places_N64.reshape(-1)[far_F] - nearest_F.astype(np.float32))[moved_F]
    return Scan(
        far_F[moved_F] + first_group * GROUP_SIZE,
        nearest_F[moved_F],
        np.empty(0, dtype=np.int64),
        np.empty(0, dtype=np.uint16),
        np.empty(0, dtype=np.uint16),
        np.empty((0, GROUP_SIZE), dtype=np.uint8),
        0,
        float(distance_N64.max()),
    )


def _scan_block(weights_N64: Floats, old_N64: Codes, scales_N: Bits16, biases_N: Bits16, hysteresis: float, first_group: int) -> Scan:
    """`scan` of some whole groups; `first_group` is the number of the first one in its tensor."""
    if not np.isfinite(weights_N64).all():
        raise NonFiniteError("a weight is NaN or infinite")
    places_N64 = place(weights_N64, scales_N, biases_N)
    nearest_N64 = codes_of(places_N64)
    moved_N64 = nearest_N64 != old_N64
    if hysteresis > 0:
        moved_N64 &= np.abs(places_N64 - old_N64.astype(np.float32)) > np.float32(0.5 + hysteresis)
    outside_N = (places_N64.min(axis=1) < np.float32(-1)) | (places_N64.max(axis=1) > np.float32(256))
    regrid_R = np.flatnonzero(outside_N)
    if len(regrid_R):
        new_scales_R, new_biases_R = (grid.reshape(-1) for grid in make_grid(weights_N64[regrid_R]))
        differs_R = (new_scales_R != scales_N[regrid_R]) | (new_biases_R != biases_N[regrid_R])
        regrid_R, new_scales_R, new_biases_R = regrid_R[differs_R], new_scales_R[differs_R], new_biases_R[differs_R]
        places_N64[regrid_R] = place(weights_N64[regrid_R], new_scales_R, new_biases_R)
        nearest_N64[regrid_R] = codes_of(places_N64[regrid_R])
        moved_N64[regrid_R] = False
    else:
        new_scales_R = new_biases_R = np.empty(0, dtype=np.uint16)
    final_N64 = np.where(moved_N64, nearest_N64, old_N64)
    final_N64[regrid_R] = nearest_N64[regrid_R]
    clipped_N64 = (places_N64 < np.float32(-0.5)) | (places_N64 > np.float32(255.5))
    lag = np.abs(np.where(clipped_N64, np.float32(0), places_N64 - final_N64.astype(np.float32)))
    positions_C = np.flatnonzero(moved_N64)
    return Scan(
        positions_C.astype(np.int64) + first_group * GROUP_SIZE,
        nearest_N64.reshape(-1)[positions_C],
        regrid_R.astype(np.int64) + first_group,
        new_scales_R,
        new_biases_R,
        nearest_N64[regrid_R],
        int(np.count_nonzero(clipped_N64)),
        float(lag.max(initial=0.0)),
    )


def _grouped(weights: Floats) -> Floats:
    """[.., cols] -> [N, 64]. Raises LayoutError for a ragged last axis or another dtype."""
    if weights.dtype != np.float32 or weights.ndim == 0 or weights.shape[-1] % GROUP_SIZE:
        raise LayoutError(f"weights are {weights.dtype} {weights.shape}, not float32 with a multiple of {GROUP_SIZE} columns")
    return weights.reshape(-1, GROUP_SIZE)


def _per_group(bits: Bits16) -> Floats:
    """bf16 bits of N groups -> float32 [N, 1]."""
    return bf16_values(bits.reshape(-1, 1))
