"""`stoa join --hosts`: looks whether the wired Macs are fit, shows the command that starts their ranks, and keeps them going."""

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from cli import say
from cli.doctor import checks, wired
from cli.doctor.finding import examine
from cli.doctor.open import scene_of_mac
from cli.say import Exit
from stoa.config.load import keep_environment
from stoa.telemetry import log as telemetry
from worker_mac.cluster.agent import Set, keep_going
from worker_mac.cluster.hosts import read_hosts, read_split
from worker_mac.cluster.install import install_everywhere
from worker_mac.cluster.probe import SshProbe
from worker_mac.invited import Entry
from worker_mac.service import Service
from worker_mac.window import line_of


def join_wired(
    hosts_file: Path, entry: Entry, config: Path | None, folder: Path, *, look: bool, at_login: bool, quiet: bool = False
) -> int:
    """Be the first of a wired set until its run has stopped or a signal comes, or have launchd start it; the exit code.

    quiet: only what needs somebody is said, in this window.

    Raises WiredError for a hosts.json that cannot be used or a set that does not stay up.
    """
    telemetry.configure(level="warning" if quiet else "info", line_of=line_of, worker="mac")
    tell: Callable[[str], None] = (lambda _: None) if quiet else say.talk
    hosts, split = read_hosts(hosts_file), read_split(hosts_file)
    tell(f"{len(hosts)} Macs as one worker: each computes {'a share of every layer' if split == 'tensor' else 'some of the layers'}")
    install_everywhere(SshProbe(), hosts, tell)
    if look and not _is_fit(hosts_file, entry, folder):
        return Exit.FAULT_FOUND
    if not at_login:
        return keep_going(Set(hosts_file, config, folder, quiet=quiet), tell)
    asked = Set(hosts_file, config, folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if entry.invite is None:
        keep_environment(folder, entry.config)
    Service(Path.home() / "Library" / "LaunchAgents", folder).install(command=asked.command())
    say.talk(f"this Mac starts the set at each log-in; its log is {folder / 'worker.log'}, `stoa leave` ends it")
    return Exit.DONE


def _is_fit(hosts_file: Path, entry: Entry, folder: Path) -> bool:
    scene = scene_of_mac(entry, folder)
    found = [
        *examine(checks.chosen(checks.BEFORE_WIRED), scene, checks.SHORT_SECONDS, checks.ADVICE),
        *wired.examine_hosts(hosts_file, scene),
    ]
    bad = [one for one in found if one.verdict != "pass"]
    checks.tell(bad, Console(file=sys.stderr, highlight=False, soft_wrap=True))
    fit = all(one.verdict != "fail" for one in found)
    if not fit:
        say.error("these Macs are not fit for it", "`stoa doctor --hosts FILE` looks at everything; `--no-doctor` goes on all the same")
    return fit
