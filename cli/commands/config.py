"""`stoa config check FILE`: every fault of a configuration, before anything is started."""

from pathlib import Path

from cyclopts import App

from cli import say
from cli.arguments import Sets

config = App(name="config", help="Check a configuration file.")


@config.command
def check(file: Path, /, *, sets: Sets = ()) -> None:
    """Check a file and name every fault by file, line, key and nearest valid name.

    Parameters
    ----------
    file
        Configuration to check.
    """
    from cli.launch import check as fit
    from stoa.config.load import load_run

    settings = load_run(file, sets)
    layout = fit(settings)
    size = say.bytes_text(layout.num_bytes)
    say.talk(f"{file}: run {settings.run}, {settings.model} ({size} in int8) on {settings.environment.name}: well configured")
