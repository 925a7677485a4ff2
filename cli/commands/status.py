"""`stoa status RUN`: how a run is, in a sentence or as JSON."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from cli import say
from cli.arguments import AsJson, RunArgument, Servers

if TYPE_CHECKING:
    from cli.report.record import RunRecord

PIPE_COLUMNS: Final = 400
"""In a pipe nothing is cut to the width of a terminal."""


def status(run: RunArgument, /, *, config: Servers = None, as_json: AsJson = False) -> None:
    """How a run is, what it waits for, and each Mac."""
    from rich.console import Console

    from cli.follow import find_run
    from cli.live.progress import block

    with find_run(run, config) as found:
        record = found.collector.collect()
    if as_json:
        say.data(json.dumps(facts(record), indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    console.print(block(record, found.document.config.stop.max_steps, ""))


def facts(record: "RunRecord") -> dict[str, object]:
    """What `--json` prints."""
    last = record.evaluations[-1] if record.evaluations else None
    return {
        "run": record.facts.run,
        "state": record.state,
        "waiting_for": "" if record.state in ("stopped", "failed") else record.waiting_for,
        "end_reason": record.end_reason,
        "version": record.version,
        "step": max(record.step, record.live_step),
        "seconds": round(record.seconds, 1),
        "pass_at_1": last.pass_at_1 if last is not None else None,
        "search_rate": last.search_rate if last is not None else None,
        "macs": [asdict(session) for session in record.sessions],
    }
