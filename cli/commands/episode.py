"""`stoa episode show | ls`: what a Mac played, read turn by turn."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from cli import say
from cli.arguments import AsJson, RunArgument, Servers
from cli.examples import epilogue

if TYPE_CHECKING:
    from rich.text import Text

    from cli.transcript import EpisodeView

episode = App(
    name="episode",
    help="Read what a Mac played: turns, tool calls, rewards, which tokens were learned from.",
    help_epilogue=epilogue("episode"),
)


@episode.command
def show(
    run: RunArgument,
    name: Annotated[str, Parameter(name="ID", help="VERSION/MAC/SWEEP/GROUP/EPISODE as `stoa episode ls` tells it, like v3/mac-1/12/4/0.")],
    /,
    *,
    config: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Show one episode: its turns and tool calls, which tokens were kept, dropped or given, reward parts, version."""
    from cli.follow import find_run
    from cli.transcript import Reader, parse_id

    key, number = parse_id(run, name)
    with find_run(run, config, temporal=False) as found:
        reader = Reader(found.store, found.document)
        view = reader.view(key, reader.group(key), number, reader.fate(key))
    if as_json:
        say.data(json.dumps({"run": run, **asdict(view), "num_masked": view.num_masked}, indent=2))
        return
    tell(view)


@episode.command
def ls(
    run: RunArgument,
    /,
    *,
    version: Annotated[int | None, Parameter(help="Version they were sampled from; the newest that has any when left out.")] = None,
    limit: Annotated[int, Parameter(help="Groups to read at most.")] = 20,
    config: Servers = None,
    as_json: AsJson = False,
) -> None:
    """List episodes of a version: id, reward, turns, sampled tokens, why it ended."""
    from cli.episodes import episodes_of
    from cli.follow import find_run
    from stoa.contracts.errors import UsageError

    if limit < 1:
        raise UsageError(f"--limit {limit}: name 1 group or more")
    with find_run(run, config, temporal=False) as found:
        sampled, rows = episodes_of(found.store, found.document, version, limit)
    if as_json:
        say.data(json.dumps({"run": run, "version": sampled, "episodes": [asdict(row) for row in rows]}, indent=2))
        return
    if not rows:
        say.talk(f"run {run} has no groups{'' if version is None else f' of version {version}'} in the bucket")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("episode", "question", "reward", "turns", "tokens", "ended", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(
            row.id, row.question_id, f"{row.reward:g}", str(row.num_turns), str(row.num_sampled), row.stop_reason.replace("_", " ")
        )
    console = Console(highlight=False)
    console.print(table)


def tell(view: "EpisodeView") -> None:
    """Print one episode."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    dropped = "nothing is kept of what the gate dropped" if view.num_dropped < 0 else f"{view.num_dropped} dropped by the gate"
    console.print(f"episode {view.id}   question {view.question_id}", markup=False)
    if view.question:
        console.print(f"question  {view.question}   answers: {', '.join(view.answers)}", markup=False)
    console.print(f"played by {view.host} on version {view.version}; {_fate(view)}", markup=False)
    parts = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in sorted(view.reward_parts.items()))
    console.print(f"reward    {view.reward:g} ({parts}); ended: {view.stop_reason.replace('_', ' ')}", markup=False)
    console.print(f"tokens    {view.num_tokens}: {view.num_sampled} sampled, {view.num_masked} given (masked); {dropped}")
    for number, turn in enumerate(view.turns, 1):
        console.print()
        console.print(Text(turn.before.strip(), style="dim"))
        line = Text(f"turn {number}  ", style="bold")
        for stretch in turn.stretches:
            line.append_text(_marked(stretch.kind, stretch.text))
        console.print(line)
        for call in turn.calls:
            console.print(f"  call    {call}", markup=False)
        if turn.fault:
            console.print(f"  fault   {turn.fault.replace('_', ' ')}", markup=False)
    if view.after.strip():
        console.print(Text(view.after.strip(), style="dim"))


def _fate(view: "EpisodeView") -> str:
    if not view.fate:
        return "no step has settled it yet"
    return f"{view.fate} at step {view.step}" if view.step else view.fate


def _marked(kind: str, text: str) -> "Text":
    """Dropped tokens stand in brackets too: without colour they must be told from the others."""
    from rich.text import Text

    return Text(f"[-{text}-]", style="red strike") if kind == "dropped" else Text(text, style="green" if kind == "kept" else "dim")
