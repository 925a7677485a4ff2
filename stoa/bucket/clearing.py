"""One pass of retention over a run: list, read what HEAD leads to, judge, announce, and delete what was announced long ago.

The order is the safety: the listing comes before HEAD is read, so nothing written meanwhile can be judged; the notice
of what is unneeded comes before any deletion, and only what stood in notices without a break for the grace goes. A
reader that finds an object gone reads HEAD again and plans anew.

A notice is canonical JSON of `Notice`, create-only; each pass replaces the ones before it. The judging is `retention.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ConfigDict, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.head import Head, read_head
from stoa.bucket.manifest import Manifest, canonical, parse_canonical, read_manifest, validate
from stoa.bucket.retention import TOO_LARGE, History, Judged, Lease, Policy, Verdict, due, judge
from stoa.bucket.run_document import RunDocument
from stoa.bucket.steps import lineage, read_drop_notes
from stoa.bucket.store import Store
from stoa.contracts.errors import FormatError, ObjectMissingError

NOTICE_FORMAT: Final = "stoa-retention-1"
MAX_NOTICE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Notice:
    """Objects that will be deleted, and since when that is known (Unix seconds)."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: str
    run: str
    since: dict[str, int]


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass found. `due` was deleted, unless it was a dry run; the rest of what is unneeded waits for its grace."""

    version: int
    verdict: Verdict
    due: tuple[Judged, ...]


_NOTICE = TypeAdapter(Notice)


def policy_of(document: RunDocument, *, grace_seconds: float | None = None) -> Policy:
    """The policy of a run's settings; `grace_seconds`: another grace than theirs."""
    config, kept = document.config, document.config.retention
    return Policy(
        num_anchors=kept.anchors,
        num_checkpoints=config.publish.keep_checkpoints,
        staleness_versions=config.learning.max_staleness_hard,
        extra_group_versions=kept.group_versions,
        grace_seconds=3600 * kept.grace_hours if grace_seconds is None else grace_seconds,
    )


def clear(store: Store, document: RunDocument, leases: Sequence[Lease], policy: Policy, *, now: float, dry_run: bool = False) -> Pass:
    """Do one pass. `now` is Unix seconds. Raises ObjectMissingError before the first acquire; ObjectExistsError if
    another pass runs in the same second.
    """
    run = document.run
    objects = tuple(store.list(keys.root(run)))
    head, _ = read_head(store, run, document.public_key)
    verdict = judge(objects, history_of(store, document, head), leases, policy, now)
    notices = sorted(item.key for item in objects if item.key.startswith(keys.retention_prefix(run)))
    announced = _announced(store, run, notices)
    going = due(verdict, announced, policy, now)
    if not dry_run:
        since = {item.key: int(announced.get(item.key, now)) for item in verdict.unneeded}
        written = ""
        if since or notices:
            written = keys.retention_notice(run, int(now))
            store.create(written, canonical(_NOTICE.dump_python(Notice(NOTICE_FORMAT, run, since), mode="json")))
        # What says that something is whole goes before its parts, so that a pass cut short leaves no false promise.
        store.delete(sorted((item.key for item in going), key=lambda key: (not key.endswith(".json"), key)))
        store.delete(key for key in notices if key != written)
    return Pass(head.version, verdict, going)


def history_of(store: Store, document: RunDocument, head: Head) -> History:
    """Everything HEAD leads to: the chain of versions, the lineage of steps, the drop notes."""
    chain = chain_of(store, document, head)
    settled_at: dict[str, int] = {}
    too_large: set[str] = set()
    step_keys: set[str] = set()
    for step in lineage(store, head):
        step_keys.add(keys.step_manifest(step.run, step.epoch, step.step))
        for key in (*step.consumed, *(drop.key for drop in step.dropped), *(refusal.key for refusal in step.refused)):
            settled_at[key] = step.step
        too_large |= {refusal.key for refusal in step.refused if refusal.reason == TOO_LARGE}
    return History(
        run=document.run,
        epoch=head.epoch,
        version=head.version,
        checkpoint_key=head.checkpoint_key,
        manifest_keys=frozenset(key for key, _ in chain),
        anchors={manifest.anchor: manifest.version for _, manifest in chain},  # the oldest comes last, and stays
        step_keys=step_keys,
        settled_at=settled_at,
        notes=read_drop_notes(store, document.run),
        too_large=too_large,
    )


def chain_of(store: Store, document: RunDocument, head: Head) -> list[tuple[str, Manifest]]:
    """Key and manifest of every version, HEAD's first. Raises FormatError where a manifest is not what its child names."""
    found: list[tuple[str, Manifest]] = []
    key, sha256, version = head.manifest_key, head.manifest_sha256, head.version
    while key:
        manifest = read_manifest(store, document.run, key, sha256, document.public_key)
        if manifest.version != version:
            raise FormatError(f"{key} is of version {manifest.version}, its child names it as {version}")
        found.append((key, manifest))
        parent = manifest.parent
        key, sha256, version = (parent.manifest_key, parent.manifest_sha256, parent.version) if parent else ("", "", -1)
    return found


def _announced(store: Store, run: str, notices: Sequence[str]) -> dict[str, float]:
    """Key -> since when, by the newest notice; a notice that cannot be read announces nothing, and the grace begins anew."""
    if not notices:
        return {}
    try:
        data = store.get(notices[-1], max_bytes=MAX_NOTICE_BYTES).data
        parse_canonical(data, notices[-1])
        notice = validate(_NOTICE, data, notices[-1])
    except (FormatError, ObjectMissingError):
        return {}
    return {} if notice.format != NOTICE_FORMAT or notice.run != run else {key: float(since) for key, since in notice.since.items()}
