"""`stoa drain RUN [MAC]`."""

import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson, Reason, RunArgument, Servers

if TYPE_CHECKING:
    from pathlib import Path

MacArgument = Annotated[str, Parameter(help="Name of one Mac: it finishes its sweep and leaves, the run goes on.", show_default=False)]


def drain(run: RunArgument, mac: MacArgument = "", /, *, reason: Reason = "", config: Servers = None, as_json: AsJson = False) -> None:
    """Grant no more sweeps, train on what is on the way, then end; with a Mac, let only that one leave."""
    from cli.follow import ASKED, tell
    from stoa.contracts import names

    if not mac:
        _drain_run(run, reason or ASKED, config, as_json=as_json)
        return
    said = f"lets {mac} finish its sweep and leave; `stoa quarantine {run} {mac} --release` lets it come back"
    tell(run, config, lambda control: control.ask_mac(run, names.DRAIN_MAC, mac, reason or ASKED), as_json=as_json, said=said)


def _drain_run(run: str, reason: str, config: "Path | None", *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from cli.follow import find_run
    from stoa.contracts import names

    with find_run(run, config) as found:
        status = found.control.ask(run, names.DRAIN, reason)
    if as_json:
        say.data(json.dumps(asdict(status), indent=2))
        return
    left = say.time_text(max(0.0, status.drain_until - time.time()))
    say.data(f"run {run} drains: it ends when what is on the way is used up, within {left}; `stoa status {run}` says what it waits for")
