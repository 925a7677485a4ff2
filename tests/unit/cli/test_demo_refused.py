"""What a demo cannot be is told before anything is made or started."""

from pathlib import Path

import pytest

from cli.demo import Options, run_demo
from stoa.contracts.errors import UnknownNameError


def test_demo_of_an_environment_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no environment is called 'serch'"):
        run_demo(Options(1, 0, tmp_path / "demo", 1.0, sets=('environment.name="serch"',)))
    assert list(tmp_path.iterdir()) == []
