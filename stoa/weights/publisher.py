"""How weights enter the bucket: masters against the mirror of what is published, delta, anchor, manifest.

Assumes that the caller holds the run's lease and swaps HEAD itself: `prepare` writes objects nobody points to yet, then
the caller swaps HEAD, then `commit` advances the mirror (or `rollback` puts it back). So the mirror is always exactly
what HEAD names, and the next delta starts from it.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoa.bucket import keys
from stoa.bucket.head import Head
from stoa.bucket.manifest import (
    MANIFEST_FORMAT,
    AnchorRef,
    DeltaRef,
    Manifest,
    Parent,
    Signer,
    VersionStats,
    write_manifest,
)
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.contracts.errors import LayoutError, NonFiniteError, WeightsError, WrongBaseError, WrongStateError
from stoa.weights import grid
from stoa.weights.container import (
    ANCHOR_FORMAT,
    AnchorIndex,
    AnchorPart,
    DeltaHeader,
    anchor_groups,
    decode_delta,
    encode_anchor_part,
    encode_delta,
    encode_index,
)
from stoa.weights.digest import state_id_of
from stoa.weights.history import Doubts, by_any_way, layout_of_run, manifest_of, rebuild, stored_bytes, way_to
from stoa.weights.layout import GROUP_SIZE, Layout, TensorSpec
from stoa.weights.pulse import PCO, Change, counts_of, merge_positions
from stoa.weights.state import Undo, WeightState

ROLLUP_SPAN: Final = 16
"""Longest roll-up, in versions: a power of two."""

Scanner = Callable[
    [NDArray[np.float32], NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint16], float],
    grid.Scan,
]
"""Signature of `grid.scan`, for a trainer that quantises and compares where its masters are."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version whose objects are in the bucket, waiting for HEAD. Seconds are wall clock of each stage."""

    version: int
    manifest_key: str
    manifest_sha256: str
    state_id: str
    delta_bytes: int
    rollup_bytes: int
    anchor_bytes: int
    changed_fraction: float
    num_clipped: int
    scan_seconds: float
    encode_seconds: float
    upload_seconds: float


@dataclass(frozen=True, slots=True)
class _Published:
    """A version of the past that roll-ups may start from or run through."""

    version: int
    state_id: str
    change: Change | None
    """From the version before; None if that is not known."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A prepared version: how to go on to it, and how to go back."""

    manifest: Manifest
    parent: Parent
    state: WeightState
    undo: Undo | None
    change: Change | None


class Publisher:
    """Holds the mirror of the published weights (host memory) for the trainer that has the lease. One thread at a time."""

    def __init__(self, store: Store, document: RunDocument, signer: Signer, *, hysteresis: float, anchor_part_bytes: int) -> None:
        """Raises LayoutError if the run's model files do not give the run's layout."""
        self._store = store
        self._document = document
        self._signer = signer
        self._hysteresis = hysteresis
        self._anchor_part_bytes = anchor_part_bytes
        self.layout: Layout = layout_of_run(store, document)
        self._mirror: WeightState | None = None
        self._parent: Parent | None = None
        self._anchor: AnchorRef | None = None
        self._past: list[_Published] = []
        self._pending: _Pending | None = None

    @property
    def mirror(self) -> WeightState | None:
        """The published weights; None before the first version."""
        return self._mirror

    def load_published(self, head: Head) -> None:
        """Make the mirror what `head` names, from the bucket; nothing if it is that already, or nothing is published."""
        if self._pending is not None:
            self.rollback()
        if head.version < 0:
            self._mirror = self._parent = self._anchor = None
            self._past = []
            return
        if self._parent is not None and self._parent.manifest_sha256 == head.manifest_sha256:
            return
        manifest = manifest_of(self._store, self._document, head)

        def attempt(doubts: Doubts) -> WeightState:
            plan = way_to(self._store, self._document, manifest, doubts=doubts)
            return rebuild(plan, self.layout, self._document.run, doubts.noting(stored_bytes(self._store)))

        self._mirror = by_any_way(attempt)
        self._parent = Parent(manifest.version, head.manifest_key, head.manifest_sha256, manifest.state_id)
        self._anchor = manifest.anchor
        self._past = [_Published(manifest.version, manifest.state_id, None)]

    def prepare(
        self,
        tensors: Iterable[tuple[str, NDArray[np.float32]]],
        *,
        step: int,
        epoch: int,
        version: int,
        anchor: bool,
        quantise: Scanner = grid.scan,
    ) -> Prepared:
        """Write delta, anchor (if asked; always for the first version) and manifest of the next version.

        Args:
            tensors: every tensor of the layout once, in any order, float32 masters in the layout's shapes.
            step: optimizer step the masters are at. epoch: fencing token of the lease.
            version: one above the published version; any from 0 if nothing is published.
            quantise: `grid.scan`, or a twin of it that gives the same bits.

        Raises:
            LayoutError, NonFiniteError: the masters are not what they should be.
            WrongBaseError: `version` does not follow the mirror's. WrongStateError: our own bytes decode to other codes.
        """
        if self._pending is not None:
            raise WeightsError("the version prepared last was neither committed nor rolled back")
        if version < 0 or (self._parent is not None and version != self._parent.version + 1):
            raise WrongBaseError(f"version {version} does not follow the published {self._parent and self._parent.version}")
        started = time.monotonic()
        if self._mirror is None:
            pending, prepared = self._first(tensors, step, epoch, version, started)
        else:
            pending, prepared = self._next(self._mirror, tensors, step, epoch, version, anchor, quantise, started)
        self._pending = pending
        return prepared

    def commit(self, prepared: Prepared) -> None:
        """HEAD names the prepared version: advance the mirror."""
        pending = self._pending
        if pending is None or pending.parent.manifest_sha256 != prepared.manifest_sha256:
            raise WeightsError(f"version {prepared.version} is not the one prepared last")
        self._mirror, self._parent, self._anchor = pending.state, pending.parent, pending.manifest.anchor
        self._past.append(_Published(pending.parent.version, pending.parent.state_id, pending.change))
        del self._past[: -ROLLUP_SPAN - 1]
        self._pending = None

    def rollback(self) -> None:
        """HEAD was not swapped: put the mirror back to what is published."""
        if self._pending is not None and self._pending.undo is not None:
            self._pending.state.undo(self._pending.undo)
        self._pending = None

    def _first(
        self, tensors: Iterable[tuple[str, NDArray[np.float32]]], step: int, epoch: int, version: int, started: float
    ) -> tuple[_Pending, Prepared]:
        """The first version: make the grid; an anchor and no delta."""
        state = WeightState.empty(self.layout)
        num_clipped = 0
        for spec, master in self._checked(tensors):
            if spec.kind == "int8":
                codes, scales, biases = grid.quantise(master)
                for array, values in zip(state.quantised(spec), (codes, scales, biases), strict=True):
                    np.copyto(array, values)
                places = grid.place(master, scales, biases)
                num_clipped += int(np.count_nonzero((places < -0.5) | (places > 255.5)))
            else:
                np.copyto(state.arrays[spec.name], _stored_raw(spec, master))
        scanned = time.monotonic()
        digests = state.tensor_digests()
        stats = VersionStats(1.0, num_clipped, self._hysteresis)
        return self._seal(state, None, None, digests, stats, step, epoch, version, True, (started, scanned, time.monotonic()))

    def _next(
        self,
        mirror: WeightState,
        tensors: Iterable[tuple[str, NDArray[np.float32]]],
        step: int,
        epoch: int,
        version: int,
        anchor: bool,
        quantise: Scanner,
        started: float,
    ) -> tuple[_Pending, Prepared]:
        """A version after another: scan, encode, decode our own bytes, apply them to the mirror, check, write."""
        scans: dict[str, grid.Scan] = {}
        raws: dict[str, NDArray[np.generic]] = {}
        for spec, master in self._checked(tensors):
            if spec.kind == "int8":
                try:
                    scans[spec.name] = quantise(master, *mirror.quantised(spec), self._hysteresis)
                except NonFiniteError as error:
                    raise NonFiniteError(f"{spec.name}: {error.message}") from error
            else:
                raws[spec.name] = _stored_raw(spec, master)
        change = _change_of(mirror, scans, raws)
        scanned = time.monotonic()
        header = self._delta_header(version - 1, version, mirror.verified_id or mirror.state_id(), "")
        counts = counts_of(change)
        undo = mirror.apply(decode_delta(encode_delta(header, change), header, counts, self.layout))
        try:
            _check_scanned(mirror, scans, raws)
            digests = mirror.tensor_digests()
            lag = max((scan.lag_steps for scan in scans.values()), default=0.0)
            num_changed = len(change.positions) + change.codes.size
            clipped = sum(scan.num_clipped for scan in scans.values())
            stats = VersionStats(num_changed / self.layout.num_codes, clipped, self._hysteresis, lag)
            times = (started, scanned, time.monotonic())
            return self._seal(mirror, undo, change, digests, stats, step, epoch, version, anchor, times)
        except BaseException:
            mirror.undo(undo)
            raise

    def _seal(
        self,
        state: WeightState,
        undo: Undo | None,
        change: Change | None,
        digests: Mapping[str, str],
        stats: VersionStats,
        step: int,
        epoch: int,
        version: int,
        anchor: bool,
        times: tuple[float, float, float],
    ) -> tuple[_Pending, Prepared]:
        """Write delta, roll-ups, anchor and manifest of `state`."""
        state_id = state_id_of(self.layout, digests)
        state.verified_id = state_id
        parent = self._parent
        delta = None
        if change is not None and parent is not None:
            delta = self._write_delta(parent.version, parent.state_id, version, state_id, change)
        rollups = self._write_rollups(state, change, version, state_id)
        anchor_ref = self._write_anchor(state, version, state_id) if anchor or self._anchor is None else self._anchor
        manifest = Manifest(
            MANIFEST_FORMAT,
            self._document.run,
            epoch,
            version,
            parent,
            state_id,
            self.layout.layout_id,
            step,
            time.time(),
            delta,
            rollups,
            anchor_ref,
            dict(digests),
            stats,
        )
        key, sha256 = write_manifest(self._store, manifest, self._signer)
        pending = _Pending(manifest, Parent(version, key, sha256, state_id), state, undo, change)
        started, scanned, encoded = times
        prepared = Prepared(
            version=version,
            manifest_key=key,
            manifest_sha256=sha256,
            state_id=state_id,
            delta_bytes=delta.num_bytes if delta else 0,
            rollup_bytes=sum(ref.num_bytes for ref in rollups),
            anchor_bytes=anchor_ref.num_bytes if anchor_ref.version == version else 0,
            changed_fraction=stats.changed_fraction,
            num_clipped=stats.num_clipped,
            scan_seconds=scanned - started,
            encode_seconds=encoded - scanned,
            upload_seconds=time.monotonic() - encoded,
        )
        return pending, prepared

    def _write_delta(self, base: int, base_state_id: str, version: int, state_id: str, change: Change) -> DeltaRef:
        header = self._delta_header(base, version, base_state_id, state_id)
        data = encode_delta(header, change)
        sha256 = hashlib.sha256(data).hexdigest()
        key = keys.delta(self._document.run, base, version, sha256)
        self._store.create(key, data)
        counts = counts_of(change)
        return DeltaRef(base, base_state_id, key, sha256, len(data), header.codec, counts.num_changed, counts.num_raw, counts.num_regrid)

    def _write_rollups(self, state: WeightState, change: Change | None, version: int, state_id: str) -> tuple[DeltaRef, ...]:
        """Roll-ups from version - 2^j for every 2^j that divides `version`, as far back as the changes are known."""
        refs: list[DeltaRef] = []
        span = 2
        while change is not None and span <= ROLLUP_SPAN and version % span == 0:
            steps = self._past[-span:]  # the start of the roll-up, then the versions it runs through
            changes = [past.change for past in steps[1:] if past.change is not None]
            if len(changes) == span - 1:
                merged = _merge(state, [*changes, change])
                refs.append(self._write_delta(steps[0].version, steps[0].state_id, version, state_id, merged))
            span *= 2
        return tuple(refs)

    def _write_anchor(self, state: WeightState, version: int, state_id: str) -> AnchorRef:
        run = self._document.run
        parts: list[AnchorPart] = []
        for number, arrays in enumerate(anchor_groups(self.layout, self._anchor_part_bytes)):
            data = encode_anchor_part(state, arrays, run=run, version=version)
            sha256 = hashlib.sha256(data).hexdigest()
            key = keys.anchor_part(run, version, number, sha256)
            self._store.create(key, data)
            parts.append(AnchorPart(key, sha256, len(data), tuple(array.name for array in arrays)))
        index, sha256 = encode_index(AnchorIndex(ANCHOR_FORMAT, run, version, self.layout.layout_id, state_id, tuple(parts)))
        key = keys.anchor_index(run, version, sha256)
        self._store.create(key, index)
        return AnchorRef(version, state_id, key, sha256, len(index) + sum(part.num_bytes for part in parts))

    def _delta_header(self, base: int, version: int, base_state_id: str, state_id: str) -> DeltaHeader:
        return DeltaHeader(self._document.run, base, version, base_state_id, state_id, self.layout.layout_id, PCO)

    def _checked(self, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> Iterable[tuple[TensorSpec, NDArray[np.float32]]]:
        """The tensors with their specs. Raises LayoutError unless every one comes once, in shape and type."""
        left = dict(self.layout.by_name)
        for name, master in tensors:
            spec = left.pop(name, None)
            if spec is None:
                raise LayoutError(f"{name} is not in the layout, or came twice")
            if master.shape != spec.shape or master.dtype != np.float32:
                raise LayoutError(f"{name} is {master.dtype} {master.shape}, not float32 {spec.shape}")
            yield spec, master
        if left:
            raise LayoutError(f"{len(left)} tensors are missing, {min(left)} among them")


def _stored_raw(spec: TensorSpec, master: NDArray[np.float32]) -> NDArray[np.generic]:
    """A raw tensor as it is stored. Raises NonFiniteError."""
    stored = master if spec.dtype == "float32" else grid.bf16_bits(master)
    values = master if spec.dtype == "float32" else grid.bf16_values(grid.bf16_bits(master))
    if not np.isfinite(values).all():
        raise NonFiniteError(f"{spec.name}: a weight is NaN or infinite")
    return stored


def _change_of(mirror: WeightState, scans: Mapping[str, grid.Scan], raws: Mapping[str, NDArray[np.generic]]) -> Change:
    """All tensors' scans as one change, in canonical order."""
    positions: list[NDArray[np.int64]] = []
    differences: list[NDArray[np.int16]] = []
    groups: list[NDArray[np.int64]] = []
    offset = 0
    for spec in mirror.layout.quantised:
        scan = scans[spec.name]
        old = mirror.quantised(spec)[0].reshape(-1)[scan.positions]
        positions.append(scan.positions + offset)
        differences.append(scan.codes.astype(np.int16) - old)
        groups.append(scan.groups + offset // GROUP_SIZE)
        offset += spec.num_elements
    raw_positions: list[NDArray[np.int64]] = []
    raw_values: list[NDArray[np.uint16 | np.uint32]] = []
    offset = 0
    for spec in mirror.layout.raw:
        held = mirror.bits(spec)
        new = raws[spec.name].reshape(-1).view(held.dtype)
        moved = np.flatnonzero(held != new)
        raw_positions.append(moved + offset)
        raw_values.append(new[moved])
        offset += spec.num_elements
    for spec in mirror.layout.tensors:
        if spec.frozen and raws[spec.name].tobytes() != mirror.arrays[spec.name].tobytes():
            raise LayoutError(f"{spec.name} changed, but it is frozen for the run")
    ordered = [scans[spec.name] for spec in mirror.layout.quantised]
    return Change(
        np.concatenate(positions),
        np.concatenate(differences),
        np.concatenate(raw_positions),
        np.concatenate(raw_values),
        np.concatenate(groups),
        np.concatenate([scan.scales for scan in ordered]),
        np.concatenate([scan.biases for scan in ordered]),
        np.concatenate([scan.group_codes for scan in ordered]),
    )


def _check_scanned(mirror: WeightState, scans: Mapping[str, grid.Scan], raws: Mapping[str, NDArray[np.generic]]) -> None:
    """Raises WrongStateError unless the mirror holds every code the scans asked for: the codec was right."""
    for spec in mirror.layout.quantised:
        scan, (codes, scales, biases) = scans[spec.name], mirror.quantised(spec)
        right = (
            np.array_equal(codes.reshape(-1)[scan.positions], scan.codes)
            and np.array_equal(codes.reshape(-1, GROUP_SIZE)[scan.groups], scan.group_codes)
            and np.array_equal(scales.reshape(-1)[scan.groups], scan.scales)
            and np.array_equal(biases.reshape(-1)[scan.groups], scan.biases)
        )
        if not right:
            raise WrongStateError(
                f"{spec.name}: our own delta decodes to other codes", hint="a fault of the codec or of memory: publish again"
            )
    for spec in mirror.layout.raw:
        if raws[spec.name].tobytes() != mirror.arrays[spec.name].tobytes():
            raise WrongStateError(
                f"{spec.name}: our own delta decodes to other values", hint="a fault of the codec or of memory: publish again"
            )


def _merge(state: WeightState, changes: list[Change]) -> Change:
    """Several changes in a row that ended in `state`, as one."""
    groups = np.unique(np.concatenate([change.groups for change in changes]))
    raw_positions = np.unique(np.concatenate([change.raw_positions for change in changes]))
    positions, differences = merge_positions(changes, groups)
    touched = Change(raw_positions=raw_positions, groups=groups)
    raw_values, scales, biases, codes = state.values_at(touched)
    return Change(positions, differences, raw_positions, raw_values, groups, scales, biases, codes)
