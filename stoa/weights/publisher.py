"""How weights enter the bucket: masters against the mirror of what is published, delta, anchor, manifest.

Assumes that the caller holds the run's lease and swaps HEAD itself. `scan` is all that looks at the masters; `seal` then
writes objects nobody points to yet, also from another thread; the caller swaps HEAD; `commit` advances the mirror (or
`rollback` puts it back). So the mirror is always exactly what HEAD names, and the next delta starts from it. Anchors and
roll-ups are uploaded by `background.py`, beside all this, and announced by a later version's manifest.
"""

import contextlib
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stoa.bucket.head import Head
from stoa.bucket.manifest import (
    MANIFEST_FORMAT,
    AnchorRef,
    DeltaRef,
    Manifest,
    Parent,
    Signer,
    TensorStats,
    VersionStats,
    write_manifest,
)
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.contracts.errors import WeightsError, WrongBaseError, WrongStateError
from stoa.contracts.ids import StateId
from stoa.weights import grid
from stoa.weights.background import Background, Ready, delta_ref
from stoa.weights.cache import Cache
from stoa.weights.container import DeltaHeader, pack_delta, read_delta
from stoa.weights.digest import state_id_of
from stoa.weights.history import Doubts, by_any_way, layout_of_run, manifest_of, way_to
from stoa.weights.layout import GROUP_SIZE, Layout
from stoa.weights.pulse import PCO, Change, Counts, encode_segments, segments_of
from stoa.weights.snapshot import Masters, Scanner, Snapshot, first_weights, take_snapshot
from stoa.weights.state import Undo, WeightState


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version whose objects are in the bucket, waiting for HEAD. Seconds are wall clock of each stage.

    `rollup_bytes` and `anchor_bytes` are of what this version's manifest announces first.
    """

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
class _Scanned:
    """A version the masters were scanned for. `first` holds the weights of a run's first version, `snapshot` a later one's."""

    version: int
    step: int
    epoch: int
    anchor: bool
    inline: bool
    snapshot: Snapshot | None
    first: WeightState | None
    tensors: Mapping[str, TensorStats]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A version whose objects are written: how to go on to it, and how to go back."""

    scanned: _Scanned
    manifest: Manifest
    parent: Parent
    state: WeightState
    undo: Undo | None
    delta: tuple[DeltaHeader, Counts, bytes] | None
    ready: Ready


class Publisher:
    """Holds the mirror of the published weights (host memory) for the trainer that has the lease.

    One call at a time. `scan` reads the mirror, so it must not run before the version before it is committed.
    """

    def __init__(
        self,
        store: Store,
        document: RunDocument,
        signer: Signer,
        *,
        hysteresis: float,
        anchor_part_bytes: int,
        folder: Path | None = None,
    ) -> None:
        """`folder`: where published weights are kept, so that the next process brings less; without it, nowhere.

        Raises LayoutError if the run's model files do not give the run's layout.
        """
        self._store = store
        self._document = document
        self._signer = signer
        self._hysteresis = hysteresis
        self._part_bytes = anchor_part_bytes
        self._folder = folder
        self.layout: Layout = layout_of_run(store, document)
        self._mirror: WeightState | None = None
        self._parent: Parent | None = None
        self._anchor: AnchorRef | None = None
        self._background: Background | None = None
        self._scanned: _Scanned | None = None
        self._sealed: _Sealed | None = None

    @property
    def mirror(self) -> WeightState | None:
        """The published weights; None before the first version."""
        return self._mirror

    @property
    def anchor_version(self) -> int:
        """Version of the newest anchor that is announced; -1 before the first."""
        return -1 if self._anchor is None else self._anchor.version

    @property
    def background(self) -> Background:
        """The uploads beside the trainer's steps."""
        if self._background is None:
            self._background = Background(self._store, self._document.run, self.layout, part_bytes=self._part_bytes)
        return self._background

    def load_published(self, head: Head) -> None:
        """Make the mirror what `head` names; nothing if it is that already, or nothing is published.

        Its objects come by ranges into files, resumed where an earlier process got to. Raises what `Puller.join` raises.
        """
        self.rollback()
        if head.version < 0:
            self._mirror = self._parent = self._anchor = None
            return
        if self._parent is not None and self._parent.manifest_sha256 == head.manifest_sha256:
            return
        self.close()
        manifest = manifest_of(self._store, self._document, head)
        into = self._mirror or WeightState.empty(self.layout)
        self._mirror = self._parent = None
        with contextlib.ExitStack() as scratch:
            folder = self._folder or Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="stoa-mirror-")))
            # Only the newest anchor is worth its disk here.
            cache = Cache(self._store, self._document.run, folder, self.layout, max_bytes=0)

            def attempt(doubts: Doubts) -> WeightState:
                on_disk, versions = cache.keys()
                way = way_to(self._store, self._document, manifest, on_disk=on_disk, disk_versions=versions, doubts=doubts)
                return cache.rebuild(way, doubts, into)

            self._mirror = by_any_way(attempt)
            cache.trim(manifest.anchor.version)
        self._parent = Parent(manifest.version, head.manifest_key, head.manifest_sha256, manifest.state_id)
        self._anchor = manifest.anchor

    def prepare(
        self,
        tensors: Masters,
        *,
        step: int,
        epoch: int,
        version: int,
        anchor: bool,
        inline: bool = False,
        quantise: Scanner = grid.scan,
    ) -> Prepared:
        """`scan` and `seal` in one. A version that cannot be sealed is forgotten. Raises what they raise."""
        self.scan(tensors, step=step, epoch=epoch, version=version, anchor=anchor, inline=inline, quantise=quantise)
        try:
            return self.seal()
        except BaseException:
            self.rollback()
            raise

    def scan(
        self,
        tensors: Masters,
        *,
        step: int,
        epoch: int,
        version: int,
        anchor: bool,
        inline: bool = False,
        quantise: Scanner = grid.scan,
    ) -> float:
        """Note what the next version changes; the masters may move on afterwards. Returns the changed fraction.

        Args:
            tensors: every tensor of the layout once, in any order, float32 masters in the layout's shapes.
            step: optimizer step the masters are at. epoch: fencing token of the lease.
            version: one above the published version; any from 0 if nothing is published.
            anchor: make full weights of it, too. A run's first version always has them.
            inline: write anchor and roll-ups before the manifest, which announces them: for a run's last version.
            quantise: `grid.scan`, or a twin of it that gives the same bits.

        Raises:
            LayoutError, NonFiniteError: the masters are not what they should be.
            WrongBaseError: `version` does not follow the mirror's.
        """
        if self._scanned is not None:
            raise WeightsError("the version scanned last was neither committed nor rolled back")
        if version < 0 or (self._parent is not None and version != self._parent.version + 1):
            raise WrongBaseError(f"version {version} does not follow the published {self._parent and self._parent.version}")
        started = time.monotonic()
        snapshot = first = None
        if self._mirror is None:
            first, stats = first_weights(self.layout, tensors)
        else:
            snapshot = take_snapshot(self._mirror, tensors, self._hysteresis, quantise)
            stats = snapshot.tensors
        seconds = time.monotonic() - started
        self._scanned = _Scanned(version, step, epoch, anchor, inline, snapshot, first, stats, seconds)
        return sum(stat.num_changed for stat in stats.values()) / self.layout.num_codes

    @property
    def changes_nothing(self) -> bool:
        """True if the version scanned last would have the weights that are published, to the bit."""
        snapshot = None if self._scanned is None else self._scanned.snapshot
        return snapshot is not None and not any(len(getattr(snapshot.change, name)) for name in Change.__dataclass_fields__)

    def seal(self) -> Prepared:
        """Write all objects of the version scanned last, and its manifest. May be asked for again if it raised.

        Raises WrongStateError if our own bytes decode to something else, and what the bucket raises.
        """
        scanned = self._scanned
        if scanned is None or self._sealed is not None:
            raise WeightsError("there is no scanned version to seal")
        if scanned.snapshot is None or self._mirror is None:
            return self._seal_first(scanned)
        return self._seal_next(scanned, scanned.snapshot, self._mirror)

    def commit(self, prepared: Prepared) -> None:
        """HEAD names the prepared version: advance the mirror, and go on with what is uploaded beside."""
        sealed = self._sealed
        if sealed is None or sealed.parent.manifest_sha256 != prepared.manifest_sha256:
            raise WeightsError(f"version {prepared.version} is not the one prepared last")
        self._mirror, self._parent, self._anchor = sealed.state, sealed.parent, sealed.manifest.anchor
        scanned = sealed.scanned
        self._scanned = self._sealed = None
        self.background.announced(sealed.ready)
        if sealed.delta is not None:
            self.background.add_delta(*sealed.delta, self._anchor.version, upload=not scanned.inline)
        if scanned.anchor and self._anchor.version != prepared.version:
            self.background.start_anchor(self._mirror, prepared.version, prepared.state_id)

    def unseal(self) -> None:
        """HEAD was not swapped: put the mirror back to what is published. The version can be sealed again."""
        sealed, self._sealed = self._sealed, None
        if sealed is not None and sealed.undo is not None:
            sealed.state.undo(sealed.undo)
        if sealed is not None:
            self.background.forget(sealed.scanned.version)

    def rollback(self) -> None:
        """As `unseal`, and forget the version scanned last."""
        self.unseal()
        self._scanned = None

    def close(self) -> None:
        """End what is uploaded beside; an anchor that is not whole is given up."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def _seal_first(self, scanned: _Scanned) -> Prepared:
        """A run's first version: an anchor and no delta."""
        assert scanned.first is not None  # noqa: S101 - by construction of scan
        started = time.monotonic()
        digests = scanned.first.tensor_digests()
        state_id = state_id_of(self.layout, digests)
        digested = time.monotonic()
        anchor = self.background.upload_anchor(scanned.first, scanned.version, state_id)
        stats = VersionStats(
            changed_fraction=1.0,
            num_clipped=sum(stat.num_clipped for stat in scanned.tensors.values()),
            hysteresis=self._hysteresis,
            seconds=_rounded(scan=scanned.seconds, digest=digested - started, upload=time.monotonic() - digested),
            tensors=dict(scanned.tensors),
        )
        return self._write(scanned, scanned.first, state_id, digests, stats, None, None, Ready(anchor=anchor))

    def _seal_next(self, scanned: _Scanned, snapshot: Snapshot, mirror: WeightState) -> Prepared:
        """A version after another: encode, apply to the mirror, decode our own bytes and compare, write."""
        started = time.monotonic()
        base_state_id = mirror.verified_id or mirror.state_id()
        sections, counts = encode_segments(segments_of(snapshot.change))
        encoded = time.monotonic()
        self.background.wait_for_mirror()
        waited = time.monotonic()
        undo = mirror.apply(snapshot.change)
        try:
            applied = time.monotonic()
            digests = mirror.tensor_digests()
            state_id = state_id_of(self.layout, digests)
            digested = time.monotonic()
            header = self._header(scanned.version, base_state_id, state_id)
            data = pack_delta(header, sections, counts)
            _check_decodes(data, header, counts, self.layout, snapshot.change)
            ref = delta_ref(header, counts, data, self._document.run)
            packed = time.monotonic()
            with self.background.yielding():
                self._store.create(ref.key, data)
                ready = self._ready(scanned, mirror, state_id, header, counts, data)
                seconds = _rounded(
                    scan=scanned.seconds,
                    encode=encoded - started + packed - digested,
                    apply=applied - waited,
                    digest=digested - applied,
                    upload=time.monotonic() - packed,
                )
                stats = self._stats(snapshot, ref, seconds)
                mirror.verified_id = state_id
                return self._write(scanned, mirror, state_id, digests, stats, undo, (header, counts, data), ready)
        except BaseException:
            mirror.undo(undo)
            self.background.forget(scanned.version)
            raise

    def _ready(self, scanned: _Scanned, mirror: WeightState, state_id: str, header: DeltaHeader, counts: Counts, data: bytes) -> Ready:
        """What this version's manifest announces."""
        ready = self.background.ready
        if not scanned.inline:
            return ready
        rollups = self.background.rollups_now(header, counts, data, self.anchor_version)
        anchor = self.background.upload_anchor(mirror, scanned.version, state_id) if scanned.anchor else ready.anchor
        return Ready((*ready.rollups, *rollups), anchor)

    def _write(
        self,
        scanned: _Scanned,
        state: WeightState,
        state_id: StateId,
        digests: Mapping[str, str],
        stats: VersionStats,
        undo: Undo | None,
        delta: tuple[DeltaHeader, Counts, bytes] | None,
        ready: Ready,
    ) -> Prepared:
        """Write the manifest; the version is sealed then."""
        anchor = ready.anchor or self._anchor
        if anchor is None:
            raise WeightsError(f"version {scanned.version} has no anchor to start from")
        ref = None if delta is None else delta_ref(*delta, self._document.run)
        manifest = Manifest(
            MANIFEST_FORMAT,
            self._document.run,
            scanned.epoch,
            scanned.version,
            self._parent,
            state_id,
            self.layout.layout_id,
            scanned.step,
            time.time(),
            None if ref is None else replace(ref, version=-1, state_id=""),
            ready.rollups,
            anchor,
            dict(digests),
            stats,
        )
        key, sha256 = write_manifest(self._store, manifest, self._signer)
        state.verified_id = state_id
        self._sealed = _Sealed(scanned, manifest, Parent(scanned.version, key, sha256, state_id), state, undo, delta, ready)
        return Prepared(
            version=scanned.version,
            manifest_key=key,
            manifest_sha256=sha256,
            state_id=state_id,
            delta_bytes=ref.num_bytes if ref else 0,
            rollup_bytes=sum(rollup.num_bytes for rollup in ready.rollups),
            anchor_bytes=ready.anchor.num_bytes if ready.anchor else 0,
            changed_fraction=stats.changed_fraction,
            num_clipped=stats.num_clipped,
            scan_seconds=scanned.seconds,
            encode_seconds=sum(stats.seconds.get(stage, 0.0) for stage in ("encode", "apply", "digest")),
            upload_seconds=stats.seconds["upload"],
        )

    def _header(self, version: int, base_state_id: str, state_id: str) -> DeltaHeader:
        return DeltaHeader(self._document.run, version - 1, version, base_state_id, state_id, self.layout.layout_id, PCO)

    def _stats(self, snapshot: Snapshot, delta: DeltaRef, seconds: dict[str, float]) -> VersionStats:
        num_changed = sum(stat.num_changed for stat in snapshot.tensors.values())
        num_unit = sum(stat.num_unit for stat in snapshot.tensors.values())
        bits = {name: _bound_bits(stat, self.layout.by_name[name].num_elements) for name, stat in snapshot.tensors.items()}
        scale = delta.num_bytes / max(sum(bits.values()), 1.0)
        return VersionStats(
            changed_fraction=num_changed / self.layout.num_codes,
            num_clipped=snapshot.num_clipped,
            hysteresis=self._hysteresis,
            largest_lag_steps=snapshot.lag_steps,
            unit_fraction=num_unit / num_changed if num_changed else 0.0,
            seconds=seconds,
            tensors={name: replace(stat, num_bytes=round(bits[name] * scale)) for name, stat in snapshot.tensors.items()},
        )


def _bound_bits(stats: TensorStats, num_codes: int) -> float:
    """Shannon's bound for one tensor's changes: positions, a sign each, and re-gridded groups as they are."""
    moved = stats.num_changed - stats.num_regrid * GROUP_SIZE
    rate = moved / num_codes
    entropy = 0.0 if rate in (0.0, 1.0) else -rate * math.log2(rate) - (1 - rate) * math.log2(1 - rate)
    return num_codes * entropy + moved + stats.num_regrid * (GROUP_SIZE * 8 + 32)


def _check_decodes(data: bytes, header: DeltaHeader, counts: Counts, layout: Layout, change: Change) -> None:
    """Raises WrongStateError unless our own bytes decode to exactly the change that was applied to the mirror."""
    ours = segments_of(change)
    for decoded in read_delta(data, header, counts, layout):
        expected = next(ours, Change())
        if not all(np.array_equal(getattr(decoded, name), getattr(expected, name)) for name in Change.__dataclass_fields__):
            raise WrongStateError("our own delta decodes to other codes", hint="a fault of the codec or of memory: publish again")


def _rounded(**seconds: float) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}
