"""`stoa leave`: undo `stoa join --at-login`."""

from pathlib import Path

from cli import say


def leave(*, state: Path | None = None) -> None:
    """Stop this Mac's worker and start it at no further log-in; its state stays.

    Parameters
    ----------
    state
        Folder that `stoa join` was given.
    """
    from stoa.config.load import state_folder
    from worker_mac.service import Service

    service = Service(Path.home() / "Library" / "LaunchAgents", state or state_folder("mac"))
    parked = service.status().parked
    if not service.remove():
        say.talk("this Mac starts no worker at log-in")
        return
    say.talk("this Mac starts no worker at log-in any more" + (f"; it had parked itself: {parked}" if parked else ""))
