"""`stoa join --hosts`: looks whether the wired Macs are fit, shows the command that starts their ranks, and keeps them going."""

import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from cli import say
from cli.doctor import checks, wired
from cli.doctor.finding import examine
from cli.doctor.open import scene_of_mac
from cli.say import Exit
from stoa.contracts.errors import UsageError
from stoa.telemetry import log as telemetry
from worker_mac.cluster.hosts import read_hosts, read_split
from worker_mac.cluster.install import install_everywhere
from worker_mac.cluster.launch import Supervisor
from worker_mac.cluster.link import backends
from worker_mac.cluster.probe import SshProbe
from worker_mac.invited import Entry


def join_wired(hosts_file: Path, entry: Entry, config: Path | None, folder: Path, *, look: bool, at_login: bool) -> int:
    """Be the first of a wired set until its run has stopped or a signal comes; the exit code.

    Raises WiredError for a hosts.json that cannot be used or a set that does not stay up.
    """
    if at_login:
        raise UsageError("a wired set is not started at log-in", hint="start it in a window: it starts again by itself what is lost")
    telemetry.configure(worker="mac")
    hosts, split, probe = read_hosts(hosts_file), read_split(hosts_file), SshProbe()
    say.talk(f"{len(hosts)} Macs as one worker: each computes {'a share of every layer' if split == 'tensor' else 'some of the layers'}")
    install_everywhere(probe, hosts, say.talk)
    if look and not _is_fit(hosts_file, entry, folder):
        return Exit.FAULT_FOUND
    given = () if config is None else (str(config.resolve()),)
    supervisor = Supervisor(
        hosts, probe, (*given, "--state", str(folder.resolve())), folder.resolve(), available=backends(), say=say.talk, split=split,
    )  # fmt: skip

    def end(_number: int, _frame: FrameType | None) -> None:
        supervisor.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return supervisor.run()


def _is_fit(hosts_file: Path, entry: Entry, folder: Path) -> bool:
    scene = scene_of_mac(entry, folder)
    found = [*examine(checks.chosen(checks.BEFORE_WIRED), scene, checks.SHORT_SECONDS), *wired.examine_hosts(hosts_file, scene)]
    bad = [one for one in found if one.verdict != "pass"]
    checks.tell(bad, Console(file=sys.stderr, highlight=False, soft_wrap=True))
    fit = all(one.verdict != "fail" for one in found)
    if not fit:
        say.error("these Macs are not fit for it", "`stoa doctor --hosts FILE` looks at everything; `--no-doctor` goes on all the same")
    return fit
