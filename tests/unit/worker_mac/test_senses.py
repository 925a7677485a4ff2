"""What system tools print is read right, and what they do not tell is not known."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from worker_mac.holds import Awake, wired, wired_bytes
from worker_mac.power import PLAY, decide
from worker_mac.senses import (
    MacProbe,
    NoProbe,
    probe_here,
    read_battery,
    read_free_disk,
    read_hotspot,
    read_idle,
    read_locked,
    read_pressure,
    run_tool,
    slept_between,
)

IOREG_HID = """+-o Root  <class IORegistryEntry, id 0x100000100, retain 33>
  +-o J314sAP  <class IOPlatformExpertDevice, id 0x10000024d, registered, matched, active, busy 0 (191238 ms), retain 44>
    +-o IOResources  <class IOResources, id 0x100000116, registered, matched, active, busy 0 (5105 ms), retain 93>
      +-o IOHIDSystem  <class IOHIDSystem, id 0x10000062f, registered, matched, active, busy 0 (0 ms), retain 21>
          {
            "CFBundleIdentifier" = "com.apple.iokit.IOHIDFamily"
            "HIDIdleTime" = 312083000541
            "HIDPowerOnDelayNS" = 500000000
            "HIDParameters" = {"HIDIdleTime"=4500000000,"Clicking"=0}
          }
"""
IOREG_ROOT = """+-o Root  <class IORegistryEntry, id 0x100000100, retain 33>
    {
      "IOConsoleLocked" = No
      "IOConsoleUsers" = ({"kCGSSessionOnConsoleKey"=Yes,"kCGSSessionUserNameKey"="ada","kCGSSessionUserIDKey"=501%s})
      "OS Build Version" = "24G90"
    }
"""
ROUTE = """   route to: default
destination: default
       mask: default
    gateway: %s
  interface: en0
      flags: <UP,GATEWAY,DONE,STATIC,PRCLONING,GLOBAL>
"""


def test_idle_time_is_the_least_that_is_listed_in_seconds() -> None:
    assert read_idle(IOREG_HID) == pytest.approx(4.5)
    assert read_idle("+-o Root") is None


def test_the_lock_key_is_left_out_while_the_screen_is_open() -> None:
    assert read_locked(IOREG_ROOT % "") is False
    assert read_locked(IOREG_ROOT % ',"CGSSessionScreenIsLocked"=Yes,"CGSSessionScreenLockedTime"=1760000000') is True
    assert read_locked("") is None


@pytest.mark.parametrize(("text", "level"), [("1\n", "normal"), ("2\n", "warn"), ("4\n", "critical"), ("", None), ("7", None), ("x", None)])
def test_memory_pressure(text: str, level: str | None) -> None:
    assert read_pressure(text) == level


@pytest.mark.parametrize(
    ("gateway", "hotspot"),
    [("172.20.10.1", True), ("192.168.1.1", False), ("172.20.10.17", False), ("fe80::1%en0", False), ("link#4", None)],
)
def test_an_iphones_hotspot_is_known_by_its_network(gateway: str, hotspot: bool | None) -> None:
    assert read_hotspot(ROUTE % gateway) is hotspot


def test_no_route_is_not_known() -> None:
    assert read_hotspot("route: writing to routing socket: not in table") is None


def test_sleep_is_a_wall_clock_that_ran_ahead() -> None:
    assert slept_between((100.0, 50.0), (700.0, 51.0))
    assert not slept_between((100.0, 50.0), (700.0, 650.0))  # a stopped process: both clocks ran
    assert not slept_between((100.0, 50.0), (40.0, 51.0))  # the clock was set back


def test_a_mac_whose_tools_answer_is_sensed_and_one_whose_do_not_is_played_on() -> None:
    asked: list[str] = []

    def tool(command: Sequence[str]) -> str:
        asked.append(command[0])
        answers = {"sysctl": "2\n", "route": ROUTE % "172.20.10.1"}
        return answers.get(command[0], IOREG_HID if "IOHIDSystem" in command else IOREG_ROOT % "")

    probe = MacProbe(tool)
    senses = [probe.read(), probe.read()][1]
    assert (senses.pressure, senses.on_hotspot, senses.screen_locked) == ("warn", True, False)
    assert senses.idle_seconds == pytest.approx(4.5)
    assert senses.minute_of_day in range(1440)
    assert asked.count("route") == 1  # what changes seldom is asked seldom
    assert asked.count("sysctl") == 2
    silent = MacProbe(lambda command: "").read()
    assert (silent.pressure, silent.on_hotspot, silent.screen_locked, silent.idle_seconds) == (None, None, None, None)


@pytest.mark.parametrize("fault", [OSError(5, "away"), RuntimeError("no such sensor"), NotImplementedError()])
def test_a_battery_or_a_disk_that_cannot_be_asked_is_not_known_and_ends_no_looking(fault: Exception, tmp_path: Path) -> None:
    def battery() -> None:
        raise fault

    assert read_battery(battery) == (None, None)
    assert read_battery(lambda: None) == (True, None)
    assert read_free_disk(tmp_path / "away") is None
    assert read_free_disk(tmp_path)


def test_off_macos_nothing_is_known_and_everything_is_played() -> None:
    probe = probe_here("linux")
    assert isinstance(probe, NoProbe)
    from stoa.config.host import MacHost

    assert decide(probe.read(), MacHost(when="idle_only"), PLAY).state == "full"


def test_a_tool_that_is_missing_fails_or_hangs_tells_nothing() -> None:
    assert run_tool(("no-such-tool-of-this-system",)) == ""
    assert run_tool((sys.executable, "-c", "raise SystemExit(1)")) == ""
    assert run_tool((sys.executable, "-c", "print('here')")) == "here\n"
    began = time.monotonic()
    assert run_tool(("sleep", "20")) == ""
    assert time.monotonic() - began < 10


def test_the_system_is_kept_awake_from_hold_to_release() -> None:
    import psutil

    def holders() -> int:
        return sum(child.name() == "sleep" for child in psutil.Process().children())

    awake = Awake(("sleep", "77"))
    for _ in range(2):
        awake.hold()
    assert (awake.held, holders()) == (True, 1)
    for _ in range(2):
        awake.release()
    assert (awake.held, holders()) == (False, 0)
    missing = Awake(("no-such-tool-of-this-system",))
    missing.hold()
    assert not missing.held


def test_the_wired_limit_is_put_back_however_the_block_ends() -> None:
    limits = [5]

    def set_limit(num_bytes: int) -> int:
        limits.append(num_bytes)
        return limits[-2]

    with pytest.raises(KeyError), wired(9, set_limit):
        raise KeyError
    assert limits == [5, 9, 5]
    with wired(0, set_limit):
        pass
    assert limits == [5, 9, 5]


GB = 1 << 30


@pytest.mark.parametrize(
    ("recommended_gb", "wired_gb"),
    # a sweep is planned to take 10.5 GB; nine tenths of what macOS recommends is the most. Macs of 8, 16, 24, 64 and 128 GB
    [(5.33, 4.797), (10.67, 9.603), (16.0, 10.5), (48.0, 10.5), (96.0, 10.5)],
)
def test_no_more_is_wired_than_is_planned_nor_than_is_allowed(recommended_gb: float, wired_gb: float) -> None:
    found = wired_bytes(int(10.5 * GB), int(recommended_gb * GB * 0.9))
    assert found / GB == pytest.approx(wired_gb, abs=1e-3)
    assert wired_bytes(10 * GB, None) == 0


def test_the_guest_does_not_load_mlx() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import worker_mac.guest, sys; print('mlx' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout == "False\n"  # only the engine's module loads MLX
