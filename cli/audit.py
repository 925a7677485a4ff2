"""Checks that nothing was counted twice: the lineage of steps and the chain of versions of one run, from its records.

Pure: the rows come from signed manifests and create-only step objects; no server is asked.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cli.report.record import RunRecord, StepRow, VersionRow


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
