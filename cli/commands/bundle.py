"""`stoa bundle [RUN]`: what somebody who helps needs to see, in one file without secrets."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson, Servers


def bundle(
    run: Annotated[str, Parameter(help="Name of a run to tell of too.")] = "",
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Zip file to write; stoa-bundle-TIME.zip when left out.")] = None,
    logs: Annotated[tuple[Path, ...], Parameter(consume_multiple=False, help="More logs; those beside --config are packed too.")] = (),
    config: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Pack logs, versions, resolved settings, the doctor's findings and a run's facts for who helps; secrets are removed."""
    import time

    from cli.bundle import beside, write_bundle
    from stoa.config.load import load_run
    from stoa.contracts.errors import UsageError

    for folder in logs:
        if not folder.is_dir():
            raise UsageError(f"--logs {folder}: not a folder", hint="logs of a demo lie in runs/demo-N/logs")
    settings = load_run(config, (f"run={run}",) if run else ())
    path = out if out is not None else Path(f"stoa-bundle-{time.strftime('%Y%m%d-%H%M%S')}.zip")
    done = write_bundle(path, settings, run, logs, beside(config))
    if as_json:
        say.data(json.dumps(asdict(done), indent=2))
        return
    for line in done.missing:
        say.talk(f"not in it: {line}")
    say.talk(f"bundle: {done.path}, {say.counted(len(done.parts), 'part')}; secrets are removed, but look before you send it")
