"""What a Mac's owner writes: what is refused, and that the refusal says where and what was meant."""

import tomllib
from pathlib import Path

import pytest

from stoa.config.host import MacHost
from stoa.config.load import MAC_CONFIG, load_mac_host
from stoa.contracts.errors import ConfigError


def refused(tmp_path: Path, text: str) -> ConfigError:
    path = tmp_path / "mac.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_mac_host(path)
    return caught.value


def test_the_shipped_file_shows_every_setting_at_its_default() -> None:
    assert load_mac_host(MAC_CONFIG) == MacHost() == load_mac_host(None)
    assert set(tomllib.loads(MAC_CONFIG.read_text())) == set(MacHost.model_fields)


def test_a_misspelt_setting_names_file_line_and_nearest(tmp_path: Path) -> None:
    error = refused(tmp_path, 'when = "full"\nidle_minuts = 3.0\n')
    assert error.message == f"{tmp_path / 'mac.toml'}:2: idle_minuts is not a setting"
    assert error.hint == "did you mean idle_minutes?"


def test_a_wrong_choice_names_the_nearest(tmp_path: Path) -> None:
    error = refused(tmp_path, 'when = "gently"\n')
    assert error.message.startswith(f"{tmp_path / 'mac.toml'}:1: when = 'gently': ")
    assert error.hint == "did you mean gentle?"


def test_parts_without_a_kernel_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mac.toml"
    path.write_text('plain_ops = ["head", "experts"]\n')
    assert load_mac_host(path).plain_ops == ("head", "experts")
    error = refused(tmp_path, 'plain_ops = ["head", "expert"]\n')
    assert "plain_ops.1 = 'expert': " in error.message
    assert error.hint == "did you mean experts?"


@pytest.mark.parametrize("text", ["25:00-07:00", "22-7", "22:00-07:60", "always"])
def test_hours_that_are_no_times_are_refused(tmp_path: Path, text: str) -> None:
    assert "22:00-07:30" in refused(tmp_path, f'hours = "{text}"\n').message


def test_a_battery_that_stops_above_its_restart_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, "battery_stop_percent = 80.0\nbattery_restart_percent = 60.0\n")
    assert "battery_stop_percent = 80.0 is above battery_restart_percent = 60.0" in error.message


def test_a_missing_file_names_the_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_mac_host(tmp_path / "none.toml")
    assert str(MAC_CONFIG) in caught.value.hint


@pytest.mark.parametrize(("hours", "minutes"), [("", None), ("22:00-07:30", (1320, 450)), ("00:05-23:59", (5, 1439))])
def test_hours_are_minutes_of_the_day(hours: str, minutes: tuple[int, int] | None) -> None:
    assert MacHost(hours=hours).minutes_of_day == minutes
