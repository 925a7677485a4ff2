"""`stoa fleet RUN`: the Macs of a run, the fastest first, and why the slowest is slow."""

import json
from dataclasses import asdict

from cli import say
from cli.arguments import AsJson, RunArgument, Servers


def fleet(run: RunArgument, /, *, config: Servers = None, as_json: AsJson = False) -> None:
    """The Macs of a run, the fastest first, with what slows each; quarantined and drained ones with the reason."""
    from rich.console import Console
    from rich.table import Table

    from cli.follow import PIPE_COLUMNS, find_run

    with find_run(run, config) as found:
        view = found.control.fleet_view(run)
    members = sorted(view.members, key=lambda member: (-member.tokens_per_second, member.host))
    if as_json:
        rows = [asdict(member) for member in members]
        say.data(json.dumps({"run": run, "num_macs": view.num_macs, "slowest": view.slowest, "macs": rows}, indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("Mac", "place", "state", "sweep", "version", "tokens/s", ""):
        table.add_column(name, justify="left" if name in {"Mac", "place", "state", ""} else "right", no_wrap=True)
    for one in members:
        speed = f"{one.tokens_per_second:.0f}" if one.tokens_per_second else "-"
        version = str(one.version) if one.version >= 0 else "-"
        table.add_row(one.host, one.place, one.state, str(one.sweep), version, speed, one.slow_because)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    console.print(table if members else f"run {run} has no Macs")
    unlisted = view.num_macs - sum(one.state == "live" for one in members)
    if unlisted > 0:
        console.print(f"and {unlisted} more: the run lists a thousand")
    if view.slowest:
        console.print(f"slowest: {view.slowest}", markup=False)
