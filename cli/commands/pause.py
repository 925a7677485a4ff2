"""`stoa pause RUN`."""

from cli.arguments import AsJson, Reason, RunArgument, Servers


def pause(run: RunArgument, /, *, reason: Reason = "", config: Servers = None, as_json: AsJson = False) -> None:
    """Pause a run: Macs finish their group, the trainer waits."""
    from cli.follow import ask
    from stoa.contracts import names

    ask(run, names.PAUSE, reason, config, as_json=as_json, said=f"is paused; `stoa resume {run}` goes on")
