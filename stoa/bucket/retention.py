"""What a run still needs of its bucket, and what may go. Pure: a listing and what HEAD leads to in, a verdict out.

Nothing is asked and nothing deleted here (`clearing.py` does both). What is not needed now may be in use by a reader
that planned a moment ago, so an object goes only after it was announced as unneeded and stayed so for the grace. What
this program did not write is never judged unneeded.

Needed, by kind:
    run.json, HEAD.json, model      always
    manifests     all in the chain of HEAD (the audit walks it), and those HEAD may still come to name
    anchors       the newest complete ones, those that lead to the staleness window or to a lease, and one being uploaded
    deltas        all that lead on from the oldest needed anchor, named by a manifest already or not
    steps         all in the lineage of HEAD (what was trained on), and all of the lease that is on
    oversized     what an invited Mac wrote under groups or evals and is larger than any such object: nobody reads it, it goes at once,
                  and so does what comes later under the key of a group that was refused as too large
    groups        those not settled by a step that every kept checkpoint is past, and those still in the staleness window
    grants        the newest of each host, and those of groups that are there
    drops         those that name a group in the window, and all of the lease that is on
    checkpoints   the one HEAD names, the newest complete ones, and those being written
    evals         always: the results, and what they were marked from
    retention     the announcements themselves; `clearing.py` replaces them
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stoa.bucket import keys
from stoa.bucket.manifest import AnchorRef
from stoa.bucket.store import Listed, kind_of
from stoa.contracts.errors import FormatError

TOO_LARGE: Final = "too_large"
"""Reason of a group that a step refused by its size, as in `stoa.rollouts.admit`."""
ALWAYS: Final = frozenset({"run.json", "HEAD.json", "model", "evals", "retention"})
CHECKPOINT_MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Policy:
    """How much is kept beyond what is needed at this moment."""

    num_anchors: int = 2
    num_checkpoints: int = 2
    num_grants_a_host: int = 16
    staleness_versions: int = 8
    """A group of an older version than HEAD's less this is never trained on."""
    extra_group_versions: int = 8
    """Settled groups are kept for so many versions more, for people who look."""
    grace_seconds: float = 86_400.0
    """How long an object must have been announced before it goes."""
    most_group_bytes: int = 64 * 1024 * 1024
    """Of a group or a part of an evaluation: what is larger is refused by its size and read by nobody. A ticket cannot bound it."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader whose way to the newest version starts at version `base`: weights at hand, or an anchor. Ends at `until` (Unix seconds)."""

    reader: str
    base: int
    until: float


@dataclass(frozen=True, slots=True)
class History:
    """What HEAD leads to."""

    run: str
    epoch: int
    version: int
    checkpoint_key: str
    manifest_keys: Collection[str]
    """Of the whole chain."""
    anchors: Mapping[AnchorRef, int]
    """Named in the chain -> the first version whose manifest names it: readers of older versions do not know it."""
    step_keys: Collection[str]
    """Of the whole lineage."""
    settled_at: Mapping[str, int]
    """Group -> step that consumed, dropped or refused it."""
    notes: Mapping[str, Sequence[str]]
    """Drop note -> its groups."""
    too_large: Collection[str] = frozenset()
    """Groups that a step refused by their size alone."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One object and why it is needed, or why not."""

    key: str
    num_bytes: int
    reason: str
    at_once: bool = False
    """Nobody reads it, so no reader is waited for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is needed and what is not, in key order. `floor`: the oldest version that a way may start from."""

    needed: tuple[Judged, ...]
    unneeded: tuple[Judged, ...]
    floor: int


def judge(objects: Sequence[Listed], history: History, leases: Sequence[Lease], policy: Policy, now: float) -> Verdict:
    """Judge every object of a run.

    Args:
        objects: a listing of the run's prefix, taken *before* HEAD was read: what came later is not in it.
        leases: readers that said where their way starts; those that have ended are passed over.
        now: Unix seconds.
    """
    floor, anchors = _needed_anchors(objects, history, [lease for lease in leases if lease.until > now], policy)
    window = history.version - policy.staleness_versions
    checkpoints, oldest_step = _needed_checkpoints(objects, history, policy)
    groups = [named for _, named in keys.ours((item.key for item in objects), keys.parse_group)]
    facts = _Facts(
        history,
        policy,
        floor,
        anchors,
        window,
        checkpoints,
        oldest_step,
        {(g.host, g.sweep) for g in groups},
        _newest_grants(objects, policy),
    )
    needed: list[Judged] = []
    unneeded: list[Judged] = []
    for item in sorted(objects, key=lambda item: item.key):
        if unread := _why_unread(item, history, policy):
            unneeded.append(Judged(item.key, item.num_bytes, unread, at_once=True))
            continue
        try:
            why = _why_needed(item.key, facts)
        except FormatError:
            why = "not written by this program"
        (needed if why else unneeded).append(Judged(item.key, item.num_bytes, why or _WHY_NOT[kind_of(item.key)]))
    return Verdict(tuple(needed), tuple(unneeded), floor)


def due(verdict: Verdict, announced: Mapping[str, float], policy: Policy, now: float) -> tuple[Judged, ...]:
    """What may be deleted: unneeded, and announced as such, without a break, for the grace. announced: key -> Unix seconds.

    What nobody reads has no reader to wait for.
    """

    def may_go(item: Judged) -> bool:
        return item.at_once or (item.key in announced and now - announced[item.key] >= policy.grace_seconds)

    return tuple(item for item in verdict.unneeded if may_go(item))


def _why_unread(item: Listed, history: History, policy: Policy) -> str:
    """Why nobody ever reads an object; "" if somebody may. A ticket may create again what was cleared."""
    if item.num_bytes > policy.most_group_bytes and kind_of(item.key) in ("groups", "evals"):
        return f"larger than {policy.most_group_bytes} bytes"
    return "its key was refused before as too large" if item.key in history.too_large else ""


_WHY_NOT: Final = {
    "manifests": "not in the chain of HEAD",
    "anchors": "older than every way that is kept, or never announced",
    "deltas": "leads to a version older than every way that is kept",
    "steps": "of a lease that ended, not in the lineage of HEAD",
    "groups": "settled, and older than the staleness window",
    "grants": "played, and its groups are gone",
    "drops": "of groups older than the staleness window",
    "checkpoints": "older than those that are kept, or never finished",
}


@dataclass(frozen=True, slots=True)
class _Facts:
    history: History
    policy: Policy
    floor: int
    anchors: Collection[int]
    window: int
    checkpoints: Collection[tuple[int, int]]
    oldest_step: int
    sweeps: Collection[tuple[str, int]]
    newest_grants: Collection[str]


def _why_needed(key: str, facts: _Facts) -> str:
    """Why an object is needed; "" if it is not. Raises FormatError for a key that is none of ours."""
    history, kind = facts.history, kind_of(key)
    if kind in ALWAYS:
        return "always"
    match kind:
        case "manifests":
            return _one_of((key in history.manifest_keys, "chain of HEAD"), (keys.parse_manifest(key).version > history.version, "to come"))
        case "anchors":
            return _one_of((keys.parse_anchor(key).version in facts.anchors, "a way starts there"))
        case "deltas":
            return _one_of((keys.parse_delta(key).version > facts.floor, f"leads on from version {facts.floor}"))
        case "steps":
            return _one_of((key in history.step_keys, "lineage of HEAD"), (keys.parse_step(key).epoch >= history.epoch, "lease that is on"))
        case "groups":
            named, step = keys.parse_group(key), history.settled_at.get(key)
            return _one_of(
                (step is None, "not settled"),
                (step is not None and step > facts.oldest_step, "free again if the run goes back to a checkpoint"),
                (named.version >= facts.window - facts.policy.extra_group_versions, "recent"),
            )
        case "grants":
            named = keys.parse_grant(key)
            return _one_of((key in facts.newest_grants, "recent"), ((named.host, named.sweep) in facts.sweeps, "its groups are there"))
        case "drops":
            epoch, groups = keys.parse_drop_note(key), history.notes.get(key)
            recent = groups is None or any(keys.parse_group(group).version >= facts.window for group in groups)
            return _one_of((epoch >= history.epoch, "lease that is on"), (recent, "names groups in the window"))
        case "checkpoints":
            named = keys.parse_checkpoint(key)
            return _one_of(((named.epoch, named.step) in facts.checkpoints, "a run may go on from it"))
        case _:
            raise FormatError(f"{key!r} is of no kind this program writes")


def _one_of(*reasons: tuple[bool, str]) -> str:
    return next((why for holds, why in reasons if holds), "")


def _needed_anchors(objects: Sequence[Listed], history: History, leases: Sequence[Lease], policy: Policy) -> tuple[int, Collection[int]]:
    """The oldest version a way may start from, and the versions of the anchors that are needed."""
    sizes: dict[int, int] = {}
    listed = {item.key for item in objects}
    for item in objects:
        for _, named in keys.ours((item.key,), keys.parse_anchor):
            sizes[named.version] = sizes.get(named.version, 0) + item.num_bytes
    named = {ref.version: ref for ref in history.anchors}
    complete = sorted(v for v, ref in named.items() if ref.index_key in listed and sizes.get(v, 0) >= ref.num_bytes)
    kept = set(complete[-policy.num_anchors :])
    floor = min(kept, default=0)
    # Any version in the staleness window may still be asked for: by a sweep that is redone, by an evaluation.
    for base in (max(0, history.version - policy.staleness_versions), *(lease.base for lease in leases)):
        before = [version for version in complete if history.anchors[named[version]] <= base]
        kept |= set(before[-1:])
        floor = min(floor, before[-1] if before else base)
    announced = max(named, default=-1)
    return floor, kept | {version for version in sizes if version > announced}


def _needed_checkpoints(objects: Sequence[Listed], history: History, policy: Policy) -> tuple[Collection[tuple[int, int]], int]:
    """(epoch, step) of the checkpoints that are needed, and the step of the oldest a run may go on from (0: none)."""
    found = list(keys.ours((item.key for item in objects), keys.parse_checkpoint))
    places = {(named.epoch, named.step) for _, named in found}
    complete = sorted((named.epoch, named.step) for _, named in found if named.name == CHECKPOINT_MANIFEST and named.epoch <= history.epoch)
    usable = set(complete[-policy.num_checkpoints :])
    usable |= {(named.epoch, named.step) for key, named in found if key == history.checkpoint_key}
    newest = max(usable, default=(history.epoch, 0))
    coming = {place for place in places if place[0] >= history.epoch and place > newest}
    return usable | coming, min((step for _, step in usable), default=0)


def _newest_grants(objects: Sequence[Listed], policy: Policy) -> Collection[str]:
    """The newest grants of every host."""
    by_host: dict[str, list[tuple[int, str]]] = {}
    for key, named in keys.ours((item.key for item in objects), keys.parse_grant):
        by_host.setdefault(named.host, []).append((named.sweep, key))
    return {key for grants in by_host.values() for _, key in sorted(grants)[-policy.num_grants_a_host :]}
