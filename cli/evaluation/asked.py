"""What a person asks of evaluations: of a live run another one, of any run those it has, of two how they compare."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cli import say
from cli.evaluation import shown
from cli.evaluation.shown import Exam
from cli.follow import find_run
from cli.say import Exit
from stoa.bucket.evals import all_summaries, read_summary
from stoa.contracts.errors import ServiceError, UsageError
from stoa.contracts.evaluation_messages import EvalAsk


def examine_run(run: str, version: int, num_questions: int, num_samples: int, name: str, config: Path | None) -> Exam:
    """Have a live run examine a version; returns when it is marked. Raises UsageError, ServiceError."""
    with find_run(run, config) as found:
        ask = EvalAsk(name or f"asked-{uuid.uuid4().hex[:8]}", version, num_questions, num_samples)
        what = "its newest version" if version < 0 else f"version {version}"
        result, players = found.control.examine(run, ask, lambda: say.talk(f"run {run} examines {what} as {ask.name}"))
        if not result.key:
            raise ServiceError(f"run {run}: evaluation {ask.name}: {result.error}")
        return shown.of_summary(read_summary(found.store, result.key), players)


def show_run(run: str, config: Path | None, out: Path | None, *, as_json: bool) -> Exit:
    """All evaluations of a run."""
    with find_run(run, config, temporal=False) as found:
        exams = [shown.of_summary(summary) for summary in all_summaries(found.store, run)]
    if not exams:
        say.error(f"run {run} has no evaluation", f"`stoa eval {run} --version -1` makes one of its newest version")
        return Exit.FAILED
    return show(exams, out, as_json=as_json)


def show(exams: Sequence[Exam], out: Path | None, *, as_json: bool) -> Exit:
    """Print exams, and keep the last one in a file if one is named."""
    if out is not None:
        shown.write(exams[-1], out)
    if as_json:
        say.data(json.dumps([shown.as_tree(exam) for exam in exams], indent=2))
        return Exit.DONE
    for exam in exams:
        for line in shown.lines(exam):
            say.data(line)
    return Exit.DONE


def show_compared(run: str, names: tuple[str, str], config: Path | None, *, as_json: bool) -> Exit:
    """Compare two evaluations: names or versions of the run's, or files."""
    exams: list[Exam] = []
    for name in names:
        if Path(name).is_file():
            exams.append(shown.read(Path(name)))
        elif run:
            with find_run(run, config, temporal=False) as found:
                exams.append(shown.pick(all_summaries(found.store, run), name))
        else:
            raise UsageError(f"{name}: no such file", hint="name the run before --compare to compare its evaluations")
    found, told = shown.compared(*exams)
    if as_json:
        say.data(json.dumps({"before": exams[0].evaluation, "after": exams[1].evaluation, **asdict(found)}, indent=2))
    else:
        for line in told:
            say.data(line)
    return Exit.DONE
