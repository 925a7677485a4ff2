"""`stoa invite RUN`: a token that lets one more Mac join."""

import json
import time
from pathlib import Path

from cli import say
from cli.arguments import AsJson, RunArgument, Servers


def invite(
    run: RunArgument,
    /,
    *,
    host: str = "",
    expires: str = "7d",
    ca: Path | None = None,
    config: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Print a token that lets a friend's Mac join a run, with nothing else to set up there.

    The token is a secret: whoever has it can play for the run under its host's name until it expires or is revoked.

    Parameters
    ----------
    host
        Name of the Mac in the run; drawn when left out.
    expires
        How long it is good for: 90m, 12h, 7d.
    ca
        PEM file of the authority that signed the proxy's certificate, if it is one of your own.
    """
    from cli.inviting import invite_mac, seconds_of
    from cli.launch import open_store
    from stoa.bucket.run_document import read_run
    from stoa.config.load import load_run, signing_seed

    seconds = seconds_of(expires)
    settings = load_run(config, (f"run={run}",))
    store = open_store(settings)
    document = read_run(store, run)
    if config is None:
        settings = settings.model_copy(update={"macs": document.config.macs})
    made = invite_mac(settings, document, store, signing_seed(), host=host, seconds=seconds, ca=ca)
    invite, until = made.invite, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made.invite.expires_at))
    if as_json:
        facts = {"token": made.token, "invite": invite.invite, "host": invite.host, "run": run, "expires_at": invite.expires_at}
        say.data(
            json.dumps({**facts, "temporal": invite.temporal.address, "bucket": invite.bucket.endpoint, "notes": made.notes}, indent=2)
        )
        return
    say.data(made.token)
    say.talk(f"invitation {invite.invite}, good until {until}; on the Mac: `stoa join TOKEN`")
    say.talk(f"to take it back: `stoa revoke {run} {invite.invite}`")
    for note in made.notes:
        say.talk(f"note: {note}")
