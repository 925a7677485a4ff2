"""`stoa report RUN`: the report of a run, ended or not."""

from pathlib import Path

from cli import say
from cli.arguments import AsJson, RunArgument, Servers


def report(run: RunArgument, /, *, out: Path | None = None, interval: int = -1, config: Servers = None, as_json: AsJson = False) -> None:
    """Write report.json, metrics.jsonl, report.html and plots of a run from its bucket.

    Parameters
    ----------
    out
        Folder to write into; report-RUN when left out.
    interval
        Version whose time as the newest the timeline shows; one from the middle of the run when left out.
    """
    import json

    from cli.follow import find_run
    from cli.report.write import write_report

    folder = out if out is not None else Path(f"report-{run}")
    with find_run(run, config) as found:
        summary = write_report(found.collector.collect(everything=True, interval=interval), folder)
    if as_json:
        say.data(json.dumps(summary.as_json(), indent=2))
    for fault in summary.audit.faults:
        say.error(f"audit: {fault}")
    say.talk(f"report: {folder / 'report.html'}")
