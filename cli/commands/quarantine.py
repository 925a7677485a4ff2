"""`stoa quarantine RUN MAC`."""

from typing import Annotated

from cyclopts import Parameter

from cli.arguments import AsJson, Reason, RunArgument, Servers

MacArgument = Annotated[str, Parameter(help="Name of the Mac.")]


def quarantine(
    run: RunArgument,
    mac: MacArgument,
    /,
    *,
    release: bool = False,
    unseen: bool = False,
    reason: Reason = "",
    config: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Train on nothing more of a Mac and let it stop; its owner is told why.

    Parameters
    ----------
    release
        Undo it, and undo `stoa drain RUN MAC`.
    unseen
        Also a Mac that the run has not met: it is kept from joining.
    """
    from cli.follow import ASKED, tell
    from stoa.contracts import names

    update = names.RELEASE if release else names.QUARANTINE
    said = f"takes groups of {mac} again" if release else f"takes no more groups of {mac}"
    tell(run, config, lambda control: control.ask_mac(run, update, mac, reason or ASKED, unseen=unseen), as_json=as_json, said=said)
