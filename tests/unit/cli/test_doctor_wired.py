import json
import re
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.wired_cases import STOCK
from cli.commands.doctor import doctor
from cli.commands.join import join
from cli.doctor import wired
from cli.doctor.finding import Finding
from cli.doctor.open import scene_of
from stoa.config.load import load_run
from tests.unit.worker_mac.test_wired_hosts import IFCONFIG, OTHER, PORTS, UNPLUGGED
from worker_mac.cluster import rank
from worker_mac.cluster.hosts import CONTROL_OFFSET, PORT, WiredHost, read_hosts, read_split
from worker_mac.cluster.install import ours
from worker_mac.cluster.launch import MAX_STARTS, UNREACHED_SECONDS
from worker_mac.cluster.link import STUCK_SECONDS
from worker_mac.cluster.probe import Said, SshProbe, read_wire
from worker_mac.cluster.set_engine import split_model
from worker_mac.cluster.split import Found, Split, Strength, limit_bytes
from worker_mac.model_config import read_model_config

MINI = WiredHost("mini.local")
ECHO = "3 packets transmitted, 3 packets received, 0.0% packet loss\nround-trip min/avg/max/stddev = 0.312/0.401/0.498/0.05 ms\n"
SLOW_ECHO = ECHO.replace("0.312/0.401/0.498", "11.2/43.7/290.1")


def said(text: str = "", code: int = 0) -> Said:
    return Said(code, text)


def tells(speed: int = 10**11, chip: str = "applegpu_g16g", memory: int = 12 << 30) -> Said:
    """As the set's program on a Mac finds it."""
    return said(json.dumps({"recommended_bytes": memory, "bandwidth_bytes": speed, "chip": chip}) + "\n")


class Desk:
    """Two Macs on a wire as their commands tell it; a test changes single answers, by host and a part of the command."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.answers: dict[tuple[str, str], Said] = {
            ("127.0.0.1", "hostname"): said("studio.local\n"),
            ("127.0.0.1", "ifconfig"): said(IFCONFIG),
            ("mini.local", "ifconfig"): said(OTHER),
            ("127.0.0.1", "networksetup"): said(PORTS),
            ("mini.local", "networksetup"): said(PORTS),
            ("127.0.0.1", "ping"): said(ECHO),
            ("127.0.0.1", "nc"): said(""),
            ("mini.local", "true"): said(""),
            ("mini.local", "BatchMode"): said(""),
            ("mini.local", "stoa-wired"): said(f"{ours()}\n"),
            ("169.254.90.1", "head"): said("\0" * wired.PROBE_BYTES),
            ("127.0.0.1", "hw.memsize"): said("17179869184\nApple M4\n"),
            ("mini.local", "hw.memsize"): said("17179869184\nApple M4\n"),
            ("127.0.0.1", "cluster.strength"): tells(),
            ("mini.local", "cluster.strength"): tells(),
        }

    def ask(self, host: WiredHost, command: Sequence[str]) -> Said:
        self.asked.append((host.ssh, tuple(command)))
        words = " ".join(command)
        found = [part for name, part in self.answers if name == host.ssh and part in words]
        return self.answers[(host.ssh, max(found, key=len))] if found else said("", 1)


def look(desk: Desk, folder: Path, rows: list[dict] | None = None) -> dict[str, Finding]:
    path = folder / "hosts.json"
    path.write_text(json.dumps(rows or [{"ssh": "127.0.0.1"}, {"ssh": "mini.local"}]))
    scene = scene_of(load_run(None), "mac", folder)
    return {one.name: one for one in wired.examine_hosts(path, scene, desk)}


def test_two_macs_that_are_fit_pass_every_check_and_nothing_is_changed(tmp_path: Path) -> None:
    desk = Desk()
    found = look(desk, tmp_path)
    assert {one.verdict for one in found.values()} == {"pass"}, found
    assert found["link to mini.local"].found == "169.254.90.1 answers in 0.401 ms and takes connections"
    assert found["layers"].found.startswith("0 to ")
    readers = {"true", "hostname", "ifconfig", "networksetup", "ping", "nc", "ssh", "lsof", "sysctl", "head", "stoa-wired/venv/bin/python"}
    assert {command[0] for _, command in desk.asked} <= {*readers, sys.executable}
    flags = {"networksetup": "-listallhardwareports", "sysctl": "-n", "nc": "-z"}
    assert all(command[1] == flags[command[0]] for _, command in desk.asked if command[0] in flags)
    assert all(len(command) == 1 for _, command in desk.asked if command[0] == "ifconfig")


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        (
            "ann@mini.local: Permission denied (publickey,password).",
            "key is not in the agent or the keychain",
            "ssh-add --apple-use-keychain",
        ),
        ("ssh: connect to host mini.local port 22: Connection refused", "it takes no connection", "FileVault blocks SSH until then"),
        ("ssh: connect to host mini.local port 22: Operation timed out", "does not answer", "FileVault"),
        ("ssh: Could not resolve hostname mini.local: nodename nor servname provided", "name is not known", "Settings, Sharing"),
        ("Host key verification failed.", "host key is not known", "ssh mini.local"),
        ("something else", "something else", "without a password"),
    ],
)
def test_a_host_that_ssh_does_not_reach_is_named_with_its_cause(tmp_path: Path, text: str, what: str, fix: str) -> None:
    desk = Desk()
    desk.answers[("mini.local", "true")] = said(text, 255)
    found = look(desk, tmp_path)["ssh mini.local"]
    assert found.verdict == "fail" and what in found.found and fix in found.fix


def test_echo_without_connections_is_the_broken_bridge(tmp_path: Path) -> None:
    desk = Desk()
    desk.answers[("127.0.0.1", "nc")] = said("nc: connectx to 169.254.90.1 port 22 (tcp) failed: No route to host", 1)
    found = look(desk, tmp_path)["link to mini.local"]
    assert found.verdict == "fail" and "error 65" in found.found and "restart that Mac" in found.fix


def test_a_link_as_slow_as_wifi_and_one_that_is_silent_are_told_apart(tmp_path: Path) -> None:
    desk = Desk()
    desk.answers[("127.0.0.1", "ping")] = said(SLOW_ECHO)
    slow = look(desk, tmp_path)["link to mini.local"]
    assert slow.verdict == "warn" and "43.7 ms" in slow.found
    desk.answers[("127.0.0.1", "ping")] = said("3 packets transmitted, 0 packets received", 2)
    assert "does not answer" in look(desk, tmp_path)["link to mini.local"].found


def test_addresses_that_are_stale_wireless_or_missing() -> None:
    wire = read_wire(OTHER, PORTS)
    stale = wired.check_wire(wire, WiredHost("mini.local", ("169.254.12.12",)))
    assert stale.verdict == "warn" and "169.254.12.12 in the file is stale: bridge0 has 169.254.90.1" in stale.found
    wireless = wired.check_wire(wire, WiredHost("mini.local", ("192.168.1.21",)))
    assert wireless.verdict == "fail" and "Wi-Fi" in wireless.found
    missing = wired.check_wire(read_wire(UNPLUGGED, PORTS), MINI)
    assert missing.verdict == "fail" and "Thunderbolt cable" in missing.fix
    assert wired.check_wire(wire, WiredHost("mini.local", ("169.254.90.1",))).verdict == "pass"


def test_a_port_in_use_and_another_program_are_warnings(tmp_path: Path) -> None:
    desk = Desk()
    desk.answers[("mini.local", "-iTCP:3701")] = said("COMMAND PID USER\nControlCe 501 ann 10u IPv4 0x1 0t0 TCP *:3701 (LISTEN)\n")
    desk.answers[("mini.local", "stoa-wired")] = said("0.0.1 0.30.0\n")
    desk.answers[("mini.local", "BatchMode")] = said("Permission denied", 255)
    found = look(desk, tmp_path)
    assert "ControlCe" in found["port 3701 of mini.local"].found and "another port is tried" in found["port 3701 of mini.local"].fix
    assert found["program on mini.local"].verdict == "warn" and ours() in found["program on mini.local"].found
    assert found["ssh from mini.local"].verdict == "warn"


def test_a_hosts_file_that_cannot_be_read_is_one_finding(tmp_path: Path) -> None:
    found = look(Desk(), tmp_path, [{"ssh": "127.0.0.1"}])
    assert list(found) == [wired.HOSTS] and found[wired.HOSTS].verdict == "fail"


def test_a_model_that_does_not_fit_is_told_before_anything_starts(tmp_path: Path) -> None:
    scene = scene_of(load_run(None), "mac", tmp_path)
    macs = [Strength(1 << 20, 1.0)] * 2
    found = wired.check_split(scene, macs, (WiredHost("127.0.0.1"), MINI))
    assert found.verdict == "fail" and "do not fit these 2 Macs" in found.found and "wire one more" in found.fix


def test_the_layers_that_doctor_tells_are_a_guess_until_all_speeds_are_known(tmp_path: Path) -> None:
    def told(here: int, there: int) -> str:
        speeds, desk = {"127.0.0.1": here, "mini.local": there}, Desk()
        rows = [{"ssh": ssh} | ({"bandwidth_bytes": speed} if speed else {}) for ssh, speed in speeds.items()]
        for ssh in speeds:  # the program is there, and an old one
            desk.answers[(ssh, "cluster.strength")] = said("No module named worker_mac.cluster.strength", 1)
        return look(desk, tmp_path, rows)["layers"].found

    alike, _, guess = told(0, 0).partition("; ")
    assert guess.startswith("if memory is as quick on all: the set measures it")
    assert told(0, 10**11).partition("; ")[0] == told(10**11, 0).partition("; ")[0] == alike, "one speed alone says nothing of the other"
    assert told(10**11, 10**11) == alike
    assert told(10**10, 10**11) != alike


def test_the_layers_that_doctor_tells_are_those_that_the_set_takes(tmp_path: Path) -> None:
    """Both have speed and room from one program and go by one function; the file's word wins."""
    desk, scene = Desk(), scene_of(load_run(None), "mac", tmp_path)
    (tmp_path / "mac.toml").write_text("memory_fraction = 0.5\n")
    desk.answers[("127.0.0.1", "cluster.strength")] = tells(10**11)
    desk.answers[("mini.local", "cluster.strength")] = tells(3 * 10**11, "applegpu_g16s", 0)
    rows = [{"ssh": "127.0.0.1", "bandwidth_bytes": 2 * 10**11}, {"ssh": "mini.local", "memory_bytes": 1 << 33}]
    found = look(desk, tmp_path, rows)["layers"].found
    words = ["--limits", f"0,{1 << 33}", "--bandwidths", f"{2 * 10**11},0", "--memory-fraction", "0.5"]
    asked = rank.read_options(["--control", "h:1", "--ended", "e", *words])
    macs = [Strength(limit_bytes(asked.limits[0], 12 << 30, asked.memory_fraction), 2e11), Strength(1 << 33, 3e11)]
    here = wired.Seen(WiredHost("127.0.0.1", bandwidth_bytes=2 * 10**11), (), found=Found(12 << 30, 10**11, ""))
    assert wired.strengths_of([here], scene)[0] == macs[0] == Strength(6 << 30, 2e11)
    assert scene.layout and scene.model_config
    first, second = split_model(read_model_config(scene.model_config), scene.layout, macs, 4096)
    assert f"0 to {first.stop - 1} on 127.0.0.1 (" in found and f"{second.start} to {second.stop - 1} on mini.local (" in found
    assert "if memory is as quick" not in found


def test_this_machine_tells_what_the_set_would_find_of_it() -> None:
    found = wired._find(SshProbe(), wired.LOCAL)
    assert found is not None and found.bandwidth_bytes > 0 and found.recommended_bytes >= 0


def test_chips_must_be_alike_where_each_computes_a_share_of_every_layer(tmp_path: Path) -> None:
    def seen(here: str, there: str, *chips: str) -> list[wired.Seen]:
        found = [Found(1, 1, chip) for chip in chips] or [None, None]
        hosts = (wired.LOCAL, MINI)
        return [wired.Seen(host, (), brand=brand, found=one) for host, brand, one in zip(hosts, (here, there), found, strict=True)]

    unlike = seen("Apple M3 Max", "Apple M4", "applegpu_g15s", "applegpu_g16g")
    refused = wired.check_chips(unlike, "tensor")
    assert refused.verdict == "fail" and "Apple M3 Max in 127.0.0.1, Apple M4 in mini.local" in refused.found and "split" in refused.fix
    assert wired.check_chips(unlike, "pipeline").verdict == "pass"
    assert wired.check_chips(seen("Apple M4", "Apple M4", "applegpu_g16g", "applegpu_g16g"), "tensor").verdict == "pass"
    assert wired.check_chips(seen("Apple M3 Max", "Apple M4"), "tensor").verdict == "warn", "before the program is there"
    assert wired.check_chips(seen("", ""), "tensor").verdict == "warn"
    assert wired.check_chips(seen("Apple M4", "Apple M4"), "tensor").verdict == "pass"


def test_with_a_share_of_every_layer_on_each_the_slowest_is_named(tmp_path: Path) -> None:
    path, desk = tmp_path / "hosts.json", Desk()
    path.write_text(json.dumps({"split": "tensor", "hosts": [{"ssh": "127.0.0.1"}, {"ssh": "mini.local"}]}))
    desk.answers[("127.0.0.1", "cluster.strength")] = tells(4 * 10**11, "applegpu_g15s")
    desk.answers[("mini.local", "cluster.strength")] = tells(10**11)
    found = {one.name: one for one in wired.examine_hosts(path, scene_of(load_run(None), "mac", tmp_path), desk)}
    assert found["chips"].verdict == "fail" and "unlike chips round otherwise" in found["chips"].found
    assert found["speeds"].verdict == "warn" and "all wait for mini.local" in found["speeds"].found and "4.0 times" in found["speeds"].found
    desk.answers[("mini.local", "cluster.strength")] = desk.answers[("127.0.0.1", "cluster.strength")]
    found = {one.name: one for one in wired.examine_hosts(path, scene_of(load_run(None), "mac", tmp_path), desk)}
    assert found["speeds"].verdict == found["chips"].verdict == "pass"


def test_a_mac_that_works_for_a_run_is_looked_at_by_the_runs_own_settings(tmp_path: Path) -> None:
    theirs = load_run(None).model_copy(update={"learning": load_run(None).learning.model_copy(update={"dtype": "bfloat16"})})
    document = SimpleNamespace(config=theirs, model_files=())
    scene = scene_of(load_run(None), "mac", tmp_path)
    scene.__dict__["run"] = document
    assert scene.settings is theirs and scene.layout is not None and scene.layout.raw_dtype == "bfloat16"
    home = scene_of(load_run(None), "all", tmp_path)
    home.__dict__["run"] = document
    assert home.settings is home.config


def test_what_of_each_layer_goes_where_is_told_of_a_tensor_split(tmp_path: Path) -> None:
    scene, macs = scene_of(load_run(None), "mac", tmp_path), [Strength(None, 1.0)] * 2
    found = wired.check_split(scene, macs, (WiredHost("127.0.0.1"), MINI), "tensor")
    # The demo's policy has blocks too narrow for shares of whole groups.
    assert found.verdict == "fail" and "cannot be dealt out to 2 Macs" in found.found and 'leave "split" out' in found.fix
    config = dict(scene.model_config or {}) | {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wide = scene_of(load_run(None).model_copy(update={"model": str(tmp_path)}), "mac", tmp_path)
    found = wired.check_split(wide, macs, (WiredHost("127.0.0.1"), MINI), "tensor")
    assert found.verdict == "pass" and "of each 1/2 on every Mac" in found.found and "convolutions and embedding on all" in found.found


def test_the_layers_of_a_family_that_is_only_examined_are_told_and_what_is_not_computed(tmp_path: Path) -> None:
    def told(split: Split = "pipeline", **changes: object) -> Finding:
        (tmp_path / "config.json").write_text(json.dumps(STOCK["llama"] | changes))
        scene = scene_of(load_run(None).model_copy(update={"model": str(tmp_path)}), "mac", tmp_path)
        return wired.check_split(scene, [Strength(None, 1.0)] * 2, (WiredHost("127.0.0.1"), MINI), split)

    assert told().verdict == "pass" and told().found.startswith("0 to 1 on 127.0.0.1 (")
    refused = told("tensor", model_type="qwen2")
    assert refused.verdict == "fail" and "cannot be dealt out" in refused.found
    refused = told(model_type="nemotron_h")
    assert refused.verdict == "fail" and "state-space layers are not computed here" in refused.found and "can be examined" in refused.fix


GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "wired-macs.md"


def test_what_the_guide_shows_is_read(tmp_path: Path) -> None:
    text = GUIDE.read_text()
    shown = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert shown
    path = tmp_path / "hosts.json"
    path.write_text(shown[1])
    assert [host.ssh for host in read_hosts(path)] == ["127.0.0.1", "ann@mini.local"]
    split = re.search(r"```json\n(\{.*?)```", text, re.DOTALL)
    assert split
    path.write_text(split[1])
    assert read_split(path) == "tensor" and len(read_hosts(path)) == 2
    flags = {name for command in (join, doctor) for name in signature(command).parameters}
    assert set(re.findall(r"stoa \w+ .*?--(\w+)", text)) == {"hosts"} <= flags
    assert f"every {UNREACHED_SECONDS:g} seconds" in text
    assert f"port {PORT} " in text and f"orders on {PORT + CONTROL_OFFSET}," in text
    assert f"in {STUCK_SECONDS:g} seconds" in text and "six starts in a row" in text and MAX_STARTS == 6


def test_the_command_looks_at_the_hosts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cli.doctor.checks.ALL", ())
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1"}]))
    assert doctor(None, role="mac", state=tmp_path, hosts=path, as_json=True) in (0, 4)
    told = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert told[wired.HOSTS]["verdict"] == "pass" and "layers" in told
