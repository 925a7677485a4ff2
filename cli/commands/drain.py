"""`stoa drain RUN [MAC]`."""

from typing import Annotated

from cyclopts import Parameter

from cli.arguments import AsJson, Reason, RunArgument, Servers

MacArgument = Annotated[str, Parameter(help="Name of one Mac: it finishes its sweep and leaves, the run goes on.", show_default=False)]


def drain(run: RunArgument, mac: MacArgument = "", /, *, reason: Reason = "", config: Servers = None, as_json: AsJson = False) -> None:
    """Grant no more sweeps, train on what is on the way, then end; with a Mac, let only that one leave."""
    from cli.follow import ASKED, ask, tell
    from stoa.contracts import names

    if not mac:
        ask(run, names.DRAIN, reason, config, as_json=as_json, said="drains: it ends when what is on the way is used up")
        return
    said = f"lets {mac} finish its sweep and leave; `stoa quarantine {run} {mac} --release` lets it come back"
    tell(run, config, lambda control: control.ask_mac(run, names.DRAIN_MAC, mac, reason or ASKED), as_json=as_json, said=said)
