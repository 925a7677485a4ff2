"""`stoa config check FILE`: every fault of a configuration, before anything is started."""

from pathlib import Path

from cyclopts import App

from cli import say

config = App(name="config", help="Check a configuration file.")


@config.command
def check(file: Path, /, *, set: tuple[str, ...] = ()) -> None:  # noqa: A002 - the flag is called --set
    """Check a file and name every fault by file, line, key and nearest valid name.

    Parameters
    ----------
    file
        Configuration to check.
    set
        A setting to change, as table.key=value; may be repeated.
    """
    from environments.registry import create_environment  # names settled below
    from stoa.config.load import load_run

    settings = load_run(file, set)
    create_environment
    say.talk(f"{file}: run {settings.run} is well configured")
