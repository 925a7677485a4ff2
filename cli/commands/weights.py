"""`stoa weights ls | verify | diff | gc`: the published weights of a run, looked at, checked, compared and cleared."""

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from cli import say
from cli.arguments import AsJson, RunArgument, Servers
from cli.examples import epilogue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoa.bucket.retention import Judged

weights = App(name="weights", help="Look at, check, compare and clear the published weights of a run.", help_epilogue=epilogue("weights"))
MOST_TENSORS = 20


@weights.command
def ls(run: RunArgument, /, *, config: Servers = None, as_json: AsJson = False) -> None:
    """List the versions of a run: what each is made of, how large, and whether it is still in the bucket."""
    from cli.follow import find_run
    from cli.weights import versions

    with find_run(run, config, temporal=False) as found:
        lines = versions(found.store, found.document)
    if as_json:
        say.data(json.dumps({"run": run, "versions": [asdict(line) for line in lines]}, indent=2))
        return
    _table(
        ("version", "step", "changed", "delta", "roll-ups from", "anchor", ""),
        [
            (
                str(line.version),
                str(line.step),
                f"{100 * line.changed_fraction:.3f} %" if line.delta_bytes else "",
                say.bytes_text(line.delta_bytes) if line.delta_bytes else "",
                " ".join(map(str, line.rollups_from)),
                say.bytes_text(line.anchor_bytes) if line.anchor_bytes else "",
                "" if line.here else "deleted",
            )
            for line in lines
        ],
    )


@weights.command
def verify(run: RunArgument, /, *, version: int | None = None, config: Servers = None, as_json: AsJson = False) -> say.Exit:
    """Check every byte that leads to a version, and that every way there gives the weights that were signed.

    Parameters
    ----------
    version
        Version to check; the newest when left out.
    """
    import tempfile
    from pathlib import Path

    from cli.follow import find_run
    from cli.weights import verify as check

    with find_run(run, config, temporal=False) as found, tempfile.TemporaryDirectory() as scratch:
        result = check(found.store, found.document, Path(scratch), version)
    if as_json:
        say.data(json.dumps({"run": run, **asdict(result)}, indent=2))
    for fault in result.faults:
        say.error(f"{fault.where}: {fault.message}")
    if result.faults:
        return say.Exit.FAULT_FOUND
    size = say.bytes_text(result.num_bytes)
    say.talk(
        f"run {run}, version {result.version}: {result.num_manifests} manifests and {result.num_objects} objects ({size}) are as signed"
    )
    for way in result.ways:
        say.talk(f"  {way}: state {result.state_id[:16]}")
    return say.Exit.DONE


@weights.command
def diff(
    run: RunArgument,
    base: Annotated[int, Parameter(help="The older version.")],
    version: Annotated[int, Parameter(help="The newer version.")],
    /,
    *,
    config: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Say what changed between two versions, tensor by tensor."""
    import tempfile
    from pathlib import Path

    from cli.follow import find_run
    from cli.weights import difference

    with find_run(run, config, temporal=False) as found, tempfile.TemporaryDirectory() as scratch:
        result = difference(found.store, found.document, base, version, Path(scratch))
    if as_json:
        say.data(json.dumps({"run": run, **asdict(result)}, indent=2))
        return
    say.talk(
        f"run {run}, version {base} to {version}: {result.num_changed} codes ({100 * result.changed_fraction:.3f} %), "
        f"{100 * result.unit_share:.1f} % of them by one step; {result.num_raw_changed} other values; "
        f"{result.num_regridded_groups} groups on a new grid; {say.bytes_text(result.num_bytes)} of deltas"
    )
    _table(
        ("tensor", "changed", "of", "share", "by one step", "largest"),
        [
            (
                line.name,
                str(line.num_changed),
                str(line.num_elements),
                f"{100 * line.changed_fraction:.3f} %",
                f"{100 * line.unit_share:.1f} %" if line.largest_steps else "",
                str(line.largest_steps or ""),
            )
            for line in result.tensors[:MOST_TENSORS]
        ],
    )


@weights.command
def gc(
    run: RunArgument,
    /,
    *,
    dry_run: Annotated[bool, Parameter(help="Say what would be announced and deleted; change nothing.")] = False,
    grace_hours: Annotated[float | None, Parameter(help="How long an object must have been announced; by default the run's.")] = None,
    config: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Delete what a run needs no more: announced at one pass, deleted at a later one, once the grace is over."""
    from cli.follow import find_run
    from cli.weights import collect
    from stoa.contracts.errors import ServiceError, UsageError

    if grace_hours is not None and not grace_hours >= 0:
        raise UsageError(f"--grace-hours {grace_hours}: not a duration", hint="name hours, 0 or more")
    grace_seconds = None if grace_hours is None else 3600 * grace_hours
    with find_run(run, config) as found:
        try:
            hosts = tuple(member.host for member in found.control.fleet(run))
            sessions = found.control.sessions(run, hosts)
        except ServiceError as problem:
            if not dry_run:
                raise
            say.talk(f"which Macs read what is not known ({problem.message}): only what the bucket says counts here")
            sessions = ()
        result = collect(found.store, found.document, sessions, grace_seconds=grace_seconds, dry_run=dry_run)
    going = {item.key for item in result.due}
    waiting = [item for item in result.verdict.unneeded if item.key not in going]
    if as_json:
        facts = {
            "run": run,
            "version": result.version,
            "dry_run": dry_run,
            "floor": result.verdict.floor,
            "needed": _by_kind(result.verdict.needed),
            "deleted": [asdict(item) for item in result.due],
            "announced": [asdict(item) for item in waiting],
        }
        say.data(json.dumps(facts, indent=2))
        return
    for word, items in (("needed", result.verdict.needed), ("announced", waiting), ("would go" if dry_run else "deleted", result.due)):
        size = say.bytes_text(sum(item.num_bytes for item in items))
        say.talk(f"{word}: {len(items)} objects, {size}")
    _table(("objects", "of", "bytes", "", "why"), _why(result.verdict.unneeded, going))
    if result.verdict.unneeded:
        say.talk("each of them by its key: --json")


def _by_kind(items: "Sequence[Judged]") -> dict[str, dict[str, int]]:
    """Kind of object -> count and bytes."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for item in items:
        kind = item.key.split("/")[2]
        counts[kind] += 1
        sizes[kind] += item.num_bytes
    return {kind: {"objects": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)}


def _why(items: "Sequence[Judged]", going: set[str]) -> list[tuple[str, ...]]:
    """Kinds of objects by what becomes of them and why, the largest first: a run has thousands of objects."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for item in items:
        row = (item.key.split("/")[2], "goes" if item.key in going else "waits", item.reason)
        counts[row] += 1
        sizes[row] += item.num_bytes
    return [(str(counts[row]), row[0], say.bytes_text(size), *row[1:]) for row, size in sizes.most_common()]


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Rows for people, on standard output; nothing if there are none."""
    from rich.console import Console
    from rich.table import Table

    if rows:
        table = Table(*header, box=None, padding=(0, 2, 0, 0), header_style="dim")
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table)
