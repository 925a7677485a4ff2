"""`stoa warmstart OUT --model DIR`: teach a policy an environment's form on Macs, and write the checkpoint a run starts from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson
from cli.say import Exit

if TYPE_CHECKING:
    from worker_mac.warmstart.settings import Settings

_MOST_GB = 1e6


@dataclass(frozen=True)
class Lesson:
    """What is taught to which policy, and how."""

    model: Annotated[str, Parameter(help="Folder of the hub checkpoint to begin with; `new`: random weights in the demo's shape.")]
    environment: Annotated[str, Parameter(help="Whose demonstrations.")] = "search"
    dialogues: Annotated[Path | None, Parameter(help="File of demonstrations, JSON lines, instead of the environment's own.")] = None
    full: Annotated[bool, Parameter(help="Train every weight; else adapters.")] = False
    bits: Annotated[Literal[0, 4, 8], Parameter(help="Of the frozen weights under adapters; 0: as they are.")] = 4
    rank: Annotated[int, Parameter(help="Inner size of an adapter.")] = 8
    scale: Annotated[float, Parameter(help="An adapter's product counts this many times.")] = 20.0
    no_experts: Annotated[bool, Parameter(help="No adapters on experts.")] = False
    steps: Annotated[int | None, Parameter(help="Optimizer steps; 200, and 600 for `new`.")] = None
    rows: Annotated[int | None, Parameter(help="Demonstrations a step, over all Macs; 32, and 64 for `new`.")] = None
    learning_rate: Annotated[float | None, Parameter(help="At its height; 1e-4, and 4e-3 for `new`.")] = None
    seed: Annotated[int, Parameter(help="Of weights, adapters and demonstrations.")] = 0


@dataclass(frozen=True)
class Machines:
    """Where it runs and what it may take."""

    max_tokens: Annotated[int, Parameter(help="Longest demonstration that is taught; 0: the longest that fits.")] = 0
    grad_checkpoint: Annotated[bool, Parameter(help="Compute each layer twice and keep less.")] = False
    memory_gb: Annotated[float, Parameter(help="Memory a process may use; 0: what the machine grants.")] = 0.0
    ranks: Annotated[int, Parameter(help="Processes on this machine.")] = 1
    hosts: Annotated[Path | None, Parameter(help="hosts.json of wired Macs; each has the model, at one path from `stoa-wired`.")] = None
    split: Annotated[Literal["data", "tensor"], Parameter(help="What several share out: rows, or the model's matrices.")] = "data"
    shares: Annotated[str, Parameter(help="Speeds of the processes, as in 2,1; measured when left out.")] = ""
    save_every: Annotated[int, Parameter(help="Steps from one saved state to the next.")] = 50
    state: Annotated[Path | None, Parameter(help="Folder of saved states; OUT.warmstart when left out.")] = None
    resume: Annotated[bool, Parameter(help="Go on from the saved state.")] = False


def warmstart(
    out: Annotated[Path, Parameter(help="New folder for the hub checkpoint.")],
    /,
    *,
    lesson: Annotated[Lesson, Parameter(name="*")],
    machines: Annotated[Machines, Parameter(name="*")] = Machines(),
    as_json: AsJson = False,
) -> Exit:
    """Teach a policy by demonstrations, on one Mac or several, and write the hub checkpoint that a run starts from.

    What it takes of memory is said before anything is loaded, and refused if it does not fit. Ctrl-C ends it after the
    present step with its state saved; --resume goes on bit for bit.
    """
    from importlib.util import find_spec

    from cli.warmstart import Hosts, run
    from stoa.contracts.errors import MissingExtraError, UsageError

    if find_spec("mlx_lm") is None:
        raise MissingExtraError("a warm start on a Mac needs mlx_lm", hint="run `pip install 'stoa[mac]'`")
    if out.name in ("", ".."):
        out = out.resolve()
    if not out.name:
        raise UsageError(f"{out}: no checkpoint can be written there", hint="name a new folder")
    state = machines.state if machines.state is not None else out.with_name(f"{out.name}.warmstart")
    wired = None
    if machines.hosts is not None:
        state.mkdir(parents=True, exist_ok=True)
        wired = Hosts.find(machines.hosts, state)
        out, state = out.resolve(), state.resolve()
    settings = settings_of(out, state, lesson, machines, wired.num_ranks if wired else machines.ranks)
    outcome = run(settings.to_json(), settings.num_ranks, wired, resume=machines.resume)
    if as_json:
        say.data(json.dumps({"memory": outcome.memory, "last_step": outcome.last_step, "exported": outcome.exported}))
    if outcome.fault is not None and outcome.exported is None:
        say.error(str(outcome.fault["message"]), str(outcome.fault["hint"]))
    elif outcome.exit is Exit.STOPPED:
        say.talk("stopped; the same command with --resume goes on")
    elif outcome.exit is Exit.FAILED:
        say.error("a process of the warm start ended without a word", "look above; the same command with --resume goes on")
    return outcome.exit


def settings_of(out: Path, state: Path, lesson: Lesson, machines: Machines, num_ranks: int) -> "Settings":
    """What the processes are told. Raises ConfigError or UsageError for what cannot be."""
    from cli.warmstart import parse_shares
    from stoa.contracts.errors import UsageError
    from worker_mac.warmstart.settings import FRESH, Settings, defaults

    if not 0 <= machines.memory_gb < _MOST_GB:
        raise UsageError(f"--memory-gb {machines.memory_gb}: not a size of a memory", hint="gigabytes, 0 for what the machine grants")
    usual = defaults(lesson.model)
    settings = Settings(
        model=lesson.model,
        out=str(out),
        state=str(state),
        environment=lesson.environment,
        dialogues=str(lesson.dialogues or ""),
        mode="full" if lesson.full or lesson.model == FRESH else "lora",
        bits=lesson.bits,
        rank=lesson.rank,
        scale=lesson.scale,
        experts=not lesson.no_experts,
        split=machines.split,
        num_ranks=num_ranks,
        num_steps=usual.num_steps if lesson.steps is None else lesson.steps,
        batch_rows=usual.batch_rows if lesson.rows is None else lesson.rows,
        learning_rate=usual.learning_rate if lesson.learning_rate is None else lesson.learning_rate,
        num_warmup_steps=usual.num_warmup_steps,
        seed=lesson.seed,
        max_tokens=machines.max_tokens,
        grad_checkpoint=machines.grad_checkpoint,
        save_every=machines.save_every,
        memory_bytes=int(machines.memory_gb * 1e9),
        shares=parse_shares(machines.shares),
    )
    settings.check()
    return settings
