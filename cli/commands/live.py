"""`stoa live RUN`: a run on the whole terminal."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson, RunArgument, Servers


def live(
    run: RunArgument,
    /,
    *,
    every: Annotated[float, Parameter(help="Seconds between two looks: more over a slow line.")] = 2.0,
    picture: Annotated[Literal["fleet", "timeline", "star"], Parameter(help="What a snapshot shows in the middle.")] = "fleet",
    snapshot: Annotated[Path | None, Parameter(help="Write one picture as SVG to this file, and end.")] = None,
    size: Annotated[str, Parameter(help="Columns and rows of the snapshot.")] = "120x32",
    config: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run, its Macs, bandwidth and alarms on the whole terminal; pause it, or drain a Mac, by key."""
    import json
    import re
    import sys
    from dataclasses import asdict

    from cli.follow import find_run
    from cli.live.source import Servers as RealSource
    from cli.live.view import Look, view_of
    from stoa.contracts.errors import UsageError

    if not 0.2 <= every <= 3600:
        raise UsageError(f"--every {every:g}: not a time to wait", hint="name 0.2 to 3600 seconds")
    shape = re.fullmatch(r"(\d{2,3})x(\d{2,3})", size)
    if shape is None:
        raise UsageError(f"--size {size}: not columns and rows", hint="for example --size 120x32")
    if snapshot is None and not as_json and not sys.stdout.isatty():
        raise UsageError(
            "stoa live needs a terminal", hint=f"for plain lines: `stoa status {run} --follow`; for a picture: `--snapshot FILE`"
        )
    with find_run(run, config) as found:
        source = RealSource(found)
        if as_json:
            say.data(json.dumps({"run": run, **asdict(view_of(Look(0.0, source.look()), None, 0))}, indent=2))
            return
        from cli.live.app import Live

        app = Live(source, steps=0, every=every)
        if snapshot is None:
            app.run()
            return
        from cli.live.snapshot import take

        keys = () if picture == "fleet" else (picture[0],)
        snapshot.write_text(take(app, (int(shape[1]), int(shape[2])), keys, apart_seconds=every), "utf-8")
        say.talk(f"live: written to {snapshot}")
