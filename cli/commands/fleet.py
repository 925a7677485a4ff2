"""`stoa fleet RUN`: the Macs of a run, the fastest first, and why the slowest is slow."""

import json
from typing import TYPE_CHECKING

from cli import say
from cli.arguments import AsJson, RunArgument, Servers

if TYPE_CHECKING:
    from cli.follow import Found
    from cli.report.record import Held


def fleet(run: RunArgument, /, *, config: Servers = None, as_json: AsJson = False) -> None:
    """The Macs of a run, the fastest first, with what slows each; quarantined, drained and revoked ones with the reason."""
    from rich.console import Console
    from rich.table import Table

    from cli.follow import PIPE_COLUMNS, find_run
    from cli.live.view import slowest_line
    from cli.macs import SPEED, doing, macs_or_left, with_revoked
    from stoa.bucket.revocations import Revoked
    from stoa.contracts import names

    with find_run(run, config) as found:
        macs, note = macs_or_left(found.control, run, found.collector.collect)
        held = "" if note else held_now(found)
        revoked = Revoked(found.store, run, found.document.public_key)
        revoked.look()
    macs = with_revoked(macs, revoked.sentences())
    sessions = sorted(macs.sessions, key=lambda one: (-one.tokens_per_second, one.host))
    slowest = macs.slowest if macs.num_unlisted else slowest_line(sessions).removeprefix("slowest: ")
    if as_json:
        rows = [
            {
                "host": one.host,
                "session": names.session_workflow_id(run, one.host),
                "sweep": one.sweep,
                "state": one.state,
                "doing": doing(one, held)[0],
                "version": one.version,
                "tokens_per_second": one.tokens_per_second,
                "place": one.place,
                "slow_because": one.slow_because,
                "reason": doing(one, held)[1],
            }
            for one in sessions
        ]
        say.data(json.dumps({"run": run, "num_macs": macs.num_macs, "slowest": slowest, "note": note, "macs": rows}, indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("Mac", "place", "state", "sweep", "version", "tokens/s", ""):
        table.add_column(name, justify="left" if name in {"Mac", "place", "state", ""} else "right", no_wrap=True)
    for one in sessions:
        state, reason = doing(one, held)
        speed = f"{one.tokens_per_second:.0f}" if one.tokens_per_second else "-"
        version = str(one.version) if one.version >= 0 else "-"
        table.add_row(one.host, one.place, state, str(one.sweep), version, speed, reason or one.slow_because)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    console.print(table if sessions else f"run {run} has no Macs")
    if any(one.tokens_per_second for one in sessions):
        console.print(SPEED, style="dim", soft_wrap=True)
    if note:
        console.print(note, markup=False, soft_wrap=True)
    if macs.num_unlisted:
        console.print(f"and {macs.num_unlisted} more: the run lists a thousand")
    if slowest:
        console.print(f"slowest: {slowest}", markup=False)


def held_now(found: "Found") -> "Held":
    """What the run has its Macs do, if it is paused; "" also where nobody answers."""
    from contextlib import suppress

    from cli.macs import held_by
    from stoa.bucket.head import read_head
    from stoa.contracts.errors import ObjectMissingError, ServiceError

    run, head_state = found.document.run, ""
    with suppress(ObjectMissingError):
        head_state = read_head(found.store, run, found.document.public_key)[0].state
    with suppress(ServiceError):
        return held_by(found.control.status(run).state, head_state)
    return ""
