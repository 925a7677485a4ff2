"""`stoa join [FILE]`: this Mac's worker, here or at each log-in."""

import os
import sys
from pathlib import Path

from cli import say
from cli.say import Exit


def join(
    run: str = "",
    /,
    *,
    stdin: bool = False,
    at_login: bool = False,
    state: Path | None = None,
    no_doctor: bool = False,
    hosts: Path | None = None,
    quiet: bool = False,
) -> Exit:
    """Let this Mac generate rollouts for a run: in this window, or at each log-in.

    Parameters
    ----------
    run
        The token of an invitation, or a configuration of your own. When left out: the invitation that was taken before, else
        the demo's configuration.
    stdin
        Read the token from standard input: there it stands in no list of processes and no history of a shell.
    at_login
        Start it now and at each log-in, again after a crash only; `stoa leave` undoes it.
    state
        Folder of this Mac's state; its mac.toml says what the Mac's owner allows.
    no_doctor
        Do not look first whether this Mac is fit for it.
    hosts
        Work as one with the Macs that this hosts.json names, which are wired to this one: each computes some of the layers.
    quiet
        In this window: no bar while weights come, and only what needs you.
    """
    from cli.doctor.checks import fit_for_join
    from stoa.bucket.invite import PREFIX
    from stoa.config.load import keep_environment, state_folder
    from worker_mac.invited import enter, keep_invite
    from worker_mac.service import Service, worker_command

    folder, file = state or state_folder("mac"), None
    text = sys.stdin.read().strip() if stdin else run
    if stdin or text.startswith(PREFIX) or (text.startswith("stoa") and not Path(text).exists()):
        invite = keep_invite(folder, text)
        say.talk(f"invited to run {invite.run} as {invite.host}; the token is kept in {folder}, for you alone")
    elif text:
        file = _file_of(text)
    entry = enter(file, folder)
    if hosts is not None:
        from cli.wired import join_wired

        return Exit(join_wired(hosts, entry, file, folder, look=not no_doctor, at_login=at_login, quiet=quiet))
    if not no_doctor and not fit_for_join(entry, folder):
        return Exit.FAULT_FOUND
    if not at_login:
        sys.stderr.flush()
        os.execv(sys.executable, (*worker_command(file, folder), *(("--quiet",) if quiet else ())))  # noqa: S606 - becomes the worker
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if entry.invite is None:
        keep_environment(folder, entry.config)
    Service(Path.home() / "Library" / "LaunchAgents", folder).install(file)
    say.talk(f"this Mac works for the run at each log-in; its log is {folder / 'worker.log'}, `stoa leave` ends it")
    return Exit.DONE


def _file_of(text: str) -> Path:
    """The configuration that was named. Raises ConfigError if it is none: a token may have been meant."""
    from stoa.bucket.invite import PREFIX
    from stoa.config.load import DEFAULT_CONFIG
    from stoa.contracts.errors import ConfigError

    if not os.path.exists(text):  # also False for what is too long for a name: a token without its beginning
        raise ConfigError(f"{text}: no such file", hint=f"a token begins with {PREFIX}; an example of a file is {DEFAULT_CONFIG}")
    return Path(text)
