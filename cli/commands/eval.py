"""`stoa eval`: how good a run's versions, or a checkpoint, are on held-out questions."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson, Servers, Sets
from cli.say import Exit

TargetArgument = Annotated[str, Parameter(help="Name of a run, or a checkpoint: a folder, or owner/name.")]


def eval(
    target: TargetArgument = "",
    /,
    *,
    version: Annotated[int | None, Parameter(help="Have the live run examine this version now; -1: the newest.")] = None,
    questions: Annotated[int, Parameter(help="Held-out questions; 0: as many as the run's last evaluation has.")] = 0,
    samples: Annotated[int, Parameter(help="Samples of each question; with several, pass@k is told too.")] = 8,
    name: Annotated[
        str, Parameter(help="Name of the evaluation; of a checkpoint: Macs that name the same one, with --config, share it.")
    ] = "",
    compare: Annotated[
        tuple[str, str] | None, Parameter(help="Two evaluations of the run, or versions, or files of --out.", consume_multiple=True)
    ] = None,
    workers: Annotated[int, Parameter(help="Processes that play a checkpoint on this machine.")] = 1,
    hosts: Annotated[Path | None, Parameter(help="A checkpoint is played by the wired Macs that this hosts.json names, as one.")] = None,
    no_doctor: Annotated[bool, Parameter(help="Do not look first whether these Macs are fit for it.")] = False,
    seed: Annotated[int, Parameter(help="Seed of questions and samples of a checkpoint.")] = 0,
    out: Annotated[Path | None, Parameter(help="Keep the result in this file, for --compare.")] = None,
    config: Servers = None,
    sets: Sets = (),
    as_json: AsJson = False,
) -> Exit:
    """Show a run's evaluations; with --version make one on its Macs, beside training; of a checkpoint, here.

    A checkpoint is played by this machine's engine in int8, as a Mac of a run would play it; its task is that of --config.
    Several Macs share the work where each runs this command with the same --name and a --config that names their bucket; with
    --hosts a wired set is one of them.
    """
    from cli.evaluation import asked
    from stoa.contracts.errors import UsageError

    is_checkpoint = "/" in target or Path(target).is_dir()
    if hosts is not None and (compare is not None or not is_checkpoint):
        raise UsageError("--hosts is for a checkpoint", hint="a run is played by the Macs that joined it: `stoa join --hosts`")
    if compare is not None:
        return asked.show_compared(target, compare, config, as_json=as_json)
    if not target:
        raise UsageError("nothing to evaluate", hint="name a run or a checkpoint: `stoa eval demo`, `stoa eval path/to/checkpoint`")
    if is_checkpoint:
        from cli.evaluation.standalone import Asked, examine

        exam = examine(Asked(target, questions, samples, seed, workers, config, sets, name, hosts, not no_doctor))
        return asked.show([exam], out, as_json=as_json)
    if version is None:
        return asked.show_run(target, config, out, as_json=as_json)
    exam = asked.examine_run(target, version, questions, samples, name, config)
    say.talk(f"evaluation {exam.evaluation} of version {exam.version} is kept with the run")
    return asked.show([exam], out, as_json=as_json)
