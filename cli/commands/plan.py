"""`stoa plan gpu`: what fits, worked out before a machine is hired."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from cli import say
from cli.arguments import AsJson

if TYPE_CHECKING:
    from cli.plan.gpu import Line, Model

plan = App(name="plan", help="Work out what fits before hiring a machine.")


@plan.command
def gpu(
    *,
    model: Annotated[Path | None, Parameter(help="Checkpoint folder; LFM2.5-8B-A1B when left out.")] = None,
    gpus: Annotated[int, Parameter(help="GPUs of one machine; the usual ones when left out.")] = 0,
    memory_gb: Annotated[float, Parameter(help="Memory of one GPU in GB of 1e9 bytes.")] = 0.0,
    micro_batch_tokens: Annotated[int, Parameter(help="Tokens of a forward and backward pass there must be room for.")] = 8192,
    as_json: AsJson = False,
) -> None:
    """Memory of the trainer on 1 to 8 GPUs: which layouts and optimizer states fit, and what room they leave."""
    import json
    from dataclasses import asdict

    from cli.plan.gpu import STANDARD, advice, read_model
    from cli.plan.gpu import plan as plan_machine
    from stoa.contracts.errors import UsageError

    if bool(gpus) != bool(memory_gb):
        raise UsageError("a machine needs both --gpus and --memory-gb", hint="leave both out for the usual machines")
    found = read_model(model)
    machines = ((gpus, memory_gb),) if gpus else STANDARD
    planned = [(num, size, plan_machine(found, num, size)) for num, size in machines]
    if as_json:
        tree = [
            {"gpus": num, "memory_gb": size, "advice": advice(lines, micro_batch_tokens), "ways": [asdict(line) for line in lines]}
            for num, size, lines in planned
        ]
        say.data(json.dumps({"model": asdict(found), "micro_batch_tokens": micro_batch_tokens, "machines": tree}, indent=2))
        return
    _print(found, planned, micro_batch_tokens)


def _print(model: "Model", planned: "list[tuple[int, float, list[Line]]]", micro_batch_tokens: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from cli.plan.gpu import HEAD_BYTES, RESERVE_BYTES, advice

    console = Console(highlight=False)
    experts = f", {model.num_expert / model.num_parameters:.1%} in experts" if model.num_expert else ""
    console.print(f"{model.name}: {model.num_parameters:,} parameters{experts}; int8 on the wire {say.bytes_text(model.wire_bytes)}")
    for num, size, lines in planned:
        table = Table("way", "state on a GPU", "micro-batch it leaves room for", "host memory", "", box=None, pad_edge=False)
        for line in lines:
            room = f"{line.micro_batch_tokens:,} tokens" if line.fits else "does not fit"
            note = line.way.note if line.way.status == "built" else f"{line.way.note} (not built)"
            table.add_row(line.way.name, say.bytes_text(line.state_bytes), room, say.bytes_text(line.host_bytes), note)
        console.print(f"\n[bold]{num} x {size:g} GB[/]: {advice(lines, micro_batch_tokens)}")
        console.print(table)
    kept = say.bytes_text(model.activation_bytes_per_token)
    console.print(
        f"\nA token keeps {kept} for the backward pass; a GPU keeps {say.bytes_text(RESERVE_BYTES)} and 5 % for itself, the head "
        f"{say.bytes_text(HEAD_BYTES)} of logits and {say.bytes_text(model.embedding_bytes)} of gradient. No GPU was measured."
    )
