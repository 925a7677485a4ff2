"""What the trainer is held for: one pass over the masters that notes how the published weights must change.

The result is small (a few numbers a changed code) and does not look at the masters again, so optimizer steps go on while
it is encoded and uploaded. Tensors come one at a time; none is kept. How codes are chosen is `grid.py`'s.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoa.bucket.manifest import TensorStats
from stoa.contracts.errors import LayoutError, NonFiniteError
from stoa.weights import grid
from stoa.weights.layout import GROUP_SIZE, Layout, TensorSpec
from stoa.weights.pulse import Change, RawBits
from stoa.weights.state import WeightState

Masters = Iterable[tuple[str, NDArray[np.float32]]]
"""Every tensor of the layout once, in any order, float32 in the layout's shapes."""
Scanner = Callable[
    [NDArray[np.float32], NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint16], float],
    grid.Scan,
]
"""Signature of `grid.scan`, for a trainer that quantises and compares where its masters are."""
_LOCAL: Final = np.dtype(np.uint32)
"""Positions within a tensor while they are collected: no tensor has 2^32 elements."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The change from the published weights to the masters' codes. `lag_steps`: farthest a master is from its new code."""

    change: Change
    tensors: dict[str, TensorStats]
    lag_steps: float

    @property
    def num_clipped(self) -> int:
        """Masters beyond the ends of their grid by more than half a step."""
        return sum(stats.num_clipped for stats in self.tensors.values())


@dataclass(frozen=True, slots=True)
class _Piece:
    """One int8 tensor's part of the change; positions and groups count within the tensor."""

    positions: NDArray[np.uint32]
    differences: NDArray[np.int16]
    groups: NDArray[np.int64]
    scales: NDArray[np.uint16]
    biases: NDArray[np.uint16]
    codes: NDArray[np.uint8]


def take_snapshot(mirror: WeightState, masters: Masters, hysteresis: float, scanner: Scanner = grid.scan) -> Snapshot:
    """Compare masters with the published weights, tensor by tensor.

    Raises:
        LayoutError: a tensor is missing, strange or of a wrong shape, or a frozen one changed.
        NonFiniteError: a weight is NaN or infinite; names the tensor.
    """
    layout = mirror.layout
    pieces: dict[str, _Piece] = {}
    raws: dict[str, tuple[NDArray[np.uint32], RawBits]] = {}
    stats: dict[str, TensorStats] = {}
    lag_steps = 0.0
    for spec, master in checked(layout, masters):
        if spec.kind == "int8":
            codes, scales, biases = mirror.quantised(spec)
            try:
                scan = scanner(master, codes, scales, biases, hysteresis)
            except NonFiniteError as error:
                raise NonFiniteError(f"{spec.name}: {error.message}") from error
            pieces[spec.name], stats[spec.name] = _piece_of(scan, codes)
            lag_steps = max(lag_steps, scan.lag_steps)
        else:
            held = mirror.bits(spec)
            new = stored_raw(spec, master).reshape(-1).view(held.dtype)
            moved = grid.differing(held, new)
            if spec.frozen and len(moved):
                raise LayoutError(f"{spec.name} changed, but it is frozen for the run")
            if not spec.frozen:
                raws[spec.name] = moved.astype(_LOCAL), new[moved]
    return Snapshot(_joined_change(layout, pieces, raws), stats, lag_steps)


def first_weights(layout: Layout, masters: Masters) -> tuple[WeightState, dict[str, TensorStats]]:
    """The weights of a run's first version: the grid is made here. Raises as `take_snapshot`."""
    state = WeightState.empty(layout)
    stats: dict[str, TensorStats] = {}
    for spec, master in checked(layout, masters):
        if spec.kind == "int8":
            try:
                num_clipped = grid.quantise_into(master, *state.quantised(spec))
            except NonFiniteError as error:
                raise NonFiniteError(f"{spec.name}: {error.message}") from error
            stats[spec.name] = TensorStats(spec.num_elements, 0, num_clipped, 0)
        else:
            np.copyto(state.arrays[spec.name], stored_raw(spec, master))
    return state, stats


def checked(layout: Layout, masters: Masters) -> Iterator[tuple[TensorSpec, NDArray[np.float32]]]:
    """The masters with their specs. Raises LayoutError unless every one comes once, in shape and type."""
    left = dict(layout.by_name)
    for name, master in masters:
        spec = left.pop(name, None)
        if spec is None:
            raise LayoutError(f"{name} is not in the layout, or came twice")
        if master.shape != spec.shape or master.dtype != np.float32:
            raise LayoutError(f"{name} is {master.dtype} {master.shape}, not float32 {spec.shape}")
        yield spec, master
    if left:
        raise LayoutError(f"{len(left)} tensors are missing, {min(left)} among them")


def stored_raw(spec: TensorSpec, master: NDArray[np.float32]) -> NDArray[np.generic]:
    """A raw tensor as it is stored. Raises NonFiniteError."""
    if spec.dtype == "float32":
        stored = values = master
    else:
        stored = grid.bf16_bits(master)
        values = grid.bf16_values(stored)
    # Both: rounding to bf16 makes infinities of large numbers, and zeros of some NaNs, CUDA's own among them.
    if not (np.isfinite(master).all() and np.isfinite(values).all()):
        raise NonFiniteError(f"{spec.name}: a weight is NaN or infinite")
    return stored


def _piece_of(scan: grid.Scan, codes: NDArray[np.uint8]) -> tuple[_Piece, TensorStats]:
    differences = scan.codes.astype(np.int16) - codes.reshape(-1)[scan.positions]
    num_unit = int(np.count_nonzero(np.abs(differences) == 1))
    stats = TensorStats(len(differences) + scan.group_codes.size, num_unit, scan.num_clipped, len(scan.groups))
    piece = _Piece(scan.positions.astype(_LOCAL), differences, scan.groups, scan.scales, scan.biases, scan.group_codes)
    return piece, stats


def _joined_change(layout: Layout, pieces: dict[str, _Piece], raws: dict[str, tuple[NDArray[np.uint32], RawBits]]) -> Change:
    """All tensors' pieces as one change, in canonical order."""
    ordered = [pieces[spec.name] for spec in layout.quantised]
    positions = np.empty(sum(len(piece.positions) for piece in ordered), dtype=np.int64)
    groups = np.empty(sum(len(piece.groups) for piece in ordered), dtype=np.int64)
    filled = num_groups = offset = 0
    for spec, piece in zip(layout.quantised, ordered, strict=True):
        np.add(piece.positions, np.int64(offset), out=positions[filled : filled + len(piece.positions)])
        np.add(piece.groups, offset // GROUP_SIZE, out=groups[num_groups : num_groups + len(piece.groups)])
        filled, num_groups, offset = filled + len(piece.positions), num_groups + len(piece.groups), offset + spec.num_elements
    raw_positions: list[NDArray[np.int64]] = []
    offset = 0
    for spec in layout.raw:
        raw_positions.append(raws[spec.name][0].astype(np.int64) + offset)
        offset += spec.num_elements
    return Change(
        positions,
        np.concatenate([piece.differences for piece in ordered]),
        np.concatenate(raw_positions),
        np.concatenate([raws[spec.name][1] for spec in layout.raw]),
        groups,
        np.concatenate([piece.scales for piece in ordered]),
        np.concatenate([piece.biases for piece in ordered]),
        np.concatenate([piece.codes for piece in ordered]),
    )
