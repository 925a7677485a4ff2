"""Keeps a wired set going in one process: what `stoa join --hosts` becomes, and what launchd starts at log-in.

    python -m worker_mac.cluster.agent HOSTS [CONFIG] --state DIR

At log-in it waits for Macs that are not up yet; a set that fails again and again is parked, as one Mac's worker is.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog

from stoa.config.load import load_mac_host
from stoa.contracts.errors import StoaError
from stoa.telemetry import log as telemetry
from worker_mac.cluster.hosts import read_hosts, read_split
from worker_mac.cluster.launch import Supervisor
from worker_mac.cluster.link import backends
from worker_mac.cluster.probe import SshProbe
from worker_mac.ending import LastCall
from worker_mac.service import QUICK_SECONDS, Attempts

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Set:
    """One set. `config`: of the run, None with an invitation; `folder`: the state of the first Mac's worker, with its mac.toml.

    quiet: every Mac says only what needs somebody.
    """

    hosts: Path
    config: Path | None
    folder: Path
    quiet: bool = False

    def command(self) -> tuple[str, ...]:
        """What launchd starts; no key and no secret stands in it."""
        given = () if self.config is None else (str(self.config.resolve()),)
        line = (sys.executable, "-m", "worker_mac.cluster.agent", str(self.hosts.resolve()), *given)
        return (*line, "--state", str(self.folder.resolve()))


def supervisor_of(asked: Set, say: Callable[[str], None], *, at_login: bool = False) -> Supervisor:
    """What keeps the set going. Raises as `keep_going` does."""
    given = () if asked.config is None else (str(asked.config.resolve()),)
    flags = (*(("--kept",) if at_login else ()), *(("--quiet",) if asked.quiet else ()))
    worker = (*given, "--state", str(asked.folder.resolve()), *flags)
    return Supervisor(
        read_hosts(asked.hosts), SshProbe(), worker, asked.folder.resolve(), available=backends(), say=say,
        split=read_split(asked.hosts), patient=at_login, quiet=asked.quiet,
        memory_fraction=fraction_of(asked.folder),
    )  # fmt: skip


def fraction_of(folder: Path) -> float | None:
    """What the first Mac's owner lets weights and pages take, as mac.toml in their folder says; None: the usual. Raises ConfigError."""
    limits = folder / "mac.toml"
    return load_mac_host(limits).memory_fraction if limits.is_file() else None


def keep_going(asked: Set, say: Callable[[str], None], *, at_login: bool = False) -> int:
    """Be the first of the set until its run has stopped or a signal comes; the exit code.

    at_login: endpoints and keys are those that were kept in the folder, and Macs that are not there yet are waited for.
    Raises WiredError for a hosts.json that cannot be used or a set that does not stay up, ConfigError for such a mac.toml.
    """
    supervisor = supervisor_of(asked, say, at_login=at_login)

    def end(_number: int, _frame: FrameType | None) -> None:
        supervisor.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return supervisor.run()


def read_options(arguments: Sequence[str] | None) -> Set:
    """Parse the command line; argparse exits with 2 on wrong use."""
    parser = argparse.ArgumentParser(prog="python -m worker_mac.cluster.agent", description="Keeps a wired set going.")
    parser.add_argument("hosts", type=Path, help="hosts.json")
    parser.add_argument("config", type=Path, nargs="?", default=None)
    parser.add_argument("--state", type=Path, required=True, help="folder of the first Mac's worker")
    found = parser.parse_args(arguments)
    return Set(found.hosts, found.config, found.state)


def main(arguments: Sequence[str] | None = None) -> int:
    """As launchd starts it: 0 also once it has failed three times in a row, so that it is not started again."""
    asked = read_options(arguments)
    telemetry.configure(worker="mac")
    attempts = Attempts(asked.folder)
    if parked := attempts.begin():
        _log.error("worker_parked", reason=parked)
        return 0
    LastCall(attempts.forget, QUICK_SECONDS).start()
    try:
        code = keep_going(asked, _say, at_login=True)
    except StoaError as error:
        _log.error("set_given_up", reason=error.message, hint=error.hint)
        # It has tried for minutes and yet not begun: that counts as failing soon.
        if parked := Attempts(asked.folder).failed(error.message):
            _log.error("worker_parked", reason=parked)
        return 0 if parked else 1
    attempts.forget()
    return code


def _say(text: str) -> None:
    _log.info("set_says", text=text)


if __name__ == "__main__":
    sys.exit(main())
