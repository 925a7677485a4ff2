"""`stoa join [FILE]`: this Mac's worker, here or at each log-in."""

import os
import sys
from pathlib import Path

from cli import say


def join(file: Path | None = None, /, *, at_login: bool = False, state: Path | None = None) -> None:
    """Let this Mac generate rollouts for a run: in this window, or at each log-in.

    Parameters
    ----------
    file
        Configuration of the run.
    at_login
        Start it now and at each log-in, again after a crash only; `stoa leave` undoes it.
    state
        Folder of this Mac's state; its mac.toml says what the Mac's owner allows.
    """
    from stoa.config.load import keep_environment, load_run, state_folder
    from worker_mac.service import Service, worker_command

    settings = load_run(file)
    folder = state or state_folder("mac")
    if not at_login:
        command = worker_command(file, folder)
        os.execv(sys.executable, command)  # noqa: S606 - this process becomes the worker
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    keep_environment(folder, settings)
    Service(Path.home() / "Library" / "LaunchAgents", folder).install(file)
    say.talk(f"this Mac works for the run at each log-in; its log is {folder / 'worker.log'}, `stoa leave` ends it")
