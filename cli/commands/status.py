"""`stoa status RUN`: how a run is, in a sentence or as JSON."""

import json
from dataclasses import asdict

from cli import say
from cli.arguments import AsJson, RunArgument, Servers


def status(run: RunArgument, /, *, config: Servers = None, as_json: AsJson = False) -> None:
    """How a run is, what it waits for, and each Mac."""
    from rich.console import Console

    from cli.follow import find_run
    from cli.live.progress import block

    with find_run(run, config) as found:
        now = found.control.status(run)
        record = found.collector.collect()
    if as_json:
        say.data(json.dumps({**asdict(now), "macs": [asdict(session) for session in record.sessions]}, indent=2))
        return
    Console(highlight=False).print(block(record, found.document.config.stop.max_steps, ""))
