"""`stoa run CONFIG`: start a run, or go on with a stopped one."""

from pathlib import Path
from typing import TYPE_CHECKING

from cli import say
from cli.arguments import Sets
from cli.say import Exit

if TYPE_CHECKING:
    from stoa.config.run import RunConfig


def run(
    config: Path | None = None,
    /,
    *,
    resume: bool = False,
    detach: bool = False,
    no_doctor: bool = False,
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
    """
    from cli.doctor.checks import fit_for_run
    from cli.follow import Found, follow, reached
    from cli.launch import launch, open_store
    from cli.report.collect import Collector
    from cli.temporal import Control
    from stoa.config.load import load_run

    settings = load_run(config, sets)
    if not no_doctor and not fit_for_run(settings):
        return Exit.FAULT_FOUND
    with Control(settings.temporal) as control:
        launched = launch(settings, control, resume=resume)
        first_screen(settings, config, launched.layout.num_bytes, resume=resume)
        if detach:
            return Exit.DONE
        store = open_store(settings)
        found = Found(settings, launched.document, store, control, Collector(launched.document, store, control))
        try:
            record = follow(found, settings.stop.max_steps)
        except KeyboardInterrupt:
            say.talk(f"no longer following; the run goes on: `stoa status {settings.run}`, `stoa stop {settings.run}`")
            return Exit.STOPPED
        if record.state == "gone":
            say.error(f"run {settings.run}: {record.end_reason}")
            return Exit.FAILED
        result = control.result(settings.run)
        say.talk(f"run {settings.run} ended at step {result.step}, version {result.version}: {result.end_reason}")
        if record.state == "failed":
            return Exit.FAILED
        return Exit.DONE if reached(settings.stop, record) else Exit.STOPPED


def first_screen(settings: "RunConfig", file: Path | None, weights_bytes: int, *, resume: bool) -> None:
    """What was started, where it is, when it ends, and how to follow and stop it."""
    from stoa.config.load import load_run

    stop = settings.stop
    say.talk(f"run {settings.run} {'goes on' if resume else 'is started'}: {settings.model} on {settings.environment.name}")
    say.talk(f"control   Temporal at {settings.temporal.address}, workflow run-{settings.run}")
    say.talk(f"bytes     {settings.bucket.endpoint}/{settings.bucket.name}; full weights {say.bytes_text(weights_bytes)}")
    limits = [
        f"{stop.max_steps} steps" if stop.max_steps else "",
        f"version {stop.max_versions}" if stop.max_versions else "",
        say.counted(stop.max_minutes, "minute") if stop.max_minutes else "",
        f"pass@1 of {stop.target_pass_at_1:g}" if stop.target_pass_at_1 else "",
        say.counted(stop.max_gpu_hours, "GPU hour") if stop.max_gpu_hours else "",
        say.counted(stop.max_dollars, "dollar") if stop.max_dollars else "",
        "an alarm that pauses" if stop.on_alarm else "",
    ]
    say.talk(f"ends at   {' or '.join(filter(None, limits)) or '`stoa stop`'}")
    named = f" {file}" if file is not None else ""
    say.talk(f"needs     `python -m trainer_gpu.worker{named}` and one or more `python -m worker_mac.worker{named}`")
    if load_run(file).run != settings.run:
        say.talk(f'          with a file that says run = "{settings.run}": workers take the name from theirs')
    say.talk(f"follow    `stoa status {settings.run} --follow`; Macs: `stoa fleet {settings.run}`")
    say.talk(f"stop      `stoa stop {settings.run}`; report: `stoa report {settings.run}`")
