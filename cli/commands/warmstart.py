"""`stoa warmstart OUT --model DIR`: teach a policy an environment's form on Macs, and write the checkpoint a run starts from."""

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson
from cli.say import Exit


def warmstart(
    out: Annotated[Path, Parameter(help="New folder for the hub checkpoint.")],
    /,
    *,
    model: Annotated[str, Parameter(help="Folder of the hub checkpoint to begin with; `new`: random weights in the demo's shape.")],
    environment: Annotated[str, Parameter(help="Whose demonstrations.")] = "search",
    dialogues: Annotated[Path | None, Parameter(help="File of demonstrations, JSON lines, instead of the environment's own.")] = None,
    full: Annotated[bool, Parameter(help="Train every weight; else adapters.")] = False,
    bits: Annotated[Literal[0, 4, 8], Parameter(help="Of the frozen weights under adapters; 0: as they are.")] = 4,
    rank: Annotated[int, Parameter(help="Inner size of an adapter.")] = 8,
    scale: Annotated[float, Parameter(help="An adapter's product counts this many times.")] = 20.0,
    no_experts: Annotated[bool, Parameter(help="No adapters on experts.")] = False,
    steps: Annotated[int | None, Parameter(help="Optimizer steps; 200, and 600 for `new`.")] = None,
    rows: Annotated[int | None, Parameter(help="Demonstrations a step, over all Macs; 32, and 64 for `new`.")] = None,
    learning_rate: Annotated[float | None, Parameter(help="At its height; 1e-4, and 4e-3 for `new`.")] = None,
    seed: Annotated[int, Parameter(help="Of weights, adapters and demonstrations.")] = 0,
    max_tokens: Annotated[int, Parameter(help="Longest demonstration that is taught; 0: the longest that fits.")] = 0,
    grad_checkpoint: Annotated[bool, Parameter(help="Compute each layer twice and keep less.")] = False,
    memory_gb: Annotated[float, Parameter(help="Memory a process may use; 0: what the machine grants.")] = 0.0,
    ranks: Annotated[int, Parameter(help="Processes on this machine.")] = 1,
    hosts: Annotated[Path | None, Parameter(help="hosts.json of wired Macs; each has the model, at one path from `stoa-wired`.")] = None,
    split: Annotated[Literal["data", "tensor"], Parameter(help="What several share out: rows, or the model's matrices.")] = "data",
    shares: Annotated[str, Parameter(help="Speeds of the processes, as in 2,1; measured when left out.")] = "",
    save_every: Annotated[int, Parameter(help="Steps from one saved state to the next.")] = 50,
    state: Annotated[Path | None, Parameter(help="Folder of saved states; OUT.warmstart when left out.")] = None,
    resume: Annotated[bool, Parameter(help="Go on from the saved state.")] = False,
    as_json: AsJson = False,
) -> Exit:
    """Teach a policy by demonstrations, on one Mac or several, and write the hub checkpoint that a run starts from.

    What it takes of memory is said before anything is loaded, and refused if it does not fit. Ctrl-C ends it after the
    present step with its state saved; --resume goes on bit for bit.
    """
    from importlib.util import find_spec

    from cli.warmstart import Hosts, parse_shares, run
    from stoa.contracts.errors import MissingExtraError
    from worker_mac.warmstart.settings import FRESH, Settings, defaults

    if find_spec("mlx_lm") is None:
        raise MissingExtraError("a warm start on a Mac needs mlx_lm", hint="run `pip install 'stoa[mac]'`")
    kept = state if state is not None else out.with_name(f"{out.name}.warmstart")
    wired = None
    if hosts is not None:
        kept.mkdir(parents=True, exist_ok=True)
        wired = Hosts.find(hosts, kept)
    usual = defaults(model)
    settings = Settings(
        model=model,
        out=str(out.resolve() if wired else out),
        state=str(kept.resolve() if wired else kept),
        environment=environment,
        dialogues=str(dialogues or ""),
        mode="full" if full or model == FRESH else "lora",
        bits=bits,
        rank=rank,
        scale=scale,
        experts=not no_experts,
        split=split,
        num_ranks=wired.num_ranks if wired else ranks,
        num_steps=usual.num_steps if steps is None else steps,
        batch_rows=usual.batch_rows if rows is None else rows,
        learning_rate=usual.learning_rate if learning_rate is None else learning_rate,
        num_warmup_steps=usual.num_warmup_steps,
        seed=seed,
        max_tokens=max_tokens,
        grad_checkpoint=grad_checkpoint,
        save_every=save_every,
        memory_bytes=int(memory_gb * 1e9),
        shares=parse_shares(shares),
    )
    settings.check()
    outcome = run(settings.to_json(), settings.num_ranks, wired, resume=resume)
    if as_json:
        say.data(json.dumps({"memory": outcome.memory, "last_step": outcome.last_step, "exported": outcome.exported}))
    if outcome.fault is not None and outcome.exported is None:
        say.error(str(outcome.fault["message"]), str(outcome.fault["hint"]))
    elif outcome.exit is Exit.STOPPED:
        say.talk("stopped; the same command with --resume goes on")
    elif outcome.exit is Exit.FAILED:
        say.error("a process of the warm start ended without a word", "look above; the same command with --resume goes on")
    return outcome.exit
