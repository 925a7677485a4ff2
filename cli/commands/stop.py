"""`stoa stop RUN`."""

from cli.arguments import AsJson, Reason, RunArgument, Servers


def stop(run: RunArgument, /, *, reason: Reason = "", config: Servers = None, as_json: AsJson = False) -> None:
    """End a run after its present step, with a last evaluation."""
    from cli.follow import ask
    from stoa.contracts import names

    ask(run, names.STOP, reason, config, as_json=as_json, said="is ending; `stoa run CONFIG --resume` goes on with it later")
