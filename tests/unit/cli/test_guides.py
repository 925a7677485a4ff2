"""Guides name commands and settings that there are: every TOML block loads, every `stoa` command in a line of text exists."""

import re
import tomllib
from pathlib import Path

import pytest

from cli.main import _COMMANDS
from stoa.config.load import load_run

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "invite-macs.md"
COMMANDS = {name for group in _COMMANDS.values() for name in group}


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL))
def test_a_configuration_of_the_guide_is_one(text: str, tmp_path: Path) -> None:
    assert tomllib.loads(text)["run"] == "friends"
    path = tmp_path / "friends.toml"
    path.write_text(text)
    settings = load_run(path, environ={})
    assert settings.macs.temporal_address == "macs.example.org:7234"
    assert settings.temporal.namespace_core != settings.temporal.namespace_mac


def test_a_command_of_the_guide_is_one() -> None:
    named = set(re.findall(r"`?stoa ([a-z]+)\b", GUIDE.read_text()))
    assert {"invite", "join", "revoke", "proxy", "status", "run", "setup", "leave"} <= named
    assert named - COMMANDS == set()


def test_a_flag_of_the_guide_is_one() -> None:
    from inspect import signature

    from cli.commands.invite import invite
    from cli.commands.join import join
    from cli.commands.proxy import proxy
    from cli.commands.revoke import revoke

    flags = {name.replace("_", "-") for command in (invite, join, proxy, revoke) for name in signature(command).parameters}
    assert set(re.findall(r"--([a-z][a-z-]+)", GUIDE.read_text())) - flags - {"profile"} == set()


def test_every_variable_of_the_guide_is_read() -> None:
    import stoa.config.load as load

    source = Path(load.__file__).read_text()
    assert [name for name in re.findall(r"STOA_[A-Z_]+", GUIDE.read_text()) if name not in source] == []
