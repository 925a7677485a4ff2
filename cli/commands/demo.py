"""`stoa demo`: the whole thing on one machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from cli import say
from cli.arguments import Sets
from cli.say import Exit

if TYPE_CHECKING:
    from cli.report.summary import Summary


def demo(
    *,
    workers: int = 2,
    seed: int = 0,
    out: Path | None = None,
    minutes: float = 8.0,
    config: Path | None = None,
    quiet: bool = False,
    sets: Sets = (),
) -> Exit:
    """Run everything on this machine and write a report: servers, trainer, Macs, the small search task.

    It ends by itself after its steps or at its limit, and leaves no process behind.

    Parameters
    ----------
    workers
        Mac workers, each a process with one thread.
    seed
        Seed of the world, of the order of questions and of sampling.
    out
        New folder for state, logs and report; runs/demo-N when left out.
    minutes
        Limit of wall clock; the run then ends with what it has.
    config
        Another configuration than configs/demo.toml.
    quiet
        Say only how it ended.
    """
    from cli.demo import Options, next_folder, run_demo
    from stoa.contracts.errors import UsageError

    if not 1 <= workers <= 64:
        raise UsageError(f"--workers {workers}: from 1 to 64")
    if minutes <= 0:
        raise UsageError(f"--minutes {minutes:g}: must be more than 0")
    options = Options(workers, seed, out if out is not None else next_folder(), minutes, config, sets, quiet)
    outcome = run_demo(options)
    tell(options.out, outcome.summary)
    if outcome.summary.audit.faults or outcome.summary.state == "failed":
        return Exit.FAILED
    return Exit.DONE if outcome.complete else Exit.STOPPED


def tell(folder: Path, summary: "Summary") -> None:
    """The last lines: what came of the run, and where to look."""
    exam, search = summary.pass_at_1, summary.search_rate
    say.talk()
    say.talk(f"{summary.versions} versions, {summary.steps} steps in {say.time_text(summary.seconds)}: {summary.end_reason}")
    if exam.num_questions:
        low, high = exam.interval_95
        say.talk(
            f"held-out pass@1 {exam.start:.3f} -> {exam.end:.3f} ({low:.3f} to {high:.3f}, {say.counted(exam.num_questions, 'question')})"
        )
        say.talk(f"search rate     {search.start:.3f} -> {search.end:.3f}")
    ratio = f", {summary.anchor_to_delta_ratio:.1f} times smaller than an anchor" if summary.anchor_to_delta_ratio else ""
    say.talk(f"median delta    {say.bytes_text(summary.delta_bytes_median)}{ratio}")
    if summary.idle_reason:
        for number, reason in enumerate(summary.idle_reason.split("; ")):
            say.talk(f"{'' if number else 'waiting':16}{reason}")
    for fault in summary.audit.faults:
        say.error(f"audit: {fault}")
    if summary.audit.clean:
        say.talk("audit           no group trained twice, no version published twice, chain whole")
    say.talk(f"report          {folder / 'report.html'}")
    say.talk(f"open it again   `stoa services --demo {folder}`, then `stoa status {summary.run} --config {folder / 'config.json'}`")
