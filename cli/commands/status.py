"""`stoa status RUN`: how a run is, in a sentence or as JSON."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson, RunArgument, Servers
from cli.say import Exit

if TYPE_CHECKING:
    from cli.report.record import RunRecord

Follow = Annotated[bool, Parameter(help="Go on until the run has ended; Ctrl-C ends only the following.")]


def status(run: RunArgument, /, *, follow: Follow = False, config: Servers = None, as_json: AsJson = False) -> Exit | None:
    """How a run is, what it waits for, and each Mac."""
    from rich.console import Console

    from cli.follow import PIPE_COLUMNS, find_run, gone, is_absent
    from cli.follow import follow as follow_to_its_end
    from cli.live.progress import block
    from cli.report.collect import Newest

    with find_run(run, config, newest=Newest()) as found:
        if follow:
            try:
                record = follow_to_its_end(found, 0)
            except KeyboardInterrupt:
                say.talk(f"no longer following; the run goes on: `stoa stop {run}` ends it")
                return Exit.STOPPED
        else:
            record = found.collector.collect()
            if record.state not in ("stopped", "failed") and is_absent(found.control, run):
                record = gone(record)
        away = "" if record.state in ("stopped", "failed") else found.collector.temporal_away
    spent = {"gpu_hours": record.gpu_hours, "dollars": round(record.gpu_hours * record.facts.gpu_usd_an_hour, 6)}
    if as_json:
        say.data(json.dumps({**facts(record), **spent}, indent=2))
        return _unanswered(away)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    console.print(block(record, record.max_steps, ""))
    if spent["gpu_hours"]:
        price = f", {spent['dollars']:.2f} dollars" if spent["dollars"] else ""
        console.print(f"used {spent['gpu_hours']:.2f} GPU hours{price}")
    return _unanswered(away)


def _unanswered(away: str) -> Exit | None:
    """What was shown is not how the run is, if Temporal told nothing."""
    if away:
        say.error(away)
    return Exit.FAILED if away else None


def facts(record: "RunRecord") -> dict[str, object]:
    """What `--json` prints."""
    last = record.evaluations[-1] if record.evaluations else None
    return {
        "run": record.facts.run,
        "state": record.state,
        "waiting_for": "" if record.state in ("stopped", "failed", "gone") else record.waiting_for,
        "end_reason": record.end_reason,
        "version": record.version,
        "step": max(record.step, record.live_step),
        "max_steps": record.max_steps,
        "seconds": round(record.seconds, 1),
        "pass_at_1": last.pass_at_1 if last is not None else None,
        "search_rate": last.search_rate if last is not None else None,
        "macs": [asdict(session) for session in record.sessions],
    }
