"""Macs that are to be wired together: can they be reached, over the wire, by the same program, and does the model fit them?

Everything is asked through the port `worker_mac.cluster.probe.Probe`, by commands that only read: no setting of the
network is ever changed here.
"""

import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cli.doctor.finding import Finding, bad, good, warn
from cli.doctor.machine import gpu_bytes, longest_tokens
from cli.doctor.scene import Scene
from cli.say import bytes_text
from stoa.contracts.errors import StoaError, WiredError
from worker_mac.cluster.hosts import CONTROL_OFFSET, FOLDER, HERE, PORT, PYTHON, WiredHost, read_hosts, read_split
from worker_mac.cluster.install import installed, ours
from worker_mac.cluster.probe import BRIDGE, SSH_FAILED, Probe, Said, SshProbe, Wire, last_line, read_wire
from worker_mac.cluster.split import Found, Split, Strength, limit_bytes, num_bytes_of
from worker_mac.cluster.tensor import share_layout
from worker_mac.families import engine_config, engine_layout

HOSTS: Final = "wired hosts"
LOCAL: Final = WiredHost(HERE)
SLOW_MS: Final = 5.0
"""A wire answers in less than a millisecond, Wi-Fi in 20 to 300."""
PROBE_BYTES: Final = 16 << 20
LEAST_BYTES_PER_SECOND: Final = 50_000_000
UNLIKE: Final = 1.5
"""Speeds of memory that differ more are worth a split by speed."""
_AVERAGE: Final = re.compile(r"(?:min/avg/max\S*) = [\d.]+/([\d.]+)/")
_FILEVAULT: Final = "log in once at its own screen: FileVault blocks SSH until then"
_SSH_FAULTS: Final = (
    (
        "Permission denied",
        "its key is not in the agent or the keychain",
        "run `ssh-add --apple-use-keychain ~/.ssh/id_ed25519`, once `ssh-copy-id {ssh}`",
    ),
    ("Host key verification failed", "its host key is not known here", "run `ssh {ssh}` once and accept the key"),
    ("Could not resolve", "the name is not known", "write its name as Settings, Sharing shows it, for example mini.local"),
    ("refused", "it takes no connection", f"{_FILEVAULT}; switch Remote Login on in Settings, Sharing"),
    ("timed out", "it does not answer", f"wake it up; {_FILEVAULT}"),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the checks of one host found out for the others."""

    host: WiredHost
    findings: tuple[Finding, ...]
    address: str = ""
    memory_bytes: int = 0
    """Of its GPU at most, as its system tells; where the program is not installed there yet."""
    brand: str = ""
    """Of its chip, for example Apple M4 Max."""
    found: Found | None = None
    """As the set's own program there finds it."""


def examine_hosts(path: Path, scene: Scene, probe: Probe | None = None, *, port: int = PORT) -> list[Finding]:
    """All checks of the Macs in a hosts.json."""
    try:
        hosts, split = read_hosts(path), read_split(path)
    except WiredError as error:
        return [bad(HOSTS, error.message, error.hint)]
    probe = probe or SshProbe()
    on_a_wire = not all(host.is_here for host in hosts)
    with ThreadPoolExecutor(len(hosts), thread_name_prefix="hosts") as pool:
        asked = [pool.submit(_look, probe, host, port + rank, on_a_wire=on_a_wire) for rank, host in enumerate(hosts)]
        seen = [one.result() for one in asked]
        found = [good(HOSTS, f"{len(hosts)} Macs: {', '.join(host.ssh for host in hosts)}")]
        found += [finding for one in seen for finding in one.findings]
        if on_a_wire:
            links = [pool.submit(_check_link, probe, one) for one in seen[1:] if one.address and not one.host.is_here]
            found += [finding for link in links for finding in link.result()]
    strengths = strengths_of(seen, scene)
    found += [_check_port(probe, LOCAL, port + CONTROL_OFFSET), check_chips(seen, split)]
    measured = all(one.host.bandwidth_bytes or one.found for one in seen)
    if split == "tensor" and measured:
        found.append(check_speeds(strengths, hosts))
    return [*found, check_split(scene, strengths, hosts, split, measured=measured)]


def _look(probe: Probe, host: WiredHost, port: int, *, on_a_wire: bool) -> Seen:
    """What one host tells of itself."""
    findings: list[Finding] = []
    fits = True
    if not host.is_here:
        reached = check_ssh(probe.ask(host, ("true",)), host)
        findings.append(reached)
        if reached.verdict == "fail":
            return Seen(host, tuple(findings))
        program = _check_program(probe, host)
        fits = program.verdict == "pass"
        findings += [check_ssh_back(probe, host), program]
    address = ""
    if on_a_wire:
        wire = read_wire(probe.ask(host, ("ifconfig",)).text, probe.ask(host, ("networksetup", "-listallhardwareports")).text)
        address = wire.bridge_address
        findings.append(check_wire(wire, host))
    findings.append(_check_port(probe, host, port))
    told = probe.ask(host, ("sysctl", "-n", "hw.memsize", "machdep.cpu.brand_string"))
    size, _, brand = told.text.partition("\n") if told.code == 0 else ("", "", "")
    limit = probe.ask(host, ("sysctl", "-n", "iogpu.wired_limit_mb")).text if size.isdecimal() else ""
    memory = gpu_bytes(int(size), lambda _: limit, "darwin") if size.isdecimal() else 0
    return Seen(host, tuple(findings), address, memory, brand.strip(), _find(probe, host) if fits else None)


def _find(probe: Probe, host: WiredHost) -> Found | None:
    """What the set would find there as it starts, asked of the same program; None if that does not say."""
    python = sys.executable if host.is_here else f"{FOLDER}/{PYTHON}"
    said = probe.ask(host, (python, "-m", "worker_mac.cluster.strength"))
    try:
        return Found(**json.loads(last_line(said.text))) if said.code == 0 else None
    except (ValueError, TypeError):
        return None


def check_ssh(said: Said, host: WiredHost) -> Finding:
    """Of `ssh host true`, without a password."""
    name = f"ssh {host.ssh}"
    if said.code == 0:
        return good(name, "reached without a password")
    for words, what, fix in _SSH_FAULTS:
        if words in said.text:
            return bad(name, f"{what}: {last_line(said.text)}", fix.format(ssh=host.ssh))
    return bad(name, last_line(said.text), f"make `ssh {host.ssh} true` work without a password")


def check_ssh_back(probe: Probe, host: WiredHost) -> Finding:
    """From a host to this Mac: needed when that Mac is to start the set."""
    name, here = f"ssh from {host.ssh}", last_line(probe.ask(LOCAL, ("hostname",)).text)
    said = probe.ask(host, ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", here, "true"))
    if said.code == 0:
        return good(name, f"it reaches {here}")
    return warn(
        name, f"it does not reach {here}: {last_line(said.text)}", f"only this Mac can start the set; else run `ssh-copy-id {here}` there"
    )


def _check_program(probe: Probe, host: WiredHost) -> Finding:
    name = f"program on {host.ssh}"
    try:
        found = installed(probe, host)
    except WiredError as error:
        return bad(name, error.message, error.hint)
    if found == ours():
        return good(name, f"stoa and mlx are {found}, as here")
    return warn(name, f"stoa and mlx are {found or 'missing'}, here {ours()}", "`stoa join --hosts` installs the same wheel there")


def check_wire(wire: Wire, host: WiredHost) -> Finding:
    """Its address on the Thunderbolt bridge, against what the file says."""
    name = f"wire of {host.ssh}"
    wireless = [ip for ip in host.ips if wire.is_wireless(ip)]
    if wireless:
        return bad(name, f"{wireless[0]} in the file is its Wi-Fi, 50 times slower", f"remove it from the file: {BRIDGE}'s is looked up")
    if not wire.bridge_address:
        return bad(
            name, f"{BRIDGE} has no address", "plug the Thunderbolt cable in at both ends; Settings, Network shows Thunderbolt Bridge"
        )
    stale = [ip for ip in host.ips if ip not in wire.devices]
    if stale:
        return warn(
            name,
            f"{stale[0]} in the file is stale: {BRIDGE} has {wire.bridge_address} since its last start",
            "nothing: it is looked up at each start",
        )
    return good(name, f"{BRIDGE} has {wire.bridge_address}")


def _check_link(probe: Probe, seen: Seen) -> list[Finding]:
    """From this Mac to another: echo, a connection, speed."""
    name, address = f"link to {seen.host.ssh}", seen.address
    echo = probe.ask(LOCAL, ("ping", "-c", "3", "-t", "5", address))
    tcp = probe.ask(LOCAL, ("nc", "-z", "-G", "5", address, "22"))
    found = check_link(name, address, echo, tcp)
    if found.verdict == "fail":
        return [found]
    return [found, _check_speed(probe, seen.host, address)]


def check_link(name: str, address: str, echo: Said, tcp: Said) -> Finding:
    """Of `ping` and `nc -z` to an address on the wire."""
    average = _AVERAGE.search(echo.text)
    if echo.code == 0 and tcp.code:
        return bad(
            name,
            f"{address} answers echoes but takes no connection (error 65): a port was taken out of {BRIDGE}",
            f"restart that Mac and leave {BRIDGE} as macOS makes it: nothing else mends it",
        )
    if echo.code or average is None:
        return bad(name, f"{address} does not answer", "look at the cable; the address changes at every restart, so ask again")
    milliseconds = float(average[1])
    if milliseconds > SLOW_MS:
        return warn(name, f"{address} answers in {milliseconds:g} ms, as slow as Wi-Fi", "use a Thunderbolt cable")
    return good(name, f"{address} answers in {milliseconds:g} ms and takes connections")


def _check_speed(probe: Probe, host: WiredHost, address: str) -> Finding:
    """What comes through SSH over the wire: less than the wire itself has."""
    name = f"speed of {host.ssh}"
    user, at, _ = host.ssh.rpartition("@")
    began = time.monotonic()
    said = probe.ask(replace(host, ssh=f"{user}{at}{address}"), ("head", "-c", str(PROBE_BYTES), "/dev/zero"))
    seconds = time.monotonic() - began
    if said.code or len(said.text) < PROBE_BYTES:
        return warn(name, "not measured: SSH does not go to the address on the wire", f"run `ssh {user}{at}{address}` once")
    speed = PROBE_BYTES / seconds
    if speed < LEAST_BYTES_PER_SECOND:
        return warn(name, f"only {bytes_text(int(speed))}/s", "use a Thunderbolt cable, not one for charging")
    return good(name, f"at least {bytes_text(int(speed))}/s")


def _check_port(probe: Probe, host: WiredHost, port: int) -> Finding:
    name = f"port {port} of {host.ssh}"
    said = probe.ask(host, ("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN"))
    rows = said.text.splitlines()[1:]
    if said.code in (SSH_FAILED, 127) or not rows:
        return good(name, "free")
    return warn(name, f"in use by {rows[0].split()[0]}", "nothing: another port is tried (bind error 48 or 49)")


def check_chips(seen: Sequence[Seen], split: Split) -> Finding:
    """Do the chips compute alike? Only Macs that compute the same hidden states need to."""
    name = "chips"
    named = ", ".join(f"{one.brand or (one.found.chip if one.found else '') or 'not known'} in {one.host.ssh}" for one in seen)
    if split == "pipeline":
        return good(name, f"{named}; they may differ: no Mac computes another's layers")
    brands = {one.brand for one in seen}
    known = {one.found.chip for one in seen if one.found is not None}
    if len(known) > 1:
        return bad(name, f"{named}: unlike chips round otherwise", 'leave "split" out of the file: layers are split then')
    if any(one.found is None for one in seen) and (len(brands) > 1 or "" in brands):
        return warn(name, f"{named}: the set refuses unlike ones", 'leave "split" out of the file unless they are the same')
    return good(name, f"{named}: they round alike")


def check_speeds(macs: Sequence[Strength], hosts: Sequence[WiredHost]) -> Finding:
    """With a share of every layer on each, all wait for the slowest in every layer."""
    name, speeds = "speeds", [mac.bandwidth for mac in macs]
    slowest = hosts[speeds.index(min(speeds))].ssh
    if max(speeds) > UNLIKE * min(speeds):
        return warn(
            name, f"all wait for {slowest}, whose memory is {max(speeds) / min(speeds):.1f} times slower than the quickest's",
            'leave "split" out of the file: layers go by speed then',
        )  # fmt: skip
    return good(name, "about alike")


def strengths_of(seen: Sequence[Seen], scene: Scene) -> list[Strength]:
    """Of each Mac, by the rules of the set itself. Memory whose speed nobody tells counts as quick as the mean of the others'."""
    speeds = [one.host.bandwidth_bytes or (one.found.bandwidth_bytes if one.found else 0) for one in seen]
    known = [speed for speed in speeds if speed]
    usual = sum(known) / len(known) if known else 1.0
    memory = [one.found.recommended_bytes if one.found else one.memory_bytes for one in seen]
    limits = [limit_bytes(one.host.memory_bytes, size, scene.allowed.memory_fraction) for one, size in zip(seen, memory, strict=True)]
    return [Strength(limit, float(speed or usual)) for limit, speed in zip(limits, speeds, strict=True)]


def check_split(
    scene: Scene, macs: Sequence[Strength], hosts: Sequence[WiredHost], split: Split = "pipeline", *, measured: bool = False
) -> Finding:
    """Which layers would go where, and whether that fits. measured: the speed of each Mac's memory is known, stated or measured."""
    from worker_mac.cluster.set_engine import split_model

    name = "layers"
    if scene.model_config is None:
        return good(name, "the model is not known here yet")
    try:
        # Of families that are only examined, too: which one a run's policy may be is said elsewhere.
        config, layout = engine_config(scene.model_config), engine_layout(scene.model_config, scene.settings.learning.dtype)
        spans = split_model(config, layout, macs, longest_tokens(scene), split)
    except StoaError as error:
        return bad(name, error.message, error.hint)
    known = "" if all(mac.limit_bytes for mac in macs) else "; the memory of some is not known"
    if split == "tensor":
        share = sum(array.num_bytes for array in share_layout(layout, len(hosts)).arrays)
        return good(name, f"of each 1/{len(hosts)} on every Mac ({bytes_text(share)} each), convolutions and embedding on all{known}")
    parts = [
        f"{span.start} to {span.stop - 1} on {host.ssh} ({bytes_text(num_bytes_of(layout, span, config.num_layers))})"
        for span, host in zip(spans, hosts, strict=True)
    ]
    if not measured and not all(host.bandwidth_bytes for host in hosts):
        known += "; if memory is as quick on all: the set measures it as it starts, unless hosts.json says bandwidth_bytes"
    return good(name, f"{', '.join(parts)}{known}")
