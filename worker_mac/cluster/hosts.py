"""Which Macs are wired together, as a person writes it, and as `mlx.launch` is told it.

hosts.json is a list like MLX's own hostfile, `[{"ssh": "127.0.0.1"}, {"ssh": "mini.local"}]`, the first being this Mac.
It may also stand under "hosts" in an object, beside "split": "pipeline", which it is unless said, or "tensor".
Addresses on the wire change at every reboot: they are looked up, by `probe.py`, and what the file says is only compared.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stoa.contracts.errors import WiredError
from worker_mac.cluster.split import Split

HERE: Final = "127.0.0.1"
"""MLX takes this name literally as this machine, and starts its rank without SSH."""
FOLDER: Final = "stoa-wired"
"""In every user's home: homes differ, so its paths are relative. The program is installed in it."""
PYTHON: Final = "venv/bin/python"
PORT: Final = 3700
"""MLX's own default is often taken on a Mac."""
CONTROL_OFFSET: Final = 50
_FIELDS: Final = frozenset(("ssh", "ips", "rdma", "memory_bytes", "bandwidth_bytes"))
_NAME: Final = re.compile(r"[^-\s\x00-\x1f][^\s\x00-\x1f]*")
"""What SSH takes for a name, and not for an option."""
_HINT: Final = 'write a list like [{"ssh": "127.0.0.1"}, {"ssh": "mini.local"}], this Mac first'


@dataclass(frozen=True, slots=True)
class WiredHost:
    """One Mac. `ssh`: how SSH finds it, with a user if it is another; memory_bytes, bandwidth_bytes: stated, 0 for as found."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | None, ...] = ()
    memory_bytes: int = 0
    bandwidth_bytes: int = 0

    @property
    def is_here(self) -> bool:
        """True for this machine."""
        return self.ssh == HERE


def read_hosts(path: Path) -> tuple[WiredHost, ...]:
    """The Macs of a hosts.json. Raises WiredError for a file that is no such list."""
    found = _read(path)
    if isinstance(found, dict):
        if odd := sorted(str(name) for name in found.keys() - {"hosts", "split"}):
            raise WiredError(f"{path}: {odd[0]} is not a setting of a wired set", hint="known are hosts, split")
        found = found.get("hosts")
    if not isinstance(found, list) or len(found) < 2:
        raise WiredError(f"{path}: not a list of two Macs or more", hint=_HINT)
    hosts = tuple(_host(path, number, entry) for number, entry in enumerate(found))
    if not hosts[0].is_here:
        raise WiredError(f"{path}: the first Mac is {hosts[0].ssh}, not this one", hint=f'the first entry is {{"ssh": "{HERE}"}}')
    others = [host.ssh for host in hosts if not host.is_here]
    if len(set(others)) < len(others):
        raise WiredError(f"{path}: names a Mac twice", hint="each Mac is one entry")
    return hosts


def read_split(path: Path) -> Split:
    """What the set of a hosts.json shares out. Raises WiredError for something else than is known."""
    found = _read(path)
    split = found.get("split", "pipeline") if isinstance(found, dict) else "pipeline"
    if split == "pipeline" or split == "tensor":
        return split
    raise WiredError(f"{path}: split is {split!r}", hint='"pipeline" gives each Mac some of the layers, "tensor" a share of every layer')


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise WiredError(f"{path}: {why}", hint=_HINT) from error


def _host(path: Path, number: int, entry: object) -> WiredHost:
    if not isinstance(entry, dict) or not isinstance(entry.get("ssh"), str) or not entry["ssh"]:
        raise WiredError(f"{path}: entry {number} has no ssh name", hint=_HINT)
    if odd := sorted(str(name) for name in entry.keys() - _FIELDS):
        raise WiredError(f"{path}: {odd[0]} is not a setting of a host", hint=f"known are {', '.join(sorted(_FIELDS))}")
    numbers = {name: entry.get(name, 0) for name in ("memory_bytes", "bandwidth_bytes")}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise WiredError(f"{path}: {name} of {entry['ssh']} is {value!r}, not a whole number", hint=_HINT)
    ips, rdma = entry.get("ips", []), entry.get("rdma", [])
    if not isinstance(ips, list) or not isinstance(rdma, list) or not _NAME.fullmatch(entry["ssh"]):
        raise WiredError(f"{path}: entry {number} is not what MLX's hostfile has", hint=_HINT)
    return WiredHost(entry["ssh"], tuple(str(ip) for ip in ips), tuple(None if one is None else str(one) for one in rdma), **numbers)


def hostfile(hosts: Sequence[WiredHost], addresses: Sequence[str]) -> str:
    """MLX's hostfile, of addresses on the wire by rank."""
    rows = [
        {"ssh": host.ssh, "ips": [address]} | ({"rdma": list(host.rdma)} if host.rdma else {})
        for host, address in zip(hosts, addresses, strict=True)
    ]
    return json.dumps(rows, indent=1) + "\n"


def choose_backend(hosts: Sequence[WiredHost], available: Sequence[str]) -> str:
    """The quickest that this MLX reports and the hosts are wired for: jaccl where each names its RDMA devices, else ring."""
    if "jaccl" in available and all(len(host.rdma) == len(hosts) for host in hosts):
        return "jaccl"
    if "ring" not in available:
        raise WiredError("this MLX has no ring backend", hint="install the MLX that the extra `mac` names")
    return "ring"


@dataclass(frozen=True, slots=True)
class Launch:
    """What `mlx.launch` is told. `worker`: arguments of the first Mac's worker."""

    program: str
    hostfile: Path
    hosts: tuple[WiredHost, ...]
    control_address: str
    ended: Path
    worker: tuple[str, ...]
    backend: str = "ring"
    port: int = PORT
    folder: str = FOLDER
    python: str = PYTHON
    starter: int = 0
    """The process that ends the set when it ends; 0: none."""
    starter_host: str = ""
    split: Split = "pipeline"
    memory_fraction: float | None = None
    """Of what the system recommends for its GPU, as the first Mac's owner allows; None: the usual."""
    quiet: bool = False
    exam: bool = False
    """`worker` is the task of an examination."""

    def line(self) -> tuple[str, ...]:
        """The command. It is started in the home folder, so that `--cwd` means the same on every Mac."""
        stated = (
            ("--limits", ",".join(str(host.memory_bytes) for host in self.hosts)),
            ("--bandwidths", ",".join(str(host.bandwidth_bytes) for host in self.hosts)),
        )
        return (
            self.program, "--hostfile", str(self.hostfile), "--backend", self.backend, "--starting-port", str(self.port),
            "--cwd", self.folder, "--python", self.python, "--",
            "-m", "worker_mac.cluster.rank", "--control", f"{self.control_address}:{self.port + CONTROL_OFFSET}",
            "--backend", self.backend, "--ended", str(self.ended),
            *(("--split", self.split) if self.split != "pipeline" else ()), *(("--exam",) if self.exam else ()),
            *(("--memory-fraction", str(self.memory_fraction)) if self.memory_fraction is not None else ()),
            *(("--quiet",) if self.quiet else ()),
            *(("--starter", str(self.starter), "--starter-host", self.starter_host) if self.starter else ()),
            *(word for flag, value in stated if value.strip("0,") for word in (flag, value)), "--", *self.worker,
        )  # fmt: skip

    def text(self) -> str:
        """The command for a shell."""
        return shlex.join(self.line())
