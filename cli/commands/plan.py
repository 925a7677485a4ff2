"""`stoa plan gpu | fleet`: what fits, and what a fleet brings, worked out before anything is hired."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from cli import say
from cli.arguments import AsJson
from cli.examples import epilogue

if TYPE_CHECKING:
    from cli.plan.fleet_answers import Answers, Way
    from cli.plan.gpu import Line, Model

plan = App(name="plan", help="Work out what fits before hiring a machine, and what a fleet of Macs brings.", help_epilogue=epilogue("plan"))


@plan.command
def fleet(
    file: Annotated[Path | None, Parameter(help="TOML of the fleet; configs/fleet.toml when left out.")] = None,
    *,
    config: Annotated[Path | None, Parameter(help="TOML of the run; full-size settings when left out.")] = None,
    hours: Annotated[float, Parameter(help="Hours to simulate, the first quarter not counted.")] = 24.0,
    as_json: AsJson = False,
) -> None:
    """What a fleet of Macs brings: steps, idle time, staleness, bytes and cost; what the internet costs; how many Macs are enough."""
    import json

    from cli.plan.fleet_answers import answer, as_tree
    from cli.plan.fleet_spec import DEFAULT_FLEET, FleetPlan
    from stoa.config.load import load_run, load_section
    from stoa.config.run import RunConfig
    from stoa.contracts.errors import UsageError

    if not 0.1 <= hours <= 1000.0:
        raise UsageError(f"--hours {hours:g}: not between 0.1 and 1000")
    found = load_section(file or DEFAULT_FLEET, FleetPlan, example=DEFAULT_FLEET)
    if not found.num_macs:
        raise UsageError(f"{file}: no Macs to plan with", hint="give a kind of Macs a count: [macs.NAME] count = 14")
    run = load_run(config, environ={}) if config else RunConfig()
    answers = answer(found, run, hours)
    if as_json:
        say.data(json.dumps({**as_tree(answers), "plan": found.model_dump()}))
        return
    _print_fleet(answers)


def _print_fleet(found: "Answers") -> None:
    """Sentences and a small table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{say.counted(found.num_macs, 'Mac')}[/], {found.hours_simulated:g} simulated hours, mean of three draws")
    console.print(
        f"{found.steps:.1f} steps and {found.versions:.1f} versions an hour; {found.groups_trained:.0f} groups trained on, "
        f"{found.discarded_fraction:.1%} of what came too old"
    )
    console.print(
        f"the trainer waits for groups {found.trainer_idle_share:.1%} of its time; Macs wait {found.mac_wait_share:.1%} for a grant, "
        f"{found.mac_pull_share:.1%} for bytes, and are away {found.mac_away_share:.1%}"
    )
    ages = ", ".join(f"{lag}: {share:.0%}" for lag, share in found.staleness.items() if share >= 0.005)
    console.print(f"versions of lag at training (mean {found.staleness_mean:.2f}): {ages}")
    bill = found.bill
    console.print(
        f"{found.gb_down:.2f} GB down and {found.gb_up:.2f} GB up an hour; ${bill.trainer:.2f} trainer + ${bill.bucket_requests:.2f} "
        f"requests + ${bill.egress:.2f} egress an hour; {bill.storage_gb_a_day:.0f} GB a day kept unless cleared"
    )
    table = Table("100 versions", "hours", "USD an hour", "USD", box=None, pad_edge=False)
    ways: tuple[tuple[str, Way], ...] = (
        ("these Macs over the internet", found.internet),
        ("the same Macs on one LAN", found.lan),
        ("the stated GPU box", found.gpu_box),
    )
    for name, way in ways:
        table.add_row(name, f"{way.hours:.1f}", f"{way.usd_an_hour:.2f}", f"{way.usd:.0f}")
    console.print(table)
    console.print(f"the internet makes it {found.internet_costs_share:+.1%} longer; one Mac more, {found.one_more_mac:+.1%} steps")
    enough = f"{found.macs_to_saturate} Macs of this mix" if found.macs_to_saturate else "no number of Macs that was tried"
    console.print(f"{enough} keep the trainer busy (it waits less than 5 %)")


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

    from cli.plan.gpu import MOST_TOKENS, STANDARD, advice, read_model
    from cli.plan.gpu import plan as plan_machine
    from stoa.contracts.errors import UsageError

    if bool(gpus) != bool(memory_gb):
        raise UsageError("a machine needs both --gpus and --memory-gb", hint="leave both out for the usual machines")
    if not 1 <= micro_batch_tokens <= MOST_TOKENS:
        raise UsageError(f"--micro-batch-tokens: a forward and backward pass has 1 to {MOST_TOKENS:,}")
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


def _recommended(advised: str, micro_batch_tokens: int) -> str:
    """A heading's second half: which way to take, and by what it was chosen."""
    if advised.startswith("nothing"):
        return advised
    return f"take {advised!r}, the first way below with room for {micro_batch_tokens:,} tokens"


def _print(model: "Model", planned: "list[tuple[int, float, list[Line]]]", micro_batch_tokens: int) -> None:
    import json

    from rich.console import Console
    from rich.table import Table

    from cli.plan.gpu import HEAD_BYTES, RESERVE_BYTES, WAYS, advice

    console = Console(highlight=False)
    experts = f", {model.num_expert / model.num_parameters:.1%} in experts" if model.num_expert else ""
    console.print(f"{model.name}: {model.num_parameters:,} parameters{experts}; int8 on the wire {say.bytes_text(model.wire_bytes)}")
    for num, size, lines in planned:
        table = Table("way", "state on a GPU", "micro-batch it leaves room for", "host memory", box=None, pad_edge=False)
        for line in lines:
            room = f"{line.micro_batch_tokens:,} tokens" if line.fits else "does not fit"
            table.add_row(line.way.name, say.bytes_text(line.state_bytes), room, say.bytes_text(line.host_bytes))
        console.print(
            f"\n[bold]{num} x {size:g} GB[/]: {_recommended(advice(lines, micro_batch_tokens), micro_batch_tokens)}", soft_wrap=True
        )
        console.print(table)
    console.print()
    for way in WAYS:
        chosen = ", ".join(f"learning.{name} = {json.dumps(value)}" for name, value in way.settings.items())
        console.print(f"{way.name}: {way.note}{f' ({chosen})' if chosen else ''}", soft_wrap=True)
    kept = say.bytes_text(model.activation_bytes_per_token)
    console.print(
        f"\nA token keeps {kept} for the backward pass; a GPU keeps {say.bytes_text(RESERVE_BYTES)} and 5 % for itself, the head "
        f"{say.bytes_text(HEAD_BYTES)} of logits and {say.bytes_text(model.embedding_bytes)} of gradient. "
        "Tokens are taken to be spread evenly over the experts: where GPUs share them, the one most chosen keeps more. No GPU was measured."
    )
