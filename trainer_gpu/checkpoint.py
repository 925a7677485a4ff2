"""The trainer's whole state in the bucket: safetensors parts, then one signed JSON manifest that makes them count.

What the tensors are is `parallel.Trainable`'s business and which checkpoint is the run's is HEAD's. A part's sha256 is
checked before its bytes are decoded, and nothing is unpickled. A repeated save of the same step finds its own bytes.

The manifest is `Document` as signed canonical JSON; its key ends in `manifest.json`.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save

from stoa.bucket import keys
from stoa.bucket.manifest import Signer, read_signed, write_signed
from stoa.bucket.store import Store, check_sha256
from stoa.contracts.errors import BucketError, CheckpointError, ObjectExistsError

FORMAT = "stoa-checkpoint-1"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20
_LOST = "put the object back from a copy of the bucket"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint must belong to before it is loaded."""

    run: str
    layout_id: str
    architecture: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What a resumed trainer must know beside its tensors."""

    epoch: int
    step: int
    version: int
    """Version that names this state, or the newest one before it."""
    step_manifest_key: str
    settled: tuple[str, ...]
    """Keys of groups, in the staleness window, that were consumed, dropped or refused up to `step`."""
    grants_position: int = 0
    """Questions granted so far, as the bucket showed it."""
    grants_open: tuple[tuple[str, int], ...] = ()
    """(host, sweep) of grants with groups still to come."""
    rng: str = ""
    """States of the random generators of every rank; see `rng.py`."""


@dataclass(frozen=True, slots=True)
class Part:
    """One safetensors object."""

    name: str
    key: str
    sha256: str
    num_bytes: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A checkpoint's manifest."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: str
    identity: Identity
    facts: Facts
    parts: tuple[Part, ...]
    sig: str = ""


_DOCUMENT = TypeAdapter(Document)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint in the bucket."""

    key: str
    num_bytes: int


def save_parts(
    store: Store,
    run: str,
    epoch: int,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    part_bytes: int,
    rank: int = 0,
    on_part: Callable[[str], None] = lambda name: None,
) -> tuple[Part, ...]:
    """Write one rank's tensors; one part's bytes are in memory at a time. Nothing counts before `save_checkpoint`.

    `on_part` is told of each part before it is written.

    Raises ObjectExistsError if this step of this epoch was saved with other tensors: two trainers hold one lease.
    """
    parts: list[Part] = []
    for index, names in enumerate(_cut(tensors, part_bytes)):
        name = f"part-{index:04d}.safetensors" if rank == 0 else f"rank-{rank:04d}-part-{index:04d}.safetensors"
        on_part(name)
        data = save({n: tensors[n].detach().cpu().contiguous() for n in names})
        key = keys.checkpoint(run, epoch, step, name)
        store.create(key, data, kind="checkpoint")
        parts.append(Part(name, key, hashlib.sha256(data).hexdigest(), len(data), tuple(names)))
    return tuple(parts)


def save_checkpoint(store: Store, signer: Signer, identity: Identity, facts: Facts, parts: tuple[Part, ...]) -> Saved:
    """Write the manifest that makes `parts`, of all ranks, a checkpoint. Raises ObjectExistsError as `save_parts`."""
    data = write_signed(_DOCUMENT, Document(FORMAT, identity, facts, parts), signer)
    key = keys.checkpoint(identity.run, facts.epoch, facts.step, MANIFEST)
    try:
        store.create(key, data, kind="checkpoint")
    except ObjectExistsError:
        # A publish that was retried: open grants may have moved on meanwhile, the tensors cannot have.
        if read_document(store, key, identity, signer.public_key).parts != parts:
            raise
    return Saved(key, sum(part.num_bytes for part in parts) + len(data))


def read_document(store: Store, key: str, identity: Identity, public_key: str) -> Document:
    """The manifest of a checkpoint, checked: signature, run, layout and architecture.

    Raises:
        CheckpointError: it is missing, torn, or of another run or architecture.
    """
    try:
        document = read_signed(_DOCUMENT, store.get(key, max_bytes=MAX_MANIFEST_BYTES).data, public_key, key)
    except BucketError as error:
        raise CheckpointError(f"{key} cannot be used: {error}", hint=_LOST) from error
    if document.format != FORMAT:
        raise CheckpointError(f"{key} has format {document.format!r}; this trainer reads {FORMAT!r}")
    for field, expected in asdict(identity).items():
        found = getattr(document.identity, field)
        if found != expected:
            raise CheckpointError(
                f"{key} has {field} {found!r}; this run's is {expected!r}",
                hint="a checkpoint loads only into the run and the architecture it was saved from",
            )
    return document


def read_tensors(
    store: Store, parts: tuple[Part, ...], *, on_part: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every part; one part is in memory at a time. `on_part` is told of each before it is read.

    Raises CheckpointError if a part is missing, has other bytes than promised, or other tensors.
    """
    for part in parts:
        on_part(part.name)
        try:
            data = store.get(part.key, max_bytes=part.num_bytes).data
            check_sha256(data, part.sha256, part.key)
            tensors = load(data)
        except (BucketError, SafetensorError) as error:
            raise CheckpointError(f"{part.key} cannot be used: {error}", hint=_LOST) from error
        if set(tensors) != set(part.tensors):
            raise CheckpointError(f"{part.key} holds other tensors than its manifest lists")
        yield from tensors.items()


def older_checkpoints(store: Store, named: str) -> list[str]:
    """Keys of the manifests of the finished checkpoints before `named`, newest first; none is of a later step."""
    place = keys.parse_checkpoint(named)
    found = _listed(store, place.run, place.epoch)
    older = sorted((one for one in found if one < (place.epoch, place.step) and one[1] <= place.step), reverse=True)
    return [key for one in older for key in found[one] if _is_manifest(key)]


def prune_checkpoints(store: Store, run: str, *, epoch: int, keep: int, named: str, unusable: Collection[str] = ()) -> int:
    """Delete what is older than the newest `keep` finished checkpoints, except the one HEAD names; returns how many went.

    unusable: manifests of checkpoints that could not be loaded: they do not count, nor do those that were never finished.

    The manifest goes first, so that a deletion cut short leaves parts without a manifest and never the reverse.
    Checkpoints of a later epoch are another trainer's and stay.
    """
    found = _listed(store, run, epoch)
    finished = sorted(
        (place for place, names in found.items() if any(_is_manifest(key) and key not in unusable for key in names)), reverse=True
    )
    if len(finished) <= keep:
        return 0
    doomed = [names for place, names in sorted(found.items()) if place < finished[keep - 1] and named not in names]
    for names in doomed:
        store.delete([key for key in names if _is_manifest(key)])
        store.delete([key for key in names if not _is_manifest(key)])
    return len(doomed)


def _listed(store: Store, run: str, epoch: int) -> dict[tuple[int, int], list[str]]:
    """(epoch, step) -> keys of the objects of the checkpoints of leases up to `epoch`, finished or not."""
    found: dict[tuple[int, int], list[str]] = {}
    listed = (one.key for one in store.list(keys.checkpoints_prefix(run)))
    for key, place in keys.ours(listed, keys.parse_checkpoint):
        if place.epoch <= epoch:
            found.setdefault((place.epoch, place.step), []).append(key)
    return found


def _is_manifest(key: str) -> bool:
    return key.endswith(f"/{MANIFEST}")


def _cut(tensors: Mapping[str, torch.Tensor], part_bytes: int) -> Iterator[list[str]]:
    """Names in sorted order, cut so that each part stays under `part_bytes` where its tensors allow it."""
    names: list[str] = []
    size = 0
    for name in sorted(tensors):
        num_bytes = tensors[name].numel() * tensors[name].element_size()
        if names and size + num_bytes > part_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    if names:
        yield names
