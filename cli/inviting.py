"""Makes invitations: what a friend's Mac is told, and the checks that keep an owner from handing out too much.

The token's form is `stoa/bucket/invite.py`'s. Nothing here is printed; the commands do that.
"""

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stoa.bucket import keys
from stoa.bucket.head import read_head
from stoa.bucket.invite import BucketDoor, Invite, TemporalDoor, write_invite
from stoa.bucket.manifest import Signer
from stoa.bucket.revocations import Revoked
from stoa.bucket.run_document import RunDocument, read_run
from stoa.bucket.steps import MAX_STEP_BYTES
from stoa.bucket.store import SMALL_BYTES, Store
from stoa.config.load import Credentials, bucket_credentials, is_loopback, mac_credentials
from stoa.config.run import RunConfig
from stoa.contracts import names
from stoa.contracts.errors import (
    AccessDeniedError,
    BucketError,
    ConfigError,
    InviteRevokedError,
    ObjectMissingError,
    RunMissingError,
    SignatureError,
    UsageError,
)
from stoa.contracts.namesakes import namesakes, shared

MAX_SECONDS: Final = 366 * 86_400.0
MIN_SECONDS: Final = 60.0
_UNITS: Final = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
_READS_STEPS: Final = (
    "the key for Macs also reads what the trainer keeps to itself, so a Mac that is suspected can find out and behave until it is "
    f"trusted again; where the bucket can, let that key read no more than {', '.join(keys.MAC_READS)}"
)
_KEY_HINT: Final = "make a key that may only read this bucket, and set STOA_MAC_BUCKET_KEY and STOA_MAC_BUCKET_SECRET to it"


@dataclass(frozen=True, slots=True)
class Invited:
    """A token, what is in it, and what its maker should know."""

    token: str
    invite: Invite
    notes: tuple[str, ...]


def seconds_of(text: str) -> float:
    """A time like 90m, 12h or 7d. Raises UsageError for anything else, or less than a minute, or more than a year."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([mhd])", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise UsageError(f"--expires {text}: a time like 90m, 12h or 7d, from 1m to 366d")
    return seconds


def invite_mac(
    config: RunConfig, document: RunDocument, store: Store, seed: bytes, *, host: str = "", seconds: float, ca: Path | None = None
) -> Invited:
    """An invitation to the run of `document` for `host`, or for a name that is drawn. `config`: where the servers are.

    Raises:
        SignatureError: the signing key here is not the run's. InviteRevokedError: that host name was revoked.
        AccessDeniedError, UsageError: there is no key for Macs, or one that may do more than read.
    """
    signer = Signer.from_seed(seed)
    if signer.public_key != document.public_key:
        raise SignatureError(
            f"run {document.run} is signed by another key than this host's",
            hint="invite from the host that started it, or set STOA_SIGNING_KEY",
        )
    host = host or f"mac-{secrets.token_hex(3)}"
    if (reason := Revoked(store, document.run, document.public_key).reason(host, "")) is not None:
        raise InviteRevokedError(f"{reason}; the name is not used again in this run", hint="choose another --host")
    credentials = mac_credentials(config.bucket)
    check_mac_key(store, document.run, credentials)
    token, invite = write_token(config, signer, credentials, host, seconds=seconds, ca=_read_ca(ca))
    notes = [*_notes(config, invite), *_namesakes(store, document.run, host)]
    if reads_steps(store, document, credentials):
        notes.append(_READS_STEPS)
    return Invited(token, invite, tuple(notes))


def write_token(
    config: RunConfig, signer: Signer, credentials: Credentials, host: str, *, seconds: float, ca: str = ""
) -> tuple[str, Invite]:
    """A token for the run of `config`, unchecked: `credentials` are those it carries, `signer` has the run's key."""
    macs, temporal, bucket = config.macs, config.temporal, config.bucket
    address, tls = (macs.temporal_address, macs.temporal_tls) if macs.temporal_address else (temporal.address, temporal.tls)
    endpoint = macs.bucket_endpoint or bucket.endpoint
    return write_invite(
        signer,
        config.run,
        host,
        seconds=seconds,
        temporal=TemporalDoor(address, temporal.namespace_mac, tls, ca),
        bucket=BucketDoor(endpoint, bucket.name, bucket.region, credentials.key, credentials.secret, credentials.session),
        min_build=names.OLDEST_MAC_BUILD,
    )


def check_mac_key(store: Store, run: str, credentials: Credentials) -> None:
    """Try the key for Macs: it must read the run and must not write. Raises AccessDeniedError or UsageError."""
    if credentials.key == bucket_credentials(store.settings).key:
        raise UsageError("the key for Macs is the owner's own, which may write and delete", hint=_KEY_HINT)
    theirs = Store(store.settings, credentials)
    try:
        theirs.get(keys.run_json(run), max_bytes=SMALL_BYTES)
    except (AccessDeniedError, ObjectMissingError) as error:
        raise AccessDeniedError(f"the key for Macs cannot read the run: {error.message}", hint=_KEY_HINT) from None
    probe = keys.key_probe(run, secrets.token_hex(8))
    try:
        theirs.create(probe, b"may a Mac's key write?")
    except AccessDeniedError:
        return
    store.delete([probe])
    raise UsageError("the key for Macs may write to the bucket, and with that delete what is in it", hint=_KEY_HINT)


def reads_steps(store: Store, document: RunDocument, credentials: Credentials) -> bool:
    """True if the key for Macs opens step manifests, which tell whose groups are not trained on.

    Tried on the newest manifest, before the first step on a key where there is none: a server that hides what is missing
    from who may not list (AWS S3) is then taken at its best.
    """
    try:
        newest = read_head(store, document.run, document.public_key)[0].step_manifest_key
    except ObjectMissingError:
        newest = ""
    try:
        Store(store.settings, credentials).get(newest or keys.step_manifest(document.run, 1, 1), max_bytes=MAX_STEP_BYTES)
    except AccessDeniedError:
        return False
    except ObjectMissingError:
        pass
    return True


def _notes(config: RunConfig, invite: Invite) -> list[str]:
    """What is not wrong, but may not be meant."""
    notes: list[str] = []
    local = [where for where in (invite.temporal.address, invite.bucket.endpoint) if is_loopback(where)]
    if local:
        loopback = f"{' and '.join(local)} {'are' if len(local) > 1 else 'is'} loopback"
        notes.append(f"for Macs on this machine only: {loopback}; set [macs] in the configuration for others")
    elif not invite.temporal.tls or not invite.bucket.endpoint.startswith("https://"):
        notes.append("passes, or bytes, cross the net in clear: good inside a private network only")
    if not config.macs.temporal_address and not local:
        notes.append(
            "this Mac is sent to Temporal itself, where its pass opens nothing: put `stoa proxy` before it, and its address into [macs]"
        )
    return notes


def _namesakes(store: Store, run: str, host: str) -> list[str]:
    """A note for each run in this bucket that has not ended and may have a Mac whose name is spelt like this one's."""
    notes: list[str] = []
    for other, its_host in namesakes(run, host):
        try:
            is_live = read_head(store, other, read_run(store, other).public_key)[0].state != "stopped"
        except RunMissingError:
            continue
        except ObjectMissingError:
            is_live = True  # its trainer has not come yet
        except BucketError:
            continue  # what cannot be read is no run that goes on here, and another run's trouble
        if is_live:
            notes.append(f"{shared(run, host, (other, its_host))}: whichever comes second is turned away; choose another --host")
    return notes


def _read_ca(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a certificate ({error})") from None
    if "-----BEGIN CERTIFICATE-----" not in text or "PRIVATE KEY" in text:
        raise ConfigError(f"{path}: not a file of certificates alone", hint="give the authority's certificate, in PEM")
    return text
