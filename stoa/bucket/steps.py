"""Step manifests: what every optimizer step consumed, dropped and measured, each naming the one before it.

The lineage of HEAD is the truth about which groups were trained on: a step whose manifest it does not hold never
happened, and its groups are free again. Drop notes tell the admission ledger early of groups that will not be trained
on, so that a trainer which finds no usable group does not wait for room that only its next step would make.

Layout: canonical JSON (UTF-8, sorted keys, no spaces) of `StepManifest` or `DropNote`, create-only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter

from stoa.bucket import keys
from stoa.bucket.head import Head
from stoa.bucket.manifest import canonical, parse_canonical, validate
from stoa.bucket.store import Store
from stoa.contracts.errors import BucketError, FormatError, NonFiniteError

STEP_FORMAT: Final = "stoa-step-1"
NOTE_FORMAT: Final = "stoa-drops-1"
MAX_STEP_BYTES: Final = 8 << 20
_STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0.0)]


class Dropped(NamedTuple):
    """A group that was admitted and not trained on."""

    key: str
    reason: str


class Refused(NamedTuple):
    """A group that was not admitted."""

    key: str
    host: str
    reason: str


class GroupMismatch(NamedTuple):
    """How far the sampler's numbers of one group were from the trainer's, over its sampled tokens and before the step."""

    mean: float
    """Of |pi - mu|."""
    k3: float
    """Mean of pi / mu - 1 - ln(pi / mu)."""
    p99: float
    """99th percentile of |pi - mu|."""
    far_share: float
    """Share of tokens with |ln(pi / mu)| above 0.2."""
    ratio_mean: float
    """Mean of pi / mu: 1 in expectation for an honest sampler, however far the policy has moved."""
    likeliness: float = 0.0
    """Mean of ln pi plus the entropy of pi: about 0 for tokens that were drawn from pi, above it where likely ones were preferred."""


class Canary(NamedTuple):
    """A group that was admitted, compared with `version` newest, and not trained on because its host is on trial."""

    key: str
    version: int
    distance: int
    mismatch: GroupMismatch


@dataclass(frozen=True, slots=True)
class HostCounts:
    """What one host sent since the step before, and how far its numbers were from the trainer's."""

    __pydantic_config__ = _STRICT

    accepted: _Count = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Reason -> groups."""
    quarantined: bool = False
    num_sampled_tokens: _Count = 0
    decode_seconds: float = 0.0
    pull_latency_seconds: float = 0.0
    idle_seconds: float = 0.0
    mismatch_mean: float = 0.0
    """Mean |pi - mu| over the tokens of this host that the step trained on."""
    mismatch_p99: float = 0.0
    """Its 99th percentile."""
    gate_drop_rate: float = 0.0
    """Share of this host's tokens with an advantage that the gate dropped."""
    num_missing_episodes: _Count = 0
    """Episodes that its accepted groups lack: lost to faults that are not the policy's."""
    batch_occupancy: float = 0.0
    """As it says itself, like the two below: episodes that ran over the most that could run at once; 0 for unsaid."""
    prefix_hit_share: float = 0.0
    """Share of prompt tokens that were in its cache already."""
    peak_memory_bytes: _Count = 0
    """Most that its engine has held."""


@dataclass(frozen=True, slots=True)
class StepManifest:
    """One optimizer step. Steps count from 1; `version` was the newest when the step took its groups.

    `dropped`, `refused` and `hosts` cover everything since the step before. `facts` are settings that say what the
    numbers mean, such as gate_mode and anchor_source.
    """

    __pydantic_config__ = _STRICT

    format: str
    run: str
    epoch: _Count
    step: Annotated[int, Field(ge=1)]
    version: _Count
    parent_key: str
    consumed: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    refused: tuple[Refused, ...]
    hosts: dict[str, HostCounts]
    metrics: dict[str, float]
    started_at: float
    """Unix seconds."""
    wait_seconds: _Seconds
    train_seconds: _Seconds
    facts: dict[str, str] = field(default_factory=dict)
    gated: dict[str, tuple[tuple[_Count, ...], ...]] = field(default_factory=dict)
    """Of a few of the consumed groups, each episode's dropped tokens: their places among its sampled tokens, from 0."""
    mismatches: tuple[GroupMismatch, ...] = ()
    """Of each consumed group, in their order."""
    distances: tuple[_Count, ...] = ()
    """Optimizer steps between the weights that each consumed group was played with and those that it met."""
    canaries: tuple[Canary, ...] = ()
    """Groups of hosts on trial that were compared since the step before."""


@dataclass(frozen=True, slots=True)
class DropNote:
    """Groups that will not be trained on, ahead of the step manifest that says so."""

    __pydantic_config__ = _STRICT

    format: str
    run: str
    epoch: _Count
    number: _Count
    dropped: tuple[Dropped, ...]


_STEP: Final = TypeAdapter(StepManifest)
_NOTE: Final = TypeAdapter(DropNote)


def write_step(store: Store, manifest: StepManifest) -> str:
    """Write the manifest of a step, create-only; returns its key.

    Raises:
        NonFiniteError: a metric is NaN or infinite: leave out what was not measured.
        FormatError: a group is in it twice, or is no group of this run; or a field is none that `read_step` takes.
        ObjectExistsError: this lease has another manifest of this step already.
    """
    for name, value in manifest.metrics.items():
        if not math.isfinite(value):
            raise NonFiniteError(f"step {manifest.step}: metric {name} is {value}", hint="leave out what was not measured")
    key = keys.step_manifest(manifest.run, manifest.epoch, manifest.step)
    _check(manifest, key)
    data = canonical(_STEP.dump_python(manifest, mode="json"))
    validate(_STEP, data, key)  # nobody could follow the run beyond a step that cannot be read
    store.create(key, data)
    return key


def read_step(store: Store, run: str, key: str) -> StepManifest:
    """The manifest under `key`. Raises FormatError if it is torn, or of another run, lease or step than its key says."""
    data = store.get(key, max_bytes=MAX_STEP_BYTES).data
    parse_canonical(data, key)
    manifest = validate(_STEP, data, key)
    if manifest.run != run:
        raise FormatError(f"{key} is a step of run {manifest.run}, not of run {run}")
    _check(manifest, key)
    return manifest


def lineage(store: Store, head: Head, *, until_key: str = "") -> Iterator[StepManifest]:
    """Manifests of the steps that HEAD's weights went through, newest to oldest.

    until_key: stop before this manifest, whose steps the caller knows already; "" walks back to step 1.

    Raises FormatError where a manifest does not follow its parent: steps fall by one and leases never rise, so the walk ends.
    """
    key, step, epoch = head.step_manifest_key, head.step, head.epoch
    while key != until_key:
        if not key:
            raise FormatError(f"run {head.run}: the lineage ends before it meets {until_key}")
        manifest = read_step(store, head.run, key)
        if manifest.step != step or manifest.epoch > epoch:
            raise FormatError(f"{key} is step {manifest.step} of lease {manifest.epoch}; the one after it needs step {step} of {epoch}")
        yield manifest
        key, step, epoch = manifest.parent_key, manifest.step - 1, manifest.epoch
    if not until_key and step != 0:
        raise FormatError(f"run {head.run}: the lineage ends at step {step + 1}, not at step 1")


def write_drop_note(store: Store, run: str, epoch: int, number: int, dropped: Sequence[Dropped]) -> str:
    """Tell of groups that will not be trained on; `number` counts the notes of a lease. Returns the note's key."""
    note = DropNote(NOTE_FORMAT, run, epoch, number, tuple(dropped))
    key = keys.drop_note(run, epoch, number)
    store.create(key, canonical(_NOTE.dump_python(note, mode="json")))
    return key


def read_drop_notes(store: Store, run: str, *, epoch: int = 0, start_after: str = "") -> dict[str, tuple[str, ...]]:
    """Keys of the groups in the drop notes of a lease, or of all (epoch 0), by the note's key; only of notes after `start_after`.

    A note that cannot be read, or is of another run, tells nothing: step manifests tell the same later.
    """
    listed = store.list(keys.drop_notes_prefix(run, epoch), start_after)
    return {found.key: tuple(drop.key for drop in _read_note(store, run, found.key)) for found in listed}


def read_noted(store: Store, run: str) -> tuple[Dropped, ...]:
    """All groups in the drop notes of all leases, with why they will not be trained on; a note tells nothing as above."""
    return tuple(drop for found in store.list(keys.drop_notes_prefix(run)) for drop in _read_note(store, run, found.key))


def _read_note(store: Store, run: str, key: str) -> tuple[Dropped, ...]:
    try:
        data = store.get(key, max_bytes=MAX_STEP_BYTES).data
        parse_canonical(data, key)
        note = validate(_NOTE, data, key)
    except BucketError:
        return ()
    if note.run != run or keys.drop_note(run, note.epoch, note.number) != key:
        return ()
    ours = {group for group, _ in keys.ours((drop.key for drop in note.dropped), keys.parse_group)}
    return tuple(drop for drop in note.dropped if drop.key in ours)


def _check(manifest: StepManifest, key: str) -> None:
    if manifest.format != STEP_FORMAT:
        raise FormatError(f"{key} is a {manifest.format}, not a {STEP_FORMAT}")
    if keys.step_manifest(manifest.run, manifest.epoch, manifest.step) != key:
        raise FormatError(f"{key} holds step {manifest.step} of lease {manifest.epoch}")
    if manifest.parent_key and keys.parse_step(manifest.parent_key).run != manifest.run:
        raise FormatError(f"{key} follows a step of another run: {manifest.parent_key}")
    settled = [*manifest.consumed, *(drop.key for drop in manifest.dropped)]
    if len(set(settled)) != len(settled):
        raise FormatError(f"{key} names a group twice")
    if foreign := manifest.gated.keys() - set(manifest.consumed):
        raise FormatError(f"{key} tells of dropped tokens of {min(foreign)}, which it did not train on")
    for group in settled:
        if keys.parse_group(group).run != manifest.run:
            raise FormatError(f"{key} names a group of another run: {group}")
