"""Reading published versions: manifests from HEAD backwards, the plan to a version, and its weights from the bytes.

Shared by both ends of the weights' way. Where bytes come from (the bucket, a disk cache) is the caller's `Fetch`; it
returns bytes whose sha256 it has checked.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

import structlog

from stoa.bucket.head import Head
from stoa.bucket.manifest import AnchorRef, Manifest, read_manifest
from stoa.bucket.run_document import RunDocument
from stoa.bucket.store import SMALL_BYTES, Store, check_sha256
from stoa.contracts.errors import (
    DigestError,
    FormatError,
    LayoutError,
    ObjectMissingError,
    ObjectTooLargeError,
    StoaError,
    WrongBaseError,
    WrongStateError,
)
from stoa.weights.chain import Hop, Plan, plan
from stoa.weights.container import (
    MAX_INDEX_BYTES,
    AnchorPart,
    DeltaHeader,
    counts_in,
    decode_anchor_part,
    decode_index,
    read_anchor_part,
    read_delta,
)
from stoa.weights.layout import Layout, layout_of
from stoa.weights.pulse import NIBBLE, PCO, Change, Codec
from stoa.weights.state import WeightState

MAX_WALK: Final = 64
"""Versions walked back beyond the newest anchor, to reach weights that are at hand."""
MAX_KNOWN: Final = 64
"""Manifests kept in memory: as far as a plan looks back; each names all tensors."""

Fetch = Callable[[str, str, int], bytes]
"""(key, sha256, num_bytes) -> the bytes."""
Place = Callable[[str, str, int], Path]
"""(key, sha256, num_bytes) -> a file of that many bytes, which need not have been checked since it came."""
NUM_READERS: Final = 4
"""Files of an anchor that are read at once: a disk gives one reader a fraction of what it can."""
_Had = TypeVar("_Had")
_Built = TypeVar("_Built")
_log = structlog.get_logger()


def layout_of_run(store: Store, document: RunDocument) -> Layout:
    """The layout of a run's weights, from its config.json in the bucket. Raises LayoutError if it is not the run's."""
    file = next((file for file in document.model_files if file.name == "config.json"), None)
    if file is None:
        raise LayoutError(f"run {document.run} has no config.json among its model files")
    data = store.get(file.key, max_bytes=min(file.num_bytes, SMALL_BYTES)).data
    check_sha256(data, file.sha256, file.key)
    try:
        model_config = json.loads(data)
    except ValueError as error:
        raise FormatError(f"{file.key} is not JSON: {error}") from error
    if not isinstance(model_config, dict):
        raise FormatError(f"{file.key} is not a JSON object")
    layout = layout_of(model_config, document.config.learning.dtype)  # pyright: ignore[reportUnknownArgumentType]
    if layout.layout_id != document.layout_id:
        raise LayoutError(
            f"run {document.run} has layout {document.layout_id[:16]}, this program makes {layout.layout_id[:16]} of its config.json",
            hint="the run was started by another version of this project",
        )
    return layout


class Known:
    """The manifests of one run that were read last: a sha256 names one for ever, and each is the parent of the next one wanted."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Manifest] = OrderedDict()

    def read(self, store: Store, document: RunDocument, key: str, sha256: str) -> Manifest:
        """The manifest under `key`, from memory if it is there. Raises as `read_manifest` does."""
        manifest = self._kept.get(sha256)
        if manifest is None:
            manifest = read_manifest(store, document.run, key, sha256, document.public_key)
        self._kept[sha256] = manifest
        self._kept.move_to_end(sha256)
        if len(self._kept) > MAX_KNOWN:
            self._kept.popitem(last=False)
        return manifest


def manifest_of(store: Store, document: RunDocument, head: Head, known: Known | None = None) -> Manifest:
    """The manifest HEAD names. Raises ObjectMissingError before the first version, FormatError if it is another version's."""
    if head.version < 0:
        raise ObjectMissingError(f"run {document.run} has published no version yet", hint="wait for the trainer")
    manifest = (known or Known()).read(store, document, head.manifest_key, head.manifest_sha256)
    if manifest.version != head.version or manifest.layout_id != document.layout_id:
        raise FormatError(f"{head.manifest_key} is of version {manifest.version}, HEAD is at {head.version}")
    return manifest


def walk(store: Store, document: RunDocument, newest: Manifest, down_to: int, known: Known | None = None) -> list[Manifest]:
    """Manifests from `newest` back to version `down_to` (or the first), newest first."""
    known = known or Known()
    found = [newest]
    while found[-1].version > down_to:
        parent = found[-1].parent
        if parent is None:
            break
        manifest = known.read(store, document, parent.manifest_key, parent.manifest_sha256)
        if manifest.version != parent.version or manifest.state_id != parent.state_id:
            raise FormatError(f"{parent.manifest_key} is not the parent its child names")
        found.append(manifest)
    return found


@dataclass(slots=True)
class Doubts:
    """What a way to some weights must do without: objects that were found missing or damaged, and perhaps all roll-ups."""

    keys: set[str] = field(default_factory=set)
    rollups: bool = False

    def noting(self, fetch: Callable[[str, str, int], _Had]) -> Callable[[str, str, int], _Had]:
        """`fetch`, with each object noted that cannot be had."""

        def noted(key: str, sha256: str, num_bytes: int) -> _Had:
            try:
                return fetch(key, sha256, num_bytes)
            except (ObjectMissingError, DigestError, ObjectTooLargeError):
                self.keys.add(key)
                raise

        return noted

    def clear(self, manifest: Manifest) -> Manifest:
        """The manifest without the deltas and roll-ups that are in doubt."""
        delta = None if manifest.delta is not None and manifest.delta.key in self.keys else manifest.delta
        rollups = () if self.rollups else tuple(ref for ref in manifest.rollups if ref.key not in self.keys)
        return replace(manifest, delta=delta, rollups=rollups)

    def of_anchor(self, anchor: AnchorRef) -> bool:
        """True if the anchor's index or a part of it is in doubt; they share a folder."""
        folder = anchor.index_key.rpartition("/")[0]
        return any(key.rpartition("/")[0] == folder for key in self.keys)


def by_any_way(attempt: Callable[[Doubts], _Built]) -> _Built:
    """Try the cheapest way; while something on it is missing or damaged, the next one without that.

    Damage that no single object can be blamed for is put down to roll-ups, once. Raises what was met first if no way is left.
    """
    doubts = Doubts()
    first: StoaError | None = None
    while True:
        before = (len(doubts.keys), doubts.rollups)
        try:
            return attempt(doubts)
        except (ObjectMissingError, ObjectTooLargeError, DigestError, FormatError, WrongBaseError, WrongStateError) as error:
            _log.warning("way_refused", kind=type(error).__name__, message=error.message)
            first = first or error
            if len(doubts.keys) == before[0]:
                doubts.rollups = True
            if (len(doubts.keys), doubts.rollups) == before:
                raise first from None


def way_to(
    store: Store,
    document: RunDocument,
    target: Manifest,
    *,
    have: Mapping[int, str] | None = None,
    on_disk: Collection[str] = (),
    disk_versions: Collection[int] = (),
    doubts: Doubts | None = None,
    known: Known | None = None,
) -> Plan:
    """The cheapest plan to `target`, reading as many manifests as it takes.

    have: version -> state_id of weights at hand. on_disk: keys whose bytes are here; disk_versions: versions of anchors
    among them. doubts: what it must do without; then older anchors are looked at too. known: manifests that were read before.
    """
    doubts, known = doubts or Doubts(), known or Known()
    at_hand = {version: state_id for version, state_id in (have or {}).items() if version <= target.version}
    near = [v for v in (*at_hand, *disk_versions) if target.anchor.version - MAX_WALK <= v <= target.version]
    # Weights at hand at or after the newest anchor are nearer than it; older ones are worth a look too.
    down_to = max((v for v in near if v >= target.anchor.version), default=min([target.anchor.version, *near]))
    manifests = walk(store, document, target, down_to, known)
    if down_to > target.anchor.version and have and manifests[-1].state_id != have.get(down_to):
        manifests += walk(store, document, manifests[-1], target.anchor.version, known)[1:]
    while True:
        anchors = {manifest.anchor.version for manifest in manifests if not doubts.of_anchor(manifest.anchor)}
        cleared = [doubts.clear(manifest) for manifest in manifests]
        try:
            return plan(cleared, target.version, have=at_hand, on_disk=on_disk, anchors=anchors)
        except ObjectMissingError:
            oldest = manifests[-1]
            further = min(oldest.anchor.version, oldest.version - 1)
            if oldest.parent is None or further < target.anchor.version - MAX_WALK:
                raise
            manifests += walk(store, document, oldest, further, known)[1:]


def rebuild(
    way: Plan,
    layout: Layout,
    run: str,
    fetch: Fetch,
    *,
    place: Place | None = None,
    into: WeightState | None = None,
) -> WeightState:
    """The weights at the end of a plan that starts from an anchor; digests of all arrays are checked at its start and end.

    place: where the files of the anchor's parts are, which are then read straight into the arrays, several at once.
    into: weights that are overwritten in place; without it, new ones. They are worth nothing if this raises.
    """
    if way.anchor is None:
        raise WrongBaseError("a plan without an anchor starts from weights at hand")
    state = into or WeightState.empty(layout)
    index = decode_index(fetch(way.anchor.index_key, way.anchor.index_sha256, MAX_INDEX_BYTES), layout, way.anchor.index_key)
    if index.run != run or index.version != way.anchor.version or index.state_id != way.anchor.state_id:
        raise WrongBaseError(f"{way.anchor.index_key} is the index of version {index.version} of run {index.run}")
    if sum(part.num_bytes for part in index.parts) > way.anchor.num_bytes:
        raise FormatError(f"{way.anchor.index_key} names more bytes than its manifest promises")
    if place is None:
        for part in index.parts:
            decode_anchor_part(fetch(part.key, part.sha256, part.num_bytes), part, state)
        digests = state.tensor_digests()
    else:
        digests = _read_parts(index.parts, place, state)
    state.accept(digests, way.anchor.state_id, f"anchor of version {way.anchor.version}")
    for hop in way.hops:
        state.apply_segments(read_hop(hop, layout, run, fetch(hop.ref.key, hop.ref.sha256, hop.ref.num_bytes)))
    if way.hops:
        state.verify(way.hops[-1].state_id, f"version {way.hops[-1].version} from anchor {way.anchor.version}")
    return state


def _read_parts(parts: Sequence[AnchorPart], place: Place, state: WeightState) -> dict[str, str]:
    """Read an anchor's parts into `state`, each as soon as its file is there; returns the digests of all arrays."""
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="anchor") as pool:
        reading = [pool.submit(read_anchor_part, place(part.key, part.sha256, part.num_bytes), part, state) for part in parts]
        for done in reading:
            digests |= done.result()
    return digests


def read_hop(hop: Hop, layout: Layout, run: str, data: bytes) -> Iterator[Change]:
    """The change in the checked bytes of one delta or roll-up, segment by segment."""
    ref = hop.ref
    if ref.codec not in (PCO, NIBBLE):
        raise FormatError(f"{ref.key}: this program knows no codec {ref.codec!r}", hint="install a newer version")
    codec: Codec = PCO if ref.codec == PCO else NIBBLE
    header = DeltaHeader(run, ref.base, hop.version, ref.base_state_id, hop.state_id, layout.layout_id, codec)
    return read_delta(data, header, counts_in(ref), layout)
