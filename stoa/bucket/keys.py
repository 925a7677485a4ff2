"""Every key in the bucket, built and parsed: the only place where one is spelt.

    runs/<run>/run.json
    runs/<run>/HEAD.json
    runs/<run>/model/<name>-<sha16>
    runs/<run>/manifests/<version:08d>.e<epoch>-<sha16>.json
    runs/<run>/deltas/<from:08d>-<to:08d>-<sha16>.safetensors
    runs/<run>/anchors/<version:08d>/<part:04d>-<sha16>.safetensors
    runs/<run>/anchors/<version:08d>/index-<sha16>.json
    runs/<run>/grants/<host>/<sweep:08d>.json
    runs/<run>/groups/v<version:08d>/<host>/<sweep:08d>/<group:02d>.safetensors.zst
    runs/<run>/steps/e<epoch>/s<step:08d>.json
    runs/<run>/drops/e<epoch>/<number:08d>.json
    runs/<run>/checkpoints/e<epoch>/s<step:08d>/<name>
    runs/<run>/evals/v<version:08d>/<evaluation>/<part:04d>-<host>.safetensors.zst
    runs/<run>/evals/v<version:08d>/<evaluation>/summary.json
    exams/<exam>/exam.json
    exams/<exam>/claims/<part:06d>-<attempt:02d>.json
    exams/<exam>/answers/<part:06d>.safetensors.zst
    probes/<name>
    runs/<run>/retention/<unix seconds:010d>.json
    runs/<run>/revoked/<host | invite>.json
    runs/<run>/probe/<word>

`sha16` is the first 16 hex digits of the sha256 of the object's bytes.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from stoa.contracts.errors import FormatError
from stoa.contracts.ids import is_name

_GROUP = re.compile(r"runs/([a-z0-9-]+)/groups/v(\d{8})/([a-z0-9-]+)/(\d{8})/(\d{2})\.safetensors\.zst")
_STEP = re.compile(r"runs/([a-z0-9-]+)/steps/e(\d+)/s(\d{8})\.json")
_DROPS = re.compile(r"runs/([a-z0-9-]+)/drops/e(\d+)/\d{8}\.json")
_CHECKPOINT = re.compile(r"runs/([a-z0-9-]+)/checkpoints/e(\d+)/s(\d{8})/([a-zA-Z0-9.-]+)")
_MANIFEST = re.compile(r"runs/([a-z0-9-]+)/manifests/(\d{8})\.e(\d+)-[0-9a-f]{16}\.json")
_DELTA = re.compile(r"runs/([a-z0-9-]+)/deltas/(\d{8})-(\d{8})-[0-9a-f]{16}\.safetensors")
_ANCHOR = re.compile(r"runs/([a-z0-9-]+)/anchors/(\d{8})/(?:index-[0-9a-f]{16}\.json|\d{4}-[0-9a-f]{16}\.safetensors)")
_EXAM_CLAIM = re.compile(r"exams/([a-z0-9-]+)/claims/(\d{6})-(\d{2})\.json")
_EXAM_ANSWER = re.compile(r"exams/([a-z0-9-]+)/answers/(\d{6})\.safetensors\.zst")
_GRANT = re.compile(r"runs/([a-z0-9-]+)/grants/([a-z0-9-]+)/(\d{8})\.json")

MAC_READS = tuple(f"runs/*/{what}" for what in ("run.json", "HEAD.json", "model/*", "manifests/*", "deltas/*", "anchors/*"))
"""What an invited Mac reads, as patterns of keys: all that its key for the bucket needs to allow."""

_Parts = TypeVar("_Parts")


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The parts of a group's key."""

    run: str
    version: int
    host: str
    sweep: int
    group: int


@dataclass(frozen=True, slots=True)
class StepKey:
    """The parts of a step manifest's key."""

    run: str
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """The parts of the key of one object of a checkpoint."""

    run: str
    epoch: int
    step: int
    name: str


@dataclass(frozen=True, slots=True)
class GrantKey:
    """The parts of a grant's key."""

    run: str
    host: str
    sweep: int


@dataclass(frozen=True, slots=True)
class DeltaKey:
    """The parts of the key of a delta or roll-up."""

    run: str
    base: int
    version: int


@dataclass(frozen=True, slots=True)
class VersionKey:
    """The parts of the key of a manifest, or of one object of an anchor (which says no epoch)."""

    run: str
    version: int
    epoch: int = 0


def root(run: str) -> str:
    """Prefix of all objects of a run. Raises FormatError if `run` is not a name."""
    if not is_name(run):
        raise FormatError(f"run name {run!r} is not lower case letters, digits and dashes (1 to 48)")
    return f"runs/{run}/"


def run_json(run: str) -> str:
    """Create-only description of a run."""
    return f"{root(run)}run.json"


def head(run: str) -> str:
    """The one mutable object of a run."""
    return f"{root(run)}HEAD.json"


def model_file(run: str, name: str, sha256: str) -> str:
    """A file of the base checkpoint a Mac needs: config.json, tokenizer.json, chat template."""
    return f"{root(run)}model/{name}-{sha256[:16]}"


def manifest(run: str, version: int, epoch: int, sha256: str) -> str:
    """Signed manifest of a version."""
    return f"{root(run)}manifests/{version:08d}.e{epoch}-{sha256[:16]}.json"


def delta(run: str, base: int, version: int, sha256: str) -> str:
    """Delta (base = version - 1) or roll-up from `base` to `version`."""
    return f"{root(run)}deltas/{base:08d}-{version:08d}-{sha256[:16]}.safetensors"


def anchor_part(run: str, version: int, part: int, sha256: str) -> str:
    """One part of an anchor: whole tensors."""
    return f"{root(run)}anchors/{version:08d}/{part:04d}-{sha256[:16]}.safetensors"


def anchor_index(run: str, version: int, sha256: str) -> str:
    """Index of an anchor's parts."""
    return f"{root(run)}anchors/{version:08d}/index-{sha256[:16]}.json"


def anchors_prefix(run: str) -> str:
    """Prefix of all anchors."""
    return f"{root(run)}anchors/"


def probe(name: str) -> str:
    """An object that only tests the bucket: of no run, and deleted at once."""
    return f"probes/{name}"


def grant(run: str, host: str, sweep: int) -> str:
    """Grant of one sweep of one host, create-only."""
    return f"{root(run)}grants/{host}/{sweep:08d}.json"


def grants_prefix(run: str, host: str = "") -> str:
    """Prefix of all grants, or of one host's."""
    return f"{root(run)}grants/{host}/" if host else f"{root(run)}grants/"


def group(run: str, version: int, host: str, sweep: int, index: int) -> str:
    """One group of episodes, create-only."""
    return f"{root(run)}groups/v{version:08d}/{host}/{sweep:08d}/{index:02d}.safetensors.zst"


def groups_prefix(run: str) -> str:
    """Prefix of all groups."""
    return f"{root(run)}groups/"


def groups_of_version(run: str, version: int) -> str:
    """Prefix of the groups sampled from one version."""
    return f"{root(run)}groups/v{version:08d}/"


def groups_of_sweep(run: str, version: int, host: str, sweep: int) -> str:
    """Prefix of one sweep's groups at one version."""
    return f"{root(run)}groups/v{version:08d}/{host}/{sweep:08d}/"


def step_manifest(run: str, epoch: int, step: int) -> str:
    """Create-only record of one optimizer step."""
    return f"{root(run)}steps/e{epoch}/s{step:08d}.json"


def steps_of_epoch(run: str, epoch: int) -> str:
    """Prefix of one lease's step manifests."""
    return f"{root(run)}steps/e{epoch}/"


def drop_note(run: str, epoch: int, number: int) -> str:
    """Groups that will not be trained on, told before the step manifest that records them, create-only."""
    return f"{root(run)}drops/e{epoch}/{number:08d}.json"


def drop_notes_prefix(run: str, epoch: int = 0) -> str:
    """Prefix of all drop notes, or of one lease's."""
    return f"{root(run)}drops/e{epoch}/" if epoch else f"{root(run)}drops/"


def checkpoint(run: str, epoch: int, step: int, name: str) -> str:
    """One object of a checkpoint; `name` is `manifest.json` for the one written last."""
    return f"{root(run)}checkpoints/e{epoch}/s{step:08d}/{name}"


def checkpoints_prefix(run: str) -> str:
    """Prefix of all checkpoints."""
    return f"{root(run)}checkpoints/"


def eval_part(run: str, version: int, evaluation: str, part: int, host: str) -> str:
    """Episodes of one part of an evaluation."""
    return f"{eval_parts_prefix(run, version, evaluation)}{part:04d}-{host}.safetensors.zst"


def eval_parts_prefix(run: str, version: int, evaluation: str) -> str:
    """Prefix of an evaluation's parts, and of its summary."""
    return f"{root(run)}evals/v{version:08d}/{evaluation}/"


def eval_summary(run: str, version: int, evaluation: str) -> str:
    """Scored summary of an evaluation."""
    return f"{root(run)}evals/v{version:08d}/{evaluation}/summary.json"


def evals_prefix(run: str) -> str:
    """Prefix of all evaluations."""
    return f"{root(run)}evals/"


def exam_document(exam: str) -> str:
    """What is asked in the examination of a checkpoint, create-only."""
    return f"{_exam(exam)}exam.json"


def exam_claim(exam: str, part: int, attempt: int) -> str:
    """Who plays a part; a later attempt takes it over from one that fell silent. Create-only."""
    return f"{_exam(exam)}claims/{part:06d}-{attempt:02d}.json"


def exam_answer(exam: str, part: int) -> str:
    """Episodes of a part, create-only: it counts once, however many played it."""
    return f"{_exam(exam)}answers/{part:06d}.safetensors.zst"


def exam_claims_prefix(exam: str) -> str:
    """Prefix of all claims."""
    return f"{_exam(exam)}claims/"


def exam_answers_prefix(exam: str) -> str:
    """Prefix of all answers."""
    return f"{_exam(exam)}answers/"


def parse_exam_claim(key: str) -> tuple[int, int]:
    """Part and attempt of a claim's key. Raises FormatError for another key."""
    found = _EXAM_CLAIM.fullmatch(key)
    if found is None:
        raise FormatError(f"{key} is no claim of an examination")
    return int(found[2]), int(found[3])


def parse_exam_answer(key: str) -> int:
    """Part of an answer's key. Raises FormatError for another key."""
    found = _EXAM_ANSWER.fullmatch(key)
    if found is None:
        raise FormatError(f"{key} is no answer of an examination")
    return int(found[2])


def _exam(exam: str) -> str:
    if not is_name(exam):
        raise FormatError(f"{exam!r} is no name of an examination")
    return f"exams/{exam}/"


def retention_prefix(run: str) -> str:
    """Prefix of the notices of what will be deleted."""
    return f"{root(run)}retention/"


def retention_notice(run: str, at: int) -> str:
    """Notice, written at this Unix second, of what will be deleted, create-only."""
    return f"{retention_prefix(run)}{at:010d}.json"


def key_probe(run: str, word: str) -> str:
    """An object that is tried to be written with a key that must not write."""
    return f"{root(run)}probe/{word}"


def revoked_prefix(run: str) -> str:
    """Prefix of all revocations."""
    return f"{root(run)}revoked/"


def revocation(run: str, what: str) -> str:
    """Notice, create-only, that a host or one invite (its id has a dot) may no longer take part."""
    return f"{revoked_prefix(run)}{what}.json"


def parse_manifest(key: str) -> VersionKey:
    """Parts of a manifest's key. Raises FormatError for anything else."""
    found = _MANIFEST.fullmatch(key)
    if found is None:
        raise FormatError(f"{key!r} is not the key of a manifest")
    run, version, epoch = found.groups()
    return VersionKey(run, int(version), int(epoch))


def parse_delta(key: str) -> DeltaKey:
    """Parts of the key of a delta or roll-up. Raises FormatError for anything else."""
    found = _DELTA.fullmatch(key)
    if found is None:
        raise FormatError(f"{key!r} is not the key of a delta")
    run, base, version = found.groups()
    return DeltaKey(run, int(base), int(version))


def parse_anchor(key: str) -> VersionKey:
    """Parts of the key of one object of an anchor. Raises FormatError for anything else."""
    found = _ANCHOR.fullmatch(key)
    if found is None:
        raise FormatError(f"{key!r} is not the key of an anchor's object")
    run, version = found.groups()
    return VersionKey(run, int(version))


def parse_group(key: str) -> GroupKey:
    """Parts of a group's key. Raises FormatError for anything else."""
    found = _GROUP.fullmatch(key)
    if found is None:
        raise FormatError(f"{key!r} is not the key of a group")
    run, version, host, sweep, index = found.groups()
    return GroupKey(run, int(version), host, int(sweep), int(index))


def parse_step(key: str) -> StepKey:
    """Parts of a step manifest's key. Raises FormatError for anything else."""
    found = _STEP.fullmatch(key)
    if found is None:
        raise FormatError(f"{key!r} is not the key of a step manifest")
    run, epoch, step = found.groups()
    return StepKey(run, int(epoch), int(step))


def parse_drop_note(key: str) -> int:
    """Epoch of a drop note's key. Raises FormatError for anything else."""
    found = _DROPS.fullmatch(key)
    if found is None:
        raise FormatError(f"{key!r} is not the key of a drop note")
    return int(found.group(2))


def parse_checkpoint(key: str) -> CheckpointKey:
    """Parts of the key of a checkpoint's object. Raises FormatError for anything else."""
    found = _CHECKPOINT.fullmatch(key)
    if found is None:
        raise FormatError(f"{key!r} is not the key of a checkpoint's object")
    run, epoch, step, name = found.groups()
    return CheckpointKey(run, int(epoch), int(step), name)


def parse_grant(key: str) -> GrantKey:
    """Parts of a grant's key. Raises FormatError for anything else."""
    found = _GRANT.fullmatch(key)
    if found is None:
        raise FormatError(f"{key!r} is not the key of a grant")
    run, host, sweep = found.groups()
    return GrantKey(run, host, int(sweep))


def ours(listed: Iterable[str], parse: Callable[[str], _Parts]) -> Iterator[tuple[str, _Parts]]:
    """Each key that `parse` takes, with its parts; what a stranger put under the same prefix is passed over."""
    for key in listed:
        try:
            parts = parse(key)
        except FormatError:
            continue
        yield key, parts
