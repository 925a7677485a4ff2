"""The cheapest way from the weights a machine has to a version it wants. Pure: no I/O, no arrays.

Ways are anchors, deltas (one version on) and roll-ups (several on); all are in the manifests from the wanted version
back to the oldest one looked at. Costs are bytes to download; what is on disk already costs nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stoa.bucket.manifest import AnchorRef, DeltaRef, Manifest
from stoa.contracts.errors import ObjectMissingError


@dataclass(frozen=True, slots=True)
class Hop:
    """One delta or roll-up on the way, to `version` with `state_id`."""

    ref: DeltaRef
    version: int
    state_id: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Start from `anchor` (None: from the weights at hand, version `base`), then take the hops in order."""

    anchor: AnchorRef | None
    base: int
    hops: tuple[Hop, ...]
    num_bytes: int
    """Bytes to download."""


def plan(
    manifests: Sequence[Manifest],
    target: int,
    *,
    have: Mapping[int, str] | None = None,
    on_disk: Collection[str] = (),
    anchors: Collection[int] | None = None,
) -> Plan:
    """The plan with the fewest bytes to download, then the fewest hops, then the newest start.

    Weights at hand win over any anchor as long as the way from them downloads no more than a whole anchor: updating in
    place needs no second copy in memory.

    Args:
        manifests: of the target and of versions before it, any order.
        target: the wanted version.
        have: version -> state_id of weights at hand.
        on_disk: keys of deltas and of indexes of whole anchors whose bytes are here already.
        anchors: versions of the anchors that may be started from; None for all that the manifests name.

    Raises:
        ObjectMissingError: no way leads to the target.
    """
    by_version = {manifest.version: manifest for manifest in manifests if manifest.version <= target}
    if target not in by_version:
        raise ObjectMissingError(f"no manifest of version {target}")
    at_hand = [
        Plan(None, version, (), 0)
        for version, state_id in (have or {}).items()
        if version in by_version and by_version[version].state_id == state_id
    ]
    at_anchors = [
        Plan(anchor, anchor.version, (), 0 if anchor.index_key in on_disk else anchor.num_bytes)
        for anchor in {manifest.anchor for manifest in by_version.values()}
        if anchor.version in by_version and by_version[anchor.version].state_id == anchor.state_id
        if anchors is None or anchor.version in anchors
    ]
    from_hand = _cheapest(by_version, at_hand, on_disk).get(target)
    if from_hand is not None and from_hand.num_bytes <= by_version[target].anchor.num_bytes:
        return from_hand
    found = _cheapest(by_version, at_anchors, on_disk).get(target, from_hand)
    if found is None:
        raise ObjectMissingError(f"no anchor or chain of deltas leads to version {target}", hint="look further back in the manifests")
    return found


def _cheapest(by_version: Mapping[int, Manifest], starts: Sequence[Plan], on_disk: Collection[str]) -> Mapping[int, Plan]:
    """The best plan to every version that can be reached from `starts`. Hops only go forward, so one pass is enough."""
    best: dict[int, Plan] = {}

    def offer(version: int, found: Plan) -> None:
        known = best.get(version)
        if known is None or _rank(found) < _rank(known):
            best[version] = found

    for start in starts:
        offer(start.base, start)
    hops = _hops(by_version)
    for version in sorted(by_version):
        for hop in hops.get(version, ()):
            before = best.get(hop.ref.base)
            if before is not None and by_version[hop.ref.base].state_id == hop.ref.base_state_id:
                num_bytes = before.num_bytes + (0 if hop.ref.key in on_disk else hop.ref.num_bytes)
                offer(version, Plan(before.anchor, before.base, (*before.hops, hop), num_bytes))
    return best


def _hops(by_version: Mapping[int, Manifest]) -> Mapping[int, list[Hop]]:
    """All deltas and roll-ups by the version they lead to. Roll-ups stand in the manifest of that version or of a later one."""
    hops: dict[int, list[Hop]] = {}
    for manifest in by_version.values():
        for ref in (*manifest.rollups, *((manifest.delta,) if manifest.delta else ())):
            version, state_id = (manifest.version, manifest.state_id) if ref.version < 0 else (ref.version, ref.state_id)
            end = by_version.get(version)
            if end is not None and end.state_id == state_id:
                hops.setdefault(version, []).append(Hop(ref, version, state_id))
    return hops


def _rank(found: Plan) -> tuple[int, int, int]:
    return found.num_bytes, len(found.hops), -found.base
