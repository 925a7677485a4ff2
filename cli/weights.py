"""What a run's versions are made of, whether every byte is as signed, what changed between two, and what may be deleted.

Looks at the bucket as a Mac would: from HEAD backwards, trusting signatures only. Printing is `cli/commands/weights.py`'s.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from stoa.bucket import keys
from stoa.bucket.clearing import Pass, chain_of, clear, policy_of
from stoa.bucket.head import read_head
from stoa.bucket.manifest import AnchorRef, DeltaRef, Manifest
from stoa.bucket.retention import Lease
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import Store
from stoa.contracts.errors import BucketError, ObjectMissingError, UsageError, WeightsError
from stoa.contracts.fleet_messages import SessionStatus
from stoa.weights.cache import Cache
from stoa.weights.chain import Hop, Plan, plan
from stoa.weights.container import MAX_INDEX_BYTES, decode_index
from stoa.weights.history import layout_of_run, read_hop, rebuild
from stoa.weights.layout import Layout
from stoa.weights.pulse import merge_positions

LEASE_SECONDS: Final = 86_400.0
"""How long a Mac that was seen now is taken to go on from its version."""


@dataclass(frozen=True, slots=True)
class VersionLine:
    """One version. Bytes are 0 where there is none; `here` says whether the delta and the anchor are in the bucket still."""

    version: int
    step: int
    epoch: int
    created_at: float
    state_id: str
    changed_fraction: float
    delta_bytes: int
    rollups_from: tuple[int, ...]
    rollup_bytes: int
    anchor_bytes: int
    here: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """One object, or one way to the weights, that is not as it should be."""

    where: str
    message: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What was checked. `ways`: each way the weights of `version` were built by."""

    version: int
    state_id: str
    num_manifests: int
    num_objects: int
    num_bytes: int
    ways: tuple[str, ...]
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class TensorLine:
    """What changed of one tensor. `unit_share`: share of the changes that are by one step."""

    name: str
    num_elements: int
    num_changed: int
    changed_fraction: float
    unit_share: float
    largest_steps: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What changed between two versions; tensors that changed most come first. Raw tensors count values, not steps."""

    base: int
    version: int
    num_bytes: int
    num_changed: int
    changed_fraction: float
    unit_share: float
    num_regridded_groups: int
    num_raw_changed: int
    tensors: tuple[TensorLine, ...]


def versions(store: Store, document: RunDocument) -> tuple[VersionLine, ...]:
    """Every version in the chain of HEAD, oldest first."""
    chain = [manifest for _, manifest in _chain(store, document)]
    root = keys.root(document.run)
    listed = {item.key for folder in ("deltas/", "anchors/") for item in store.list(root + folder)}
    rollups: dict[int, list[DeltaRef]] = {}
    for manifest in chain:
        for ref in manifest.rollups:
            rollups.setdefault(_leads_to(ref, manifest), []).append(ref)
    anchors = {manifest.anchor.version: manifest.anchor for manifest in chain}
    return tuple(_line(m, rollups.get(m.version, []), anchors.get(m.version), listed) for m in reversed(chain))


def verify(store: Store, document: RunDocument, folder: Path, version: int | None = None) -> Verified:
    """Check every object that leads to `version` (default: HEAD's), and that every way there gives the signed weights.

    folder: scratch room for what is downloaded. Raises what reading HEAD or a manifest raises; faults of objects are returned.
    """
    chain = [manifest for _, manifest in _chain(store, document)]
    newest = chain[0]
    chain = [manifest for manifest in chain if version is None or manifest.version <= version]
    if version is not None and (not chain or chain[0].version != version):
        raise UsageError(f"run {document.run} has no version {version}; the newest is {newest.version}")
    layout = layout_of_run(store, document)
    cache = Cache(store, document.run, folder, layout)
    listed = {item.key for item in store.list(keys.root(document.run))}
    faults: list[Fault] = []
    num_objects = num_bytes = 0
    anchors = {manifest.anchor.version: manifest.anchor for manifest in chain if manifest.anchor.index_key in listed}
    floor = min(anchors, default=0)
    deltas = [ref for m in chain for ref in (*m.rollups, *((m.delta,) if m.delta else ())) if _leads_to(ref, m) > floor]
    wanted = [(ref.key, ref.sha256, ref.num_bytes) for ref in deltas]
    for anchor in anchors.values():
        try:
            index = cache.read(anchor.index_key, anchor.index_sha256, MAX_INDEX_BYTES)
            wanted += [(part.key, part.sha256, part.num_bytes) for part in decode_index(index, layout, anchor.index_key).parts]
        except BucketError as error:
            faults.append(Fault(anchor.index_key, error.message))
    for key, sha256, size in wanted:
        num_objects += 1
        num_bytes += size
        try:
            cache.read(key, sha256, size)
        except BucketError as error:
            faults.append(Fault(key, error.message))
    ways: list[str] = []
    for name, way in _ways(chain, tuple(anchors)):
        try:
            rebuild(way, layout, document.run, cache.read)
            ways.append(name)
        except (BucketError, WeightsError) as error:
            faults.append(Fault(name, error.message))
    return Verified(chain[0].version, chain[0].state_id, len(chain), num_objects, num_bytes, tuple(ways), tuple(faults))


def difference(store: Store, document: RunDocument, base: int, version: int, folder: Path) -> Difference:
    """What changed from `base` to `version`, from the deltas between them: no weights are built.

    Raises UsageError if these are not two versions of the run, oldest first; ObjectMissingError if a delta was deleted.
    """
    chain = {manifest.version: manifest for _, manifest in _chain(store, document)}
    if not base < version or base not in chain or version not in chain:
        raise UsageError(
            f"no way from version {base} to {version} of run {document.run}",
            hint=f"name two of its versions, {min(chain)} to {max(chain)}, the older one first",
        )
    layout = layout_of_run(store, document)
    cache = Cache(store, document.run, folder, layout)
    positions, differences = np.empty(0, np.int64), np.empty(0, np.int16)
    groups, raw = np.empty(0, np.int64), np.empty(0, np.int64)
    num_bytes = 0
    for number in range(base + 1, version + 1):
        manifest = chain[number]
        ref = manifest.delta
        if ref is None:
            raise ObjectMissingError(f"version {number} has no delta")
        num_bytes += ref.num_bytes
        data = cache.read(ref.key, ref.sha256, ref.num_bytes)
        for change in read_hop(Hop(ref, number, manifest.state_id), layout, document.run, data):
            groups, raw = np.union1d(groups, change.groups), np.union1d(raw, change.raw_positions)
            # What went there and back again cancels.
            before = replace(change, positions=positions, differences=differences)
            positions, differences = merge_positions([before, change], groups)
    return _difference(layout, base, version, num_bytes, positions, differences, len(groups), raw)


def collect(store: Store, document: RunDocument, sessions: Sequence[SessionStatus], *, grace_seconds: float | None, dry_run: bool) -> Pass:
    """One pass of retention; the versions that live sessions serve are kept, with all that leads on from them.

    grace_seconds: None for the run's own.
    """
    now = time.time()
    leases = [Lease(s.host, s.version, now + LEASE_SECONDS) for s in sessions if s.state != "ended" and s.version >= 0]
    return clear(store, document, leases, policy_of(document, grace_seconds=grace_seconds), now=now, dry_run=dry_run)


def _chain(store: Store, document: RunDocument) -> list[tuple[str, Manifest]]:
    head, _ = read_head(store, document.run, document.public_key)
    chain = chain_of(store, document, head)
    if not chain:
        raise ObjectMissingError(f"run {document.run} has published no version yet", hint="wait for the trainer")
    return chain


def _leads_to(ref: DeltaRef, manifest: Manifest) -> int:
    return manifest.version if ref.version < 0 else ref.version


def _line(manifest: Manifest, rollups: Sequence[DeltaRef], anchor: AnchorRef | None, listed: set[str]) -> VersionLine:
    delta = manifest.delta
    here = (delta is None or delta.key in listed) and (anchor is None or anchor.index_key in listed)
    return VersionLine(
        manifest.version,
        manifest.step,
        manifest.epoch,
        manifest.created_at,
        manifest.state_id,
        manifest.stats.changed_fraction,
        delta.num_bytes if delta else 0,
        tuple(sorted(ref.base for ref in rollups)),
        sum(ref.num_bytes for ref in rollups),
        anchor.num_bytes if anchor else 0,
        here,
    )


def _ways(chain: Sequence[Manifest], anchors: Sequence[int]) -> Iterator[tuple[str, Plan]]:
    """From every anchor by single deltas, and from the oldest by the fewest bytes, to the first of the chain."""
    plain = [replace(manifest, rollups=()) for manifest in chain]
    target = chain[0].version
    for anchor in sorted(anchors):
        yield f"anchor {anchor} and every delta", plan(plain, target, anchors=(anchor,))
    if anchors:
        yield f"anchor {min(anchors)} and roll-ups", plan(chain, target, anchors=(min(anchors),))


def _difference(
    layout: Layout,
    base: int,
    version: int,
    num_bytes: int,
    positions: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    differences: "np.ndarray[tuple[int], np.dtype[np.int16]]",
    num_groups: int,
    raw: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> Difference:
    """Counts by tensor."""
    lines: list[TensorLine] = []
    offset = 0
    sizes = np.abs(differences)
    for spec in layout.quantised:
        start, stop = np.searchsorted(positions, [offset, offset + spec.num_elements])
        offset += spec.num_elements
        lines.append(_tensor(spec.name, spec.num_elements, sizes[start:stop]))
    offset = 0
    for spec in layout.raw:
        start, stop = np.searchsorted(raw, [offset, offset + spec.num_elements])
        offset += spec.num_elements
        lines.append(TensorLine(spec.name, spec.num_elements, int(stop - start), float(stop - start) / spec.num_elements, 0.0, 0))
    total = _tensor("", layout.num_codes, sizes)
    return Difference(
        base,
        version,
        num_bytes,
        total.num_changed,
        total.changed_fraction,
        total.unit_share,
        num_groups,
        len(raw),
        tuple(sorted(lines, key=lambda line: (-line.changed_fraction, line.name))),
    )


def _tensor(name: str, num_elements: int, sizes: "np.ndarray[tuple[int], np.dtype[np.int16]]") -> TensorLine:
    count = len(sizes)
    unit = float(np.count_nonzero(sizes == 1)) / count if count else 0.0
    return TensorLine(name, num_elements, count, count / num_elements, unit, int(sizes.max(initial=0)))
