"""`stoa doctor [FILE]`: is this machine, and are its servers, fit for a run?"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cli import say
from cli.arguments import AsJson
from cli.say import Exit


def doctor(
    file: Annotated[Path | None, Parameter(help="Configuration of the run; the demo's when left out.")] = None,
    /,
    *,
    role: Annotated[Literal["mac", "gpu", "all", "home", ""], Parameter(help="What this machine is to be; else what is installed.")] = "",
    state: Annotated[Path | None, Parameter(help="Folder of this Mac's state.")] = None,
    hosts: Annotated[Path | None, Parameter(help="hosts.json of Macs that are to be wired together: look at them too.")] = None,
    as_json: AsJson = False,
) -> Exit:
    """Check this machine and its servers: each check passes, warns or fails, and says how to mend it."""
    import time

    from rich.console import Console

    from cli.doctor import checks
    from cli.doctor.finding import examine
    from cli.doctor.open import open_scene
    from stoa.contracts.errors import UsageError

    began = time.monotonic()
    try:
        scene = open_scene(file, role or None, state)
        found = examine(checks.ALL, scene, advice=checks.ADVICE)
        if hosts is not None:
            from cli.doctor.wired import examine_hosts

            found += examine_hosts(hosts, scene)
    except UsageError as problem:
        found = [checks.config_finding(problem)]
    if as_json:
        say.data(checks.as_json(found, time.monotonic() - began))
    else:
        checks.tell(found, Console(highlight=False, soft_wrap=True))
    return Exit.FAULT_FOUND if any(one.verdict == "fail" for one in found) else Exit.DONE
