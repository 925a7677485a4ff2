"""Gets a wired set ready for an examination, as `stoa join --hosts` does for a run: the same program on each Mac, and fit for it.

Who starts its ranks is `worker_mac.cluster.sitting`.
"""

import sys
from pathlib import Path

from rich.console import Console

from cli import say
from cli.doctor import checks, wired
from cli.doctor.scene import Scene
from stoa.config.load import state_base
from stoa.config.run import RunConfig
from stoa.contracts.errors import WiredError
from worker_mac.cluster.hosts import read_hosts, read_split
from worker_mac.cluster.install import install_everywhere
from worker_mac.cluster.probe import SshProbe


def make_ready(hosts_file: Path, config: RunConfig, *, look: bool) -> None:
    """Install the program where it is missing, and look whether the set is fit for the configuration's model.

    Raises WiredError for a hosts.json that cannot be used, and if it is not fit, after what is wrong was told.
    """
    hosts, split = read_hosts(hosts_file), read_split(hosts_file)
    say.talk(f"{len(hosts)} Macs as one player: each computes {'a share of every layer' if split == 'tensor' else 'some of the layers'}")
    say.talk("asking each of them which program it has")
    install_everywhere(SshProbe(), hosts, say.talk)
    if not look:
        return
    say.talk("looking whether they are fit for the model")
    found = wired.examine_hosts(hosts_file, Scene("mac", config, state_base() / "mac", None))
    checks.tell([one for one in found if one.verdict != "pass"], Console(file=sys.stderr, highlight=False, soft_wrap=True))
    if any(one.verdict == "fail" for one in found):
        raise WiredError("these Macs are not fit for it", hint="`--no-doctor` goes on all the same")
