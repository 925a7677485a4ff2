"""How a worker enters a run: with its owner's configuration and keys, or with the invitation that its state folder keeps.

An invitation carries everything: endpoints, a key that only reads, a pass for the proxy, and what opens its tickets. What
is in a token is `stoa/bucket/invite.py`'s business.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from activities.codec import TicketCodec
from stoa.bucket.invite import Invite, read_invite, require_build
from stoa.bucket.tickets import TicketBook
from stoa.config.load import Credentials, bucket_credentials, kept_environment, load_run, temporal_access
from stoa.config.run import RunConfig, Temporal
from stoa.contracts.access import Access
from stoa.contracts.errors import InviteError
from worker_mac.identity import pinned_key, project_version

INVITE_FILE: Final = "invite"
TICKETS_FILE: Final = "tickets"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a run is, and what this Mac shows there. `config` has this Mac's endpoints; all else is the run's own."""

    config: RunConfig
    credentials: Credentials
    access: Access
    invite: Invite | None = None

    @property
    def invite_id(self) -> str:
        """Of the invitation; "" for one of the owner's own Macs."""
        return "" if self.invite is None else self.invite.invite

    @property
    def codec(self) -> TicketCodec | None:
        """Opens the tickets of this invitation."""
        invite = self.invite
        return None if invite is None else TicketCodec({invite.invite: invite.seal_bytes}.get, opens=True)

    def host(self, asked: str) -> str:
        """This Mac's name in the run. Raises InviteError if `asked` is another than the invitation's."""
        if self.invite is not None and asked not in ("", self.invite.host):
            raise InviteError(f"the invitation is for {self.invite.host}, not for {asked}", hint="leave out --host")
        return asked if self.invite is None else self.invite.host

    def pinned(self, run_folder: Path) -> str | None:
        """The key that this Mac trusts for the run."""
        return pinned_key(run_folder) if self.invite is None else self.invite.public_key

    def tickets(self, run_folder: Path) -> TicketBook | None:
        """What an invited Mac writes with."""
        return None if self.invite is None else TicketBook(self.invite.run, self.invite.host, run_folder / TICKETS_FILE)


def enter(config: Path | None, folder: Path, *, kept: bool = False) -> Entry:
    """By a configuration if one is named, else by the invitation in `folder` if there is one, else by the demo's configuration.

    kept: endpoints and keys are those that were kept in `folder`.

    Raises ConfigError; InviteError, InviteExpiredError or BuildTooOldError for an invitation that is no good here.
    """
    path = folder / INVITE_FILE
    if config is None and path.is_file():
        return _by_invite(read_invite(path.read_text("ascii", "replace")), folder)
    environ = kept_environment(folder) if kept else None
    found = load_run(config, environ=environ)
    return Entry(found, bucket_credentials(found.bucket, environ=environ), temporal_access(found.temporal, environ=environ))


def keep_invite(folder: Path, token: str) -> Invite:
    """Take a token over for later starts, for this folder's owner only, once it is known to be good. Raises as `enter` does."""
    invite = read_invite(token)
    _by_invite(invite, folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = folder / f"{INVITE_FILE}.part"
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write("".join(token.split()) + "\n")
    part.replace(folder / INVITE_FILE)
    return invite


def _by_invite(invite: Invite, folder: Path) -> Entry:
    require_build(invite.min_build, project_version())
    known = pinned_key(folder / "runs" / invite.run)
    if known is not None and known != invite.public_key:
        raise InviteError(
            f"the token is for another run {invite.run} than the one this Mac knows: it is signed by another key",
            hint=f"if the run was made anew on purpose, remove {folder / 'runs' / invite.run}",
        )
    door = invite.temporal
    try:
        temporal = Temporal(address=door.address, namespace_mac=door.namespace, tls=door.tls)
        config = RunConfig(run=invite.run, temporal=temporal, bucket=invite.bucket_settings)
    except ValidationError as error:
        raise InviteError(f"the token names servers that cannot be: {error.errors()[0]['msg']}", hint="ask for another token") from None
    return Entry(config, invite.credentials, invite.access, invite)
