"""`stoa revoke RUN INVITE | --host NAME`: take an invitation back."""

import json

from cli import say
from cli.arguments import AsJson, Reason, RunArgument, Servers


def revoke(
    run: RunArgument, invite: str = "", /, *, host: str = "", reason: Reason = "", config: Servers = None, as_json: AsJson = False
) -> None:
    """Let an invited Mac take part no longer: the proxy refuses it within seconds, and it is granted nothing more.

    Parameters
    ----------
    invite
        Id of the invitation, as `stoa invite` printed it.
    host
        Instead: everything under this host's name, now and later. The name is not used again in this run.
    """
    from cli.launch import open_store
    from stoa.bucket.manifest import Signer
    from stoa.bucket.revocations import revoke as write
    from stoa.bucket.run_document import read_run
    from stoa.config.load import load_run, signing_seed
    from stoa.contracts.errors import SignatureError, UsageError

    if bool(invite) == bool(host):
        raise UsageError(
            "name one: the id of an invitation, or --host NAME",
            hint=f"`stoa invite` printed the id, like attic.0123abcd; `stoa fleet {run}` shows the names of Macs that came",
        )
    settings = load_run(config, (f"run={run}",))
    store = open_store(settings)
    signer = Signer.from_seed(signing_seed())
    if signer.public_key != read_run(store, run).public_key:
        raise SignatureError(
            f"run {run} is signed by another key than this host's", hint="revoke from the host that started it, or set STOA_SIGNING_KEY"
        )
    what = invite or host
    is_new = write(store, signer, run, what, reason)
    if as_json:
        say.data(json.dumps({"run": run, "revoked": what, "is_new": is_new}))
        return
    say.talk(f"{what} {'is revoked' if is_new else 'was revoked before'}: the proxy refuses it within seconds, no grant follows")
