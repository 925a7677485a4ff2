"""Signed documents, and the manifest of a version: what it is made of and how to check every byte of it.

A signed document is canonical JSON (UTF-8, sorted keys, no spaces) with `sig` = base64 ed25519 over the document
without `sig`. The private key never leaves the trainer's host; readers pin the public key (base64, 32 bytes).

A manifest names its parent, so the chain of versions is walked backwards from HEAD; nothing is ever listed.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ConfigDict, TypeAdapter, ValidationError

from stoa.bucket import keys
from stoa.bucket.store import SMALL_BYTES, Store, check_sha256
from stoa.contracts.errors import ConfigError, FormatError, SignatureError

MANIFEST_FORMAT: Final = "stoa-manifest-1"
_STRICT: Final = ConfigDict(extra="forbid", strict=True)
_Document = TypeVar("_Document")


class Signer:
    """The private half of a run's ed25519 key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> "Signer":
        """A fresh key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "Signer":
        """The key of a 32-byte seed. Raises ConfigError for another length."""
        if len(seed) != 32:
            raise ConfigError(f"a signing key has 32 bytes, not {len(seed)}", hint="STOA_SIGNING_KEY is base64 of 32 bytes")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes, for keeping in a file only its owner can read."""
        return self._key.private_bytes_raw()

    @property
    def public_key(self) -> str:
        """base64 of the public key."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode("ascii")

    def sign(self, document: Mapping[str, object]) -> str:
        """base64 signature over the canonical form of `document` without `sig`."""
        return base64.b64encode(self._key.sign(canonical(_unsigned(document)))).decode("ascii")


def canonical(document: Mapping[str, object]) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces; NaN and infinity are refused."""
    try:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise FormatError(f"a document holds a number JSON cannot carry: {error}") from error
    return text.encode("utf-8")


def verify(document: Mapping[str, object], public_key: str, where: str = "a document") -> None:
    """Raises SignatureError if `document` is unsigned or not signed by `public_key`; `where`: its name in the message."""
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
        signature = base64.b64decode(str(document.get("sig", "")), validate=True)
        key.verify(signature, canonical(_unsigned(document)))
    except (InvalidSignature, binascii.Error, ValueError) as error:
        raise SignatureError(f"{where} is not signed by this run's key", hint="another run, or a bucket somebody else wrote to") from error


def write_signed(adapter: TypeAdapter[Any], document: object, signer: Signer) -> bytes:
    """Canonical bytes of a document dataclass, with its `sig` made anew."""
    tree: dict[str, object] = adapter.dump_python(document, mode="json")
    return canonical({**tree, "sig": signer.sign(tree)})


def read_signed(adapter: TypeAdapter[_Document], data: bytes, public_key: str, where: str) -> _Document:
    """The document in `data`. Raises FormatError if torn or not canonical, SignatureError if not signed by `public_key`."""
    tree = parse_canonical(data, where)
    verify(tree, public_key, where)
    return validate(adapter, data, where)


def parse_canonical(data: bytes, where: str) -> Mapping[str, object]:
    """The JSON object in `data`. Raises FormatError if it is none, or not in canonical form."""
    try:
        tree = json.loads(data)
        same = isinstance(tree, dict) and canonical(tree) == data  # pyright: ignore[reportUnknownArgumentType]
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON: {error}") from error
    if not same:
        raise FormatError(f"{where} is not a canonical JSON object")
    return tree


def validate(adapter: TypeAdapter[_Document], data: bytes, where: str) -> _Document:
    """The dataclass of JSON bytes. Raises FormatError that names the first wrong field."""
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise FormatError(f"{where}: {field}: {first['msg']}", hint="written by another version of this project?") from error


@dataclass(frozen=True, slots=True)
class Parent:
    """The version a manifest follows."""

    __pydantic_config__ = _STRICT

    version: int
    manifest_key: str
    manifest_sha256: str
    state_id: str


@dataclass(frozen=True, slots=True)
class DeltaRef:
    """A delta (base = version - 1) or a roll-up, with everything needed to bound its decoding.

    A roll-up is announced by a later manifest than the version it leads to, so it says which that is: `version` and
    `state_id`. Where they are -1 and empty it leads to the version of the manifest it stands in.
    """

    __pydantic_config__ = _STRICT

    base: int
    base_state_id: str
    key: str
    sha256: str
    num_bytes: int
    codec: str
    num_changed: int
    num_raw: int
    num_regrid: int
    version: int = -1
    state_id: str = ""


@dataclass(frozen=True, slots=True)
class AnchorRef:
    """Full weights at a version."""

    __pydantic_config__ = _STRICT

    version: int
    state_id: str
    index_key: str
    index_sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One int8 tensor's share of a version. `num_unit`: codes that moved by one step; `num_bytes`: its share of the delta."""

    __pydantic_config__ = _STRICT

    num_changed: int
    num_unit: int
    num_clipped: int
    num_regrid: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VersionStats:
    """What a publish measured.

    largest_lag_steps: farthest a master is from its published code, in code steps. unit_fraction: share of the changes that
    are by one step. seconds: wall clock by stage (scan, encode, apply, digest, upload). tensors: int8 tensors by name.
    """

    __pydantic_config__ = _STRICT

    changed_fraction: float
    num_clipped: int
    hysteresis: float
    largest_lag_steps: float = 0.0
    unit_fraction: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, TensorStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version. The first has no parent and no delta; `anchor` is the newest complete one at or before it."""

    __pydantic_config__ = _STRICT

    format: str
    run: str
    epoch: int
    version: int
    parent: Parent | None
    state_id: str
    layout_id: str
    step: int
    created_at: float
    delta: DeltaRef | None
    rollups: tuple[DeltaRef, ...]
    anchor: AnchorRef
    tensor_digests: dict[str, str]
    stats: VersionStats
    sig: str = ""


_MANIFEST = TypeAdapter(Manifest)


def write_manifest(store: Store, manifest: Manifest, signer: Signer) -> tuple[str, str]:
    """Sign and write a manifest, create-only; returns its key and sha256."""
    data = write_signed(_MANIFEST, manifest, signer)
    sha256 = hashlib.sha256(data).hexdigest()
    key = keys.manifest(manifest.run, manifest.version, manifest.epoch, sha256)
    store.create(key, data)
    return key, sha256


def read_manifest(store: Store, run: str, key: str, sha256: str, public_key: str) -> Manifest:
    """The manifest under `key`.

    Raises DigestError, SignatureError or FormatError if it is not the one that was named, by this run's key, of this run.
    """
    data = store.get(key, max_bytes=SMALL_BYTES).data
    check_sha256(data, sha256, key)
    manifest = read_signed(_MANIFEST, data, public_key, key)
    if manifest.format != MANIFEST_FORMAT or manifest.run != run:
        raise FormatError(f"{key} is a {manifest.format} of run {manifest.run}, not a {MANIFEST_FORMAT} of run {run}")
    return manifest


def _unsigned(document: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in document.items() if name != "sig"}
