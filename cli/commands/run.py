"""`stoa run CONFIG`: start a run, or go on with a stopped one."""

from pathlib import Path
from typing import TYPE_CHECKING

from cli import say
from cli.arguments import Sets
from cli.say import Exit

if TYPE_CHECKING:
    from cli.launch import Launched
    from cli.temporal import Control
    from stoa.config.run import RunConfig


def run(
    config: Path | None = None,
    /,
    *,
    resume: bool = False,
    detach: bool = False,
    no_doctor: bool = False,
    out: Path | None = None,
    quiet: bool = False,
    sets: Sets = (),
) -> Exit:
    """Start a run and follow it to its end. Ctrl-C stops following; the run goes on.

    Parameters
    ----------
    config
        Configuration; the demo's when left out.
    resume
        Go on with the stopped run of this name. Only [stop] may differ from what it was started with.
    detach
        Start it and return.
    no_doctor
        Do not look first whether this machine is fit for it.
    out
        Folder for metrics.jsonl while it is followed and the report at the end; runs/RUN when left out.
    quiet
        Say only what was started and how it ended.
    """
    from cli.doctor.checks import fit_for_run
    from cli.first_screen import Promise, first_screen
    from cli.launch import launch
    from cli.temporal import Control
    from stoa.config.load import load_run
    from stoa.contracts.namesakes import alike

    settings = load_run(config, sets)
    if not no_doctor and not fit_for_run(settings):
        return Exit.FAULT_FOUND
    with Control(settings.temporal) as control:
        launched = launch(settings, control, resume=resume)
        folder = out if out is not None else Path("runs") / settings.run
        promise = Promise(config, load_run(config).run, control.present(settings.run), folder, resume=resume, detach=detach)
        for line in first_screen(settings, launched.layout, promise):
            say.talk(line)
        for note in filter(None, (alike(settings.run, other) for other in control.live_runs())):
            say.talk(f"note: {note}")
        if detach:
            return Exit.DONE
        return _follow(settings, launched, control, folder, quiet=quiet)


def _follow(settings: "RunConfig", launched: "Launched", control: "Control", folder: Path, *, quiet: bool) -> Exit:
    """Show it until it has ended, keep its metrics, and write its report."""
    from cli.follow import Found, follow, reached
    from cli.launch import open_store
    from cli.report.collect import Collector
    from cli.report.write import MetricsFile, write_report

    store = open_store(settings)
    found = Found(settings, launched.document, store, control, Collector(launched.document, store, control))
    try:
        record = follow(found, settings.stop.max_steps, on_record=MetricsFile(folder / "metrics.jsonl").keep, quiet=quiet)
    except KeyboardInterrupt:
        say.talk(f"no longer following; the run goes on: `stoa status {settings.run}`, `stoa stop {settings.run}`")
        return Exit.STOPPED
    write_report(found.collector.collect(everything=True), folder)
    say.talk(f"report: {folder / 'report.html'}")
    if record.state == "gone":
        say.error(f"run {settings.run}: {record.end_reason}")
        return Exit.FAILED
    result = control.result(settings.run)
    say.talk(f"run {settings.run} ended at step {result.step}, version {result.version}: {result.end_reason}")
    if record.state == "failed":
        return Exit.FAILED
    return Exit.DONE if reached(settings.stop, record) else Exit.STOPPED
