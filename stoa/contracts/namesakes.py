"""Macs of two runs that have one name in Temporal: host `b-c` of run `a`, and host `c` of run `a-b`.

A session and its queue are named by run and host with a dash between (`names.mac_queue`), so two such Macs would share both.
Whose session it is says its run and host; whoever is handed something of the other one refuses it. Standard library only.
"""

from typing import Final

from stoa.contracts.ids import is_name

HINT: Final = "give this Mac another name: `--host NAME`, or ask for an invitation under another one"


def namesakes(run: str, host: str) -> tuple[tuple[str, str], ...]:
    """Every other (run, host) with the session and the queue of this one."""
    whole = f"{run}-{host}"
    cuts = [at for at, letter in enumerate(whole) if letter == "-" and at != len(run)]
    return tuple((whole[:at], whole[at + 1 :]) for at in cuts if is_name(whole[:at]) and is_name(whole[at + 1 :]))


def other_run(run: str, host: str, other_host: str) -> str:
    """The run that has a namesake of this Mac under the host name `other_host`; "" if there is none."""
    return next((found for found, its_host in namesakes(run, host) if its_host == other_host), "")


def shared(run: str, host: str, other: tuple[str, str]) -> str:
    """One sentence that names two namesakes, this one first."""
    return f"Mac {host} of run {run} and Mac {other[1]} of run {other[0]} have one name in Temporal"


def clash(run: str, host: str, other: tuple[str, str]) -> str:
    """The same of one that is there, named first, and one that would be."""
    return f"{shared(run, host, other)}, and the first is there already"


def alike(run: str, other: str) -> str:
    """Which names of Macs two live runs should leave alone, in one sentence; "" if no two of their Macs can be namesakes."""
    short, long = sorted((run, other), key=len)
    if not long.startswith(f"{short}-"):
        return ""
    first = f"{long.removeprefix(f'{short}-')}-"
    return (
        f"run {other} is live here too: a Mac of run {short} called {first}NAME has the same name in Temporal as Mac NAME of run {long}, "
        "and whichever comes second is turned away"
    )
