"""What a report needs beyond manifests: a few groups, read whole. Some are episodes worth reading, some one publish interval's.

A group that was cleared, or cannot be decoded, is passed over. Nothing here writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from platform import machine, python_version, system
from typing import Final

from cli.report.record import Landing, RunRecord, StepRow, SweepBar, Told
from cli.transcript import EpisodeView, Fate, Reader
from stoa.bucket import keys
from stoa.bucket.run_document import RunDocument
from stoa.bucket.steps import read_step
from stoa.bucket.store import Listed, Store
from stoa.contracts.errors import BucketError, FormatError, UsageError
from stoa.rollouts.records import Group

LAST_STEPS: Final = 6
"""Steps at a run's end whose episodes are compared."""
MOST_GROUPS: Final = 256
"""Groups of an interval that are read at most."""
_PACKAGES: Final = ("stoa", "torch", "megatron-core", "mlx", "mlx-lm", "numpy", "temporalio", "boto3", "pydantic", "tokenizers")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A group that was read, with what became of it."""

    key: str
    group: Group
    fate: Fate


def look_at(store: Store, document: RunDocument, record: RunRecord, interval: int = -1) -> RunRecord:
    """The record with transcripts, the sweeps of one publish interval, and versions of software."""
    reader = Reader(store, document)
    chosen = interval if interval >= 0 else middle_version(record)
    sweeps, engines = sweeps_of(store, document.run, record, chosen, reader)
    return replace(
        record,
        transcripts=transcripts(store, record, reader),
        interval=chosen if sweeps else -1,
        sweeps=sweeps,
        engines=engines,
        software=software(),
    )


def middle_version(record: RunRecord) -> int:
    """A version from the middle of the run that was followed by another; -1 if there is none."""
    followed = [row.version for row in record.versions[:-1]]
    return followed[len(followed) // 2] if followed else -1


def interval_bounds(record: RunRecord, version: int) -> tuple[float, float]:
    """Unix seconds from the publication of a version to that of the next, or to the end of the run; (0, 0) if there is none."""
    published = {row.version: row.published_at for row in record.versions}
    if version not in published:
        return 0.0, 0.0
    return published[version], published.get(version + 1, record.ended_at)


def sweeps_of(
    store: Store, run: str, record: RunRecord, version: int, reader: Reader | None
) -> tuple[tuple[SweepBar, ...], Mapping[str, str]]:
    """Sweeps that brought groups while `version` was the newest, and each host's engine; without a reader only landings are known."""
    start, end = interval_bounds(record, version)
    if end <= start:
        return (), {}
    found: dict[tuple[str, int], list[tuple[Listed, Group | None]]] = {}
    engines: dict[str, str] = {}
    for listed, key in _landed(store, run, version, start, end):
        group = _read(reader, listed.key) if reader is not None else None
        if group is not None:
            engines[group.host] = f"{group.fingerprint.engine}; stoa {group.fingerprint.build}"
        found.setdefault((key.host, key.sweep), []).append((listed, group))
    bars = [_bar(host, sweep, groups) for (host, sweep), groups in sorted(found.items())]
    return tuple(bars), engines


def transcripts(store: Store, record: RunRecord, reader: Reader) -> tuple[Told, ...]:
    """Best and worst episodes of the last steps, the worst of the first, and the one that lost most tokens to the gate."""
    steps = record.steps
    if not steps:
        return ()
    last = [seen for row in steps[-LAST_STEPS:] for seen in _trained_on(store, record.facts.run, row, reader)]
    first = _trained_on(store, record.facts.run, steps[0], reader)
    strict = max(steps, key=lambda row: row.metrics.get("gate_drop_rate", 0.0))
    lossy = _trained_on(store, record.facts.run, strict, reader)
    best, worst = _ranked(last, reader), _ranked(last, reader)[::-1]
    lost = sorted(_ranked(lossy, reader), key=lambda view: -view.num_dropped)
    told = [
        *(Told("Best of the last steps", view) for view in best[:1]),
        *(Told("Worst of the last steps", view) for view in worst[:1]),
        *(Told("Worst of the first step", view) for view in _ranked(first, reader)[-1:]),
        *(Told("Most tokens dropped by the gate", view) for view in lost[:1] if view.num_dropped > 0),
    ]
    # A short run's steps are first and last at once: each episode is told once.
    return tuple({one.episode.id: one for one in reversed(told)}.values())[::-1]


def software() -> Mapping[str, str]:
    """Versions of what the report's machine runs; packages that are not installed are left out."""
    found = {"python": f"{python_version()} on {system()} {machine()}"}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _landed(store: Store, run: str, version: int, start: float, end: float) -> list[tuple[Listed, keys.GroupKey]]:
    """Groups that came while `version` was the newest: of this version, or of one that a Mac still played then."""
    found: list[tuple[Listed, keys.GroupKey]] = []
    for sampled in range(version, max(-1, version - 9), -1):
        for listed in store.list(keys.groups_of_version(run, sampled)):
            for _, key in keys.ours([listed.key], keys.parse_group):
                # The bucket's clock tells whole seconds.
                if start - 1 < listed.modified_at < end:
                    found.append((listed, key))
    return found[:MOST_GROUPS]


def _bar(host: str, sweep: int, groups: Sequence[tuple[Listed, Group | None]]) -> SweepBar:
    landings: list[Landing] = []
    started, pull, version = 0.0, 0.0, -1
    for listed, group in groups:
        finished = listed.modified_at
        if group is not None:
            started, pull = group.timings.sweep_started_at, group.timings.pull_latency_seconds
            finished = started + group.timings.decode_seconds
        version = keys.parse_group(listed.key).version
        landings.append(Landing(finished, max(finished, listed.modified_at), listed.num_bytes))
    return SweepBar(host, sweep, version, started, pull, tuple(sorted(landings, key=lambda one: one.finished_at)))


def _trained_on(store: Store, run: str, row: StepRow, reader: Reader) -> list[_Seen]:
    """The groups of a step of which it is kept what the gate dropped; of an older run its first group."""
    found: list[_Seen] = []
    try:
        gated = read_step(store, run, row.key).gated
    except BucketError:
        gated = {}
    for key in row.gated or row.consumed[:1]:
        if (group := _read(reader, key)) is not None:
            found.append(_Seen(key, group, Fate(row.step, "trained on", gated.get(key))))
    return found


def _read(reader: Reader, key: str) -> Group | None:
    try:
        return reader.group(key)
    except (UsageError, FormatError):
        return None


def _ranked(seen: Sequence[_Seen], reader: Reader) -> list[EpisodeView]:
    """Episodes, the best first: by reward, then by how much of it was right, then the shorter one."""

    def all_of() -> Iterator[EpisodeView]:
        for one in seen:
            yield from (reader.view(one.key, one.group, number, one.fate) for number in range(len(one.group.episodes)))

    return sorted(all_of(), key=lambda view: (-view.reward, -view.reward_parts.get("cover", 0.0), view.num_sampled, view.id))
