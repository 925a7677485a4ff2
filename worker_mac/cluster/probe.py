"""What other Macs tell of their wires: asked over SSH, through a port, parsed by functions that are tested on kept samples.

Nothing here changes a setting, of the network or anything else.
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from stoa.contracts.errors import WiredError
from worker_mac.cluster.hosts import WiredHost

BRIDGE: Final = "bridge0"
"""macOS joins all Thunderbolt ports in it; it has the address, the ports themselves have none that last."""
ASK_SECONDS: Final = 8.0
CONNECT_SECONDS: Final = 5
SSH_FAILED: Final = 255
_DEVICE: Final = re.compile(r"^(\w+): flags=", re.MULTILINE)
_INET: Final = re.compile(r"^\s+inet (\d+\.\d+\.\d+\.\d+)", re.MULTILINE)
_PORTS: Final = re.compile(r"Hardware Port: (.+)\nDevice: (\w+)")


@dataclass(frozen=True, slots=True)
class Said:
    """What a command gave on a host. `code` 255: SSH itself failed."""

    code: int
    text: str


class Probe(Protocol):
    """Asks a host to run a command that only reads."""

    def ask(self, host: WiredHost, command: Sequence[str]) -> Said: ...  # noqa: D102


class SshProbe:
    """Runs it here, or over SSH; never asks for a password."""

    def ask(self, host: WiredHost, command: Sequence[str]) -> Said:
        """See `Probe`."""
        words = list(command)
        if not host.is_here:
            options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
            words = ["ssh", *options, host.ssh, shlex.join(command)]
        try:
            done = subprocess.run(words, capture_output=True, timeout=ASK_SECONDS, check=False, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return Said(SSH_FAILED, f"{words[0]} did not answer in {ASK_SECONDS:g} s")
        except OSError as error:
            return Said(127, str(error))
        return Said(done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Wire:
    """A host's interfaces: address -> device, and device -> what macOS calls its port, for example Wi-Fi."""

    devices: dict[str, str]
    ports: dict[str, str]

    @property
    def bridge_address(self) -> str:
        """Of the Thunderbolt bridge; "" if it has none."""
        return next((address for address, device in self.devices.items() if device == BRIDGE), "")

    def kind(self, address: str) -> str:
        """What an address belongs to; "" if it is none of this host's."""
        device = self.devices.get(address, "")
        return self.ports.get(device, device)

    def is_wireless(self, address: str) -> bool:
        """True for an address that leaves by Wi-Fi."""
        return self.kind(address).lower() in ("wi-fi", "airport")


def read_wire(ifconfig: str, ports: str) -> Wire:
    """Of what `ifconfig` and `networksetup -listallhardwareports` print."""
    devices: dict[str, str] = {}
    starts = [*_DEVICE.finditer(ifconfig)]
    for number, start in enumerate(starts):
        end = starts[number + 1].start() if number + 1 < len(starts) else len(ifconfig)
        for found in _INET.finditer(ifconfig, start.end(), end):
            devices[found[1]] = start[1]
    return Wire(devices, {device: name.strip() for name, device in _PORTS.findall(ports)})


def wire_of(probe: Probe, host: WiredHost) -> Wire:
    """A host's interfaces. Raises WiredError if it cannot be asked."""
    said = probe.ask(host, ("ifconfig",))
    if said.code:
        raise WiredError(f"{host.ssh} cannot be asked: {last_line(said.text)}", hint="see `stoa doctor --hosts`")
    return read_wire(said.text, probe.ask(host, ("networksetup", "-listallhardwareports")).text)


def addresses_of(probe: Probe, hosts: Sequence[WiredHost]) -> tuple[str, ...]:
    """Each host's address on the wire as it is now: of bridge0, or loopback for several ranks on this machine alone.

    Raises WiredError for a host that cannot be asked or has no wire; an address by Wi-Fi is never taken.
    """
    if all(host.is_here for host in hosts):
        return tuple(host.ssh for host in hosts)
    found: list[str] = []
    for host in hosts:
        wire = wire_of(probe, host)
        if any(wire.is_wireless(ip) for ip in host.ips) and not wire.bridge_address:
            raise WiredError(
                f"{host.ssh}: {', '.join(host.ips)} is its Wi-Fi, 50 times slower than a wire", hint="join the Macs by a Thunderbolt cable"
            )
        if not wire.bridge_address:
            raise WiredError(
                f"{host.ssh} has no address on {BRIDGE}", hint="plug the Thunderbolt cable in; Settings, Network shows Thunderbolt Bridge"
            )
        found.append(wire.bridge_address)
    return tuple(found)


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no answer")
