"""`stoa resume RUN`."""

from cli.arguments import AsJson, Reason, RunArgument, Servers


def resume(run: RunArgument, /, *, reason: Reason = "", config: Servers = None, as_json: AsJson = False) -> None:
    """Undo a pause."""
    from cli.follow import ask
    from stoa.contracts import names

    ask(run, names.RESUME, reason, config, as_json=as_json, said="goes on")
