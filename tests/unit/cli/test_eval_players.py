"""How `stoa eval CHECKPOINT` starts who plays: processes here, or a wired set."""

from pathlib import Path
from typing import Any, cast

import pytest

from cli.evaluation import standalone
from stoa.config.load import load_run


class House:
    """Starts nothing."""

    def __init__(self) -> None:
        self.given: list[dict[str, str]] = []

    def start(self, name: str, command: list[str], *, env: dict[str, str], log: Path) -> None:
        self.given.append(env)


@pytest.mark.parametrize("hosts", [None, Path("hosts.json")])
def test_what_players_put_aside_goes_with_the_commands_own_folder(tmp_path: Path, hosts: Path | None) -> None:
    """A set that is lost ends by force, and removes nothing itself."""
    house, config = House(), load_run(None)
    asked = standalone.Asked("x", 4, 1, 0, 1, None, (), hosts=hosts)
    standalone._seat(cast(Any, house), tmp_path, config, config.bucket, asked, "exam-1", tmp_path, ["q"])
    assert [env["TMPDIR"] for env in house.given] == [str(tmp_path)]
