"""Invitations: the one line of text that lets a friend's Mac join a run, and the pass in it that says who calls.

    stoa1.<base64url, without padding, of canonical JSON, signed by the run's key>

An invitation is for one host name and has an end. It carries everything that Mac needs: where the servers are, a key that
may only read the bucket, the key that opens its tickets, the run's public key, and its pass. A pass is a signed document
of its own, shown with every call to Temporal: what the proxy sees gives no access to the bucket.

A token is a secret: it is printed once by `stoa invite` and kept by the Mac in a file only its owner can read.
"""

import base64
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import ConfigDict, TypeAdapter

from stoa.bucket.manifest import Signer, parse_canonical, read_signed, validate, verify, write_signed
from stoa.config.load import Credentials
from stoa.config.run import Bucket
from stoa.contracts.access import Access
from stoa.contracts.errors import BuildTooOldError, FormatError, InviteError, InviteExpiredError, SignatureError
from stoa.contracts.ids import is_name
from stoa.contracts.sealed import host_of, is_invite

PREFIX: Final = "stoa1."
INVITE_FORMAT: Final = "stoa-invite-1"
PASS_FORMAT: Final = "stoa-pass-1"  # noqa: S105 - the name of a format
MAX_TOKEN_CHARACTERS: Final = 16_384
MAX_PASS_CHARACTERS: Final = 2_048
_STRICT: Final = ConfigDict(extra="forbid", strict=True)
_VERSION: Final = re.compile(r"\d+(?:\.\d+)*")
_ASK_AGAIN: Final = "ask who invited you for another token (`stoa invite`)"


@dataclass(frozen=True, slots=True)
class Pass:
    """Says that whoever shows it is `host` of `run`, from `issued_at` to `expires_at` (Unix seconds)."""

    __pydantic_config__ = _STRICT

    format: str
    run: str
    host: str
    invite: str
    issued_at: int
    expires_at: int
    sig: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class TemporalDoor:
    """Where the Mac finds Temporal, or the proxy before it. `ca`: PEM that is trusted instead of the system's; may be ""."""

    __pydantic_config__ = _STRICT

    address: str
    namespace: str
    tls: bool = False
    ca: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class BucketDoor:
    """Where the Mac finds the bucket, and a key that may only read there."""

    __pydantic_config__ = _STRICT

    endpoint: str
    name: str
    region: str
    key: str = field(repr=False)
    secret: str = field(repr=False)
    session: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Invite:
    """An invitation as read. Printing one shows no secret."""

    __pydantic_config__ = _STRICT

    format: str
    run: str
    host: str
    invite: str
    """Its id: <host>.<8 hex digits>."""
    issued_at: int
    expires_at: int
    public_key: str
    min_build: str
    """Oldest build of this project that the run takes; "" for any."""
    temporal: TemporalDoor
    bucket: BucketDoor
    seal_key: str = field(repr=False)
    """base64 of the 32 bytes that open its tickets."""
    proof: str = field(repr=False)
    """Its pass, as it is shown."""
    sig: str = field(default="", repr=False)

    @property
    def access(self) -> Access:
        """How its Mac speaks to Temporal."""
        return Access(self.temporal.tls, ca=self.temporal.ca.encode(), api_key=self.proof, is_invited=True)

    @property
    def credentials(self) -> Credentials:
        """Its key for the bucket."""
        return Credentials(self.bucket.key, self.bucket.secret, self.bucket.session)

    @property
    def bucket_settings(self) -> Bucket:
        """Where its bucket is."""
        return Bucket(endpoint=self.bucket.endpoint, name=self.bucket.name, region=self.bucket.region)

    @property
    def seal_bytes(self) -> bytes:
        """The 32 bytes that open its tickets."""
        return base64.b64decode(self.seal_key)


_PASS = TypeAdapter(Pass)
_INVITE = TypeAdapter(Invite)


def new_id(host: str) -> str:
    """The id of a new invite for `host`."""
    return f"{host}.{secrets.token_hex(4)}"


def seal_key(seed: bytes, run: str, invite: str) -> bytes:
    """The 32 bytes that seal the tickets of one invite: they follow from the run's signing seed, and not the other way."""
    return HKDF(SHA256(), length=32, salt=None, info=f"stoa tickets 1\n{run}\n{invite}".encode()).derive(seed)


def write_invite(
    signer: Signer,
    run: str,
    host: str,
    *,
    seconds: float,
    temporal: TemporalDoor,
    bucket: BucketDoor,
    min_build: str = "",
    now: float | None = None,
) -> tuple[str, Invite]:
    """A new token for `host`, and what is in it. Raises InviteError if `host` is no name."""
    if not is_name(host):
        raise InviteError(f"host name {host!r} is not lower case letters, digits and dashes (1 to 48)")
    issued_at = int(time.time() if now is None else now)
    one = Pass(PASS_FORMAT, run, host, new_id(host), issued_at, issued_at + max(1, int(seconds)))
    invite = Invite(
        INVITE_FORMAT,
        run,
        host,
        one.invite,
        one.issued_at,
        one.expires_at,
        signer.public_key,
        min_build,
        temporal,
        bucket,
        base64.b64encode(seal_key(signer.seed, run, one.invite)).decode("ascii"),
        _encoded(_PASS, one, signer),
    )
    token = f"{PREFIX}{_encoded(_INVITE, invite, signer)}"
    return token, read_invite(token, now=issued_at)


def read_invite(token: str, *, now: float | None = None) -> Invite:
    """The invitation in a token; white space, which mail programs add, is passed over.

    Raises InviteError if it is none or was garbled, InviteExpiredError if it is past its time.
    """
    text = "".join(token.split())
    if not text.startswith(PREFIX):
        newer = re.match(r"stoa\d+\.", text) is not None
        raise InviteError(
            "this token was made by another version of stoa" if newer else f"this is no join token: one begins with {PREFIX}",
            hint="install the version of who invited you" if newer else "copy the whole line that `stoa invite` printed",
        )
    where = "the join token"
    if len(text) > MAX_TOKEN_CHARACTERS:
        raise InviteError(f"{where} is longer than any", hint=_ASK_AGAIN)
    try:
        data = _decoded(text.removeprefix(PREFIX))
        tree = parse_canonical(data, where)
        verify(tree, str(tree.get("public_key", "")))
        invite = validate(_INVITE, data, where)
    except (FormatError, SignatureError, ValueError):
        raise InviteError(f"{where} was cut off or changed on its way", hint=f"copy the whole line, or {_ASK_AGAIN}") from None
    fits = invite.format == INVITE_FORMAT and is_name(invite.run) and is_invite(invite.invite) and host_of(invite.invite) == invite.host
    if not fits or len(_seal_bytes(invite)) != 32:
        raise InviteError(f"{where} is not one this version can use", hint=_ASK_AGAIN)
    check_time(invite.issued_at, invite.expires_at, where, now)
    return invite


def read_pass(text: str, public_key: str, run: str, *, now: float | None = None) -> Pass:
    """The pass shown. Raises InviteError if it is none of this run, InviteExpiredError if it is past its time."""
    where = "the pass"
    if len(text) > MAX_PASS_CHARACTERS:
        raise InviteError(f"{where} is longer than any", hint=_ASK_AGAIN)
    try:
        found = read_signed(_PASS, _decoded(text), public_key, where)
    except (FormatError, SignatureError, ValueError):
        raise InviteError(f"{where} is none of run {run}", hint=_ASK_AGAIN) from None
    if (found.format, found.run, host_of(found.invite)) != (PASS_FORMAT, run, found.host) or not is_invite(found.invite):
        raise InviteError(f"{where} is none of run {run}", hint=_ASK_AGAIN)
    check_time(found.issued_at, found.expires_at, f"the invitation {found.invite}", now)
    return found


def check_time(issued_at: int, expires_at: int, where: str, now: float | None = None) -> None:
    """Raises InviteExpiredError after the end. A start in the future is a clock that is wrong, and not minded."""
    at = time.time() if now is None else now
    if at >= expires_at:
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires_at))
        raise InviteExpiredError(f"{where} was good until {day}", hint=_ASK_AGAIN)


def require_build(minimum: str, build: str) -> None:
    """Raises BuildTooOldError if `build` is an older version than `minimum`; a source folder without a version passes."""
    wanted, found = _VERSION.match(minimum), _VERSION.match(build)
    if wanted is None or found is None:
        return
    if _numbers(found[0]) < _numbers(wanted[0]):
        raise BuildTooOldError(
            f"this is stoa {build}, and the run takes {minimum} or newer", hint=f"run `pip install 'stoa[mac]>={minimum}'`"
        )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _seal_bytes(invite: Invite) -> bytes:
    try:
        return invite.seal_bytes
    except ValueError:
        return b""


def _encoded(adapter: TypeAdapter[Any], document: object, signer: Signer) -> str:
    return base64.urlsafe_b64encode(write_signed(adapter, document, signer)).decode("ascii").rstrip("=")


def _decoded(text: str) -> bytes:
    """Raises ValueError for text that is not the base64url of something: a lax decoder skips over what is wrong."""
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if base64.urlsafe_b64encode(data).decode("ascii").rstrip("=") != text:
        raise ValueError("not base64url")
    return data
