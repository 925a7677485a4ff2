"""Checks that nothing was counted twice or lost: the lineage of steps, the chain of versions and the groups of one run.

Pure: the rows come from signed manifests, create-only step objects and a listing of the bucket; no server is asked.
`audit` needs a run's record only; what became of uploads, and whether a fenced trainer was ever obeyed, needs somebody
who watched HEAD and listed the groups.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cli.report.record import RunRecord, StepRow, VersionRow
from stoa.bucket import keys


@dataclass(frozen=True, slots=True)
class Audit:
    """What the checks found; `faults` is empty when all is well."""

    num_steps: int
    num_versions: int
    groups_trained_twice: int
    versions_published_twice: int
    lineage_contiguous: bool
    chain_whole: bool
    faults: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """True if nothing was found."""
        return not self.faults


@dataclass(frozen=True, slots=True)
class Arrived:
    """A group in the bucket, and when it came: the bucket's clock, Unix seconds."""

    key: str
    at: float


@dataclass(frozen=True, slots=True)
class HeadSeen:
    """HEAD as somebody read it at a time (Unix seconds)."""

    at: float
    seq: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Uploads:
    """What became of the groups that arrived: keys, each in one of these, or trained on or dropped with a reason."""

    lost: tuple[str, ...]
    """Passed over: the trainer took younger ones, or they grew too old, and no step or note says why."""
    refused: tuple[str, ...]
    """Refused though honest: for another reason than that their slot's group had come already."""
    too_late: tuple[str, ...]
    """Came when their version was beyond the hard bound of staleness already."""
    waiting: tuple[str, ...]
    """Might still be trained on."""


def uploads(
    record: RunRecord, arrived: Sequence[Arrived], *, max_staleness_hard: int, noted: Collection[str] = (), grace_seconds: float = 30.0
) -> Uploads:
    """What became of every group in the bucket, by the lineage of HEAD and the drop notes (`noted`).

    grace_seconds: a step that began so soon after a group came need not have known it.
    """
    gone: set[str] = {*noted}
    refused: list[str] = []
    for row in record.steps:
        gone |= {*row.consumed, *row.dropped, *(key for key, _, _ in row.refused)}
        refused += [key for key, _, reason in row.refused if reason != "slot_taken"]
    lost: list[str] = []
    too_late: list[str] = []
    waiting: list[str] = []
    for group in sorted((one for one in arrived if one.key not in gone), key=lambda one: one.key):
        version = keys.parse_group(group.key).version
        if _version_at(record.versions, group.at) - version > max_staleness_hard:
            too_late.append(group.key)
        elif record.version - version > max_staleness_hard or _overtaken(record.steps, version, group.at + grace_seconds):
            lost.append(group.key)
        else:
            waiting.append(group.key)
    return Uploads(tuple(lost), tuple(refused), tuple(too_late), tuple(waiting))


def _version_at(versions: Sequence[VersionRow], at: float) -> int:
    return max((row.version for row in versions if row.published_at <= at), default=0)


def _overtaken(steps: Sequence[StepRow], version: int, since: float) -> bool:
    """True if a step that began after `since` trained on a younger version: groups are taken oldest version first."""
    return any(row.started_at > since and any(keys.parse_group(key).version > version for key in row.consumed) for row in steps)


def zombie_writes(record: RunRecord, heads: Sequence[HeadSeen]) -> tuple[str, ...]:
    """Writes of a trainer that had been fenced and were obeyed all the same.

    heads: HEAD as it was read on the way, in any order.
    """
    faults: list[str] = []
    ordered = sorted(heads, key=lambda head: head.seq)
    for before, head in pairwise(ordered):
        if head.epoch < before.epoch:
            faults.append(f"HEAD number {head.seq} is of lease {head.epoch}, after lease {before.epoch}")
    taken_at: dict[int, float] = {}
    for head in ordered:
        taken_at[head.epoch] = min(head.at, taken_at.get(head.epoch, head.at))
    for row in record.versions:
        late = [epoch for epoch, at in taken_at.items() if epoch > row.epoch and at < row.published_at]
        if late:
            faults.append(f"version {row.version} of lease {row.epoch} was made after lease {min(late)} had the run")
    for before, row in pairwise(record.versions):
        if row.epoch < before.epoch:
            faults.append(f"version {row.version} is of lease {row.epoch}, after lease {before.epoch}")
    for before, row in pairwise(record.steps):
        if row.epoch < before.epoch:
            faults.append(f"step {row.step} is of lease {row.epoch}, after lease {before.epoch}")
    return tuple(faults)


def audit(record: RunRecord) -> Audit:
    """Check the lineage of HEAD: steps 1, 2, 3 ... each naming the one before; no group in two steps; versions 0, 1, 2
    ... each naming the one before, its bytes and its state; no version twice.
    """
    lineage = lineage_faults(record.steps)
    groups = twice(record.steps)
    chain = chain_faults(record.versions)
    doubled = published_twice(record)
    head = _head_faults(record)
    faults = (
        *lineage,
        *(f"group {key} was trained on in steps {', '.join(map(str, steps))}" for key, steps in groups.items()),
        *chain,
        *(f"version {version} was published twice" for version in doubled),
        *head,
    )
    return Audit(
        num_steps=len(record.steps),
        num_versions=len(record.versions),
        groups_trained_twice=len(groups),
        versions_published_twice=len(doubled),
        lineage_contiguous=not lineage,
        chain_whole=not chain,
        faults=faults,
    )


def twice(steps: Sequence[StepRow]) -> dict[str, tuple[int, ...]]:
    """Group key -> steps, of groups that more than one step consumed, or one step twice."""
    seen: dict[str, list[int]] = {}
    for row in steps:
        for key in row.consumed:
            seen.setdefault(key, []).append(row.step)
    return {key: tuple(found) for key, found in seen.items() if len(found) > 1}


def published_twice(record: RunRecord) -> tuple[int, ...]:
    """Versions that two manifests were published under: in the chain of HEAD, or in any HEAD that was read on the way."""
    named = {(row.version, row.sha256) for row in record.versions} | set(record.heads_seen)
    counts = Counter(version for version, _ in named)
    repeated = Counter(row.version for row in record.versions)
    return tuple(sorted(version for version in counts if version >= 0 and max(counts[version], repeated[version]) > 1))


def lineage_faults(steps: Sequence[StepRow]) -> tuple[str, ...]:
    """What breaks the row of steps, oldest first: a gap, a step that does not name the one before, epochs that fall."""
    faults: list[str] = []
    if steps and steps[0].step != 1:
        faults.append(f"the lineage begins at step {steps[0].step}, not at 1")
    for before, row in pairwise(steps):
        if row.step != before.step + 1:
            faults.append(f"step {row.step} follows step {before.step}")
        if row.parent_key != before.key:
            faults.append(f"step {row.step} names {row.parent_key or 'nothing'} as its parent, not {before.key}")
        if row.epoch < before.epoch:
            faults.append(f"step {row.step} is of lease {row.epoch}, after lease {before.epoch}")
    return tuple(faults)


def chain_faults(versions: Sequence[VersionRow]) -> tuple[str, ...]:
    """What breaks the chain of versions, oldest first: a gap, another parent, another state, no anchor to begin from."""
    faults: list[str] = []
    if versions and versions[0].version != 0:
        faults.append(f"the chain begins at version {versions[0].version}, not at 0")
    if versions and versions[0].anchor_version != versions[0].version:
        faults.append(f"version {versions[0].version} has no anchor, and no version before it")
    for before, row in pairwise(versions):
        if row.version != before.version + 1 or row.parent_version != before.version:
            faults.append(f"version {row.version} (parent {row.parent_version}) follows version {before.version}")
        elif row.parent_sha256 != before.sha256:
            faults.append(f"version {row.version} was made from another manifest of version {before.version}")
        elif row.parent_state_id != before.state_id:
            faults.append(f"version {row.version} was made from weights other than version {before.version}'s")
    return tuple(faults)


def _head_faults(record: RunRecord) -> tuple[str, ...]:
    faults: list[str] = []
    if record.versions and record.versions[-1].version != record.version:
        faults.append(f"HEAD names version {record.version}, its chain ends at {record.versions[-1].version}")
    if record.steps and record.steps[-1].step != record.step:
        faults.append(f"HEAD names step {record.step}, its lineage ends at {record.steps[-1].step}")
    return tuple(faults)
