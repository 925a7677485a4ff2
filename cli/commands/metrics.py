"""`stoa metrics RUN`: a run's numbers, for other programs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson, RunArgument, Servers
from cli.say import Exit

if TYPE_CHECKING:
    from cli.follow import Found
    from stoa.telemetry.sinks import Sink


Target = Literal["jsonl", "prometheus", "trackio", "wandb"]


def metrics(
    run: RunArgument,
    /,
    *,
    to: Annotated[
        Literal["jsonl", "prometheus", "trackio", "wandb"], Parameter(help="Where they go; all but jsonl need an extra.")
    ] = "jsonl",
    out: Annotated[Path | None, Parameter(help="File for jsonl, which is added to; standard output when left out.")] = None,
    follow: Annotated[bool, Parameter(help="Go on until the run has ended.")] = False,
    port: Annotated[int, Parameter(help="Port of the page for Prometheus, on this machine only.")] = 9464,
    config: Servers = None,
    as_json: AsJson = False,
) -> Exit:
    """Give a run's metrics to standard output, a file, a Prometheus page, trackio or wandb.

    A page for Prometheus is kept until Ctrl-C.
    """
    import contextlib
    import time

    from cli.follow import find_run
    from cli.metrics import Feeder, feed_until_end
    from cli.report.write import metric_rows

    with find_run(run, config, temporal=follow or to == "prometheus") as found:
        if as_json or (to == "jsonl" and out is None and not follow):
            rows = [row.tree() for row in metric_rows(found.collector.collect())]
            say.data(json.dumps({"run": run, "rows": rows}, indent=2) if as_json else "\n".join(map(json.dumps, rows)))
            return Exit.DONE
        with contextlib.closing(_sink(found, run, to, out, port)) as sink:
            try:
                num = (
                    feed_until_end(found, sink, say.talk) if follow or to == "prometheus" else Feeder(sink).feed(found.collector.collect())
                )
                while to == "prometheus":
                    time.sleep(1.0)
            except KeyboardInterrupt:
                say.talk("no longer following; the run goes on")
                return Exit.STOPPED
    say.talk(f"metrics: {say.counted(num, 'row')} of run {run} to {to if out is None else out}")
    return Exit.DONE


def _sink(found: "Found", run: str, to: str, out: Path | None, port: int) -> "Sink":
    from cli.metrics import settings_of
    from stoa.telemetry import sinks

    if to == "prometheus":
        page = sinks.Prometheus(run, port=port)
        say.talk(f"metrics: {page.url}; Ctrl-C ends it")
        return page
    if to == "trackio":
        return sinks.Trackio(run, settings_of(found))
    if to == "wandb":
        return sinks.Wandb(run, settings_of(found))
    return sinks.JsonLines(out if out is not None else Path("/dev/stdout"))
