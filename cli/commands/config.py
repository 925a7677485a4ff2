"""`stoa config check FILE`: every fault of a configuration, before anything is started."""

from pathlib import Path

from cyclopts import App

from cli import say
from cli.arguments import AsJson, Sets
from cli.examples import epilogue
from cli.say import Exit

config = App(name="config", help="Check a configuration file.", help_epilogue=epilogue("config"))


@config.command
def check(file: Path, /, *, sets: Sets = (), as_json: AsJson = False) -> Exit:
    """Check a file and name every fault by file, line, key and nearest valid name.

    Parameters
    ----------
    file
        Configuration to check.
    """
    import json

    from cli.launch import check as fit
    from cli.launch import environment_faults
    from stoa.config.load import load_run
    from stoa.contracts.errors import UsageError

    try:
        settings = load_run(file, sets, look=environment_faults)
        layout = fit(settings)
    except UsageError as problem:
        if not as_json:
            raise
        first, *more = problem.message.splitlines()
        faults = [line.strip() for line in more] or [first]
        say.data(json.dumps({"file": str(file), "well_configured": False, "faults": faults, "hint": problem.hint}, indent=2))
        return Exit.WRONG_USE
    if as_json:
        found = {"file": str(file), "well_configured": True, "faults": [], "hint": "", "weights_bytes": layout.num_bytes}
        say.data(json.dumps({**found, "settings": settings.model_dump(mode="json")}, indent=2))
        return Exit.DONE
    size = say.bytes_text(layout.num_bytes)
    say.talk(f"{file}: run {settings.run}, {settings.model} ({size} in int8) on {settings.environment.name}: well configured")
    return Exit.DONE
